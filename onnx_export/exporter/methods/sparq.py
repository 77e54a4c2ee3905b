"""Export SparQ decoding with 16-bit or int4 scoring keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx

import mlx_sparse
from mlx_sparse.checks import check_choice, check_local_window, check_rank
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.sparq.scoring_keys import GROUP

from ...defaults import dense_below
from ..families import head_dim
from .base import KEYS, Decoding, Step

if TYPE_CHECKING:
    from mlx import nn


@dataclass(frozen=True)
class SparQDecoding(Decoding):
    """Decode method SparQ with component-major scoring keys."""

    operator: ClassVar[str] = "SparQAttention"
    method: SparQ

    @classmethod
    def resolve(cls, config: SparQ, model: nn.Module, *, native: bool) -> SparQDecoding:
        """Resolve every "auto" as `mlx_sparse.enable` does, except that `defaults.dense_below` sets ``dense_below``."""
        attention = model.layers[0].self_attn
        G, D = attention.n_heads // attention.n_kv_heads, head_dim(attention)
        check_rank(config.rank, D)
        check_choice("component_score", config.component_score, ("auto", "query", "query_key"))
        resolved = config.for_model(qk_norm="q_norm" in attention, grouped=G > 1)
        method = dataclasses.replace(
            resolved,
            local_window=check_local_window(config.local_window, config.attended),
            reallocate=resolved.reallocates(G),
            dense_below=dense_below(config, attention.n_kv_heads, D, native=native),
        )
        return CodedSparQDecoding(method) if method.key_bits < 16 else cls(method)

    def attributes(self, lanes: int) -> dict[str, float]:
        method = self.method
        return {
            "rank": method.rank,
            "top_k": method.attended,
            "local_window": check_local_window(method.local_window, method.attended),
            "reallocate": int(bool(method.reallocate)),
            "component_score": ("query", "query_key").index(method.component_score),
            "lanes": lanes,
            "dense_below": int(method.dense_below),
        }

    def attend(self, call: Step) -> mx.array:
        made: mx.array = mlx_sparse.sparq_attention(
            call.query,
            call.keys,
            call.values,
            component_score=self.method.component_score,
            key_bits=self.method.key_bits,
            scale=call.scale,
            backend="ops",
            **self.method.parameters(),
        )
        return made

    def shortened(self) -> SparQDecoding:
        method = self.method
        top_k = min(method.attended, KEYS)
        window = min(int(method.local_window or 0), top_k // 4)
        short = dataclasses.replace(method, top_k=top_k, local_window=window, dense_below=0)
        return dataclasses.replace(self, method=short)


@dataclass(frozen=True)
class CodedSparQDecoding(SparQDecoding):
    """Decode method SparQ with int4 scoring keys, which only the native kernels support."""

    operator: ClassVar[str] = "SparQCodedAttention"
    group: ClassVar[int] = GROUP

    def attributes(self, lanes: int) -> dict[str, float]:
        return {name: value for name, value in super().attributes(lanes).items() if name != "lanes"}
