"""Store the keys, values and auxiliary cache state of a layer, and read the left padding from attention masks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from mlx_sparse.checks import ShapeError

from .key_codes import Codes
from .running_statistics import RunningStatistics, outside_inference_mode

# Each capacity is a multiple of this number, so that the rows of ``keys_t`` start at 128-byte cache lines.
ROW_MULTIPLE = 256
GROWTH = 32  # buffers grow by 1/32, so that copies per token are small compared with the reads of a decode step


class Buffers:
    """Growable buffers of a cache layer. Rows ``[0, length)`` are in use. Appending rarely copies these rows.

    The first SparQ step computes ``keys_t`` or the int4 scoring keys, and the running statistics. Later steps update
    these arrays. If a context has no sparse steps, it therefore costs no more than in transformers' own layer.

    Attributes:
        keys, values: ``(B, Hkv, capacity, D)``; rows from index ``length`` on are stale.
        keys_t: ``(B, Hkv, D, capacity)`` component-major copy of rows ``[0, transposed)``, or None.
        codes: int4 scoring keys, or None. They replace ``keys_t`` and the running statistics of the keys.
        key_statistics, value_statistics: running statistics of the rows from ``left_padding`` on, or None.
    """

    @outside_inference_mode
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Allocate empty buffers with the heads, head dims and dtypes of ``keys`` and ``values (B, Hkv, L, D)``."""
        self.keys, self.values = (rows.new_empty(*rows.shape[:2], 0, rows.shape[3]) for rows in (keys, values))
        self.length = 0
        self.keys_t: torch.Tensor | None = None
        self.transposed = 0
        self.codes: Codes | None = None
        self._discard_statistics()

    def _discard_statistics(self) -> None:
        self.key_statistics: RunningStatistics | None = None
        self.value_statistics: RunningStatistics | None = None
        self.left_padding: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append ``keys`` and ``values (B, Hkv, L, D)``."""
        for rows, buffer in ((keys, self.keys), (values, self.values)):
            B, Hkv, _, D = buffer.shape
            L = rows.shape[2]
            if rows.shape != (B, Hkv, L, D) or rows.dtype != buffer.dtype:  # torch would broadcast these rows
                wanted = f"(B={B}, Hkv={Hkv}, L={L}, D={D}) in {buffer.dtype}"
                raise ShapeError(
                    f"past_key_values: expected rows {wanted}, got {tuple(rows.shape)} in {rows.dtype}. "
                    "Create a new SparQCache for another batch or model."
                )
        stop = self.length + keys.shape[2]
        if stop > self.keys.shape[2]:
            self._grow(stop)
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop

    @outside_inference_mode
    def _grow(self, length: int) -> None:
        capacity = -(-(length + length // GROWTH) // ROW_MULTIPLE) * ROW_MULTIPLE

        def grown(buffer: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
            larger = buffer.new_empty(*buffer.shape[:dim], capacity, *buffer.shape[dim + 1 :])
            larger.narrow(dim, 0, rows).copy_(buffer.narrow(dim, 0, rows))
            return larger

        self.keys, self.values = grown(self.keys, 2, self.length), grown(self.values, 2, self.length)
        if self.keys_t is not None:
            self.keys_t = grown(self.keys_t, 3, self.transposed)

    def crop(self, length: int) -> None:
        for kept in (self.key_statistics, self.value_statistics, self.codes):
            if kept is not None:
                kept.rewind(length)
        self.transposed = min(self.transposed, length)
        self.length = length

    @outside_inference_mode
    def select(self, sequences: torch.Tensor) -> None:
        """Keep only the sequences with the indices ``sequences``, in this order. An index may occur several times."""
        self.keys, self.values = self.keys.index_select(0, sequences), self.values.index_select(0, sequences)
        if self.keys_t is not None:
            self.keys_t = self.keys_t.index_select(0, sequences)
        if self.left_padding is not None:
            self.left_padding = self.left_padding.index_select(0, sequences)
        for kept in (self.key_statistics, self.value_statistics, self.codes):
            if kept is not None:
                kept.select(sequences)

    def columns(self) -> torch.Tensor:
        """Transpose new rows and return the component-major keys ``(B, Hkv, D, length)``."""
        self.codes = None
        if self.keys_t is None:
            self._allocate_columns()
        assert self.keys_t is not None
        rows = slice(self.transposed, self.length)
        self.keys_t[..., rows] = self.keys[:, :, rows].transpose(-1, -2)
        self.transposed = self.length
        return self.keys_t[..., : self.length]

    @outside_inference_mode
    def _allocate_columns(self) -> None:
        B, Hkv, capacity, D = self.keys.shape
        self.keys_t = self.keys.new_empty(B, Hkv, D, capacity)

    def coded(self, padding: Padding | None) -> Codes:
        """Quantize new full groups and return the int4 scoring keys of the rows in use."""
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
        """Return the mean of the valid values and the standard deviation of the valid keys, float32 ``(B, Hkv, D)``.

        The mean is None unless ``mean`` is True, and the deviation is None unless ``spread`` is True. Later calls
        update the mean in place.
        """
        if not mean and not spread:
            return None, None
        first = None if padding is None else padding.first
        lacking = (mean and self.value_statistics is None) or (spread and self.key_statistics is None)
        if lacking or not _same(self.left_padding, padding):
            self._allocate_statistics(mean, spread)
        self.left_padding = first
        for running, buffer in ((self.key_statistics, self.keys), (self.value_statistics, self.values)):
            if running is not None:
                running.extend(buffer, self.length, first)
        return (
            self.value_statistics.mean if mean and self.value_statistics else None,
            self.key_statistics.deviation() if spread and self.key_statistics else None,
        )

    @outside_inference_mode
    def _allocate_statistics(self, mean: bool, spread: bool) -> None:
        self._discard_statistics()
        self.value_statistics = RunningStatistics(self.values, spread=False) if mean else None
        self.key_statistics = RunningStatistics(self.keys, spread=True) if spread else None


def _same(known: torch.Tensor | None, padding: Padding | None) -> bool:
    if known is None or padding is None:
        return known is None and padding is None
    return known is padding.first or padding.equals(known)


_NAME = "_mlx_sparse_padding"


class Padding:
    """Left padding, read from the attention mask ``(B, 1, 1, S)`` of one decode step.

    Every layer of a step gets the same mask. Reading the mask waits for the GPU, so only the first sparse layer reads
    the mask. Dense steps never read the mask.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        # The mask refers to this Padding. A reference back to the mask would be a cycle, which delays the release of
        # its memory, so refer to a detached view of the mask.
        self._mask = mask.detach()
        self._compared: tuple[torch.Tensor, bool] | None = None

    @cached_property
    def first(self) -> torch.Tensor | None:
        """Index of the first valid key of each sequence, int32 ``(B,)``; None if the mask is not left padding."""
        S = self._mask.shape[3]
        first = S - self._mask[:, 0, 0].sum(dim=1, dtype=torch.int32)
        valid = torch.arange(S, device=first.device) >= first[:, None]
        return first if self._mask.shape[1] == 1 and torch.equal(self._mask[:, 0, 0], valid) else None

    def equals(self, earlier: torch.Tensor) -> bool:
        """Return True if `first` equals ``earlier``. The result is cached, so that only one layer waits for the GPU."""
        if self._compared is None or self._compared[0] is not earlier:
            assert self.first is not None
            self._compared = earlier, torch.equal(earlier, self.first)
        return self._compared[1]


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Build transformers' mask for sdpa. If the mask is for a decode step, attach a `Padding` to the mask."""
    made = sdpa_mask(*args, **kwargs)
    if made is not None and made.shape[2] == 1:
        setattr(made, _NAME, Padding(made))
    return made


def padding_of(attention_mask: torch.Tensor) -> Padding | None:
    """Return the `Padding` that `mask` attached to ``attention_mask``, or None if no `Padding` is attached."""
    found: Padding | None = getattr(attention_mask, _NAME, None)
    return found
