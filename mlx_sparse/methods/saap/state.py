"""Define SAAP's auxiliary cache state, the bucket of every key (docs/spec/saap.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ...cache.state import State
from . import kmeans
from .config import SAAP

if TYPE_CHECKING:
    from ...cache.sparse_cache import SparseCache

# Number of keys per bucket to which the online mode fits centroids. More keys change the centroids little.
KEYS_PER_BUCKET = 64
# Number of rows that are converted to pre-RoPE keys and assigned to buckets at a time.
ASSIGNED_ROWS = 4096
# Number of decode steps whose keys are assigned to buckets together, with one read of the centroids. Pending keys are
# slices of larger arrays, such as a joint QKV projection, and keep up to this number of rows of these arrays in memory.
PENDING_ROWS = 64


@dataclass(frozen=True, eq=False)
class KeyLists:
    """Indices of the keys in each bucket (saap.9). Keys in the recent window are not listed.

    Attributes:
        offsets: ``(B, Hkv, buckets + 1)`` start of each bucket in ``key_ids``.
        key_ids: ``(B, Hkv, n)`` key indices, sorted by bucket.
        covered: for each sequence, the row index at which the lists end. Keys from this row on are in no list.
        bounds: values of ``covered`` as a kernel argument. An int if all sequences have the same value; otherwise an
            int32 array ``(B,)``.
        listed: for each sequence, the number of listed keys, summed over KV heads.
        capacity: largest number of keys that a decode step can attend to before the next `rebuild_lists`.
    """

    offsets: mx.array
    key_ids: mx.array
    covered: list[int]
    bounds: int | mx.array
    listed: list[int]
    capacity: int

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        return self.offsets, self.key_ids


@dataclass(frozen=True, eq=False)
class Router:
    """Key centroids and query network of one layer. All caches for this layer share one router.

    Attributes:
        source: object that returns pre-RoPE keys (`mlx_sparse.lm.rope.Source`).
        scale: scale of the attention scores.
        buckets: number of buckets C.
        centroids: ``(Hkv, C, D)``; None if centroids are fitted to each sequence (online mode).
        network: weights for `saap_route`; None in online mode, which routes queries with the centroids.
    """

    source: Any
    scale: float
    buckets: int
    centroids: mx.array | None = None
    network: Mapping[str, mx.array] | None = None

    def __deepcopy__(self, memo: object) -> Router:
        return self  # copies of a cache share the router of the model


def kmeans_network(centroids: mx.array, scale: float) -> dict[str, mx.array]:
    """Build a linear query network. Its logits are the attention scores of ``centroids (..., C, D)``."""
    return {"out_weight": mx.contiguous((centroids * scale).swapaxes(-1, -2))}


class BucketIndex(State):
    """Bucket ids of a cache's keys.

    The index covers rows ``[0, length)``. The first rows have bucket ids. The remaining rows are stored as pre-RoPE
    keys until they are assigned to buckets together. Rows from ``length`` on are unknown, for example in a cache that
    was loaded from a file; `complete` reconstructs the pre-RoPE keys of these rows. The index of a sequence does not
    depend on the other sequences in the batch. In online mode each sequence has its own centroids.

    Attributes:
        centroids: ``(Hkv, C, D)`` from the router, or ``(B, Hkv, C, D)`` in online mode; None before the first fit.
        network: weights for `saap_route`. The weights have a batch axis if ``centroids`` has a batch axis.
        fitted: in online mode, a dict that maps the index of a sequence to a row index. The centroids of the sequence
            were fitted to rows before this index. If a sequence has no entry, its centroids are zeros.
        ids: int16 ``(B, Hkv, n)`` bucket ids of rows ``[0, n)``; None if n is 0.
        pending: list of arrays ``(B, Hkv, m, D)`` with the pre-RoPE keys of the rows from n on.
        lists: keys by bucket (saap.9) from `saap_lists.rebuild_lists`. None before the first call, and again after rows
            have moved.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.centroids, self.network = router.centroids, router.network
        self.ids: mx.array | None = None
        self.pending: list[mx.array] = []
        self.lists: KeyLists | None = None
        self.fitted: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        arrays = [self.ids, *self.pending, *(self.lists.arrays if self.lists else ())]
        if self.router.centroids is None:
            arrays += [self.centroids, *(self.network or {}).values()]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def assigned(self) -> int:
        """Number of rows that have bucket ids."""
        return 0 if self.ids is None else self.ids.shape[2]

    @property
    def length(self) -> int:
        """Number of rows that have bucket ids or pending pre-RoPE keys."""
        return self.assigned + sum(rows.shape[2] for rows in self.pending)

    def rewind(self, length: int) -> None:
        """Forget the rows from index ``length`` on, and the centroids that were fitted to any of the forgotten rows."""
        self._forget_rows(length)
        if any(stop > length for stop in self.fitted.values()):
            self.fitted = {sequence: stop for sequence, stop in self.fitted.items() if stop <= length}
            if not self.fitted:
                self.centroids, self.network, self.ids, self.pending = None, None, None, []

    def _forget_rows(self, length: int) -> None:
        while self.pending and self.length > length:
            rows = self.pending.pop()
            if (kept := length - self.length) > 0:
                self.pending.append(rows[:, :, :kept])
        if self.assigned > length:
            self.ids = None if self.ids is None or length == 0 else self.ids[..., :length]
        if self.lists is not None and max(self.lists.covered) > length:
            self.lists = None

    def write(self, start: int, keys: mx.array) -> mx.array | None:
        """Add pre-RoPE ``keys (B, Hkv, n, D)`` at row ``start``.

        Return ``ids`` if this call assigned pending rows to buckets, and None otherwise. The new keys are ignored if
        earlier rows are unknown, or if there are no centroids yet.
        """
        if start != self.length or self.centroids is None:
            return None
        self.pending.append(keys)
        return self._assign_pending() if self.length - self.assigned >= PENDING_ROWS else None

    def _assign_pending(self) -> mx.array | None:
        if not self.pending:
            return None
        pending, self.pending = self.pending, []
        return self._assign(pending[0] if len(pending) == 1 else mx.concatenate(pending, axis=2))

    def _assign(self, keys: mx.array) -> mx.array:
        assert self.centroids is not None
        found = _nearest(keys, self.centroids)
        self.ids = found if self.ids is None else mx.concatenate([self.ids, found], axis=2)
        return self.ids

    def complete(self, cache: SparseCache, config: SAAP, sequences: Iterable[int] | None = None) -> None:
        """Fit missing centroids and assign every row of ``cache`` to a bucket.

        If the router's source is ``irreversible``, the index must already cover all rows.

        Args:
            sequences: indices of the sequences that get centroids; None means all sequences with keys.
        """
        if self.router.centroids is None:
            self._fit(cache, config, range(len(cache.first_rows())) if sequences is None else sequences)
        if self.centroids is not None:
            self._complete_ids(cache)

    def _complete_ids(self, cache: SparseCache) -> None:
        self._assign_pending()
        for start in range(self.assigned, cache.length, ASSIGNED_ROWS):
            stop = min(start + ASSIGNED_ROWS, cache.length)
            mx.eval(self._assign(self._pre_rope_keys(cache, slice(None), start, stop)))

    def _pre_rope_keys(self, cache: SparseCache, sequences: slice, start: int, stop: int) -> mx.array:
        offset = start if cache.padding is None else start - cache.padding[sequences]
        rows: mx.array = self.router.source.inverse_rope(cache.key_rows[sequences, :, start:stop], offset)
        return rows

    def _fit(self, cache: SparseCache, config: SAAP, sequences: Iterable[int]) -> None:
        """Fit the missing centroids of ``sequences``, and reassign the keys to the new buckets."""
        _, Hkv, _, D = cache.key_rows.shape
        C, first_rows = self.router.buckets, cache.first_rows()
        first_key = {b: first_rows[b] + config.sink_tokens for b in sequences if b not in self.fitted}
        for b, start in first_key.items():
            if start >= cache.length:
                continue
            if self.centroids is None:
                self.centroids = mx.zeros((len(first_rows), Hkv, C, D), cache.key_rows.dtype)
            self.centroids[b] = self._fit_one(cache, b, start, first_rows[b])
            self.fitted[b] = cache.length
            mx.eval(self.centroids)
            if self.ids is not None:
                one, known = slice(b, b + 1), self.assigned
                for begin in range(0, known, ASSIGNED_ROWS):
                    end = min(begin + ASSIGNED_ROWS, known)
                    keys = self._pre_rope_keys(cache, one, begin, end)
                    self.ids[one, :, begin:end] = _nearest(keys, self.centroids[one])
                    mx.eval(self.ids)
        if first_key and self.centroids is not None:
            self.network = kmeans_network(self.centroids, self.router.scale)
            mx.eval(self.network)

    def _fit_one(self, cache: SparseCache, sequence: int, start: int, first_row: int) -> mx.array:
        """Fit centroids ``(Hkv, C, D)`` to the rows of ``sequence`` from ``start`` on."""
        C, count = self.router.buckets, cache.length - start
        # Evenly spaced rows. If there are fewer rows than buckets, some rows occur more than once.
        chosen = start + np.linspace(0, count - 1, min(max(count, C), KEYS_PER_BUCKET * C)).astype(np.int32)
        # Make each row a sequence of one row, because the inverse RoPE takes one position per sequence.
        keys = cache.key_rows[sequence].swapaxes(0, 1)[mx.array(chosen)][:, :, None]
        pre_rope = self.router.source.inverse_rope(keys, mx.array(chosen - first_row))
        return kmeans.fit(pre_rope[:, :, 0].swapaxes(0, 1), C).astype(cache.key_rows.dtype)

    # The following methods update the index after mlx-lm has changed the rows or the sequences of a batch.

    def pack(self) -> BucketIndex:
        return self

    def filter(self, sequences: list[int], length: int, start: int) -> BucketIndex:
        self._assign_pending()
        self.lists = None
        rows = mx.array(sequences)
        if self.ids is not None:
            self.ids = self.ids[rows][..., start:] if start < self.assigned else None
        if self.centroids is not None and self.router.centroids is None:
            self._set_centroids(self.centroids[rows])
        stops = ((place, self.fitted.get(sequence)) for place, sequence in enumerate(sequences))
        self.fitted = {place: stop - start for place, stop in stops if stop is not None}
        return self

    def roll(self, padding: mx.array | None, length: int) -> BucketIndex:
        if padding is None:
            return self
        self._assign_pending()
        self.lists = None
        self.fitted = dict.fromkeys(self.fitted, length)
        if self.ids is None or self.assigned != length:
            self._forget_rows(0)
        else:
            place = (mx.arange(length) - padding[:, None]) % length
            self.ids = mx.take_along_axis(self.ids, mx.broadcast_to(place[:, None], self.ids.shape), axis=2)
        return self

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, SparseCache]]) -> BucketIndex | None:
        """Return the index for the merged batch, or None if the caches have no index or different routers."""
        routers = {index.router for index, _ in parts if isinstance(index, BucketIndex)}
        if len(routers) != 1:
            return None
        merged = cls(*routers)
        known = [(index if isinstance(index, BucketIndex) else cls(*routers), cache) for index, cache in parts]
        length = max(cache.length for _, cache in known)
        if length == 0:
            return merged
        place = 0
        for index, cache in known:
            index.rewind(cache.length)  # rows may have been trimmed after the last write
            padding = length - cache.length
            merged.fitted |= {place + sequence: padding + stop for sequence, stop in index.fitted.items()}
            place += len(cache.first_rows())
        fitted = [index.centroids for index, _ in known if index.centroids is not None]
        if not fitted:
            return merged
        heads = fitted[0].shape[-3]
        ids = [index._all_ids(cache, heads, length) for index, cache in known]
        if all(part is not None for part in ids):
            merged.ids = mx.concatenate([part for part in ids if part is not None])
        if merged.router.centroids is None:
            blank = mx.zeros((1, *fitted[0].shape[1:]), fitted[0].dtype)
            blanks = [mx.repeat(blank, len(cache.first_rows()), axis=0) for _, cache in known]
            own = [index.centroids for index, _ in known]
            merged._set_centroids(
                mx.concatenate([zeros if one is None else one for one, zeros in zip(own, blanks, strict=True)])
            )
        return merged

    def _all_ids(self, cache: SparseCache, heads: int, length: int) -> mx.array | None:
        """Return the bucket ids of ``cache``, left-padded to ``length`` rows, or None if an id cannot be computed."""
        if self.centroids is None or cache.length == 0:
            return mx.zeros((len(cache.first_rows()), heads, length), mx.int16)  # replaced when centroids are fitted
        if self.router.source.irreversible is not None and self.length < cache.length:
            return None
        self._complete_ids(cache)
        assert self.ids is not None
        return mx.pad(self.ids, [(0, 0), (0, 0), (length - cache.length, 0)])

    def extract(self, sequence: int, length: int, start: int) -> BucketIndex:
        self._assign_pending()
        one, part = BucketIndex(self.router), slice(sequence, sequence + 1)
        if self.ids is not None and length <= self.assigned:
            one.ids = self.ids[part, :, start:length]
        if self.centroids is not None and self.router.centroids is None:
            one._set_centroids(self.centroids[part])
        one.fitted = {0: self.fitted[sequence] - start} if sequence in self.fitted else {}
        return one

    def insert(self, sequence: int, one: BucketIndex, first: int, sequences: int) -> None:
        """Copy the missing centroids and bucket ids of a sequence from ``one``, an index that `extract` returned.

        Args:
            sequence: index of the sequence in this batch. If the sequence already has centroids, nothing is copied.
            first: first valid row of the sequence in this batch.
            sequences: number of sequences in this batch.
        """
        if sequence in self.fitted or not one.fitted:
            return
        assert one.centroids is not None
        assert one.ids is not None
        if self.centroids is None:
            self.centroids = mx.zeros((sequences, *one.centroids.shape[1:]), one.centroids.dtype)
        self.centroids[sequence] = one.centroids[0]
        self._set_centroids(self.centroids)
        self.fitted = self.fitted | {sequence: first + one.fitted[0]}
        if self.ids is not None:
            self.ids[sequence, :, first : first + one.assigned] = one.ids[0]

    def _set_centroids(self, centroids: mx.array) -> None:
        self.centroids, self.network = centroids, kmeans_network(centroids, self.router.scale)

    def unfitted(self, sequences: Iterable[int]) -> bool:
        """Return True if the mode is online and at least one of ``sequences`` has no centroids yet."""
        return self.router.centroids is None and not self.fitted.keys() >= set(sequences)


def _nearest(keys: mx.array, centroids: mx.array) -> mx.array:
    """Return the int16 ids ``(B, Hkv, n)`` of the buckets nearest to pre-RoPE ``keys (B, Hkv, n, D)``."""
    ids: mx.array = kmeans.saap_assign(keys, centroids)
    return ids.astype(mx.int16)  # int16 is enough for MAX_BUCKETS


def index_of(cache: SparseCache) -> BucketIndex | None:
    """Return the SAAP index of a cache, or None if the cache has no index."""
    index = cache.aux_states.get(SAAP.name)
    return index if isinstance(index, BucketIndex) else None
