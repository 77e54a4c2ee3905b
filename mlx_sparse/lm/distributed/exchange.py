"""Collectives of MLX's distributed runtime, with their bytes counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...checks import ConfigError


class Exchange:
    """Collectives over the ranks that share a context.

    All ranks call the same methods in the same order with arrays of the same shapes. The results are bitwise equal on
    all ranks.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        sent: bytes that this rank has sent in this forward pass, counted once for each receiver.
        messages: number of collectives in this forward pass.

    Raises:
        ConfigError: MLX cannot reach a rank.
    """

    def __init__(self) -> None:
        try:
            self._group = mx.distributed.init()
        except RuntimeError as error:
            raise ConfigError(f"shard: expected all ranks to start, got: {error}.") from None
        self.rank, self.size = self._group.rank(), self._group.size()
        self.sent = self.messages = 0
        self._last: mx.array | None = None
        self._agreed: dict[Any, float] = {}

    def begin(self) -> None:
        """Reset the counts for a new forward pass. Messages of the last pass are still sent first."""
        self.sent = self.messages = 0

    def _in_turn(self, array: mx.array, collective: Callable[..., mx.array], sent: int) -> mx.array:
        """Send ``array`` after all earlier messages have arrived.

        MLX evaluates arrays on demand and in its own order. Without this dependency, a rank that does not use a result
        would not send its message, and the other ranks would wait.
        """
        self.sent += sent
        self.messages += 1
        if self._last is not None:
            array = mx.depends(array, self._last)
        self._last = collective(array, group=self._group)
        return self._last

    def so_far(self) -> mx.array:
        """Return an array that is evaluated after all messages have arrived."""
        number = mx.array(0)
        return number if self._last is None else mx.depends(number, self._last)

    def gather(self, array: mx.array) -> mx.array:
        """Return the arrays of all ranks, ``(size, *shape)``."""
        return self._in_turn(array[None], mx.distributed.all_gather, array.nbytes * (self.size - 1))

    def add(self, array: mx.array) -> mx.array:
        """Return the sum over ranks. A ring sends ``2 (size - 1) / size`` of the bytes."""
        return self._in_turn(array, mx.distributed.all_sum, 2 * array.nbytes * (self.size - 1) // self.size)

    def from_first(self, array: mx.array) -> mx.array:
        """Return rank 0's array."""
        return self.add(array if self.rank == 0 else mx.zeros_like(array))

    def agree(self, key: Any, number: float) -> float:
        """Return rank 0's number, sent once for each ``key``: other machines may have measured other numbers."""
        if key not in self._agreed:
            first: Any = self.from_first(mx.array(float(number))).item()
            self._agreed[key] = first
        return self._agreed[key]

    def logsumexp(self, lse: mx.array) -> mx.array:
        """Return the log-sum-exp over ranks; -inf where no rank has a key."""
        return mx.logsumexp(self.gather(lse), axis=0)

    def merge(self, out: mx.array, lse: mx.array) -> tuple[mx.array, mx.array]:
        """Merge attention over each rank's keys into attention over all of them.

        Args:
            out: float32 ``(B, Hq, L, D)``.
            lse: float32 ``(B, Hq, L)``, -inf where the rank has no key.
        """
        if out.shape[2] > 1:
            # For several queries, a sum over ranks sends fewer bytes than an all-gather.
            total = self.logsumexp(lse)
            return self.add(out * _share(lse, total)[..., None]), total
        both = self.gather(mx.concatenate([out, lse[..., None]], axis=-1))
        return _merged(both[..., :-1], both[..., -1])


def join(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Merge attention over parts of this rank's keys, as `Exchange.merge` does over ranks."""
    outs, lses = (mx.stack(list(arrays)) for arrays in zip(*parts, strict=True))
    return _merged(outs, lses)


def _merged(outs: mx.array, lses: mx.array) -> tuple[mx.array, mx.array]:
    total = mx.logsumexp(lses, axis=0)
    return (outs * _share(lses, total)[..., None]).sum(axis=0), total


def _share(lse: mx.array, total: mx.array) -> mx.array:
    return mx.where(lse == -mx.inf, 0.0, mx.exp(lse - total))
