"""Component-major copies of a cache's keys, as they are or in few bits: what SparQ takes its scores from."""

from __future__ import annotations

import mlx.core as mx

from ..common.key_codes import GROUP, KeyCodes
from ..methods import registry

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

    def extend(self, keys: mx.array, S: int) -> None:
        """Cover rows ``[0, S)`` of the buffer ``keys``."""
        if S <= self.covered:
            return
        if self.keys_t is None or self.covered == 0:
            # The whole buffer, so that the next steps have room.
            room = _capacity(keys.shape[2]) - keys.shape[2]
            self.keys_t = mx.contiguous(mx.pad(keys.swapaxes(-1, -2), [(0, 0)] * 3 + [(0, room)]))
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
        coded: with room for the whole buffer; what is past ``groups`` is stale. None before the first group.
        groups: how many hold.
    """

    def __init__(self, key_bits: int, padding: mx.array | None) -> None:
        self.key_bits = key_bits
        self.coded: KeyCodes | None = None
        self.groups = 0
        self._padding = padding
        self._spread: mx.array | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.coded is None else self.coded.nbytes

    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        if self.coded is None or length // GROUP >= self.groups:
            return
        self.groups, self._spread = length // GROUP, None
        # The centre of a sequence goes with its first coded group.
        first = mx.array(0) if self._padding is None else self._padding[:, None, None] // GROUP
        self.coded = self.coded._replace(centre=mx.where(first < self.groups, self.coded.centre, 0))

    def extend(self, keys: mx.array, S: int) -> None:
        """Cover rows ``[0, S)`` of the buffer ``keys``, but for those of the group that they do not fill."""
        groups = S // GROUP
        if groups == self.groups:
            return
        self._spread = None
        if self.coded is None or self.coded.lo.shape[-1] < groups:
            self._grow(keys)
        assert self.coded is not None
        for start in range(self.groups, groups, PIECE // GROUP):
            stop = min(start + PIECE // GROUP, groups)
            padding = None if self._padding is None else self._padding - start * GROUP
            new = registry.load("code_keys", "ops")(
                keys[:, :, start * GROUP : stop * GROUP],
                padding,
                key_bits=self.key_bits,
                centre=self.coded.centre if start else None,
            )
            per_group = 2 * self.key_bits  # words of 32 bits
            self.coded.codes[..., start * per_group : stop * per_group] = new.codes
            self.coded.lo[..., start:stop] = new.lo
            self.coded.step[..., start:stop] = new.step
            self.coded = self.coded._replace(centre=new.centre)
            if stop < groups:
                mx.eval(*self.coded)
        self.groups = groups

    def _grow(self, keys: mx.array) -> None:
        B, Hkv, rows, D = keys.shape
        groups = -(-rows // (GROUP * GROUPS_MULTIPLE)) * GROUPS_MULTIPLE
        old = self.coded
        if old is None:
            blank = mx.zeros((B, Hkv, D, groups), mx.float16)
            words = mx.zeros((B, Hkv, D, groups * 2 * self.key_bits), mx.uint32)
            self.coded = KeyCodes(words, blank, mx.zeros_like(blank), mx.zeros((B, Hkv, D)))
            return
        more = groups - old.lo.shape[-1]
        codes, lo, step = (
            mx.pad(array, [(0, 0)] * 3 + [(0, more * array.shape[-1] // old.lo.shape[-1])]) for array in old[:3]
        )
        self.coded = KeyCodes(codes, lo, step, old.centre)

    def read(self, keys: mx.array, *, whole: bool) -> KeyCodes:
        """The codes of the groups that are full, or the whole buffers; before the first group of none."""
        if self.coded is None:
            self._grow(keys)
        assert self.coded is not None
        if whole:
            return self.coded
        codes, lo, step, centre = self.coded
        groups = self.groups
        return KeyCodes(codes[..., : groups * 2 * self.key_bits], lo[..., :groups], step[..., :groups], centre)

    def spread(self, keys: mx.array, S: int, first_rows: list[int]) -> mx.array:
        """(sparq.22) over rows ``[0, S)`` of the buffer ``keys``; computed once for each group."""
        if self._spread is not None:
            return self._spread
        found: mx.array = registry.load("key_spread", "ops")(
            self.read(keys, whole=False), keys[..., :S, :], self._padding, key_bits=self.key_bits
        )
        if self.groups and max(first_rows) < self.groups * GROUP:
            self._spread = found
        return found


def _capacity(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
