"""SparQ's auxiliary cache state: component-major keys, whole or in few bits, and running statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..methods import SparQ
from ..methods.scoring_keys import GROUP, WORDS, KeyCodes
from ..ops.key_codes import code_groups, key_spread
from ..ops.packed_rows import PackedRows, Rows
from .moments import Moments
from .state import State

if TYPE_CHECKING:
    from .sparse_cache import SparseCache

# Rows of a copy hold a multiple of this many keys, so that they start on a cache line of 128 bytes in every type.
ROW_MULTIPLE = 64
# As long are rows of 4-bit codes.
GROUPS_MULTIPLE = 4
# Rows of a prompt that are coded at a time, and waited for, so that their float32 copies stay small.
PIECE = 2048


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
        self._config: SparQ | None = None
        self._group, self._mixing = 0, False

    @property
    def _kept(self) -> list[Columns | Codes | Moments]:
        return [kept for kept in (self.columns, self.codes, self.keys, self.values) if kept is not None]

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def rewind(self, length: int) -> None:
        for kept in self._kept:
            kept.rewind(length)

    def read(self, cache: SparseCache, config: SparQ, G: int, *, whole: bool) -> dict[str, Any]:
        S, keys, weight, mean = cache.length, cache.key_rows, None, None
        found: dict[str, Any] = {}
        if isinstance(keys, PackedRows) and config.scores_rows(packed=True):
            self.columns = self.codes = self.keys = None
            found = {"keys_t": None, "rank": keys.shape[3]}
        elif config.key_bits == 16:
            self.columns, self.codes = self.columns or Columns(), None
            self.columns.extend(keys, S)
            found["keys_t"] = self.columns.read(S, whole=whole)
            if config.component_score == "query_key":
                self.keys = self.keys or Moments(cache.padding, spread=True)
                self.keys.extend(keys, S)
                weight = self.keys.deviation()
        else:
            codes = self.codes
            if codes is None:
                self.columns = self.keys = None
                codes = self.codes = Codes(cache.padding, cache.first_rows())
            codes.extend(keys, S)
            found["keys_t"] = codes.read(keys, whole=whole)
            if config.component_score == "query_key":
                weight = codes.spread(keys, S)
        if self._mixes(config, G):
            self.values = self.values or Moments(cache.padding, spread=False)
            self.values.extend(cache.value_rows, S)
            mean = self.values.mean()
        found["component_weight"], found["value_mean"] = weight, mean
        return found

    def _mixes(self, config: SparQ, G: int) -> bool:
        """Return whether steps mix in the mean value. Decided once for each configuration."""
        if config is not self._config or G != self._group:
            self._config, self._group, self._mixing = config, G, config.reallocates(G)
        return self._mixing


class Columns:
    """The keys themselves (`key_bits` of 16).

    Attributes:
        keys_t: ``(B, Hkv, D, capacity)``; columns past ``covered`` are stale. None before the first.
        covered: rows that it has seen.
    """

    def __init__(self) -> None:
        self.keys_t: mx.array | None = None
        self.covered = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.keys_t is None else self.keys_t.nbytes

    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        self.covered = min(self.covered, length)

    def extend(self, keys: Rows, S: int) -> None:
        """Cover rows ``[0, S)`` of the buffer ``keys``."""
        if S <= self.covered:
            self.covered = S
            return
        if self.keys_t is None or self.covered == 0:
            # The whole buffer, so that the next steps have room.
            room = _capacity(keys.shape[2]) - keys.shape[2]
            self.keys_t = mx.contiguous(mx.pad(keys[:].swapaxes(-1, -2), [(0, 0)] * 3 + [(0, room)]))
        else:
            if S > self.keys_t.shape[-1]:
                grown = _capacity(keys.shape[2]) - self.covered
                blank = mx.zeros((*self.keys_t.shape[:-1], grown), keys.dtype)
                self.keys_t = mx.concatenate([self.keys_t[..., : self.covered], blank], axis=-1)
            self.keys_t[..., self.covered : S] = keys[..., self.covered : S, :].swapaxes(-1, -2)
        self.covered = S

    def read(self, S: int, *, whole: bool) -> mx.array:
        """``keys_t`` of ``S`` rows, or the whole buffer."""
        assert self.keys_t is not None
        return self.keys_t if whole else self.keys_t[..., :S]


class Codes:
    """Codes of full groups of keys (sparq.17) to (sparq.20).

    Attributes:
        coded: with room for the whole buffer; what is past a row's groups is stale. None before the first group.
        covered: rows that it has seen.
        centre: float32 ``(B, Hkv, D)`` of the codes (sparq.17), where other keys than these decide it; else None.
    """

    def __init__(self, padding: mx.array | None, first_rows: list[int]) -> None:
        """No codes yet, of sequences that begin at ``first_rows``, which ``padding`` has for kernels."""
        self.centre: mx.array | None = None
        self.coded: KeyCodes | None = None
        self.covered = 0
        self._padding = padding
        self._first = first_rows
        each = [(slice(b, b + 1), first) for b, first in enumerate(first_rows)]
        self._alike = each if len(set(first_rows)) > 1 else [(slice(None), first_rows[0])]  # coded together
        self._spread: mx.array | None = None
        self._until = 0  # rows with which the next group is full

    @property
    def nbytes(self) -> int:
        return 0 if self.coded is None else self.coded.nbytes

    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        if length >= self.covered:
            return
        before, self.covered, self._until = self.covered, length, 0
        left = [_full(length, first) for first in self._first]
        if self.coded is None or left == [_full(before, first) for first in self._first]:
            return
        self._spread = None
        if self.centre is not None:
            return
        # The centre of a sequence goes with its first group.
        self.coded = self.coded._replace(centre=self.coded.centre * (mx.array(left) > 0)[:, None, None])

    def set_centre(self, centre: mx.array) -> None:
        """Code around ``centre`` from now on; none of the groups here was coded around another."""
        self.centre = centre
        if self.coded is not None:
            self.coded = self.coded._replace(centre=centre)

    def extend(self, keys: Rows, S: int) -> None:
        """Cover rows ``[0, S)`` of the buffer ``keys``, but for those of groups that they do not fill."""
        self.rewind(S)
        if S < self._until:
            self.covered = S
            return
        for sequences, first in self._alike:
            old, new = _full(self.covered, first), _full(S, first)
            if new > old:
                self._spread = None
                self._code(keys, sequences, first, old, new)
        self.covered = S
        self._until = min(first + (_full(S, first) + 1) * GROUP for _, first in self._alike)

    def _code(self, keys: Rows, sequences: slice, first: int, old: int, new: int) -> None:
        """Code the groups ``[old, new)`` of sequences that begin at row ``first``."""
        if self.coded is None or self.coded.lo.shape[-1] < new:
            self._grow(keys)
        assert self.coded is not None
        for start in range(old, new, PIECE // GROUP):
            stop = min(start + PIECE // GROUP, new)
            made = code_groups(
                keys[sequences, :, first + start * GROUP : first + stop * GROUP],
                centre=self.coded.centre[sequences] if start else self.centre,
            )
            self.coded.codes[sequences, ..., start * WORDS : stop * WORDS] = made.codes
            self.coded.lo[sequences, ..., start:stop] = made.lo
            self.coded.step[sequences, ..., start:stop] = made.step
            if start == 0:
                self.coded.centre[sequences] = made.centre
            if stop < new:
                mx.eval(*self.coded)

    def _grow(self, keys: Rows) -> None:
        B, Hkv, rows, D = keys.shape
        groups = -(-rows // (GROUP * GROUPS_MULTIPLE)) * GROUPS_MULTIPLE
        old = self.coded
        if old is None:
            blank = mx.zeros((B, Hkv, D, groups), mx.float16)
            words = mx.zeros((B, Hkv, D, groups * WORDS), mx.uint32)
            centre = mx.zeros((B, Hkv, D)) if self.centre is None else self.centre
            self.coded = KeyCodes(words, blank, mx.zeros_like(blank), centre)
            return
        more = groups - old.lo.shape[-1]
        codes, lo, step = (
            mx.pad(array, [(0, 0)] * 3 + [(0, more * array.shape[-1] // old.lo.shape[-1])]) for array in old[:3]
        )
        self.coded = KeyCodes(codes, lo, step, old.centre)

    def read(self, keys: Rows, *, whole: bool) -> KeyCodes:
        """The codes of as many groups as a row without padding has, or the whole buffers."""
        if self.coded is None:
            self._grow(keys)
        assert self.coded is not None
        if whole:
            return self.coded
        codes, lo, step, centre = self.coded
        groups = self.covered // GROUP
        return KeyCodes(codes[..., : groups * WORDS], lo[..., :groups], step[..., :groups], centre)

    def spread(self, keys: Rows, S: int) -> mx.array:
        """(sparq.22) over rows ``[0, S)`` of the buffer ``keys``; computed once for each group."""
        if self._spread is not None:
            return self._spread
        found = key_spread(self.read(keys, whole=False), keys[..., :S, :], self._padding)
        # The spread of a sequence without a full group changes with every row.
        if _full(S, max(self._first)) > 0:
            self._spread = found
        return found


def _full(length: int, first: int) -> int:
    """Full groups of a sequence that begins with row ``first``, in ``length`` rows."""
    return max(0, length - first) // GROUP


def _capacity(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
