"""What ranks tell each other: the collectives of MLX's distributed runtime, with their bytes counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Exchange:
    """The ranks that share a sequence.

    Every rank calls the same methods in the same order with arrays of the same shapes; what they return is the same on
    all ranks, bit for bit.

    Attributes:
        rank: this one, of ``size``.
        sent: bytes that it has given to the others in this call of the model, once for each rank that they go to.
        messages: collectives in this call.
    """

    def __init__(self) -> None:
        self._group = mx.distributed.init()
        self.rank, self.size = self._group.rank(), self._group.size()
        self.sent = self.messages = 0
        self._last: mx.array | None = None
        self._agreed: dict[Any, float] = {}

    def begin(self) -> None:
        """A call of the model begins. What the one before has left undone still comes first: a rank may want it."""
        self.sent = self.messages = 0

    def _in_turn(self, array: mx.array, collective: Callable[..., mx.array], sent: int) -> mx.array:
        """Send ``array`` once what was sent before has arrived.

        MLX evaluates what somebody asks for, in an order of its own: a rank that has no use for an answer would leave
        its peers waiting for the question.
        """
        self.sent += sent
        self.messages += 1
        if self._last is not None:
            array = mx.depends(array, self._last)
        self._last = collective(array, group=self._group)
        return self._last

    def so_far(self) -> mx.array:
        """A number that is there once everything has arrived that was sent."""
        number = mx.array(0)
        return number if self._last is None else mx.depends(number, self._last)

    def gather(self, array: mx.array) -> mx.array:
        """``(size, *shape)``: the array of each rank."""
        return self._in_turn(array[None], mx.distributed.all_gather, array.nbytes * (self.size - 1))

    def add(self, array: mx.array) -> mx.array:
        """The sum over ranks: a ring sends it round twice, each time all but one part of ``size``."""
        return self._in_turn(array, mx.distributed.all_sum, 2 * array.nbytes * (self.size - 1) // self.size)

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array, on all ranks."""
        return self.add(array if self.rank == 0 else mx.zeros_like(array))

    def agree(self, what: Any, number: float) -> float:
        """Rank 0's number, asked for once for each ``what``: machines may have measured others. Waits for it then."""
        if what not in self._agreed:
            first: Any = self.from_first(mx.array(float(number))).item()
            self._agreed[what] = first
        return self._agreed[what]

    def logsumexp(self, lse: mx.array) -> mx.array:
        """Of a rank's log-sum-exps that of all ranks; -inf where nobody has anything."""
        return _logsumexp(self.gather(lse))

    def merge(self, out: mx.array, lse: mx.array) -> tuple[mx.array, mx.array]:
        """Attention over the keys of all ranks, from what each has of its own.

        Args:
            out: float32 ``(B, Hq, L, D)``; lse: float32 ``(B, Hq, L)``, -inf where the rank has no key.
        """
        if out.shape[2] > 1:
            # A sum over ranks moves less than everyone's numbers to everyone.
            total = self.logsumexp(lse)
            return self.add(out * _share(lse, total)[..., None]), total
        both = self.gather(mx.concatenate([out, lse[..., None]], axis=-1))
        outs, lses = both[..., :-1], both[..., -1]
        total = _logsumexp(lses)
        return (outs * _share(lses, total)[..., None]).sum(axis=0), total


def join(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """`Exchange.merge` of parts that are here."""
    outs, lses = (mx.stack(list(arrays)) for arrays in zip(*parts, strict=True))
    total = _logsumexp(lses)
    return (outs * _share(lses, total)[..., None]).sum(axis=0), total


def _logsumexp(lses: mx.array) -> mx.array:
    """Over axis 0."""
    return mx.logsumexp(lses, axis=0)


def _share(lse: mx.array, total: mx.array) -> mx.array:
    return mx.where(lse == -mx.inf, 0.0, mx.exp(lse - total))
