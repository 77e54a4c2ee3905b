"""Store one context-parallel shard of a KV cache. ``offset`` counts the tokens of all shards."""

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

# Number of consecutive positions that one rank stores. It is a multiple of the group size of quantized scoring keys and
# of usual page and block sizes. It is small, so that every prefill chunk is spread evenly over the ranks.
BLOCK = 2 * GROUP


@dataclass(frozen=True)
class Shard:
    """Set of the positions that one rank stores. They satisfy ``position // BLOCK % size == rank``.

    A position belongs to the same rank at every context length. So no keys move between ranks when a cache is trimmed,
    extended or loaded from a file.
    """

    rank: int
    size: int

    def before(self, position: int) -> int:
        """Return how many positions before ``position`` belong to the rank."""
        rounds, rest = divmod(position, BLOCK * self.size)
        return rounds * BLOCK + min(max(rest - self.rank * BLOCK, 0), BLOCK)

    def own(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the positions in ``[start, stop)`` that belong to the rank, in ascending order."""
        return self.positions(self.before(start), self.before(stop))

    def positions(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return the sequence positions of the rank's rows ``[first, last)`` as int32."""
        rows = np.arange(first, last, dtype=np.int32)
        return (rows // BLOCK * self.size + self.rank) * BLOCK + rows % BLOCK

    def span(self, length: int) -> slice:
        """Divide ``length`` items, such as the queries of a chunk, among the ranks. Return the slice for this rank."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)


class ShardedKVCache(SparseCache, KVCache):
    """`mlx_lm.models.cache.KVCache` that stores the rows of one `Shard`.

    RoPE, masks and trims use ``offset``, the number of tokens in the sequence. `length` is the number of rows on this
    rank. All ranks compute the keys and values of every token. Each rank stores the rows of its shard.

    Attributes:
        sent: array that depends on all messages of the last forward pass. mlx-lm evaluates this array with the cache,
            so that a rank sends its messages even if it stores none of the new keys.
        calls: number of forward passes in progress. If ``calls`` is 0, writes raise an error, because attention over
            only the rows of this rank would be wrong.
        agreed: position up to which all ranks are known to have the same tokens; -1 before the first forward pass.
        chunk: keys and values of all tokens of the current forward pass; None outside a forward pass.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shard = shard
        self.chunk: tuple[mx.array, mx.array] | None = None
        self.sent: mx.array | None = None
        self.calls, self.agreed = 0, -1
        self._lowest = 0  # lowest position of all trims since the last `take_lowest`

    @property
    def length(self) -> int:
        return self.shard.before(self.offset)

    @property
    def position(self) -> int:
        """Number of tokens in the sequence, on all ranks together."""
        return int(self.offset)

    @property
    def shards(self) -> int:  # type: ignore[override]
        return self.shard.size

    # In a forward pass these arrays have the right shape and type, even if the rank has no rows yet.

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
        """Return the keys and values on this rank, each ``(B, Hkv, length, D)``."""
        return self.key_rows[..., : self.length, :], self.value_rows[..., : self.length, :]

    def rows_before(self, position: int) -> int:
        return self.shard.before(position)

    def own(self, start: int, rows: mx.array) -> tuple[int, mx.array]:
        return self.shard.before(start), _at(rows, self.shard.own(start, start + rows.shape[2]) - start)

    def runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        edges = sorted({start, stop, *range(-(-start // BLOCK) * BLOCK, stop, BLOCK)})
        return [(first, last, int(self.shard.positions(first, last)[0])) for first, last in pairwise(edges)]

    def counts(self) -> list[int]:
        """Return the number of rows on each rank."""
        return [Shard(rank, self.shard.size).before(self.position) for rank in range(self.shard.size)]

    def take_lowest(self) -> int:
        """Return the lowest `position` since the last call. The tokens before this position have not changed."""
        lowest, self._lowest = self._lowest, self.position
        return lowest

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store this rank's rows. Return only the new keys and values, because older rows are spread over the ranks.

        Raises:
            ConfigError: the call is not part of a forward pass of a model that is enabled with ``shard``.
        """
        if not self.calls:
            raise ConfigError(
                "cache: expected a complete KV cache, got one shard of --shard context. Create a new cache."
            )
        self.take(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self.chunk is not None
        return self.chunk

    def take(self, keys: mx.array, values: mx.array) -> None:
        """Store this rank's part of ``keys`` and ``values``, which are ``(B, Hkv, n, D)`` for the next n positions."""
        start, stop = self.position, self.position + keys.shape[2]
        first = self.length
        own = self.shard.own(start, stop)
        for state in self.aux_states.values():
            state.rewind(first)
            if state.listening:
                state.received = start, keys
        if len(own):
            self._write(first, *(_at(rows, own - start) for rows in (keys, values)))
        self.offset = stop
        self.chunk = keys, values

    def _write(self, first: int, *written: mx.array) -> None:
        """Write keys and values at row ``first``. If needed, enlarge the buffers by the same increments as mlx-lm."""
        last = first + written[0].shape[2]
        buffers: list[Any] = [self.keys, self.values]
        for kind, rows in enumerate(written):
            if buffers[kind] is None or last > buffers[kind].shape[2]:
                empty = -(-last // self.step) * self.step - first
                buffers[kind] = _grown(buffers[kind], first, rows, empty)
            buffers[kind][..., first:last, :] = rows
        self.keys, self.values = buffers

    @property
    def state(self) -> Any:
        """Arrays that mlx-lm evaluates after each prefill chunk."""
        return [array for array in (self.keys, self.values, self.sent) if array is not None]

    @state.setter
    def state(self, value: Any) -> None:
        raise ConfigError("--shard context: expected a new cache, got the state of another cache.")

    def trim(self, n: int) -> int:
        trimmed: int = super().trim(n)  # type: ignore[no-untyped-call]
        self._lowest = min(self._lowest, self.position)
        for state in self.aux_states.values():
            state.rewind(self.length)
        return trimmed

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        raise ConfigError(f"kv_bits: expected unquantized caches with --shard, got {bits} bits. Drop one option.")

    @property
    def merge(self) -> Any:
        """Raise `AttributeError`, because mlx-lm's server would batch requests if caches had this attribute."""
        raise AttributeError("merge")


def shard_caches(caches: Any, shard: Shard) -> Any:
    """Return a copy of the list ``caches`` in which each `KVCache` is replaced by a `ShardedKVCache` for ``shard``."""
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


def _at(rows: mx.array, indices: Any) -> mx.array:
    """Index axis 2 of ``rows (B, H, n, D)`` with ``indices``. If the indices are consecutive, return a slice."""
    first, last = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
    if last - first == len(indices):
        return rows[:, :, first:last]
    return rows[:, :, mx.array(indices)]


def _grown(buffer: mx.array | None, first: int, rows: mx.array, empty: int) -> mx.array:
    """Return rows ``[0, first)`` of ``buffer``, followed by ``empty`` zero rows in the dtype of ``rows``."""
    B, H, _, D = rows.shape
    blank = mx.zeros((B, H, empty, D), rows.dtype)
    return blank if buffer is None else mx.concatenate([buffer[..., :first, :], blank], axis=2)
