"""Run collectives over the ranks of a sharded context in a fixed order, and count the bytes that this rank sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...checks import ConfigError


class Exchange:
    """Collectives over the ranks that share a context.

    All ranks must call the same methods in the same order with arrays of the same shapes. The results are bitwise equal
    on all ranks.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        sent: number of bytes that this rank has sent in the current forward pass. Bytes that go to several ranks count
            once for each receiver.
        messages: number of collectives in the current forward pass.

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
        """Reset the counts at the start of a forward pass. Collectives of earlier passes still run first."""
        self.sent = self.messages = 0

    def _in_turn(self, array: mx.array, collective: Callable[..., mx.array], sent: int) -> mx.array:
        """Run ``collective`` on ``array`` after all earlier messages have arrived, and return the result.

        MLX evaluates only the arrays that are used, in any order. If the array did not depend on earlier messages
        (`mx.depends`), a rank that does not use a result would not send its message. Then the other ranks would wait.
        """
        self.sent += sent
        self.messages += 1
        if self._last is not None:
            array = mx.depends(array, self._last)
        self._last = collective(array, group=self._group)
        return self._last

    def so_far(self) -> mx.array:
        """Return an array whose evaluation waits for all messages sent so far."""
        number = mx.array(0)
        return number if self._last is None else mx.depends(number, self._last)

    def gather(self, array: mx.array) -> mx.array:
        """Return the arrays of all ranks, stacked into shape ``(size, *shape)``."""
        return self._in_turn(array[None], mx.distributed.all_gather, array.nbytes * (self.size - 1))

    def add(self, array: mx.array) -> mx.array:
        """Sum the arrays of all ranks. In a ring, a rank sends ``2 (size - 1) / size`` times ``array.nbytes`` bytes."""
        return self._in_turn(array, mx.distributed.all_sum, 2 * array.nbytes * (self.size - 1) // self.size)

    def from_first(self, array: mx.array) -> mx.array:
        """Return the array of rank 0. The other ranks must pass an array of the same shape."""
        return self.add(array if self.rank == 0 else mx.zeros_like(array))

    def agree(self, key: Any, number: float) -> float:
        """Return rank 0's ``number`` for ``key``, even if this rank passes another number. Communicate once per key."""
        if key not in self._agreed:
            first: Any = self.from_first(mx.array(float(number))).item()
            self._agreed[key] = first
        return self._agreed[key]

    def logsumexp(self, lse: mx.array) -> mx.array:
        """Return the log-sum-exp of ``lse`` over all ranks; -inf where no rank has a key."""
        return mx.logsumexp(self.gather(lse), axis=0)

    def merge(self, out: mx.array, lse: mx.array) -> tuple[mx.array, mx.array]:
        """Merge each rank's attention over its own keys into attention over the keys of all ranks.

        Args:
            out: this rank's output, float32 ``(B, Hq, L, D)``.
            lse: this rank's log-sum-exp, float32 ``(B, Hq, L)``, -inf where the rank has no key.
        """
        if out.shape[2] > 1:
            # For several queries, a sum over ranks sends fewer bytes than a gather.
            total = self.logsumexp(lse)
            return self.add(out * _share(lse, total)[..., None]), total
        both = self.gather(mx.concatenate([out, lse[..., None]], axis=-1))
        return _merged(both[..., :-1], both[..., -1])


def join(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Merge the ``(out, lse)`` pairs of disjoint sets of keys on this rank. The ranks do not communicate."""
    outs, lses = (mx.stack(list(arrays)) for arrays in zip(*parts, strict=True))
    return _merged(outs, lses)


def _merged(outs: mx.array, lses: mx.array) -> tuple[mx.array, mx.array]:
    total = mx.logsumexp(lses, axis=0)
    return (outs * _share(lses, total)[..., None]).sum(axis=0), total


def _share(lse: mx.array, total: mx.array) -> mx.array:
    return mx.where(lse == -mx.inf, 0.0, mx.exp(lse - total))
