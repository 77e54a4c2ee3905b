"""Update the mean and the standard deviation of the rows in a KV cache. Trimming rows adds no rounding errors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ...core.attend.ops import valid_keys
from ...core.packed_rows import Rows

# Number of rows that are summed together, to limit rounding errors. Longer trims restore the state after a block.
MARK_ROWS = 128
# Number of decode steps whose states are stored, so that removing a rejected draft needs no new sums.
STEPS = 16
# Number of rows that prefill sums at a time, to limit the memory of the float32 copies.
MERGED_ROWS = 8192


@dataclass(frozen=True, eq=False)
class State:
    """Sums over the valid rows in ``[0, length)``.

    Attributes:
        length: number of cache rows that the sums cover.
        sums: float32 ``(B, Hkv, 1, D)`` sum of the rows. If the standard deviation is computed, axis 2 has a second
            entry, the sum of squared distances from the mean. Before the first row, axes 0, 1 and 3 have length 1.
        count: number of valid rows, at least 1. It is a float32 scalar, or ``(B, 1, 1, 1)`` if rows are padding.
    """

    length: int
    sums: mx.array
    count: mx.array


class RunningStatistics:
    """Mean of the valid rows of keys or values. If ``spread`` is True, the standard deviation is computed too.

    Rows are never subtracted from a sum, because a NaN would remain in the sum, and a large number would leave a
    rounding error. Instead, a trim restores an earlier state, and the next step adds the rows after that state again.
    If fewer than `STEPS` steps are trimmed, usually no rows must be added again. If up to `MARK_ROWS` rows are trimmed,
    fewer than `MARK_ROWS` rows must be added again. If no earlier state is left, the next step sums all rows again.

    A decode step adds one row in one kernel launch. The step that fills a block sums the rows of the block again, which
    removes the rounding errors of the single additions.

    Args:
        padding: ``(B,)`` index of the first valid row of each sequence; None if all rows are valid. Rows before this
            index may have any contents.
        spread: True to compute the standard deviation in addition to the mean.

    Attributes:
        blocks: states at the ends of the last two blocks of `MARK_ROWS` rows.
        steps: up to `STEPS` states after the last block, one for each call of `extend`.
    """

    def __init__(self, padding: mx.array | None, *, spread: bool) -> None:
        self._padding = padding
        self._empty = State(0, mx.array([[[[0.0], [0.0]] if spread else [[0.0]]]]), mx.array(1.0))
        self.blocks = [self._empty]
        self.steps: list[State] = []

    @property
    def state(self) -> State:
        """Latest state, which covers all rows that have been added."""
        return (self.steps or self.blocks)[-1]

    @property
    def nbytes(self) -> int:
        return sum(state.sums.nbytes for state in (*self.blocks, *self.steps) if state.length)

    def rewind(self, length: int) -> None:
        """Forget the rows from index ``length`` on."""
        if length < self.state.length:
            self.blocks = [state for state in self.blocks if state.length <= length] or [self._empty]
            self.steps = [state for state in self.steps if state.length <= length]

    def extend(self, buffer: Rows, S: int) -> None:
        """Add rows of ``buffer (B, Hkv, capacity, D)`` until the statistics cover the rows ``[0, S)``."""
        self.rewind(S)
        full = S // MARK_ROWS * MARK_ROWS
        if self.state.length < full:
            self.steps = []
            for stop in (
                *range(self.state.length + MERGED_ROWS, full - MARK_ROWS, MERGED_ROWS),
                full - MARK_ROWS,
                full,
            ):
                if stop > self.state.length:
                    self.blocks = [*self.blocks, self._with_rows(buffer, stop)][-2:]
        if self.state.length < S:
            add = self._with_row if self.state.length == S - 1 else self._with_rows
            self.steps = [*self.steps, add(buffer, S)][-STEPS:]

    def _with_row(self, buffer: Rows, stop: int) -> State:
        """Return a copy of ``self.state`` with the new row ``stop - 1``, which a decode step has just written."""
        start, sums = self.state.length, self.state.sums
        row = buffer[..., start:stop, :]
        if self._padding is None:
            count = mx.array(float(stop))
        else:
            row, count = _unpadded(row, self._padding[:, None, None, None], mx.array(start))
        if sums.shape[2] == 1:
            added = _add_value(sums, row)
        else:
            added = _add_key(sums, row, sums[:, :, :1], self.state.count, count, _SQUARES)
        return State(stop, added, count)

    def _with_rows(self, buffer: Rows, stop: int) -> State:
        """Return a copy of `state` extended with rows ``[state.length, stop)``."""
        start, sums = self.state.length, self.state.sums
        valid = None if self._padding is None else valid_keys(stop, self._padding)[:, None, start:, None]

        def summed(array: mx.array) -> mx.array:
            return (array if valid is None else mx.where(valid, array, 0.0)).sum(axis=2, keepdims=True)

        rows = buffer[..., start:stop, :].astype(mx.float32)
        added = summed(rows)
        if sums.shape[2] == 2:
            n, m = self._count(0, start), self._count(start, stop)
            apart = rows - added / mx.maximum(m, 1)
            # The rounding error of the mean would enter the sum once for every row. Correct the sum.
            rest = summed(apart)
            squares = mx.maximum(summed(apart**2) - rest * (rest / mx.maximum(m, 1)), 0.0)
            added = added + rest
            # Combine the sums of two parts with different means (Chan, Golub, LeVeque, Updating formulae for computing
            # sample variances, 1979). A plain sum of squares would be inexact for components far from 0.
            between = added / mx.maximum(m, 1) - sums[:, :, :1] / mx.maximum(n, 1)
            squares = squares + between * between * (n * (m / mx.maximum(n + m, 1)))
            added = mx.concatenate([added, squares], axis=2)
        return State(stop, sums + added, mx.maximum(self._count(0, stop), 1))

    def _count(self, start: int, stop: int) -> mx.array:
        """Return the number of valid rows in ``[start, stop)``: a scalar, or ``(B, 1, 1, 1)`` if rows are padding."""
        if self._padding is None:
            return mx.array(float(stop - start))
        return mx.maximum(stop - mx.maximum(start, self._padding), 0).astype(mx.float32)[:, None, None, None]

    def mean(self) -> mx.array:
        """Return the mean of the valid rows (sparq.9), float32 ``(B, Hkv, D)``."""
        return (self.state.sums[:, :, :1] / self.state.count).squeeze(2)

    def deviation(self) -> mx.array:
        """Return the standard deviation of the valid rows (sparq.1), float32 ``(B, Hkv, D)``."""
        return _deviation(self.state.sums[:, :, 1:], self.state.count).squeeze(2)


_SQUARES = mx.array([[False], [True]])  # True selects the squared distances on axis 2 of the sums


# A decode step calls these functions once per layer. `mx.compile` reduces each to one kernel launch.


@partial(mx.compile, shapeless=True)
def _add_value(sums: mx.array, row: mx.array) -> mx.array:
    return sums + row.astype(mx.float32)


@partial(mx.compile, shapeless=True)
def _add_key(
    sums: mx.array, row: mx.array, total: mx.array, before: mx.array, count: mx.array, squares: mx.array
) -> mx.array:
    row = row.astype(mx.float32)
    apart = row - total / before
    return sums + mx.where(squares, apart * apart * (1 - 1 / count), row)


@partial(mx.compile, shapeless=True)
def _unpadded(row: mx.array, padding: mx.array, position: mx.array) -> tuple[mx.array, mx.array]:
    """Set padding in ``row`` to zero. Return the row and the number of valid rows up to ``position``, at least 1."""
    count = (position + 1 - padding).astype(mx.float32)
    return mx.where(count > 0, row, 0.0), mx.maximum(count, 1)


@partial(mx.compile, shapeless=True)
def _deviation(squares: mx.array, count: mx.array) -> mx.array:
    return mx.sqrt(squares / count)
