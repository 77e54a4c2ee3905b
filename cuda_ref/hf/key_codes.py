"""The keys of a cache in few bits: what SparQ takes its scores from instead of a copy of them."""

from __future__ import annotations

from itertools import groupby

import torch

from mlx_sparse.methods.scoring_keys import GROUP, KeyCodes

from ..torch_functions import code_groups, key_spread
from .running_statistics import lasting

BYTES = GROUP // 2  # that a group of codes takes for each component
PIECE = 2048  # rows of a prompt that are coded at a time, so that their float32 copies stay small


class Codes:
    """Codes of the full groups of each sequence's keys (sparq.17) to (sparq.20).

    Attributes:
        coded: with room for a whole buffer; what is behind the last full group of a sequence is stale.
        length: rows that are covered, but for those of the groups that they do not fill.
        padding: ``(B,)`` first valid row of each sequence, or None.
    """

    @lasting
    def __init__(self, keys: torch.Tensor, padding: torch.Tensor | None) -> None:
        """No codes yet, for the buffer ``keys (B, Hkv, capacity, D)``."""
        B, Hkv, capacity, D = keys.shape
        self.padding, self.length = padding, 0
        self._runs = _runs(padding)
        room = capacity // GROUP
        codes = torch.empty(B, Hkv, D, room * BYTES, dtype=torch.uint8, device=keys.device)
        lo = torch.empty(B, Hkv, D, room, dtype=torch.float16, device=keys.device)
        self.coded = KeyCodes(codes, lo, torch.empty_like(lo), torch.zeros(B, Hkv, D, device=keys.device))
        self._spread: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.coded.nbytes

    @lasting
    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        if length >= self.length:
            return
        for sequences, first in self._runs:
            kept = _full(length, first)
            if kept < _full(self.length, first):
                self._spread = None
            if kept == 0:
                self.coded.centre[sequences] = 0
        self.length = length

    @lasting
    def extend(self, keys: torch.Tensor, length: int) -> None:
        """Cover rows ``[0, length)`` of the buffer ``keys``, but for those of the groups that they do not fill."""
        if length // GROUP > self.coded.lo.shape[-1]:
            self._grow(keys.shape[2] // GROUP)
        for sequences, first in self._runs:
            full = _full(length, first)
            for start in range(_full(self.length, first), full, PIECE // GROUP):
                stop = min(start + PIECE // GROUP, full)
                codes, lo, step, centre = (array[sequences] for array in self.coded)
                new = code_groups(
                    keys[sequences, :, first + start * GROUP : first + stop * GROUP],
                    centre=centre if start else None,
                )
                codes[..., start * BYTES : stop * BYTES] = new.codes
                lo[..., start:stop] = new.lo
                step[..., start:stop] = new.step
                centre.copy_(new.centre)
                self._spread = None
        self.length = length

    def _grow(self, room: int) -> None:
        def grown(array: torch.Tensor, per_group: int) -> torch.Tensor:
            larger = array.new_empty(*array.shape[:-1], room * per_group)
            larger[..., : array.shape[-1]] = array
            return larger

        codes, lo, step, centre = self.coded
        self.coded = KeyCodes(grown(codes, BYTES), grown(lo, 1), grown(step, 1), centre)

    def read(self) -> KeyCodes:
        """Return the codes of the full groups, as many places as a sequence without padding has."""
        codes, lo, step, centre = self.coded
        groups = self.length // GROUP
        return KeyCodes(codes[..., : groups * BYTES], lo[..., :groups], step[..., :groups], centre)

    @lasting
    def spread(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the spread (sparq.22) over ``keys``, the rows in use; computed once for each group."""
        if self._spread is not None:
            return self._spread
        found = key_spread(self.read(), keys, self.padding)
        # The spread of a sequence without a full group changes with every row.
        if all(_full(self.length, first) for _, first in self._runs):
            self._spread = found
        return found

    @lasting
    def select(self, sequences: torch.Tensor) -> None:
        """Keep the ``sequences``, in that order."""
        self.coded = KeyCodes(*(array.index_select(0, sequences) for array in self.coded))
        if self.padding is not None:
            self.padding = self.padding.index_select(0, sequences)
            self._runs = _runs(self.padding)
        if self._spread is not None:
            self._spread = self._spread.index_select(0, sequences)


def _full(length: int, first: int) -> int:
    """Full groups of a sequence that begins with row ``first``, in ``length`` rows."""
    return max(0, length - first) // GROUP


def _runs(padding: torch.Tensor | None) -> list[tuple[slice, int]]:
    """Neighbouring sequences that begin with the same row, whose groups are full at the same time, and that row."""
    if padding is None:
        return [(slice(None), 0)]
    runs, start = [], 0
    for first, same in groupby(padding.tolist()):
        stop = start + sum(1 for _ in same)
        runs.append((slice(start, stop), first))
        start = stop
    return runs
