"""Define the settings of the decode baselines in the papers on SparQ and SAAP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...core import stats
from ...core.base import Method


def streaming_elements(S: int, D: int, *, top_k: int) -> int:
    """Return the number of elements that a StreamingLLM or OracleTopK step moves, ``2 k D + 2 D`` (sparq.13).

    The step reads k = ``top_k`` keys and values, and writes one key and one value. The selection is not counted.
    """
    return 2 * min(top_k, S) * D + 2 * D


@dataclass(frozen=True)
class Streaming(Method):
    """Attend to the first ``sink_tokens`` and the last ``recent_tokens`` keys (StreamingLLM, LM-Infinite).

    Attributes:
        sink_tokens: number of sink keys.
        recent_tokens: number of recent keys, at least 1.
    """

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    reads: ClassVar[str] = "the first 16 and the last 112 keys"
    plot_style: ClassVar[tuple[str, str]] = ("#E69F00", "D")
    budget_setting: ClassVar[str] = "recent_tokens"
    limits: ClassVar[Mapping[str, int]] = {"sink_tokens": 0, "recent_tokens": 1}

    sink_tokens: int = 16
    recent_tokens: int = 112

    @property
    def attended(self) -> int:
        return self.sink_tokens + self.recent_tokens

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return streaming_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class H2O(Method):
    """Attend to the ``top_k`` keys that received the most attention so far (heavy hitters), and evict all other keys.

    This baseline saves no time, because attention in prefill is computed twice, and evicted keys stay in memory.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    reads: ClassVar[str] = (
        "the last keys and the keys that received the most attention so far; all other keys are evicted. "
        "For comparison: it needs dense prefill"
    )
    plot_style: ClassVar[tuple[str, str]] = ("#D55E00", "s")
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"top_k": 1}
    observes_prefill: ClassVar[bool] = True

    top_k: int = 128
    local_window: int | None = None

    def supports_sinks(self, G: int) -> bool:
        return False

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return stats.h2o_elements(S, D, top_k=self.attended)


def flexgen_elements(S: int, D: int, *, top_k: int) -> int:
    """Return the number of elements that a FlexGen decode step moves, ``S D + k D + 2 D`` (sparq.15).

    The step reads S keys and k = ``top_k`` values, and writes one key and one value.
    """
    return S * D + min(top_k, S) * D + 2 * D


@dataclass(frozen=True)
class FlexGen(Method):
    """Attend to the ``top_k`` keys with the largest exact softmax weights. The weights are not renormalized."""

    name: ClassVar[str] = "flexgen"
    source: ClassVar[str] = "FlexGen, arXiv 2303.06865"
    reads: ClassVar[str] = "every key, and the values with the `top_k` largest weights"
    plot_style: ClassVar[tuple[str, str]] = ("#CC79A7", "v")
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"top_k": 1}

    top_k: int = 128

    def supports_sinks(self, G: int) -> bool:
        return False

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return flexgen_elements(S, D, top_k=self.attended)

    def rows(self, S: int) -> int:
        return S + min(self.attended, S)


@dataclass(frozen=True)
class OracleTopK(Method):
    """Attend to the ``top_k`` keys with the largest exact scores.

    The quality of this baseline is an upper bound for the quality of SparQ. The method saves no transfers.
    """

    name: ClassVar[str] = "oracle_top_k"
    source: ClassVar[str] = "the bound in the SparQ paper"
    reads: ClassVar[str] = "every key; attends to the best `top_k` keys. An upper bound of quality that saves nothing"
    plot_style: ClassVar[tuple[str, str]] = ("#009E73", "^")
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"top_k": 1}

    top_k: int = 128
    local_window: int | None = None

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return streaming_elements(S, D, top_k=self.attended)


BASELINES = (Streaming, H2O, FlexGen, OracleTopK)
