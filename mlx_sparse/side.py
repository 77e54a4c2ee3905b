"""What SparQ keeps beside a cache: component-major keys and running sums."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from .ops.select import valid_keys

if TYPE_CHECKING:
    from .cache import SparseCache

# Rows of ``keys_t`` hold a multiple of this many keys, so that they start on a cache line of 128 bytes in every type.
ROW_MULTIPLE = 64


class SideBuffers:
    """What is kept beside keys and values for rows ``[0, covered)``; everything can be rebuilt from them.

    Attributes:
        keys_t: ``(B, Hkv, D, capacity)`` component-major copy of the keys; columns past ``covered`` are stale.
        covered: rows that ``keys_t`` and the sums have seen.
        value_sum: float32 ``(B, Hkv, D)``.
        key_sums: float32 ``(B, Hkv, 2, D)``, sum and sum of squares of ``key - key_shift``. The shift, the mean of the
            rows seen first, keeps the variance from drowning in the mean, which is large for some channels of models
            with q/k-norm.
        key_shift: float32 ``(B, Hkv, 1, D)``.
    """

    def __init__(self) -> None:
        self.keys_t: mx.array | None = None
        self.covered = 0
        self.value_sum: mx.array | None = None
        self.key_sums: mx.array | None = None
        self.key_shift: mx.array | None = None

    @property
    def nbytes(self) -> int:
        arrays = (self.keys_t, self.value_sum, self.key_sums, self.key_shift)
        return sum(array.nbytes for array in arrays if array is not None)

    def extend(self, cache: SparseCache, S: int, *, mean: bool, spread: bool) -> None:
        """Take in rows ``[covered, S)`` of ``cache``, or all of them if a sum is asked for that was not kept so far."""
        self.rewind(cache, S)
        # A sum once kept is kept up, also by a method that does not read it.
        mean, spread = mean or self.value_sum is not None, spread or self.key_sums is not None
        if (mean and self.value_sum is None) or (spread and self.key_sums is None):
            self.value_sum = self.key_sums = None
            self.covered = 0
        if S <= self.covered:
            return
        keys = cache.keys
        if self.keys_t is None or self.covered == 0:
            self.keys_t = self._columns(keys)
        else:
            if S > self.keys_t.shape[-1]:
                grown = self._capacity(keys.shape[2]) - self.covered
                blank = mx.zeros((*self.keys_t.shape[:-1], grown), keys.dtype)
                self.keys_t = mx.concatenate([self.keys_t[..., : self.covered], blank], axis=-1)
            self.keys_t[..., self.covered : S] = keys[..., self.covered : S, :].swapaxes(-1, -2)
        if S == self.covered + 1 and cache.padding is None:
            self._add_one(cache, mean=mean, spread=spread)
        else:
            self._add(cache, self.covered, S, 1.0, mean=mean, spread=spread)
        self.covered = S

    @staticmethod
    def _capacity(rows: int) -> int:
        return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE

    def _columns(self, keys: mx.array) -> mx.array:
        """Component-major copy of the whole buffer."""
        S = keys.shape[2]
        columns = keys.swapaxes(-1, -2)
        return mx.contiguous(mx.pad(columns, [(0, 0)] * 3 + [(0, self._capacity(S) - S)]))

    def rewind(self, cache: SparseCache, length: int) -> None:
        """Forget rows from ``length`` on, which are about to be overwritten."""
        if length >= self.covered:
            return
        mean, spread = self.value_sum is not None, self.key_sums is not None
        if length < self.covered - length:
            # More rows go than stay: summing afresh reads fewer, and leaves no rounding of the large sum behind.
            self.value_sum = self.key_sums = self.key_shift = None
            if length > 0:
                self._add(cache, 0, length, 1.0, mean=mean, spread=spread)
        else:
            self._add(cache, length, self.covered, -1.0, mean=mean, spread=spread)
        # Evaluate now: a pending sum would hold the old keys and force the next in-place write to copy them.
        mx.eval([array for array in (self.value_sum, self.key_sums) if array is not None])
        self.covered = length

    def _add_one(self, cache: SparseCache, *, mean: bool, spread: bool) -> None:
        """`_add` of the row that a decode step brings, in one launch per sum."""
        row = slice(self.covered, self.covered + 1)
        if mean:
            assert self.value_sum is not None
            self.value_sum = _add_value(self.value_sum, cache.values[..., self.covered, :])
        if spread:
            assert self.key_sums is not None
            assert self.key_shift is not None
            self.key_sums = _add_key(self.key_sums, cache.keys[..., row, :], self.key_shift, _SQUARED)

    def _add(self, cache: SparseCache, start: int, stop: int, sign: float, *, mean: bool, spread: bool) -> None:
        valid = None
        if cache.padding is not None:
            valid = valid_keys(stop, cache.padding)[:, None, start:, None]

        def total(rows: mx.array) -> mx.array:
            return sign * (rows if valid is None else mx.where(valid, rows, 0.0)).sum(axis=2, keepdims=True)

        if mean:
            added = total(cache.values[..., start:stop, :].astype(mx.float32)).squeeze(2)
            self.value_sum = added if self.value_sum is None else self.value_sum + added
        if spread:
            rows = cache.keys[..., start:stop, :].astype(mx.float32)
            if self.key_shift is None:
                self.key_shift = rows.mean(axis=2, keepdims=True)
            rows = rows - self.key_shift
            added = mx.concatenate([total(rows), total(rows**2)], axis=2)
            self.key_sums = added if self.key_sums is None else self.key_sums + added

    def value_mean(self, count: int | mx.array) -> mx.array:
        """(sparq.9) float32 ``(B, Hkv, D)``."""
        assert self.value_sum is not None
        return self.value_sum / count

    def deviation(self, count: int | mx.array) -> mx.array:
        """(sparq.1) standard deviation of each key component, float32 ``(B, Hkv, D)``."""
        assert self.key_sums is not None
        return _deviation(self.key_sums[:, :, 0], self.key_sums[:, :, 1], mx.array(count, mx.float32))


_SQUARED = mx.array([[False], [True]])  # along axis 2 of key_sums


# A decode step calls these once per layer: compiled, each is one launch instead of several.


@partial(mx.compile, shapeless=True)
def _add_value(total: mx.array, row: mx.array) -> mx.array:
    return total + row.astype(mx.float32)


@partial(mx.compile, shapeless=True)
def _add_key(sums: mx.array, row: mx.array, shift: mx.array, squared: mx.array) -> mx.array:
    centred = row.astype(mx.float32) - shift
    return sums + mx.where(squared, centred * centred, centred)


@partial(mx.compile, shapeless=True)
def _deviation(first: mx.array, second: mx.array, count: mx.array) -> mx.array:
    return mx.sqrt(mx.maximum(second / count - (first / count) ** 2, 0.0))
