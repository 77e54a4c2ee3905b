"""The keys of a cache in few bits: what SparQ takes its scores from instead of a copy of them."""

from __future__ import annotations

import torch

from mlx_sparse.common.key_codes import GROUP, KeyCodes
from mlx_sparse.methods import registry

from .moments import lasting

PIECE = 2048  # rows of a prompt that are coded at a time, so that their float32 copies stay small


class Codes:
    """Codes of full groups of keys (sparq.17) to (sparq.20).

    Attributes:
        key_bits: of a code.
        coded: with room for a whole buffer; what is past ``groups`` is stale.
        groups: how many hold.
        padding: ``(B,)`` first valid row of each sequence, or None.
    """

    @lasting
    def __init__(self, keys: torch.Tensor, key_bits: int, padding: torch.Tensor | None) -> None:
        """No codes yet, for the buffer ``keys (B, Hkv, capacity, D)``."""
        B, Hkv, capacity, D = keys.shape
        self.key_bits, self.padding, self.groups = key_bits, padding, 0
        room = capacity // GROUP
        codes = torch.empty(B, Hkv, D, room * 8 * key_bits, dtype=torch.uint8, device=keys.device)
        lo = torch.empty(B, Hkv, D, room, dtype=torch.float16, device=keys.device)
        self.coded = KeyCodes(codes, lo, torch.empty_like(lo), torch.zeros(B, Hkv, D, device=keys.device))
        self._last_first = 0 if padding is None else int(padding.max())  # no sequence begins later
        self._spread: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.coded.nbytes

    @lasting
    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        if length // GROUP >= self.groups:
            return
        self.groups, self._spread = length // GROUP, None
        # The centre of a sequence goes with its first coded group.
        if self.padding is not None:
            self.coded.centre.mul_((self.padding // GROUP < self.groups)[:, None, None])
        elif self.groups == 0:
            self.coded.centre.zero_()

    @lasting
    def extend(self, keys: torch.Tensor, length: int) -> None:
        """Cover rows ``[0, length)`` of the buffer ``keys``, but for those of the group that they do not fill."""
        groups = length // GROUP
        if groups == self.groups:
            return
        self._spread = None
        if groups > self.coded.lo.shape[-1]:
            self._grow(keys.shape[2] // GROUP)
        for start in range(self.groups, groups, PIECE // GROUP):
            stop = min(start + PIECE // GROUP, groups)
            new = registry.load("code_keys", "triton")(
                keys[:, :, start * GROUP : stop * GROUP],
                None if self.padding is None else self.padding - start * GROUP,
                key_bits=self.key_bits,
                centre=self.coded.centre if start else None,
            )
            per_group = 8 * self.key_bits
            self.coded.codes[..., start * per_group : stop * per_group] = new.codes
            self.coded.lo[..., start:stop] = new.lo
            self.coded.step[..., start:stop] = new.step
            self.coded.centre.copy_(new.centre)
        self.groups = groups

    def _grow(self, room: int) -> None:
        def grown(array: torch.Tensor, per_group: int) -> torch.Tensor:
            larger = array.new_empty(*array.shape[:-1], room * per_group)
            larger[..., : self.groups * per_group] = array[..., : self.groups * per_group]
            return larger

        codes, lo, step, centre = self.coded
        self.coded = KeyCodes(grown(codes, 8 * self.key_bits), grown(lo, 1), grown(step, 1), centre)

    def read(self) -> KeyCodes:
        """The codes of the groups that are full."""
        codes, lo, step, centre = self.coded
        return KeyCodes(
            codes[..., : self.groups * 8 * self.key_bits], lo[..., : self.groups], step[..., : self.groups], centre
        )

    @lasting
    def spread(self, keys: torch.Tensor) -> torch.Tensor:
        """(sparq.22) over ``keys``, the rows in use; computed once for each group."""
        if self._spread is not None:
            return self._spread
        found: torch.Tensor = registry.load("key_spread", "triton")(
            self.read(), keys, self.padding, key_bits=self.key_bits
        )
        if self._last_first < self.groups * GROUP:
            self._spread = found
        return found

    @lasting
    def select(self, sequences: torch.Tensor) -> None:
        """Keep the ``sequences``, in that order."""
        self.coded = KeyCodes(*(array.index_select(0, sequences) for array in self.coded))
        if self.padding is not None:
            self.padding = self.padding.index_select(0, sequences)
        if self._spread is not None:
            self._spread = self._spread.index_select(0, sequences)
