"""SparQ in a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_sparse.checks import ConfigError, check_local_window, check_rank
from mlx_sparse.common.key_codes import GROUP
from mlx_sparse.lm.model import resolve
from mlx_sparse.methods import SparQ

from ...defaults import dense_below
from ...operators import OPERATORS, coded_axes
from ..families import head_dim
from .base import KEYS, PROMPT, Decoding


@dataclass(frozen=True)
class SparQDecoding(Decoding):
    """Decoding by SparQ."""

    operator: ClassVar[str] = "SparQAttention"
    timed: ClassVar[bool] = True
    method: SparQ

    @classmethod
    def settled(cls, config: SparQ, model: Any, *, branches: bool, packed: bool = False) -> SparQDecoding:
        """The method with every choice made as `mlx_sparse.enable` makes it."""
        args = model.args
        D = head_dim(model.layers[0].self_attn)
        by_rows = config.scores_rows(packed=packed)
        if not by_rows:
            check_rank(config.rank, D)
        if packed and not by_rows and config.key_bits == 16:
            raise ConfigError("key_bits: expected 8 or 4 with score=copy beside --kv-bits, got 16. Or give score=rows.")
        resolved = resolve(config, model)
        settled = dataclasses.replace(
            resolved,
            local_window=check_local_window(config.local_window, config.top_k),
            reallocate=resolved.reallocates(args.num_attention_heads // args.num_key_value_heads),
            dense_below=dense_below(config, D, packed=packed) if branches else config.top_k + 1,
        )
        if by_rows:
            return RowSparQDecoding(settled, D)
        return CodedSparQDecoding(settled) if settled.key_bits < 16 else cls(settled)

    def attributes(self, lanes: int) -> dict[str, float]:
        method = self.method
        return {
            "rank": method.rank,
            "top_k": method.top_k,
            "local_window": check_local_window(method.local_window, method.top_k),
            "reallocate": int(bool(method.reallocate)),
            "group_reduce": ("softmax", "logits").index(method.group_reduce),
            "component_score": ("query", "query_key").index(method.component_score),
            "lanes": lanes,
            "dense_below": int(method.dense_below),
        }

    def shortened(self, *, static: bool) -> SparQDecoding:
        method = self.method
        top_k = PROMPT if static else min(method.top_k, KEYS)
        window = min(int(method.local_window or 0), top_k // 4)
        short = dataclasses.replace(method, top_k=top_k, local_window=window, dense_below=0)
        return dataclasses.replace(self, method=short)


@dataclass(frozen=True)
class CodedSparQDecoding(SparQDecoding):
    """Decoding by SparQ with scores from few bits."""

    operator: ClassVar[str] = "SparQCodedAttention"
    group: ClassVar[int] = GROUP

    def attributes(self, lanes: int) -> dict[str, float]:
        others = {name: value for name, value in super().attributes(lanes).items() if name != "lanes"}
        return {**others, "key_bits": self.method.key_bits}

    def axes(self, capacity: int) -> dict[str, int]:
        return coded_axes(capacity, self.method.key_bits)


@dataclass(frozen=True)
class RowSparQDecoding(SparQDecoding):
    """Decoding by SparQ with exact scores, from rows of few bits.

    Attributes:
        D: head dim.
    """

    operator: ClassVar[str] = "SparQRowsAttention"
    D: int

    def attributes(self, lanes: int) -> dict[str, float]:
        kept = [attribute.name for attribute in OPERATORS[self.operator].attributes]
        return {name: value for name, value in super().attributes(lanes).items() if name in kept}

    def shortened(self, *, static: bool) -> SparQDecoding:
        """Over rows of numbers, which MLX scores alike by as many components as there are."""
        short = super().shortened(static=static)
        method = dataclasses.replace(short.method, rank=self.D, key_bits=16, component_score="query")
        return dataclasses.replace(short, method=method)
