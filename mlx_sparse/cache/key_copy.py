"""Component-major copies of a cache's keys, as they are or in few bits: what SparQ takes its scores from."""

from __future__ import annotations

import mlx.core as mx

from ..common.key_codes import GROUP, KeyCodes
from ..common.packed_rows import Rows
from ..ops.key_codes import code_groups, key_spread

# Rows of a copy hold a multiple of this many keys, so that they start on a cache line of 128 bytes in every type.
ROW_MULTIPLE = 64
# As long are rows of 4-bit codes.
GROUPS_MULTIPLE = 4
# Rows of a prompt that are coded at a time, and waited for, so that their float32 copies stay small.
PIECE = 2048


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

    def __init__(self, key_bits: int, padding: mx.array | None, first_rows: list[int]) -> None:
        """No codes yet, of sequences that begin at ``first_rows``, which ``padding`` has for kernels."""
        self.key_bits = key_bits
        self.centre: mx.array | None = None
        self.coded: KeyCodes | None = None
        self.covered = 0
        self._padding = padding
        self._first = first_rows
        each = [(slice(b, b + 1), first) for b, first in enumerate(first_rows)]
        self._alike = each if len(set(first_rows)) > 1 else [(slice(None), first_rows[0])]  # coded together
        self._spread: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.coded is None else self.coded.nbytes

    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        if length >= self.covered:
            return
        before, self.covered = self.covered, length
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
        for sequences, first in self._alike:
            old, new = _full(self.covered, first), _full(S, first)
            if new > old:
                self._spread = None
                self._code(keys, sequences, first, old, new)
        self.covered = S

    def _code(self, keys: Rows, sequences: slice, first: int, old: int, new: int) -> None:
        """Code the groups ``[old, new)`` of sequences that begin at row ``first``."""
        if self.coded is None or self.coded.lo.shape[-1] < new:
            self._grow(keys)
        assert self.coded is not None
        for start in range(old, new, PIECE // GROUP):
            stop = min(start + PIECE // GROUP, new)
            made = code_groups(
                keys[sequences, :, first + start * GROUP : first + stop * GROUP],
                key_bits=self.key_bits,
                centre=self.coded.centre[sequences] if start else self.centre,
            )
            per_group = 2 * self.key_bits  # words of 32 bits
            self.coded.codes[sequences, ..., start * per_group : stop * per_group] = made.codes
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
            words = mx.zeros((B, Hkv, D, groups * 2 * self.key_bits), mx.uint32)
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
        return KeyCodes(codes[..., : groups * 2 * self.key_bits], lo[..., :groups], step[..., :groups], centre)

    def spread(self, keys: Rows, S: int) -> mx.array:
        """(sparq.22) over rows ``[0, S)`` of the buffer ``keys``; computed once for each group."""
        if self._spread is not None:
            return self._spread
        found = key_spread(self.read(keys, whole=False), keys[..., :S, :], self._padding, key_bits=self.key_bits)
        # The spread of a sequence without a full group changes with every row.
        if _full(S, max(self._first)) > 0:
            self._spread = found
        return found


def _full(length: int, first: int) -> int:
    """Full groups of a sequence that begins with row ``first``, in ``length`` rows."""
    return max(0, length - first) // GROUP


def _capacity(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
