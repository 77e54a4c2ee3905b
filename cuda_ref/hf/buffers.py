"""Hold keys and values of a layer, and the left padding of a decode step, read from the causal mask of transformers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from mlx_sparse.checks import ShapeError

from .key_codes import Codes
from .running_statistics import RunningStatistics, lasting

# Capacities are multiples of this many rows, so that the rows of ``keys_t`` start on cache lines of 128 bytes.
ROW_MULTIPLE = 256
ROOM = 32  # buffers grow by one part in this: copying then costs less per token than a decode step reads


class Buffers:
    """Rows ``[0, length)`` of a cache layer; appending a token copies nothing.

    ``keys_t`` or codes and the moments are made when the first SparQ step asks and kept up from then on, so a context
    that stays short costs what it costs with transformers' own layer.

    Attributes:
        keys, values: ``(B, Hkv, capacity, D)``; rows from ``length`` on are stale.
        keys_t: ``(B, Hkv, D, capacity)`` component-major copy of rows ``[0, transposed)``, or None.
        codes: the keys in few bits, which stand in for ``keys_t`` and for the moments of the keys, or None.
        key_moments, value_moments: of the rows that are valid under ``left_padding``, or None.
    """

    @lasting
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Empty buffers for rows like those of ``keys`` and ``values (B, Hkv, L, D)``."""
        self.keys, self.values = (rows.new_empty(*rows.shape[:2], 0, rows.shape[3]) for rows in (keys, values))
        self.length = 0
        self.keys_t: torch.Tensor | None = None
        self.transposed = 0
        self.codes: Codes | None = None
        self._forget_moments()

    def _forget_moments(self) -> None:
        self.key_moments: RunningStatistics | None = None
        self.value_moments: RunningStatistics | None = None
        self.left_padding: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows ``(B, Hkv, L, D)`` behind those in use."""
        for rows, buffer in ((keys, self.keys), (values, self.values)):
            B, Hkv, L, D = rows.shape
            if (B, Hkv, D, rows.dtype) != (*buffer.shape[:2], buffer.shape[3], buffer.dtype):  # it could be broadcast
                wanted = f"(B={len(buffer)}, Hkv={buffer.shape[1]}, L={L}, D={buffer.shape[3]}) in {buffer.dtype}"
                raise ShapeError(
                    f"past_key_values: expected rows {wanted}, got {tuple(rows.shape)} in {rows.dtype}. "
                    "Take a new SparQCache for another batch or model."
                )
        stop = self.length + keys.shape[2]
        if stop > self.keys.shape[2]:
            self._grow(stop)
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop

    @lasting
    def _grow(self, length: int) -> None:
        capacity = -(-(length + length // ROOM) // ROW_MULTIPLE) * ROW_MULTIPLE

        def grown(buffer: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
            larger = buffer.new_empty(*buffer.shape[:dim], capacity, *buffer.shape[dim + 1 :])
            larger.narrow(dim, 0, rows).copy_(buffer.narrow(dim, 0, rows))
            return larger

        self.keys, self.values = grown(self.keys, 2, self.length), grown(self.values, 2, self.length)
        if self.keys_t is not None:
            self.keys_t = grown(self.keys_t, 3, self.transposed)

    def crop(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        for kept in (self.key_moments, self.value_moments, self.codes):
            if kept is not None:
                kept.rewind(length)
        self.transposed = min(self.transposed, length)
        self.length = length

    @lasting
    def select(self, sequences: torch.Tensor) -> None:
        """Keep the ``sequences``, in that order; one may come several times."""
        self.keys, self.values = self.keys.index_select(0, sequences), self.values.index_select(0, sequences)
        if self.keys_t is not None:
            self.keys_t = self.keys_t.index_select(0, sequences)
        if self.left_padding is not None:
            self.left_padding = self.left_padding.index_select(0, sequences)
        for kept in (self.key_moments, self.value_moments, self.codes):
            if kept is not None:
                kept.select(sequences)

    def columns(self) -> torch.Tensor:
        """Return ``keys_t (B, Hkv, D, length)`` of the rows in use."""
        self.codes = None
        if self.keys_t is None:
            self._begin_columns()
        assert self.keys_t is not None
        rows = slice(self.transposed, self.length)
        self.keys_t[..., rows] = self.keys[:, :, rows].transpose(-1, -2)
        self.transposed = self.length
        return self.keys_t[..., : self.length]

    @lasting
    def _begin_columns(self) -> None:
        B, Hkv, capacity, D = self.keys.shape
        self.keys_t = self.keys.new_empty(B, Hkv, D, capacity)

    def coded(self, padding: Padding | None) -> Codes:
        """Return the int4 scoring keys of the rows in use."""
        first = None if padding is None else padding.first
        kept = self.codes
        if kept is None or not _same(kept.padding, padding):
            self.codes = kept = Codes(self.keys, first)
            self.keys_t, self.transposed = None, 0
        kept.padding = first
        kept.extend(self.keys, self.length)
        return kept

    def statistics(
        self, *, mean: bool, spread: bool, padding: Padding | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return, where wanted, mean of the valid values and deviation of the valid keys, float32 ``(B, Hkv, D)``.

        The mean goes on changing in place.
        """
        if not mean and not spread:
            return None, None
        first = None if padding is None else padding.first
        lacking = (mean and self.value_moments is None) or (spread and self.key_moments is None)
        if lacking or not _same(self.left_padding, padding):
            self._begin_moments(mean, spread)
        self.left_padding = first
        for moments, buffer in ((self.key_moments, self.keys), (self.value_moments, self.values)):
            if moments is not None:
                moments.extend(buffer, self.length, first)
        return (
            self.value_moments.mean if mean and self.value_moments else None,
            self.key_moments.deviation() if spread and self.key_moments else None,
        )

    @lasting
    def _begin_moments(self, mean: bool, spread: bool) -> None:
        self._forget_moments()
        self.value_moments = RunningStatistics(self.values, spread=False) if mean else None
        self.key_moments = RunningStatistics(self.keys, spread=True) if spread else None


def _same(known: torch.Tensor | None, padding: Padding | None) -> bool:
    """Return True if sequences begin where they did on an earlier step."""
    if known is None or padding is None:
        return known is None and padding is None
    return known is padding.first or padding.equals(known)


_NAME = "_mlx_sparse_padding"


class Padding:
    """Left padding that the mask ``(B, 1, 1, S)`` of one decode step describes.

    Every layer of a step gets the same mask. Reading it waits for the GPU, so it is read once, when the first layer
    asks, and not at all on steps that attend densely.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask.detach()  # not the object that will hold this: a cycle would keep its memory
        self._compared: tuple[torch.Tensor, bool] | None = None

    @cached_property
    def first(self) -> torch.Tensor | None:
        """First valid key of each sequence, int32 ``(B,)``; None if the mask is not left padding."""
        S = self._mask.shape[3]
        first = S - self._mask[:, 0, 0].sum(dim=1, dtype=torch.int32)
        valid = torch.arange(S, device=first.device) >= first[:, None]
        return first if self._mask.shape[1] == 1 and torch.equal(self._mask[:, 0, 0], valid) else None

    def equals(self, earlier: torch.Tensor) -> bool:
        """Return True if `first` is that of an ``earlier`` step; compared once for all layers with the same one."""
        if self._compared is None or self._compared[0] is not earlier:
            assert self.first is not None
            self._compared = earlier, torch.equal(earlier, self.first)
        return self._compared[1]


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return sdpa's mask; that of a decode step carries its `Padding`."""
    made = sdpa_mask(*args, **kwargs)
    if made is not None and made.shape[2] == 1:
        setattr(made, _NAME, Padding(made))
    return made


def padding_of(attention_mask: torch.Tensor) -> Padding | None:
    """Return the `Padding` of a mask, or None for a mask made elsewhere or changed since."""
    found: Padding | None = getattr(attention_mask, _NAME, None)
    return found
