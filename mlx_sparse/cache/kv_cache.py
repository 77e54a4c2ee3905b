"""Define subclasses of KV caches of mlx-lm and mlx-vlm for sparse attention.

The ``state`` property of each subclass returns the ``state`` of its base class, without the auxiliary cache state.

`adopt` changes the class of a cache in place. Keys, values and offset stay the same, so saving, trimming, merging and
batching work as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import attrgetter
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from ..core.packed_rows import PackedRows
from ..core.registry import WHOLE_BUFFERS
from .sparse_cache import FullSample, Run, SparseCache
from .state import State

Mask = mx.array | str | None  # mask of an attention call in mlx-lm or mlx-vlm

# Bytes of keys and values that prefill dequantizes at a time. One KV head may exceed this limit.
DEQUANTIZED_BYTES = 16 << 20


class SparseSingle(SparseCache):
    """Mixin that adds sparse attention to the KV cache of one sequence."""

    @staticmethod
    def merge(caches: list[Any]) -> object:
        return merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        self.drop_stale_states()
        packed: Any = super().to_quantized(group_size=group_size, bits=bits)  # type: ignore[misc]
        for method, state in self.aux_states.items():
            if (found := state.pack()) is not None:
                adopt(packed)
                packed.add_state(method, found)
        return packed


class SparseQuantized(SparseCache):
    """Mixin that adds sparse attention to a quantized KV cache. Decode steps pass quantized rows to the backend."""

    bits: int

    @staticmethod
    def _contents(cache: Any) -> tuple[object, ...]:
        return cache.offset, *(cache.keys or [None]), *(cache.values or [None])

    @property
    def key_rows(self) -> PackedRows:
        return PackedRows.from_parts(self.keys, self.bits)

    @property
    def value_rows(self) -> PackedRows:
        return PackedRows.from_parts(self.values, self.bits)

    def rows(self, backend: str, S: int | None = None) -> tuple[PackedRows, PackedRows, dict[str, int]]:
        keys, values, S = self.key_rows, self.value_rows, self.length if S is None else S
        if backend in WHOLE_BUFFERS:
            return keys, values, {"length": S}
        return keys.first(S), values.first(S), {}

    def by_heads(self, run: Run, queries: mx.array, backend: str, *, packed: bool = False) -> tuple[mx.array, ...]:
        # Dequantize a few KV heads at a time, to use about `DEQUANTIZED_BYTES` bytes.
        keys, values, S = self.key_rows, self.value_rows, self.length
        B, Hkv, _, D = keys.shape
        G, step = queries.shape[1] // Hkv, max(1, DEQUANTIZED_BYTES // (2 * B * S * D * keys.itemsize))
        length = {"length": S} if backend in WHOLE_BUFFERS else {}
        parts: list[tuple[mx.array, ...]] = []
        for first in range(0, Hkv, step):
            if parts:
                keys, values = keys.after(parts[-1][0]), values.after(parts[-1][0])
            kv, heads = slice(first, first + step), slice(first * G, (first + step) * G)
            given: list[Any] = [rows.first(S, kv) if packed else rows[:, kv, :S] for rows in (keys, values)]
            parts.append(run(heads, queries[:, heads], given[0], given[1], length))
        return tuple(mx.concatenate(list(found), axis=1) for found in zip(*parts, strict=True))


class SparseBatch(SparseCache):
    """Mixin that adds sparse attention to the KV cache of a left-padded batch of sequences."""

    _idx: int
    _right_padding: Any
    left_padding: mx.array
    padding_mask: mx.array | None = None
    sliced_masks = False  # True for a model of mlx-vlm, which may pass slices of the padding mask
    other_mask = False  # True after the model has passed another mask
    _first: list[int] | None = None  # cached `first_rows`; None after rows moved
    # End row of each prompt while mlx-lm processes prompts of different lengths with right padding. `lm.seam` sets it.
    prompt_ends: list[int] | None = None
    _contents = staticmethod(attrgetter("_idx", "keys", "values", "left_padding"))

    @property
    def length(self) -> int:
        length: int = self._idx
        return length

    @property
    def padding(self) -> mx.array | None:
        padding: mx.array = self.left_padding
        return padding

    def make_mask(self, N: int, return_array: bool = False, **kwargs: object) -> mx.array:
        # `is_padding_mask` reads the address of a sliced mask. On the CPU, that does not wait for layers on the GPU.
        with mx.stream(mx.cpu) if self.sliced_masks else nullcontext():
            mask: mx.array = super().make_mask(N, return_array, **kwargs)  # type: ignore[misc]
        # `is_padding_mask` compares other masks by identity. A mask without a window hides only left padding.
        self.padding_mask = mask if kwargs.get("window_size") is None else None
        return mask

    def _moved(self, follow: Callable[[str, State], State | None]) -> None:
        super()._moved(follow)
        self._first = None

    def first_rows(self, others: Iterable[object] = ()) -> list[int]:
        # Reading `left_padding` waits for the GPU. Read all layers together, and again only if sequences change.
        if self._first is None:
            batches = [entry for entry in (self, *others) if isinstance(entry, SparseBatch)]
            batches = [entry for entry in batches if entry.left_padding.size == self.left_padding.size]
            found = np.array(mx.stack([entry.left_padding for entry in batches])).tolist()
            for entry, first in zip(batches, found, strict=True):
                entry._first = first
        assert self._first is not None
        return self._first

    def extents(self, others: Iterable[object]) -> list[tuple[int, int]] | None:
        """Return the row range ``[first, stop)`` of each sequence, or None if the right padding is unknown.

        Args:
            others: caches of the other layers. One wait for the device reads the first rows of all caches.
        """
        first_rows = self.first_rows(others)
        ends: list[int] | None = [self.length] * len(first_rows)
        if getattr(self, "_right_padding", None) is not None:  # a cache from a file has no such attribute
            ends = self.prompt_ends
        if ends is None:
            return None
        ends = [min(end, self.length) for end in ends]
        return [(min(first, end), end) for first, end in zip(first_rows, ends, strict=True)]

    def select_rows(self, sequence: int, first: int, stop: int) -> SparseKVCache:
        """Return a cache with rows ``[first, stop)`` and the `FullSample` of the sequence with index ``sequence``."""
        one = SparseKVCache()  # type: ignore[no-untyped-call]
        # If `first` is 0, take the whole buffer, which kernels can read without a copy.
        rows = slice(0, None) if first == 0 else slice(first, stop)
        one.keys, one.values = (array[sequence : sequence + 1, :, rows] for array in (self.keys, self.values))
        one.offset = stop - first
        one.drop_stale_states()
        one._full_samples = self._samples_by_sequence[sequence : sequence + 1]
        return one

    def store_full_sample(self, sequence: int, one: SparseKVCache) -> None:
        """Store the `FullSample` of ``one``, a cache from `select_rows`, for the sequence with index ``sequence``."""
        known = self._samples_by_sequence
        self._full_samples = (*known[:sequence], *(one._full_samples or (None,)), *known[sequence + 1 :])

    @property
    def _samples_by_sequence(self) -> tuple[FullSample | None, ...]:
        return self._full_samples or (None,) * self.left_padding.size

    # The following methods move rows, so they also update the auxiliary state.

    def prepare(self, **kwargs: object) -> None:
        with self._changing():
            self._moved(lambda method, state: state.roll(None, self.length))
            super().prepare(**kwargs)  # type: ignore[misc]

    def finalize(self) -> None:
        with self._changing():
            self._moved(lambda method, state: state.roll(self._right_padding, self.length))
            super().finalize()  # type: ignore[misc]

    def filter(self, batch_indices: mx.array | list[int]) -> None:
        length = self.length
        kept: list[int] = np.array(batch_indices).tolist()
        with self._changing():
            samples = self._samples_by_sequence
            self._full_samples = tuple(samples[sequence] for sequence in kept)
            super().filter(batch_indices)  # type: ignore[misc]
            self._moved(lambda method, state: state.filter(kept, length, length - self.length))

    def extend(self, other: SparseBatch) -> None:
        adopt(other)
        with self._changing(), other._changing():
            self._full_samples = self._samples_by_sequence + other._samples_by_sequence
            self._moved(lambda method, state: state.merge([(state, self), (other.aux_states.get(method), other)]))
            super().extend(other)  # type: ignore[misc]

    def extract(self, idx: int) -> object:
        self.drop_stale_states()
        one = super().extract(idx)  # type: ignore[misc]
        for method, state in self.aux_states.items():
            if (found := state.extract(idx, self.length, self.length - one.offset)) is not None:
                adopt(one)
                one.add_state(method, found)
        return one


def merge(caches: list[Any]) -> object:
    """Merge single-sequence caches and their auxiliary states into a batch. This replaces `KVCache.merge`."""
    plain = next(cls for cls in type(caches[0]).__mro__ if cls in SPARSE_CLASSES)
    merged = sys.modules[plain.__module__].BatchKVCache.merge(caches)
    for cache in caches:
        if isinstance(cache, SparseCache):
            cache.drop_stale_states()
    states = {method: state for cache in caches for method, state in getattr(cache, "aux_states", {}).items()}
    for method, state in states.items():
        adopt(caches)
        if (found := state.merge([(cache.aux_states.get(method), cache) for cache in caches])) is not None:
            adopt(merged)
            merged.add_state(method, found)
    return merged


class SparseKVCache(SparseSingle, KVCache):
    """`mlx_lm.models.cache.KVCache` that can attend sparsely."""


class SparseQuantizedKVCache(SparseQuantized, QuantizedKVCache):
    """`mlx_lm.models.cache.QuantizedKVCache` that can attend sparsely."""


class SparseBatchKVCache(SparseBatch, BatchKVCache):
    """`mlx_lm.models.cache.BatchKVCache` that can attend sparsely."""


# mlx-lm writes the class name of a cache to files and loads the class of that name. Keep mlx-lm's names.
SparseKVCache.__name__ = KVCache.__name__
SparseBatchKVCache.__name__ = BatchKVCache.__name__
SparseQuantizedKVCache.__name__ = QuantizedKVCache.__name__

SPARSE_CLASSES: dict[type, type] = {
    KVCache: SparseKVCache,
    BatchKVCache: SparseBatchKVCache,
    QuantizedKVCache: SparseQuantizedKVCache,
}


class _OfVlm:
    """Mixin for mlx-vlm's KV caches. The prefix cache of mlx-vlm copies and merges them, and compares their classes."""

    @classmethod
    def from_state(cls, state: object, meta_state: object) -> object:
        return cls.__mro__[cls.__mro__.index(SparseCache) + 1].from_state(state, meta_state)  # type: ignore[attr-defined]

    def prefix_cache_merge(self, rows: list[object], prefix_lens: object) -> object:
        ours = type(self)
        if isinstance(self, SparseSingle) and all(ours in (type(row), SPARSE_CLASSES.get(type(row))) for row in rows):
            return merge(rows)
        return super().prefix_cache_merge(rows, prefix_lens)  # type: ignore[misc]


def register_vlm(caches: ModuleType) -> None:
    """Add sparse subclasses of mlx-vlm's KV caches to `SPARSE_CLASSES`. ``caches`` is mlx_vlm.models.cache."""
    for cls, bases in (
        (caches.KVCache, (_OfVlm, SparseSingle)),
        (caches.QuantizedKVCache, (_OfVlm, SparseQuantized)),
        (caches.BatchKVCache, (_OfVlm, SparseBatch)),
    ):
        if cls not in SPARSE_CLASSES:
            # mlx-vlm's prefix cache on disk accepts only classes of its own modules.
            own = {"__doc__": cls.__doc__, "__module__": cls.__module__}
            SPARSE_CLASSES[cls] = type(cls.__name__, (*bases, cls), own)


def adopt(cache: object) -> None:
    """Change the class of a KV cache, or of each KV cache in a list, to a sparse cache class in place."""
    if isinstance(cache, (list, tuple)):
        for entry in cache:
            adopt(entry)
    elif hasattr(cache, "caches"):
        adopt(cache.caches)
    elif type(cache) in SPARSE_CLASSES:
        cache.__class__ = SPARSE_CLASSES[type(cache)]


def is_padding_mask(mask: Mask, caches: Iterable[object]) -> bool:
    """Return True if ``mask`` is causal, or if it is the padding mask of a batch cache in ``caches``."""
    if isinstance(mask, str):
        return mask == "causal"  # mlx-vlm uses other names for kernels of its own
    return any(isinstance(cache, SparseBatch) and _is_mask_of(cache, mask) for cache in caches)


def as_bias(mask: Mask, queries: mx.array, S: int) -> mx.array | None:
    """Return the mask of a decode step as a bias ``(B, Hq, 1, S)``, or None if it is no additive mask."""
    if not isinstance(mask, mx.array) or not mx.issubdtype(mask.dtype, mx.floating):
        return None
    shape = (*queries.shape[:3], S)
    if mask.shape == shape:
        return mask
    fits = mask.ndim <= 4 and all(n in (1, m) for n, m in zip(mask.shape[::-1], shape[::-1], strict=False))
    return mx.broadcast_to(mask, shape) if fits and mask.shape[-1] == S else None


def _is_mask_of(cache: SparseBatch, mask: Any) -> bool:
    """Return True if ``mask`` is the padding mask of ``cache``, or a full slice of the padding mask.

    Many models pass a full slice of the mask to the attention function.
    """
    own = cache.padding_mask
    if own is mask or own is None or not cache.sliced_masks:
        return own is mask and own is not None
    # MLX gives a full slice the same buffer. A model that has once passed another mask does so in every call.
    if cache.other_mask or mask.shape != own.shape or mask.dtype != own.dtype:
        return False
    cache.other_mask = _buffer(mask) != _buffer(own)
    return not cache.other_mask


def _buffer(mask: Any) -> tuple[object, ...]:
    """Return the address and the strides of an array. This evaluates the array."""
    rows = np.asarray(memoryview(mask))
    return rows.__array_interface__["data"][0], rows.strides
