"""What SparQ keeps beside a cache: component-major keys and running sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..methods import SparQ
from .moments import Moments
from .state import State

if TYPE_CHECKING:
    from .kv_cache import SparseCache

# Rows of ``keys_t`` hold a multiple of this many keys, so that they start on a cache line of 128 bytes in every type.
ROW_MULTIPLE = 64


class SparQState(State):
    """What SparQ keeps beside keys and values; everything can be rebuilt from them.

    Attributes:
        keys_t: ``(B, Hkv, D, capacity)`` component-major copy of the keys; columns past ``covered`` are stale.
        covered: rows that ``keys_t`` has seen.
        keys, values: moments of the rows that were there when a step last asked for them; None before the first.
    """

    def __init__(self) -> None:
        self.keys_t: mx.array | None = None
        self.covered = 0
        self.keys: Moments | None = None
        self.values: Moments | None = None

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.keys_t, self.keys, self.values) if kept is not None)

    def read(self, cache: SparseCache, config: SparQ, G: int, *, whole: bool) -> dict[str, Any]:
        reallocate, weighted = config.reallocates(G), config.component_score == "query_key"
        self.extend(cache, cache.length, mean=reallocate, spread=weighted)
        assert self.keys_t is not None
        return {
            "component_weight": self.keys.deviation() if weighted and self.keys else None,
            "keys_t": self.keys_t if whole else self.keys_t[..., : cache.length],
            "value_mean": self.values.mean() if reallocate and self.values else None,
        }

    def extend(self, cache: SparseCache, S: int, *, mean: bool, spread: bool) -> None:
        """Cover rows ``[0, S)`` of ``cache``, with the mean of its values and the spread of its keys if asked for."""
        self.rewind(S)
        if S > self.covered:
            self._extend_columns(cache.keys, S)
        if mean:
            self.values = self.values or Moments(cache.padding, spread=False)
            self.values.extend(cache.values, S)
        if spread:
            self.keys = self.keys or Moments(cache.padding, spread=True)
            self.keys.extend(cache.keys, S)

    def _extend_columns(self, keys: mx.array, S: int) -> None:
        if self.keys_t is None or self.covered == 0:
            self.keys_t = self._columns(keys)
        else:
            if S > self.keys_t.shape[-1]:
                grown = self._capacity(keys.shape[2]) - self.covered
                blank = mx.zeros((*self.keys_t.shape[:-1], grown), keys.dtype)
                self.keys_t = mx.concatenate([self.keys_t[..., : self.covered], blank], axis=-1)
            self.keys_t[..., self.covered : S] = keys[..., self.covered : S, :].swapaxes(-1, -2)
        self.covered = S

    @staticmethod
    def _capacity(rows: int) -> int:
        return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE

    def _columns(self, keys: mx.array) -> mx.array:
        """Component-major copy of the whole buffer."""
        S = keys.shape[2]
        columns = keys.swapaxes(-1, -2)
        return mx.contiguous(mx.pad(columns, [(0, 0)] * 3 + [(0, self._capacity(S) - S)]))

    def rewind(self, length: int) -> None:
        self.covered = min(self.covered, length)
        for moments in (self.keys, self.values):
            if moments is not None:
                moments.rewind(length)
