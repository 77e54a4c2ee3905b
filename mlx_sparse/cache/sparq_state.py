"""What SparQ keeps beside a cache: component-major keys, whole or in few bits, and running sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common.packed_rows import PackedRows
from ..methods import SparQ
from .key_copy import Codes, Columns
from .moments import Moments
from .state import State

if TYPE_CHECKING:
    from .sparse_cache import SparseCache


class SparQState(State):
    """What SparQ keeps beside keys and values; everything can be rebuilt from them.

    Attributes:
        columns: the keys, component-major, for ``key_bits`` of 16; None before the first step with them.
        codes: the same in few bits.
        keys, values: moments of the rows that were there when a step last asked for them; None before the first.
    """

    def __init__(self) -> None:
        self.columns: Columns | None = None
        self.codes: Codes | None = None
        self.keys: Moments | None = None
        self.values: Moments | None = None

    @property
    def _kept(self) -> list[Columns | Codes | Moments]:
        return [kept for kept in (self.columns, self.codes, self.keys, self.values) if kept is not None]

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def rewind(self, length: int) -> None:
        for kept in (self.columns, self.codes, self.keys, self.values):
            if kept is not None:
                kept.rewind(length)

    def read(self, cache: SparseCache, config: SparQ, G: int, *, whole: bool) -> dict[str, Any]:
        S, weighted = cache.length, config.component_score == "query_key"
        self.rewind(S)
        found: dict[str, Any] = {"component_weight": None, "value_mean": None}
        if config.scores_rows(packed=isinstance(cache.key_rows, PackedRows)):
            self.columns = self.codes = self.keys = None
            found |= {"keys_t": None, "key_bits": 16, "rank": cache.key_rows.shape[3]}
        elif config.key_bits == 16:
            self.columns, self.codes = self.columns or Columns(), None
            self.columns.extend(cache.key_rows, S)
            found["keys_t"] = self.columns.read(S, whole=whole)
            if weighted:
                self.keys = self.keys or Moments(cache.padding, spread=True)
                self.keys.extend(cache.key_rows, S)
                found["component_weight"] = self.keys.deviation()
        else:
            if self.codes is None or self.codes.key_bits != config.key_bits:
                self.columns = self.keys = None
                self.codes = Codes(config.key_bits, cache.padding, cache.first_rows())
            self.codes.extend(cache.key_rows, S)
            found["keys_t"] = self.codes.read(cache.key_rows, whole=whole)
            if weighted:
                found["component_weight"] = self.codes.spread(cache.key_rows, S)
        if config.reallocates(G):
            self.values = self.values or Moments(cache.padding, spread=False)
            self.values.extend(cache.value_rows, S)
            found["value_mean"] = self.values.mean()
        return found
