"""Store the int4 scoring keys of a cache, which SparQ reads instead of a component-major copy of the keys."""

from __future__ import annotations

from itertools import groupby

import torch

from mlx_sparse.methods.sparq.scoring_keys import GROUP, KeyCodes

from ..torch_functions import code_groups, key_spread
from .running_statistics import outside_inference_mode

BYTES = GROUP // 2  # bytes of codes per group and component
QUANTIZED_ROWS = 2048  # maximum number of rows that are quantized at a time, which limits the float32 copies


class Codes:
    """Int4 scoring keys of the full groups of each sequence in a cache layer (sparq.17 to sparq.20).

    Attributes:
        coded: `KeyCodes` with the capacity of the key buffer. Slots after the last full group of a sequence are stale.
        length: number of rows that have been processed; all full groups in these rows are quantized.
        padding: ``(B,)`` index of the first valid row of each sequence, or None.
    """

    @outside_inference_mode
    def __init__(self, keys: torch.Tensor, padding: torch.Tensor | None) -> None:
        B, Hkv, capacity, D = keys.shape
        self.padding, self.length = padding, 0
        self._runs = _runs(padding)
        groups = capacity // GROUP
        codes = torch.empty(B, Hkv, D, groups * BYTES, dtype=torch.uint8, device=keys.device)
        lo = torch.empty(B, Hkv, D, groups, dtype=torch.float16, device=keys.device)
        self.coded = KeyCodes(codes, lo, torch.empty_like(lo), torch.zeros(B, Hkv, D, device=keys.device))
        self._spread: torch.Tensor | None = None

    @outside_inference_mode
    def rewind(self, length: int) -> None:
        if length >= self.length:
            return
        for sequences, first in self._runs:
            kept = _full(length, first)
            if kept < _full(self.length, first):
                self._spread = None
            if kept == 0:
                self.coded.center[sequences] = 0
        self.length = length

    @outside_inference_mode
    def extend(self, keys: torch.Tensor, length: int) -> None:
        """Quantize the full groups of rows ``[0, length)`` of the buffer ``keys``."""
        if length // GROUP > self.coded.lo.shape[-1]:
            self._grow(keys.shape[2] // GROUP)
        for sequences, first in self._runs:
            full = _full(length, first)
            for start in range(_full(self.length, first), full, QUANTIZED_ROWS // GROUP):
                stop = min(start + QUANTIZED_ROWS // GROUP, full)
                codes, lo, step, center = (array[sequences] for array in self.coded)
                new = code_groups(
                    keys[sequences, :, first + start * GROUP : first + stop * GROUP], center=center if start else None
                )
                codes[..., start * BYTES : stop * BYTES] = new.codes
                lo[..., start:stop] = new.lo
                step[..., start:stop] = new.step
                center.copy_(new.center)
                self._spread = None
        self.length = length

    def _grow(self, groups: int) -> None:
        def grown(array: torch.Tensor, per_group: int) -> torch.Tensor:
            larger = array.new_empty(*array.shape[:-1], groups * per_group)
            larger[..., : array.shape[-1]] = array
            return larger

        codes, lo, step, center = self.coded
        self.coded = KeyCodes(grown(codes, BYTES), grown(lo, 1), grown(step, 1), center)

    def read(self) -> KeyCodes:
        """Return the codes of all full groups as slices. If a sequence is padded, its last slots may be stale."""
        codes, lo, step, center = self.coded
        groups = self.length // GROUP
        return KeyCodes(codes[..., : groups * BYTES], lo[..., :groups], step[..., :groups], center)

    @outside_inference_mode
    def spread(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the spread (sparq.22) of each component of ``keys``. It is reused until another group is full."""
        if self._spread is not None:
            return self._spread
        found = key_spread(self.read(), keys, self.padding)
        # The spread of a sequence without a full group changes with every row.
        if all(_full(self.length, first) for _, first in self._runs):
            self._spread = found
        return found

    @outside_inference_mode
    def select(self, sequences: torch.Tensor) -> None:
        self.coded = KeyCodes(*(array.index_select(0, sequences) for array in self.coded))
        if self.padding is not None:
            self.padding = self.padding.index_select(0, sequences)
            self._runs = _runs(self.padding)
        if self._spread is not None:
            self._spread = self._spread.index_select(0, sequences)


def _full(length: int, first: int) -> int:
    return max(0, length - first) // GROUP


def _runs(padding: torch.Tensor | None) -> list[tuple[slice, int]]:
    """Split the sequences into runs with the same first valid row. Return ``(slice, first valid row)`` of each run.

    The key groups of all sequences of a run become full at the same time.
    """
    if padding is None:
        return [(slice(None), 0)]
    runs, start = [], 0
    for first, same in groupby(padding.tolist()):
        stop = start + sum(1 for _ in same)
        runs.append((slice(start, stop), first))
        start = stop
    return runs
