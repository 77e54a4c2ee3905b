"""A KV cache with the positions of one context-parallel shard, which reports all positions to mlx-lm."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from ..checks import ConfigError
from ..methods.scoring_keys import GROUP
from .sparse_cache import SparseCache

# Consecutive positions of one rank: whole groups of quantized scoring keys, pages and blocks of SampleAttention. The
# number is small, so that the ranks get equal shares of every chunk.
BLOCK = 2 * GROUP


@dataclass(frozen=True)
class Shard:
    """The positions of one rank: all with ``position // BLOCK % size == rank``.

    The rank of a position does not depend on the length, so trims, further turns and files move no keys between ranks.
    """

    rank: int
    size: int

    def before(self, position: int) -> int:
        """Return the number of positions of the rank before ``position``."""
        rounds, rest = divmod(position, BLOCK * self.size)
        return rounds * BLOCK + min(max(rest - self.rank * BLOCK, 0), BLOCK)

    def own(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the positions of the rank in ``[start, stop)``, ascending."""
        return self.positions(self.before(start), self.before(stop))

    def positions(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return the positions of the rank's rows ``[first, last)``."""
        rows = np.arange(first, last, dtype=np.int32)
        return (rows // BLOCK * self.size + self.rank) * BLOCK + rows % BLOCK

    def span(self, length: int) -> slice:
        """Return the rank's part of ``length`` items that all ranks have, such as the queries of a chunk."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)


class ShardedKVCache(SparseCache, KVCache):
    """`mlx_lm.models.cache.KVCache` with the rows of one `Shard`.

    ``offset`` is the number of positions, which RoPE, masks and trims use; `length` is the number of rows here. All
    ranks compute the keys of every token, and each keeps its own.

    Attributes:
        sent: an array that depends on the messages of the last write. A rank that stores none of the written keys
            evaluates this array. Otherwise the other ranks would wait for its messages.
        calls: number of open calls of a model. Without an open call, the rows of other ranks cannot be attended.
        agreed: position up to which the ranks have checked that they agree; -1 before the first call.
        chunk: during a call of a model, keys and values of its tokens, of all positions.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shard = shard
        self.chunk: tuple[mx.array, mx.array] | None = None
        self.sent: mx.array | None = None
        self.calls, self.agreed = 0, -1
        self._lowest = 0  # lowest position to which the cache was trimmed after the last `take_lowest`

    @property
    def length(self) -> int:
        return self.shard.before(self.offset)

    @property
    def position(self) -> int:
        """Number of positions of all ranks together."""
        return int(self.offset)

    @property
    def shards(self) -> int:  # type: ignore[override]
        return self.shard.size

    # During a call of a model these arrays have a shape even if the rank has no rows yet.

    @property
    def key_rows(self) -> mx.array:
        return self._buffer(self.keys, 0)

    @property
    def value_rows(self) -> mx.array:
        return self._buffer(self.values, 1)

    def _buffer(self, rows: mx.array | None, kind: int) -> mx.array:
        if rows is None:
            assert self.chunk is not None
            return self.chunk[kind][:, :, :0]
        return rows

    def own_rows(self) -> tuple[mx.array, mx.array]:
        """Return keys and values ``(B, Hkv, length, D)``."""
        return self.key_rows[..., : self.length, :], self.value_rows[..., : self.length, :]

    def rows_before(self, position: int) -> int:
        return self.shard.before(position)

    def own(self, start: int, rows: mx.array) -> tuple[int, mx.array]:
        return self.shard.before(start), _at(rows, self.shard.own(start, start + rows.shape[2]) - start)

    def runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        edges = sorted({start, stop, *range(-(-start // BLOCK) * BLOCK, stop, BLOCK)})
        return [(first, last, int(self.shard.positions(first, last)[0])) for first, last in pairwise(edges)]

    def counts(self) -> list[int]:
        """Return the number of rows of each rank."""
        return [Shard(rank, self.shard.size).before(self.position) for rank in range(self.shard.size)]

    def take_lowest(self) -> int:
        """Return the position before which no row changed since the last call of this method."""
        lowest, self._lowest = self._lowest, self.position
        return lowest

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this rank's rows. Return the arguments, because this rank does not have all older rows.

        Raises:
            ConfigError: the model is not enabled with ``shard``.
        """
        if not self.calls:
            raise ConfigError("cache: expected a whole one, got a rank's share of --shard context. Make a new one.")
        self.take(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self.chunk is not None
        return self.chunk

    def take(self, keys: mx.array, values: mx.array) -> None:
        """Write this rank's rows of further positions."""
        start, stop = self.position, self.position + keys.shape[2]
        first = self.length
        own = self.shard.own(start, stop)
        for state in self.aux_states.values():
            state.rewind(first)
            state.receive(start, keys)
        if len(own):
            self._write(first, *(_at(rows, own - start) for rows in (keys, values)))
        self.offset = stop
        self.chunk = keys, values

    def _write(self, first: int, *written: mx.array) -> None:
        """Write rows from ``first`` on, in buffers that grow as mlx-lm's do."""
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
        """Arrays that mlx-lm evaluates after each chunk."""
        return [array for array in (self.keys, self.values, self.sent) if array is not None]

    @state.setter
    def state(self, value: Any) -> None:
        raise ConfigError("--shard context: expected a cache that it made, got the state of another.")

    def trim(self, n: int) -> int:
        trimmed: int = super().trim(n)  # type: ignore[no-untyped-call]
        self._lowest = min(self._lowest, self.position)
        for state in self.aux_states.values():
            state.rewind(self.length)
        return trimmed

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        raise ConfigError(f"kv_bits: expected caches in full precision with --shard, got {bits} bits. Drop one.")

    @property
    def merge(self) -> Any:
        """Raise `AttributeError`, because mlx-lm's server uses batches if the caches have this attribute."""
        raise AttributeError("merge")


def shard_caches(caches: Any, shard: Shard) -> Any:
    """Return the caches with a `ShardedKVCache` for each plain one, and the rank's part of its rows."""
    return [_sharded(cache, shard) for cache in caches]


def _sharded(cache: Any, shard: Shard) -> Any:
    if type(cache) is not KVCache:
        return cache
    found = ShardedKVCache(shard)
    if cache.offset:
        whole: list[Any] = [cache.keys, cache.values]
        found.take(*(rows[..., : cache.offset, :] for rows in whole))
        found.chunk = None
        mx.eval(found.state)
    return found


def _at(rows: mx.array, places: Any) -> mx.array:
    """Return ``rows (B, H, n, D)`` at these indices, as a slice if they are consecutive."""
    first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    if last - first == len(places):
        return rows[:, :, first:last]
    return rows[:, :, mx.array(places)]


def _grown(buffer: mx.array | None, first: int, rows: mx.array, room: int) -> mx.array:
    """Return the first ``first`` rows of ``buffer``, followed by ``room`` empty rows."""
    B, H, _, D = rows.shape
    blank = mx.zeros((B, H, room, D), rows.dtype)
    return blank if buffer is None else mx.concatenate([buffer[..., :first, :], blank], axis=2)
