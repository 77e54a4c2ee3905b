"""Compute running statistics of cache rows. The statistics stay accurate when rows are removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

MERGED_ROWS = 8192  # maximum number of rows that are merged at a time, which limits the float32 copies
MARK_ROWS = 256  # number of rows from one mark (copy of the state) to the next


def outside_inference_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``method`` run outside of torch.inference_mode, so that later calls can write to the tensors it creates."""
    wrapped: Callable[..., Any] = torch.inference_mode(False)(torch.no_grad()(method))
    return wrapped


@dataclass
class State:
    """Running statistics of the valid rows in ``[0, length)``, updated in place.

    Attributes:
        count: number of valid rows; a tensor ``(B, 1, 1)`` if sequences are padded.
        mean: float32 ``(B, Hkv, D)`` mean of the valid rows; 0 if there is no valid row.
        squares: float32 ``(B, Hkv, D)`` sum of squared deviations from the mean, or None if only the mean is needed.
    """

    length: int
    count: int | torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor | None

    def copy(self) -> State:
        return replace(self, mean=self.mean.clone(), squares=None if self.squares is None else self.squares.clone())

    def merge(self, rows: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Merge ``rows (B, Hkv, n, D)`` into the statistics. If ``valid`` is given, merge only the valid rows."""
        added: int | torch.Tensor
        self.length += rows.shape[2]
        rows = rows.float()
        if valid is None:
            added = rows.shape[2]
            mean = rows[:, :, 0] if added == 1 else rows.mean(dim=2)
            total = self.count + added
            share = added / total
        else:
            added = valid.sum(dim=2)
            mean = torch.where(valid, rows, 0.0).sum(dim=2) / added.clamp(min=1)
            total = self.count + added
            share = added / total.clamp(min=1)
        if self.squares is not None:
            delta = mean - self.mean
            self.squares.addcmul_(delta, delta * (self.count * share))
            if rows.shape[2] > 1:
                centered = rows - mean[:, :, None]
                centered = centered if valid is None else torch.where(valid, centered, 0.0)
                self.squares.add_(centered.square().sum(dim=2))
        self.mean.lerp_(mean, share)
        self.count = total

    def select(self, rows: torch.Tensor) -> State:
        count = self.count.index_select(0, rows) if isinstance(self.count, torch.Tensor) else self.count
        squares = None if self.squares is None else self.squares.index_select(0, rows)
        return State(self.length, count, self.mean.index_select(0, rows), squares)


class RunningStatistics:
    """Running mean and, optionally, sum of squared deviations of each component over the cache rows.

    Each chunk of rows is reduced to its mean and sum of squared deviations before it is merged into `state`. The result
    is accurate even if the mean is much larger than the spread. In this case, a difference of plain sums would lose
    most digits.

    Removed rows are not subtracted, because a NaN or a rounding error would remain. After a crop, the statistics
    restart from the last remaining copy in `marks`, or from zero. The rows after this copy are merged again. When a
    block is full, its rows are merged again in one step, which avoids the rounding errors of row-by-row merges.

    Attributes:
        state: statistics of all rows that were merged so far.
        marks: copies of the state at the ends of the last two blocks.
    """

    def __init__(self, buffer: torch.Tensor, *, spread: bool) -> None:
        B, Hkv, _, D = buffer.shape
        mean = torch.zeros(B, Hkv, D, dtype=torch.float32, device=buffer.device)
        self.state = State(0, 0, mean, torch.zeros_like(mean) if spread else None)
        self.marks: list[State] = []

    def rewind(self, length: int) -> None:
        if length < self.state.length:
            self.marks = [mark for mark in self.marks if mark.length <= length]
            self._restore_mark()

    @outside_inference_mode
    def _restore_mark(self) -> None:
        if self.marks:
            self.state = self.marks[-1].copy()
        else:
            squares = self.state.squares
            zeros = None if squares is None else torch.zeros_like(squares)
            self.state = State(0, 0, torch.zeros_like(self.state.mean), zeros)

    def extend(self, buffer: torch.Tensor, length: int, left_padding: torch.Tensor | None) -> None:
        """Merge the new rows of ``buffer (B, Hkv, capacity, D)`` up to row ``length - 1``.

        Args:
            left_padding: ``(B,)`` first valid row of each sequence, equal in all calls. Rows before it are ignored.
        """
        full = length // MARK_ROWS * MARK_ROWS
        if self.state.length < full:
            self._restore_mark()
            for stop in (full - MARK_ROWS, full):
                if stop > self.state.length:
                    self._merge_rows(buffer, stop, left_padding)
                    self.marks = [*self.marks, self._mark()][-2:]
        self._merge_rows(buffer, length, left_padding)

    @outside_inference_mode
    def _mark(self) -> State:
        return self.state.copy()

    def _merge_rows(self, buffer: torch.Tensor, stop: int, left_padding: torch.Tensor | None) -> None:
        for first in range(self.state.length, stop, MERGED_ROWS):
            last = min(first + MERGED_ROWS, stop)
            valid = None
            if left_padding is not None:
                positions = torch.arange(first, last, device=buffer.device)
                valid = (positions >= left_padding[:, None])[:, None, :, None]
            self.state.merge(buffer[:, :, first:last], valid)

    @property
    def mean(self) -> torch.Tensor:
        """Mean (sparq.9), float32 ``(B, Hkv, D)``. Later calls update this tensor in place."""
        return self.state.mean

    def deviation(self) -> torch.Tensor:
        """Return the standard deviation (sparq.1) of each component, float32 ``(B, Hkv, D)``."""
        assert self.state.squares is not None
        count = self.state.count
        count = count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
        return (self.state.squares / count).sqrt_()

    @outside_inference_mode
    def select(self, rows: torch.Tensor) -> None:
        self.state, self.marks = self.state.select(rows), [mark.select(rows) for mark in self.marks]
