"""Define the parameters of SparQ, and estimate its transfers and crossover length."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from ...checks import ConfigError, check_choice, check_int, check_rank
from ...core import stats
from ...core.base import Method, Step
from ...core.decide import ENOUGH_SAVED, NEVER
from .scoring_keys import KEY_BITS, Projection


class Selection(NamedTuple):
    """Parameters for selecting the keys of one decode step.

    Attributes:
        component_weight: float32 ``(B, Hkv, D)`` standard deviation of the keys for ``component_score="query_key"``;
            None for ``component_score="query"``.
        left_padding: ``(B,)`` int, index of the first valid key of each sequence.
        keys_t: ``(B, Hkv, D, S)`` component-major keys or `KeyCodes`.
        bias: ``(B, Hq, 1, S)`` numbers that are added to the logits (sparq.25).
        projection: projection of queries and latents onto ``rank`` components for ``component_score="low_rank"``. Then
            ``keys_t`` has the `KeyCodes` of projected latents.
    """

    rank: int
    top_k: int
    local_window: int
    scale: float
    component_weight: Any = None
    left_padding: Any = None
    keys_t: Any = None
    bias: Any = None
    projection: Projection | None = None


# By default, a step attends to at least `FEWEST_KEYS` keys and about 1 of `KEYS_SHARE` keys (docs/results/quality.md).
FEWEST_KEYS, KEYS_SHARE = 128, 16


@dataclass(frozen=True)
class SparQ(Method):
    """Attend to the keys that score highest on a few components. Default: the measured setting, not the paper's.

    The defaults are ``preset=default``, with int4 scoring keys. The function `sparq_attention` defaults to the setting
    of the paper, ``preset=paper``, and takes another preset as ``**SparQ.preset(NAME)`` (docs/spec/sparq.md).

    Attributes:
        rank: number r of query components used to score each key, 1..D; the smallest r for "low_rank".
        top_k: number of attended keys per KV head, including the local window. "auto" grows with the context: it is the
            largest power of two that is at most 1/16 of the keys, but at least 128. An exported file has 128.
        local_window: number of last valid keys that are always attended to, 0..top_k; None means ``top_k // 4``.
        reallocate: if True, add the mean value, weighted by the softmax mass of the skipped keys. "auto" is True for
            one query head per KV head, but False for "query_key", which underestimates the attention recall
            (docs/spec/sparq.md).
        component_score: rank components by |q| ("query", as in the paper) or by |q| times the standard deviation of the
            keys ("query_key"). "auto" is "query_key" for models with q/k-norm, because their channels have learned
            scales, and for grouped query heads with quantized scoring keys. Otherwise "auto" is "query".
            "low_rank" scores the latents of multi-head latent attention with a projection (docs/spec/low_rank.md). With
            such latents, "auto" leaves decode steps dense.
        key_bits: number of bits per component of the scoring keys: 16 (as in the paper) or 4. An int4 copy of the keys
            needs about a quarter of the transfers and memory of a 16-bit copy (docs/spec/sparq.md).
            docs/results/quality.md reports the loss of quality.
        score: data used to score the keys of a quantized KV cache (``--kv-bits``). "rows" reads all components
            of the cache and needs no additional memory. "copy" reads a copy of the keys, as for caches that are not
            quantized (docs/spec/quantized.md).
        dense_below: context length in keys below which attention stays dense. "auto" is the length that was measured
            on this machine (`mlx-sparse calibrate`). Before a measurement, "auto" is ``16 * top_k`` on the `ops`
            backend (docs/results/speed.md). On `cpu` and GPU backends, "auto" is the length at which a step saves
            `ENOUGH_SAVED` bytes. If ``top_k`` is below 128, as in experiments on short texts, every step that can be
            sparse is sparse.
    """

    name: ClassVar[str] = "sparq"
    source: ClassVar[str] = "SparQ Attention, arXiv 2312.04985"
    reads: ClassVar[str] = (
        "`rank` components of every key, then `top_k` whole keys and values ([SparQ](docs/spec/sparq.md))"
    )
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"rank": 1}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Measured setting: the default of the method.
        "default": {"component_score": "auto", "key_bits": 4},
        # Algorithm 1 with its GQA paragraph: the default of the functions.
        "paper": {"component_score": "query", "key_bits": 16},
        # Variant of this project: components ranked by |q| times the standard deviation of the keys.
        "robust": {"component_score": "query_key"},
    }

    rank: int = 32
    top_k: str | int = "auto"
    local_window: int | None = None
    reallocate: str | bool = "auto"
    component_score: str = "auto"
    key_bits: int = 4
    score: str = "rows"
    dense_below: str | int = "auto"

    def __post_init__(self) -> None:
        if self.top_k != "auto":
            check_int("top_k", self.top_k, 1)
        super().__post_init__()
        check_choice("reallocate", self.reallocate, ("auto", True, False))
        check_choice("component_score", self.component_score, ("auto", "query", "query_key", "low_rank"))
        check_choice("key_bits", self.key_bits, KEY_BITS)
        check_choice("score", self.score, ("rows", "copy"))
        if self.component_score == "low_rank" and (self.key_bits != 4 or self.reallocate is True):
            got = f"key_bits={self.key_bits}, reallocate={self.reallocate}"
            raise ConfigError(f"component_score: expected low_rank with key_bits=4 and without reallocate, got {got}.")

    @classmethod
    def preset(cls, name: str, *, qk_norm: bool = False, grouped: bool = True) -> dict[str, Any]:
        """Return the arguments of `sparq_attention` for a preset. `for_model` explains the other parameters.

        Raises:
            ConfigError: the preset is unknown.
        """
        check_choice("preset", name, tuple(cls.presets))
        config = cls(**cls.presets[name]).for_model(qk_norm=qk_norm, grouped=grouped)
        return {setting: getattr(config, setting) for setting in ("component_score", "key_bits", "reallocate")}

    def for_model(self, *, qk_norm: bool, grouped: bool = True) -> SparQ:
        auto = "query_key" if qk_norm or (self.key_bits < 16 and grouped) else "query"
        score = auto if self.component_score == "auto" else self.component_score
        mixes = False if score != "query" and self.reallocate == "auto" else self.reallocate
        return dataclasses.replace(self, component_score=score, reallocate=mixes)

    @property
    def serves_latents(self) -> bool:
        # The quality with MLA was measured on a converted model only, so the user must name a rule.
        return self.component_score != "auto"

    @property
    def scores_latents(self) -> bool:
        return self.component_score == "low_rank"

    @property
    def measurable(self) -> bool:
        return super().measurable and not self.scores_latents  # a timed layer has random latents of full rank

    def layer_arguments(self, attention: Any) -> dict[str, Any]:
        from .low_rank import query_covariance  # imports MLX

        return {"query_covariance": functools.partial(query_covariance, attention)} if self.scores_latents else {}

    def for_bias(self) -> SparQ | None:
        # The running mean of the values includes the keys that a bias hides.
        return None if self.reallocate is True else dataclasses.replace(self, reallocate=False)

    @property
    def attended(self) -> int:
        return self.attended_at(0)

    def attended_at(self, S: int) -> int:
        """Return the number of attended keys per KV head in a step over ``S`` keys, if the cache has that many."""
        grown = (1 << (S // KEYS_SHARE).bit_length()) >> 1  # the largest power of two that is not larger
        return max(FEWEST_KEYS, grown) if self.top_k == "auto" else int(self.top_k)

    def at(self, S: int) -> SparQ:
        return dataclasses.replace(self, top_k=self.attended_at(S))

    def check_head_dim(self, D: int) -> None:
        check_rank(self.rank, D)

    def reallocates(self, G: int) -> bool:
        """Return True if a layer with ``G`` query heads per KV head adds the mean value (sparq.9)."""
        return G == 1 if self.reallocate == "auto" else bool(self.reallocate)

    def scores_rows(self, *, packed: bool) -> bool:
        """Return True if SparQ scores the cache's own keys instead of a copy.

        ``packed`` is True if the KV cache is quantized.
        """
        return packed and self.score == "rows"

    def supports_sinks(self, G: int) -> bool:
        return not self.reallocates(G)

    def parameters(self, G: int = 1) -> dict[str, Any]:
        if self.top_k == "auto":
            return self.at(0).parameters(G)
        found = super().parameters(G) | {"reallocate": self.reallocates(G)}
        return {name: found[name] for name in ("rank", "top_k", "local_window", "reallocate")}

    @property
    def experiment(self) -> bool:
        return self.attended < FEWEST_KEYS

    def modeled_context(self, step: Step | None) -> int:
        if not step or step.device not in ENOUGH_SAVED:
            return KEYS_SHARE * self.attended
        # The step must save `ENOUGH_SAVED` bytes. It saves the elements of keys and values that it does not read,
        # (sparq.11) minus (sparq.12) or (sparq.23). It writes and reads the score buffer, one number per key and query
        # head: float32, or 8 bits if the precision suffices.
        packed = step.packed is not None
        by_rows = self.scores_rows(packed=packed)
        coded = self.key_bits < 16 and not by_rows
        scored = self.rank * ((2 * self.key_bits + 1) / 16 if coded else step.itemsize)
        per_key = step.pair_bytes - (step.row_bytes if by_rows else scored)
        per_key -= self._score_bytes(step.G, packed=packed, backend="metal")
        if per_key <= 0:
            return NEVER
        top_k = self.attended
        while True:
            fixed = (top_k + 1) * step.pair_bytes
            S = math.ceil((ENOUGH_SAVED[step.device] / step.heads + fixed) / per_key)
            if self.attended_at(S) <= top_k:
                return S
            if S > NEVER:
                return NEVER
            top_k *= 2

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return stats.sparq_elements(S, D, rank=self.rank, top_k=self.attended_at(S), key_bits=self.key_bits)

    def rows(self, S: int) -> int:
        return 2 * min(self.attended_at(S), S)

    def value_rows(self, S: int) -> int:
        return super().value_rows(S) + 2  # the mean value is read and written

    def _score_bytes(self, G: int, *, packed: bool, backend: str) -> int:
        """Return the bytes per key of the score buffer, which one pass over the keys writes and the next pass reads.

        The scores are float32. The Metal kernels store them as 8-bit codes if the precision suffices.
        """
        coded = packed if self.scores_rows(packed=packed) else self.key_bits < 16
        return 2 * G * (1 if backend == "metal" and coded and not self.reallocates(G) else 4)

    def step_bytes(self, S: int, D: int, *, itemsize: int, row_bytes: int, G: int, backend: str) -> int:
        packed = row_bytes < D * itemsize
        scored: float = row_bytes
        if not self.scores_rows(packed=packed):  # int4 scoring keys have the same size for every type of cache
            scored = self.rank * (itemsize if self.key_bits == 16 else (2 * self.key_bits + 1) / 16)
        per_key = scored + self._score_bytes(G, packed=packed, backend=backend)
        lists = self.rows(S) // 2 * _list_bytes(S) if backend == "metal" else 0
        return round(S * per_key) + lists + self.rows(S) * row_bytes + 4 * D * itemsize

    def with_budget(self, share: Fraction, D: int, named: Collection[str]) -> tuple[SparQ, str]:
        """Spend half of the budget on scores and half on attention.

        If ``named`` contains ``rank`` or ``top_k``, the caller adjusts only the other setting of the two. The captured
        share determines the rank of a projection, so the budget determines only its ``top_k``.
        """
        config = self if "dense_below" in named else dataclasses.replace(self, dense_below=0)
        if not ({"rank", "top_k"} & set(named) or self.scores_latents):
            rank = share * D if self.key_bits == 16 else share * D * 32 / (2 * self.key_bits + 1)
            return dataclasses.replace(config, rank=min(max(1, int(rank)), D)), "top_k"
        free = [setting for setting in ("top_k", "rank") if setting not in named]
        return config, free[0] if free else ""


def _list_bytes(S: int) -> int:
    """Return the bytes per attended key in the lists of scores and indices that one Metal launch passes to the next.

    Up to 8,192 keys are one tile. Each tile of a longer context has its own list (scripts/traffic.py counts them).
    """
    return 8 if S <= 8192 else 16 * -(-S // 4096) + 24
