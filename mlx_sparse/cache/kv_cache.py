"""KV caches that attend sparsely: mlx-lm's own caches with side buffers that their ``state`` does not show.

A cache is adopted in place (`adopt`): its keys, values and offset stay mlx-lm's, so files, trimming, merging and
batching work as before. What a method reads besides, component-major keys and running sums (`side`) or an index of
buckets (`buckets`), can be rebuilt from them and follows the cache through trim, growth, copies and reloads. The
attention that keys have received (`received`) cannot: where it is lost, H2O attends densely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..methods import Method, Prefill, SparQ, registry
from ..methods.table import WHOLE_BUFFERS
from .h2o_state import Received
from .saap_state import BucketIndex
from .sparq_state import SideBuffers


@dataclass(frozen=True)
class Full:
    """Settings and keys with which a sample kept too many blocks to be worth while."""

    config: Prefill
    fullest: float
    keys: int

    def holds(self, config: Prefill, fullest: float, S: int) -> bool:
        """Whether it need not be tried over ``S`` keys: density falls slowly, so not before they have doubled."""
        return (self.config, self.fullest) == (config, fullest) and self.keys <= S < 2 * self.keys


class SparseCache:
    """Mixed into mlx-lm's caches: side buffers, `attend` for decode steps and `attend_prompt` for prompts."""

    keys: Any
    values: Any
    _side: SideBuffers | None = None
    index: BucketIndex | None = None  # of SAAP, whose owner is the plan of an enabled model
    received: Received | None = None  # of H2O, likewise
    _full: tuple[Full | None, ...] = ()  # one, or one for each sequence of a batch; none where rows are new

    length_name = "offset"  # where mlx-lm's class keeps the number of rows in use

    @property
    def length(self) -> int:
        """Rows in use."""
        return int(getattr(self, self.length_name))

    @property
    def padding(self) -> mx.array | None:
        """``(B,)`` first valid row of each sequence, or None."""
        return None

    @property
    def state(self) -> Any:
        """What mlx-lm saves and evaluates: exactly its own."""
        return super().state  # type: ignore[misc]

    @state.setter
    def state(self, value: Any) -> None:
        self.drop_side_buffers()
        self.index = self.received = None
        self._full = ()
        super(SparseCache, type(self)).state.fset(self, value)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        own: int = super().nbytes  # type: ignore[misc]
        return own + sum(kept.nbytes for kept in (self._side, self.index, self.received) if kept is not None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if self._side is not None:
            self._side.rewind(self.length)
        if self.index is not None:
            self.index.receive(self.length, keys)
        if self.received is not None:
            self.received.rewind(self.length)
        if any(self._full):
            rows = [self.length - first for first in self.first_rows()]
            kept = zip(self._full, rows, strict=False)  # one for all rows of a batch that nothing pads
            self._full = tuple(full if full and full.keys <= length else None for full, length in kept)
        return super().update_and_fetch(keys, values)  # type: ignore[misc]

    def first_rows(self, others: Iterable[Any] = ()) -> list[int]:
        """The first valid row of each sequence. Of a batch, ``others`` are the caches of the other layers."""
        return [0] * len(self.keys)

    def drop_side_buffers(self) -> None:
        """Forget what is kept beside, but for the index; for operations that move rows."""
        self._side = self.received = None

    def attend(self, queries: mx.array, config: Method, *, scale: float, backend: str) -> tuple[mx.array, mx.array]:
        """One decode step over this cache.

        Args:
            queries: ``(B, Hq, 1, D)``; their keys and values have been written.
            config: method and parameters, with ``component_score`` resolved.

        Returns:
            ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)`` of the attended keys.
        """
        S = self.length
        keys, values, length = self.rows(backend)
        parameters: dict[str, Any] = {"scale": scale, "left_padding": self.padding, **length}
        if isinstance(config, SparQ):
            G = queries.shape[1] // keys.shape[1]
            parameters |= self._sparq_parameters(config, G, S)
            if not length:
                parameters["keys_t"] = parameters["keys_t"][..., :S]
        else:
            parameters |= config.parameters(queries.shape[1] // keys.shape[1])
        result: tuple[mx.array, mx.array] = registry.load(config.name, backend)(queries, keys, values, **parameters)
        return result

    def select_prompt(
        self, queries: mx.array, config: Prefill, *, scale: float, backend: str, fullest: float
    ) -> mx.array | None:
        """The blocks for `attend_prompt` if they are at most the share ``fullest`` of all, for which this waits."""
        S = self.length
        if any(full is not None and full.holds(config, fullest, S) for full in self._full):
            return None
        keys, _, length = self.rows(backend)
        select = registry.load(f"{config.name}_select", backend)
        blocks: mx.array = select(queries, keys, scale=scale, **config.parameters(), **length)
        pairs = config.layout(queries.shape[2], S).causal_pairs
        kept: Any = (blocks >= 0).sum().item()
        full = kept > fullest * pairs * queries.shape[0] * queries.shape[1]
        self._full = (Full(config, fullest, S),) if full else ()
        return None if full else blocks

    def attend_prompt(
        self, queries: mx.array, config: Prefill, *, scale: float, backend: str, blocks: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """A piece of a prompt over this cache, which is not a padded batch.

        Args:
            queries: ``(B, Hq, L, D)``; their keys and values have been written.
            config: method and parameters, as `Prefill.at` gives them for this context.
            blocks: what `select_prompt` chose, if it was asked.

        Returns:
            ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)`` of the attended keys and the blocks they are in,
            ``(B, Hq, R, N)``.
        """
        keys, values, length = self.rows(backend)
        if blocks is not None:
            attend = registry.load("attend_blocks", backend)
            out, lse = attend(queries, keys, values, blocks, scale=scale, block_size=config.block_size, **length)
            return out, lse, blocks
        attend = registry.load(config.name, backend)
        result: tuple[mx.array, mx.array, mx.array] = attend(
            queries, keys, values, scale=scale, **config.parameters(), **length
        )
        return result

    def rows(self, backend: str) -> tuple[mx.array, mx.array, dict[str, int]]:
        """Keys, values and further parameters: whole buffers and the length if ``backend`` reads those, or slices."""
        S = self.length
        if backend in WHOLE_BUFFERS:
            return self.keys, self.values, {"length": S}
        return self.keys[..., :S, :], self.values[..., :S, :], {}

    def _sparq_parameters(self, config: SparQ, G: int, S: int) -> dict[str, Any]:
        reallocate = config.reallocates(G)
        weighted = config.component_score == "query_key"
        side = self._side = self._side or SideBuffers()
        side.extend(self, S, mean=reallocate, spread=weighted)
        assert side.keys_t is not None
        return {
            **config.parameters(G),
            "component_weight": side.keys.deviation() if weighted and side.keys else None,
            "keys_t": side.keys_t,
            "value_mean": side.values.mean() if reallocate and side.values else None,
        }


class SparseKVCache(SparseCache, KVCache):
    """`mlx_lm.models.cache.KVCache` that can attend sparsely."""

    @classmethod
    def merge(cls, caches: Any) -> Any:
        merged = super().merge(caches)  # type: ignore[no-untyped-call]
        received = Received.joined([(getattr(cache, "received", None), cache.offset) for cache in caches])
        if received is not None:
            adopt(merged)
            merged.received = received
        return merged


class SparseBatchKVCache(SparseCache, BatchKVCache):
    """`mlx_lm.models.cache.BatchKVCache`, the server's left-padded batch, that can attend sparsely."""

    length_name = "_idx"
    padding_mask: mx.array | None = None
    _first: list[int] | None = None  # row of each sequence; None: not looked at since rows moved
    # While mlx-lm processes ragged prompts, which it pads on the right: where each ends, of which `lm.seam` takes note.
    prompt_ends: list[int] | None = None

    @property
    def padding(self) -> mx.array | None:
        padding: mx.array = self.left_padding
        return padding

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        # Remembered so that a mask that says no more than `left_padding` is known by identity.
        self.padding_mask = mask if kwargs.get("window_size") is None else None
        return mask

    def drop_side_buffers(self) -> None:
        super().drop_side_buffers()
        self._first = None

    def first_rows(self, others: Iterable[Any] = ()) -> list[int]:
        # Finding out waits for the GPU: once for each composition of the batch, and for all layers together.
        if self._first is None:
            batches = [entry for entry in (self, *others) if isinstance(entry, SparseBatchKVCache)]
            batches = [entry for entry in batches if entry.left_padding.size == self.left_padding.size]
            found: Any = mx.stack([entry.left_padding for entry in batches]).tolist()
            for entry, first in zip(batches, found, strict=True):
                entry._first = first
        assert self._first is not None
        return self._first

    def extents(self, others: Iterable[Any]) -> list[tuple[int, int]] | None:
        """Rows ``[first, stop)`` of each sequence; None where mlx-lm pads on the right and has not said how much.

        Args:
            others: as for `first_rows`.
        """
        first_rows = self.first_rows(others)
        ends: list[int] | None = [self.length] * len(first_rows)
        if getattr(self, "_right_padding", None) is not None:  # a cache from a file has no such attribute
            ends = self.prompt_ends
        if ends is None:
            return None
        ends = [min(end, self.length) for end in ends]
        return [(min(first, end), end) for first, end in zip(first_rows, ends, strict=True)]

    def alone(self, sequence: int, first: int, stop: int) -> SparseKVCache:
        """The sequence in rows ``[first, stop)`` as a cache of its own; `keep` what it learns."""
        one = SparseKVCache()  # type: ignore[no-untyped-call]
        # From row 0 on it is a view of the buffer, which kernels can read as it is.
        rows = slice(0, None) if first == 0 else slice(first, stop)
        one.keys, one.values = (array[sequence : sequence + 1, :, rows] for array in (self.keys, self.values))
        one.offset = stop - first
        one._full = self._fulls[sequence : sequence + 1]
        return one

    def keep(self, sequence: int, one: SparseKVCache) -> None:
        """Remember that the sample of a sequence was too full, or no longer is."""
        known = self._fulls
        self._full = (*known[:sequence], *(one._full or (None,)), *known[sequence + 1 :])

    @property
    def _fulls(self) -> tuple[Full | None, ...]:
        return self._full or (None,) * self.left_padding.size

    # These move rows, and of what is kept beside take along what could not be rebuilt.

    def prepare(self, **kwargs: Any) -> None:
        self.drop_side_buffers()
        super().prepare(**kwargs)  # type: ignore[no-untyped-call]

    def finalize(self) -> None:
        if self.index is not None and self._right_padding is not None:
            self.index.roll(self._right_padding, self.length)
        self.drop_side_buffers()
        super().finalize()  # type: ignore[no-untyped-call]

    def filter(self, batch_indices: Any) -> None:
        received, length = self.received, self.length
        kept: Any = mx.array(batch_indices).tolist()
        fulls = self._fulls
        self._full = tuple(fulls[sequence] for sequence in kept)
        self.drop_side_buffers()
        super().filter(batch_indices)  # type: ignore[no-untyped-call]
        if self.index is not None:
            self.index.keep(kept, length - self.length)
        if received is not None:
            self.received = received.filtered(batch_indices, length, length - self.length)

    def extend(self, other: Any) -> None:
        parts = [(cache.received, cache.length) for cache in (self, other) if isinstance(cache, SparseCache)]
        theirs = other._fulls if isinstance(other, SparseBatchKVCache) else (None,) * other.left_padding.size
        self._full = self._fulls + theirs
        if self.index is not None:
            adopt(other)
            index = other.index or BucketIndex(self.index.router)
            if index.router is not self.index.router:
                self.index = None
            else:
                self.index.join(self, index, other)
        self.drop_side_buffers()
        super().extend(other)  # type: ignore[no-untyped-call]
        if len(parts) == 2:
            self.received = Received.joined(parts)

    def extract(self, idx: int) -> Any:
        one = super().extract(idx)  # type: ignore[no-untyped-call]
        if self.received is not None:
            adopt(one)
            one.received = self.received.filtered([idx], self.length, self.length - one.offset)
        return one


# mlx-lm saves a cache under its class name and finds it again by that name: files stay its own.
SparseKVCache.__name__ = KVCache.__name__
SparseBatchKVCache.__name__ = BatchKVCache.__name__

SPARSE_CLASSES: dict[type, type] = {KVCache: SparseKVCache, BatchKVCache: SparseBatchKVCache}


def adopt(cache: Any) -> None:
    """Let ``cache`` attend sparsely, in place, if it is one of mlx-lm's plain caches; lists and CacheList too."""
    if isinstance(cache, (list, tuple)):
        for entry in cache:
            adopt(entry)
    elif hasattr(cache, "caches"):
        adopt(cache.caches)
    elif type(cache) in SPARSE_CLASSES:
        cache.__class__ = SPARSE_CLASSES[type(cache)]
