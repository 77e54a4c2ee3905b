"""A KV cache that holds a rank's share of the positions, and tells mlx-lm of all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..checks import ConfigError
from .shares import BLOCK, Shares
from .sparse_cache import SparseCache


class SlicedKVCache(SparseCache, KVCache):
    """`mlx_lm.models.cache.KVCache` of which this rank holds the rows that are its own (`Shares`).

    ``offset`` is the number of positions, which RoPE, masks and trims go by; `length` is the number of rows here. All
    ranks compute the keys of every token, and each keeps its own.

    Attributes:
        shares: which rows these are.
        told: an array that is there once the ranks have exchanged what the keys of the last write follow from. A rank
            that keeps none of these has nothing else to wait for, and would leave its peers alone.
        calls: how many calls of a model go on, outside of which nobody could attend the rows of other ranks.
        agreed: the position up to which ranks are known to agree; -1 before the first call.
        piece: while a model is called, keys and values of its tokens, of all positions: what it is given to attend to.
    """

    shares: Shares

    def __init__(self, shares: Shares) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shares = shares
        self.piece: tuple[mx.array, mx.array] | None = None
        self.told: mx.array | None = None
        self.calls, self.agreed = 0, -1
        self._lowest = 0  # position to which the cache was trimmed since somebody asked

    @property
    def length(self) -> int:
        return self.shares.before(self.offset)

    @property
    def position(self) -> int:
        """Positions of all ranks together."""
        return int(self.offset)

    @property
    def sharers(self) -> int:  # type: ignore[override]
        return self.shares.size

    # While a model is called these have a shape even where the rank has no row yet.

    @property
    def key_rows(self) -> mx.array:
        return self._buffer(self.keys, 0)

    @property
    def value_rows(self) -> mx.array:
        return self._buffer(self.values, 1)

    def _buffer(self, rows: mx.array | None, kind: int) -> mx.array:
        if rows is None:
            assert self.piece is not None
            return self.piece[kind][:, :, :0]
        return rows

    def own_rows(self) -> tuple[mx.array, mx.array]:
        """Keys and values ``(B, Hkv, length, D)``."""
        return self.key_rows[..., : self.length, :], self.value_rows[..., : self.length, :]

    def rows_before(self, position: int) -> int:
        return self.shares.before(position)

    def own(self, start: int, rows: mx.array) -> tuple[int, mx.array]:
        return self.shares.before(start), _at(rows, self.shares.own(start, start + rows.shape[2]) - start)

    def runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        edges = sorted({start, stop, *range(-(-start // BLOCK) * BLOCK, stop, BLOCK)})
        return [(first, last, int(self.shares.positions(first, last)[0])) for first, last in pairwise(edges)]

    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [Shares(rank, self.shares.size).before(self.position) for rank in range(self.shares.size)]

    def take_lowest(self) -> int:
        """The position before which everything is as it was when this was asked last."""
        lowest, self._lowest = self._lowest, self.position
        return lowest

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep what is this rank's; return the arrays themselves, as older rows are not all here.

        Raises:
            ConfigError: the model is not, or no more, enabled with ``shard``.
        """
        if not self.calls:
            raise ConfigError("cache: expected a whole one, got a rank's share of --shard context. Make a new one.")
        self.take(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self.piece is not None
        return self.piece

    def take(self, keys: mx.array, values: mx.array) -> None:
        """Keep what is this rank's of further positions."""
        start, stop = self.position, self.position + keys.shape[2]
        first = self.length
        own = self.shares.own(start, stop)
        for state in self.beside.values():
            state.rewind(first)
            state.receive(start, keys)
        if len(own):
            self._write(first, *(_at(rows, own - start) for rows in (keys, values)))
        self.offset = stop
        self.piece = keys, values

    def _write(self, first: int, *written: mx.array) -> None:
        """Put rows behind the first ones, in buffers that grow as mlx-lm's do."""
        last = first + written[0].shape[2]
        buffers: list[Any] = [self.keys, self.values]
        for kind, rows in enumerate(written):
            if buffers[kind] is None or last > buffers[kind].shape[2]:
                room = -(-last // self.step) * self.step - first
                buffers[kind] = _grown(buffers[kind], first, rows, room)
            buffers[kind][..., first:last, :] = rows
        self.keys, self.values = buffers

    @property
    def state(self) -> Any:
        """What mlx-lm evaluates after each piece."""
        return [array for array in (self.keys, self.values, self.told) if array is not None]

    @state.setter
    def state(self, value: Any) -> None:
        raise ConfigError("--shard context: expected a cache that it made, got the state of another.")

    def trim(self, n: int) -> int:
        trimmed: int = super().trim(n)  # type: ignore[no-untyped-call]
        self._lowest = min(self._lowest, self.position)
        for state in self.beside.values():
            state.rewind(self.length)
        return trimmed

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        raise ConfigError(f"kv_bits: expected caches in full precision with --shard, got {bits} bits. Drop one.")

    @property
    def merge(self) -> Any:
        """Not there: mlx-lm's server asks for it to see whether requests can be answered in batches."""
        raise AttributeError("merge")


def slice_up(caches: Any, shares: Shares) -> Any:
    """The caches with a `SlicedKVCache` for each plain one, whose rows, if it has any, are cut to those of the rank."""
    return [_sliced(cache, shares) for cache in caches]


def _sliced(cache: Any, shares: Shares) -> Any:
    if type(cache) is not KVCache:
        return cache
    found = SlicedKVCache(shares)
    if cache.offset:
        whole: list[Any] = [cache.keys, cache.values]
        found.take(*(rows[..., : cache.offset, :] for rows in whole))
        found.piece = None
        mx.eval(found.state)
    return found


def _at(rows: mx.array, places: Any) -> mx.array:
    """``rows (B, H, n, D)`` at these places: a slice where they follow one another."""
    first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    if last - first == len(places):
        return rows[:, :, first:last]
    return rows[:, :, mx.array(places)]


def _grown(buffer: mx.array | None, first: int, rows: mx.array, room: int) -> mx.array:
    """``buffer`` of ``first`` rows with ``room`` for more, of the kind of ``rows``."""
    B, H, _, D = rows.shape
    blank = mx.zeros((B, H, room, D), rows.dtype)
    return blank if buffer is None else mx.concatenate([buffer[..., :first, :], blank], axis=2)
