"""Define the settings of the decode baselines."""

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
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"top_k": 1}

    top_k: int = 128

    def supports_sinks(self, G: int) -> bool:
        return False

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return flexgen_elements(S, D, top_k=self.attended)

    def rows(self, S: int) -> int:
        return S + min(self.attended, S)

    def value_rows(self, S: int) -> int:
        return min(self.attended, S) + 1


@dataclass(frozen=True)
class OracleTopK(Method):
    """Attend to the ``top_k`` keys with the largest exact scores.

    The quality of this baseline is an upper bound for the quality of SparQ. The method saves no transfers.
    """

    name: ClassVar[str] = "oracle_top_k"
    source: ClassVar[str] = "the bound in the SparQ paper"
    reads: ClassVar[str] = "every key; attends to the best `top_k` keys. An upper bound of quality that saves nothing"
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"top_k": 1}

    top_k: int = 128
    local_window: int | None = None

    @property
    def serves_latents(self) -> bool:
        return True

    def for_bias(self) -> OracleTopK:
        return self

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return streaming_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class Quest(Method):
    """Attend to the pages of keys with the largest upper bounds on their scores (docs/spec/quest.md).

    This baseline saves no time, because each decode step computes the bounds from all keys.

    Attributes:
        page_size: number of consecutive keys per page, at least 1.
        top_k: number of attended keys per KV head, rounded up to whole pages. The current page is included. The
            default is the budget at which Quest matches dense attention on LongBench in the paper.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest, arXiv 2406.10774"
    reads: ClassVar[str] = (
        "the smallest and largest components of each page of 16 keys, then the `top_k` keys and values of the pages "
        "with the largest bounds ([Quest](docs/spec/quest.md)). For comparison: each step computes the bounds again"
    )
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"page_size": 1, "top_k": 1}

    page_size: int = 16
    top_k: int = 1024

    @property
    def attended(self) -> int:
        return -(-self.top_k // self.page_size) * self.page_size

    @property
    def unit(self) -> int:
        return self.page_size

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        """Return ``2 P D + 2 k D + 2 D`` (quest.6), for stored bounds of P pages and k = ``attended`` keys."""
        return 2 * -(-S // self.page_size) * D + streaming_elements(S, D, top_k=self.attended)


BASELINES = (Streaming, H2O, Quest, FlexGen, OracleTopK)
