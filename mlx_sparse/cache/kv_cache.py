"""KV caches that attend sparsely: mlx-lm's own caches with something beside them that their ``state`` does not show.

A cache is adopted in place (`adopt`): its keys, values and offset stay mlx-lm's, so files, trimming, merging and
batching work as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from ..methods.table import WHOLE_BUFFERS
from ..ops.packed_rows import PackedRows
from .sparse_cache import Full, Run, SparseCache
from .state import State

# Bytes of keys and values that are unpacked at a time for a prompt, of one KV head at least.
UNPACKED = 16 << 20


class SparseKVCache(SparseCache, KVCache):
    """`mlx_lm.models.cache.KVCache` that can attend sparsely."""

    @staticmethod
    def merge(caches: Any) -> Any:
        return merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        packed: Any = super().to_quantized(group_size=group_size, bits=bits)
        for method, state in self.beside.items():
            if (found := state.pack()) is not None:
                adopt(packed)
                packed.hold(method, found)
        return packed


class SparseQuantizedKVCache(SparseCache, QuantizedKVCache):
    """`mlx_lm.models.cache.QuantizedKVCache` that can attend sparsely. Steps read its rows as they are."""

    @property
    def key_rows(self) -> PackedRows:
        return PackedRows.from_parts(self.keys, self.bits)

    @property
    def value_rows(self) -> PackedRows:
        return PackedRows.from_parts(self.values, self.bits)

    def rows(self, backend: str) -> tuple[PackedRows, PackedRows, dict[str, int]]:
        keys, values, S = self.key_rows, self.value_rows, self.length
        if backend in WHOLE_BUFFERS:
            return keys, values, {"length": S}
        return keys.first(S), values.first(S), {}

    def by_heads(self, run: Run, queries: mx.array, backend: str) -> tuple[mx.array, ...]:
        # The rows of as many KV heads as `UNPACKED` bytes hold are there, and no others until these are done with.
        keys, values, S = self.key_rows, self.value_rows, self.length
        B, Hkv, _, D = keys.shape
        G, step = queries.shape[1] // Hkv, max(1, UNPACKED // (2 * B * S * D * keys.itemsize))
        length = {"length": S} if backend in WHOLE_BUFFERS else {}
        parts: list[tuple[mx.array, ...]] = []
        for first in range(0, Hkv, step):
            if parts:
                keys, values = keys.after(parts[-1][0]), values.after(parts[-1][0])
            kv, heads = slice(first, first + step), slice(first * G, (first + step) * G)
            parts.append(run(heads, queries[:, heads], keys[:, kv, :S], values[:, kv, :S], length))
        return tuple(mx.concatenate(list(found), axis=1) for found in zip(*parts, strict=True))


class SparseBatchKVCache(SparseCache, BatchKVCache):
    """`mlx_lm.models.cache.BatchKVCache`, the server's left-padded batch, that can attend sparsely."""

    padding_mask: mx.array | None = None
    _first: list[int] | None = None  # row of each sequence; None: not looked at since rows moved
    # While mlx-lm processes ragged prompts, which it pads on the right: where each ends, of which `lm.seam` takes note.
    prompt_ends: list[int] | None = None

    @property
    def length(self) -> int:
        length: int = self._idx
        return length

    @property
    def padding(self) -> mx.array | None:
        padding: mx.array = self.left_padding
        return padding

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        # Remembered so that a mask that says no more than `left_padding` is known by identity.
        self.padding_mask = mask if kwargs.get("window_size") is None else None
        return mask

    def _moved(self, follow: Callable[[str, State], State | None]) -> None:
        super()._moved(follow)
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

    # These move rows.

    def prepare(self, **kwargs: Any) -> None:
        self._moved(lambda method, state: state.roll(None, self.length))
        super().prepare(**kwargs)  # type: ignore[no-untyped-call]

    def finalize(self) -> None:
        self._moved(lambda method, state: state.roll(self._right_padding, self.length))
        super().finalize()  # type: ignore[no-untyped-call]

    def filter(self, batch_indices: Any) -> None:
        length = self.length
        kept: Any = mx.array(batch_indices).tolist()
        fulls = self._fulls
        self._full = tuple(fulls[sequence] for sequence in kept)
        super().filter(batch_indices)  # type: ignore[no-untyped-call]
        self._moved(lambda method, state: state.filter(kept, length, length - self.length))

    def extend(self, other: Any) -> None:
        adopt(other)
        self._full = self._fulls + other._fulls
        self._moved(lambda method, state: state.join(self, other.beside.get(method), other))
        super().extend(other)  # type: ignore[no-untyped-call]

    def extract(self, idx: int) -> Any:
        one = super().extract(idx)  # type: ignore[no-untyped-call]
        for method, state in self.beside.items():
            if (found := state.extract(idx, self.length, self.length - one.offset)) is not None:
                adopt(one)
                one.hold(method, found)
        return one


def merge(caches: list[Any]) -> Any:
    """Return the batch that mlx-lm makes of caches of one sequence each, with what methods keep beside any of them."""
    merged = BatchKVCache.merge(caches)
    states = {method: state for cache in caches for method, state in getattr(cache, "beside", {}).items()}
    for method, state in states.items():
        adopt(caches)
        if (found := state.merge([(cache.beside.get(method), cache) for cache in caches])) is not None:
            adopt(merged)
            merged.hold(method, found)
    return merged


# mlx-lm saves a cache under its class name and finds it again by that name: files stay its own.
SparseKVCache.__name__ = KVCache.__name__
SparseBatchKVCache.__name__ = BatchKVCache.__name__
SparseQuantizedKVCache.__name__ = QuantizedKVCache.__name__

SPARSE_CLASSES: dict[type, type] = {
    KVCache: SparseKVCache,
    BatchKVCache: SparseBatchKVCache,
    QuantizedKVCache: SparseQuantizedKVCache,
}


def adopt(cache: Any) -> None:
    """Let ``cache`` attend sparsely, in place, if it is one of mlx-lm's plain caches; lists and CacheList too."""
    if isinstance(cache, (list, tuple)):
        for entry in cache:
            adopt(entry)
    elif hasattr(cache, "caches"):
        adopt(cache.caches)
    elif type(cache) in SPARSE_CLASSES:
        cache.__class__ = SPARSE_CLASSES[type(cache)]


def is_padding_mask(mask: Any, caches: Iterable[Any]) -> bool:
    """Whether ``mask`` is causal and no more, or what a batch of ``caches`` made of its left padding besides."""
    if isinstance(mask, str):
        return True  # mlx-lm knows one: "causal"
    return any(isinstance(cache, SparseBatchKVCache) and cache.padding_mask is mask for cache in caches)
