"""Running mean and spread of the rows of a cache."""

from __future__ import annotations

import torch

CHUNK = 8192  # rows that are taken in at a time, so that their float32 copies stay small


class Moments:
    """Mean, and where asked for the squared deviation, of cache rows per component; rows can be taken out again.

    Updated by chunks from their own mean and deviation, which stays accurate where the mean is far larger than the
    spread; plain sums of squares would cancel.

    Attributes:
        count: rows so far, ``(B, 1, 1)`` where sequences are padded.
        mean: float32 ``(B, Hkv, D)``; 0 where there is no row.
        squares: float32 ``(B, Hkv, D)`` sum of squared deviations, or None.
    """

    def __init__(self, buffer: torch.Tensor, *, spread: bool) -> None:
        B, Hkv, _, D = buffer.shape
        self.count: int | torch.Tensor = 0
        self.mean = torch.zeros(B, Hkv, D, dtype=torch.float32, device=buffer.device)
        self.squares = torch.zeros_like(self.mean) if spread else None

    def take(
        self, buffer: torch.Tensor, start: int, stop: int, left_padding: torch.Tensor | None, sign: int = 1
    ) -> None:
        """Take in rows ``[start, stop)`` of ``buffer (B, Hkv, capacity, D)``, or out again with ``sign=-1``.

        Args:
            left_padding: ``(B,)`` first valid row of each sequence; earlier ones do not count.
        """
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            valid = None
            if left_padding is not None:
                positions = torch.arange(first, last, device=buffer.device)
                valid = (positions >= left_padding[:, None])[:, None, :, None]
            self._merge(buffer[:, :, first:last].float(), valid, sign)

    def _merge(self, rows: torch.Tensor, valid: torch.Tensor | None, sign: int) -> None:
        added: int | torch.Tensor
        if valid is None:
            added = rows.shape[2]
            mean = rows[:, :, 0] if added == 1 else rows.mean(dim=2)
            total = self.count + sign * added
            share = sign * added / total if total else 0.0
        else:
            added = valid.sum(dim=2)
            mean = torch.where(valid, rows, 0.0).sum(dim=2) / added.clamp(min=1)
            total = self.count + sign * added
            share = sign * added / total.clamp(min=1)
        if self.squares is not None:
            delta = mean - self.mean
            self.squares.addcmul_(delta, delta * (self.count * share))
            if rows.shape[2] > 1:
                centred = rows - mean[:, :, None]
                centred = centred if valid is None else torch.where(valid, centred, 0.0)
                self.squares.add_(centred.square().sum(dim=2), alpha=sign)
            if sign < 0:
                self.squares.clamp_(min=0.0)  # rounding
        self.mean.lerp_(mean, share)
        self.count = total

    def deviation(self) -> torch.Tensor:
        """(sparq.1) standard deviation of each component, float32 ``(B, Hkv, D)``."""
        assert self.squares is not None
        count = self.count.clamp(min=1) if isinstance(self.count, torch.Tensor) else max(self.count, 1)
        return (self.squares / count).sqrt_()

    def select(self, rows: torch.Tensor) -> None:
        """Keep the sequences ``rows``, in that order."""
        self.mean = self.mean.index_select(0, rows)
        self.squares = None if self.squares is None else self.squares.index_select(0, rows)
        self.count = self.count.index_select(0, rows) if isinstance(self.count, torch.Tensor) else self.count
