"""Decode methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import ConfigError, check_choice, check_int, check_local_window
from ..common import stats
from .base import NEVER, MethodConfig, Step

# Bytes that a layer's decode step has to save before SparQ's extra launches pay, by kind of GPU.
# Apple (base and Pro, Max, Ultra): from the roofline model (docs/results/roofline.md), its pessimistic end.
# NVIDIA: 20 microseconds of extra launches at 2.0, 4.3 and 8 TB/s, until docs/results/triton.md has measured it.
# Nothing here was measured.
ENOUGH_SAVED = {
    **{"g": 20 << 20, "s": 36 << 20, "d": 52 << 20},
    **{"sm_80": 40 << 20, "sm_90": 80 << 20, "sm_100": 160 << 20},
}


# KV heads whose query networks a GPU reads as fast as its memory delivers, by kind: one core reads that of a KV head,
# at 20 GB/s in the roofline model. Likewise the pessimistic end, and not measured.
ROUTING_HEADS = {"g": 8, "s": 27, "d": 40}

# Time that a listed row takes array operations over that of a row in MLX's dense attention (docs/results/ops.md).
GATHERED_ROW = 2.5

MAX_BUCKETS = 4096  # what the kernels hold scores of
ONLINE_BUCKETS = 256


def nvidia_kind(capability: int) -> str:
    """The key of `ENOUGH_SAVED` for a compute capability such as 90: the nearest one below it, or else the lowest."""
    known = sorted(int(kind[3:]) for kind in ENOUGH_SAVED if kind.startswith("sm_"))
    return f"sm_{max((lower for lower in known if lower <= capability), default=known[0])}"


@dataclass(frozen=True)
class SparQ(MethodConfig):
    """SparQ decoding (docs/spec/sparq.md).

    What "auto" means: ``dense_below``, the number of keys below which attention stays dense, is ``16 * top_k`` with the
    `ops` backend, about where it begins to pay (docs/results/ops.md), `pays_from` with kernels on a GPU, and none for a
    ``top_k`` below the default, which is for experiments on short texts; ``component_score`` is ``"query_key"`` for
    models with q/k-norm, whose channels learn scales of their own, and ``"query"``, the paper's, otherwise;
    ``reallocate`` is on for one query head per KV head and off otherwise, and off in models with ``"query_key"``, whose
    estimate of the attended mass is too low to mix by (docs/results/gemma3.md).
    """

    name: ClassVar[str] = "sparq"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Algorithm 1 with its GQA paragraph: what the functions do by default.
        "paper": {"component_score": "query"},
        # The paper's code listing: no local window, mean reallocation for every group size.
        "appendix_b": {"component_score": "query", "local_window": 0, "reallocate": True},
        # The authors' evaluation code: sum of logits; the current token comes free: 128 + 1 keys, 32 + 1 local.
        "eval": {"component_score": "query", "group_reduce": "logits", "top_k": 129, "local_window": 33},
        # Ours: components ranked by |q| times the spread of the keys.
        "robust": {"component_score": "query_key"},
    }

    rank: int = 32
    top_k: int = 128
    local_window: int | None = None
    reallocate: str | bool = "auto"
    group_reduce: str = "softmax"
    component_score: str = "auto"
    dense_below: str | int = "auto"

    def __post_init__(self) -> None:
        if self.dense_below != "auto":
            check_int("dense_below", self.dense_below, 0)
        check_int("rank", self.rank, 1)
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)
        check_choice("reallocate", self.reallocate, ("auto", True, False))
        check_choice("group_reduce", self.group_reduce, ("softmax", "logits"))
        check_choice("component_score", self.component_score, ("auto", "query", "query_key"))

    def for_model(self, *, qk_norm: bool) -> SparQ:
        """With what "auto" means for a model, but for what its layers decide."""
        auto = "query_key" if qk_norm else "query"
        score = auto if self.component_score == "auto" else self.component_score
        mixes = False if score == "query_key" and self.reallocate == "auto" else self.reallocate
        return dataclasses.replace(self, component_score=score, reallocate=mixes)

    def reallocates(self, G: int) -> bool:
        """Whether a layer of ``G`` query heads per KV head mixes in the mean value (sparq.9)."""
        return G == 1 if self.reallocate == "auto" else bool(self.reallocate)

    @property
    def attended(self) -> int:
        return self.top_k

    def shortest_context(self, step: Step | None = None) -> int:
        if not isinstance(self.dense_below, str):
            return max(self.dense_below, self.top_k + 1)
        if self.top_k < SparQ.top_k:
            return self.top_k + 1
        return self.pays_from(step) if step and step.gpu else 16 * self.top_k

    def pays_from(self, step: Step) -> int:
        """Keys from which a step with the kernels of a GPU saves `ENOUGH_SAVED` bytes.

        Saved are the elements of keys and values that are not read, (sparq.11) less (sparq.12); spent is the score
        buffer, one float32 number per key and query head, written and read.
        """
        per_key = step.itemsize * (2 * step.D - self.rank) - 2 * 4 * step.G
        if per_key <= 0:
            return NEVER
        fixed = step.itemsize * 2 * (self.top_k + 1) * step.D
        return math.ceil((ENOUGH_SAVED[step.gpu] / step.heads + fixed) / per_key)

    def elements(self, S: int, D: int) -> int:
        return stats.sparq_elements(S, D, rank=self.rank, top_k=self.top_k)


@dataclass(frozen=True)
class SAAP(MethodConfig):
    """SAAP decoding (docs/spec/saap.md).

    Attributes:
        artefact: file of `mlx-sparse train-saap`; the "online" mode has none.
        mode: who chooses the buckets: the "trained" query networks of the artefact, its centroids ("kmeans"), or
            centroids fitted on the prompt itself ("online").
        probes: buckets visited per KV head and step.
        buckets: how many the "online" mode fits, 256 unless given; otherwise the artefact says.
        sink_tokens, recent_tokens: first and last keys that are always attended.
        dense_layers: attention layers, from the first on, that stay dense.
        fold_every: keys that left the window are listed in their buckets this many at a time, and attended till then.
        dense_below: keys below which attention stays dense; "auto" is `pays_from` with kernels on a GPU, with the `ops`
            backend where dense attention reads `GATHERED_ROW` times the rows of a step, the query network counted as
            rows, and none for fewer ``recent_tokens`` than the default, which are for experiments on short texts.
    """

    name: ClassVar[str] = "saap"
    artefact: str | None = None
    mode: str = "trained"
    probes: int = 32
    buckets: int | None = None
    sink_tokens: int = 1
    recent_tokens: int = 2047
    dense_layers: int = 1
    fold_every: int = 256
    dense_below: str | int = "auto"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("trained", "kmeans", "online"))
        if self.mode == "online" and self.artefact is not None:
            raise ConfigError("artefact: expected none with mode=online, got a file. Leave one of them out.")
        if self.artefact is not None and (not isinstance(self.artefact, str) or not self.artefact):
            raise ConfigError(f"artefact: expected the name of a file, got {self.artefact!r}.")
        if self.buckets is not None:
            check_int("buckets", self.buckets, 1, MAX_BUCKETS)
            if self.mode != "online":
                raise ConfigError(f"buckets: expected none with mode={self.mode}, whose artefact says, got one.")
        check_int("probes", self.probes, 1, MAX_BUCKETS)
        if self.mode == "online" and self.probes > self.fitted_buckets:
            raise ConfigError(f"probes: expected at most buckets={self.fitted_buckets}, got {self.probes}.")
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 1)
        check_int("dense_layers", self.dense_layers, 0)
        check_int("fold_every", self.fold_every, 1)
        if self.dense_below != "auto":
            check_int("dense_below", self.dense_below, 0)

    @property
    def file(self) -> str | None:
        """The artefact to load; None for the "online" mode.

        Raises:
            ConfigError: none is given where one is needed.
        """
        if self.mode != "online" and self.artefact is None:
            raise ConfigError(
                "artefact: expected a file that mlx-sparse train-saap wrote, got none. "
                "Name it, saap:artefact=FILE, or use saap:mode=online, which needs none."
            )
        return self.artefact

    @property
    def fitted_buckets(self) -> int:
        """Buckets of the "online" mode."""
        return ONLINE_BUCKETS if self.buckets is None else self.buckets

    @property
    def attended(self) -> int:
        return self.sink_tokens + self.recent_tokens

    def shortest_context(self, step: Step | None = None) -> int:
        exact = self.attended + 1
        if not isinstance(self.dense_below, str):
            return max(self.dense_below, exact)
        if self.recent_tokens < SAAP.recent_tokens:
            return exact
        if step and step.gpu:
            return max(self.pays_from(step), exact)
        network = step.network // (2 * step.itemsize * step.D) if step else 0
        per_key = 1 - GATHERED_ROW * (self._visited_share(step.buckets) if step and step.buckets else 0.0)
        if per_key <= 0:
            return NEVER
        return math.ceil(GATHERED_ROW * (self.attended + self.fold_every // 2 + network) / per_key)

    def _visited_share(self, buckets: int) -> float:
        """Of the keys, those in visited buckets: buckets are uneven, so twice their share is assumed."""
        return min(2 * self.probes / buckets, 1.0)

    def pays_from(self, step: Step) -> int:
        """Keys from which a step with the kernels of a GPU saves `ENOUGH_SAVED` bytes.

        Spent are the query network and three int32 numbers per listed key: read in its bucket, written to the list and
        read there.
        """
        share = self._visited_share(step.buckets)
        row, listed = 2 * step.itemsize * step.D, 3 * 4
        per_key = row * (1 - share) - listed * share
        if per_key <= 0:
            return NEVER
        routing = step.network * max(ROUTING_HEADS.get(step.gpu, 0) / step.heads, 1.0)
        fixed = (row + listed) * (self.attended + self.fold_every // 2) + routing
        return math.ceil((ENOUGH_SAVED[step.gpu] / step.heads + fixed) / per_key)


@dataclass(frozen=True)
class Streaming(MethodConfig):
    """First ``sink_tokens`` and last ``recent_tokens`` keys (StreamingLLM, LM-Infinite)."""

    name: ClassVar[str] = "streaming"
    sink_tokens: int = 16
    recent_tokens: int = 112

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 1)

    @property
    def attended(self) -> int:
        return self.sink_tokens + self.recent_tokens

    def elements(self, S: int, D: int) -> int:
        return stats.streaming_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class H2O(MethodConfig):
    """Heavy hitters: the ``top_k`` keys with the largest attention so far; the rest is evicted for good.

    A method to compare with: what prompts attend to is computed a second time, and evicted keys stay in memory.
    """

    name: ClassVar[str] = "h2o"
    top_k: int = 128
    local_window: int | None = None

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)

    @property
    def attended(self) -> int:
        return self.top_k

    @property
    def window(self) -> int:
        """``local_window``, its default resolved."""
        return check_local_window(self.local_window, self.top_k)

    def elements(self, S: int, D: int) -> int:
        return stats.h2o_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class FlexGen(MethodConfig):
    """Exact softmax over all keys, values of the ``top_k`` largest weights, no renormalisation."""

    name: ClassVar[str] = "flexgen"
    top_k: int = 128

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)

    @property
    def attended(self) -> int:
        return self.top_k

    def elements(self, S: int, D: int) -> int:
        return stats.flexgen_elements(S, D, top_k=self.attended)


@dataclass(frozen=True)
class OracleTopK(MethodConfig):
    """The ``top_k`` keys of the exact scores: a bound on SparQ, not a saving."""

    name: ClassVar[str] = "oracle_top_k"
    top_k: int = 128
    local_window: int | None = None
    group_reduce: str = "softmax"

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)
        check_choice("group_reduce", self.group_reduce, ("softmax", "logits"))

    @property
    def attended(self) -> int:
        return self.top_k

    def elements(self, S: int, D: int) -> int:
        return stats.oracle_top_k_elements(S, D, top_k=self.attended)
