"""SAAP's index beside a cache: the bucket of every key, and the keys in order of bucket (docs/spec/saap.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np

from . import kmeans, registry
from .config import SAAP

if TYPE_CHECKING:
    from .cache import SparseCache

# The online mode fits its centroids to this many keys per bucket: more change them little.
POINTS = 64
# Rows that are turned back and assigned at a time.
PIECE = 4096
# Decode steps whose keys get their buckets together: the centroids are read once for all of them, and a model that
# computes queries, keys and values in one product keeps no more rows of it than these.
TOGETHER = 64


class BeforeRope(Protocol):
    """How queries and keys of a layer are had before RoPE: `mlx_sparse.lm.rope.Source`."""

    @property
    def irreversible(self) -> str | None:
        """Why keys that were not recorded cannot be turned back; None where they can."""

    def before(self, recorder: Any, rows: mx.array, offset: int | mx.array) -> mx.array | None:
        """Rows before RoPE of ``rows (B, H, n, D)``, the first of them at position ``offset``; None if unknown."""

    def turned_back(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        """`before` of rows that were not recorded."""


@dataclass(frozen=True, eq=False)
class Router:
    """What SAAP knows about a layer, the same for all caches of a model.

    Attributes:
        source: how its tensors before RoPE are had.
        scale: of its attention scores.
        buckets: how many there are.
        centroids: ``(Hkv, C, D)``; None where each cache fits its own.
        network: the weights that `saap_route` takes; empty where the centroids route.
    """

    source: BeforeRope
    scale: float
    buckets: int
    centroids: mx.array | None = None
    network: Mapping[str, mx.array] | None = None

    def __deepcopy__(self, memo: Any) -> Router:
        return self  # copies of a cache share the model's


def kmeans_network(centroids: mx.array, scale: float) -> dict[str, mx.array]:
    """The router whose logits are the scores of the centroids."""
    return {"out_weight": mx.contiguous((centroids * scale).swapaxes(-1, -2))}


class BucketIndex:
    """The buckets of a cache's keys, up to date with its writes and trims.

    Rows are ``[0, length)``: bucket ids of the first, keys before RoPE of the rest, which get theirs together. Rows
    from ``length`` on are unknown (the cache came from a file, or its rows moved); `complete` turns them back.

    Attributes:
        ids: int16 ``(B, Hkv, n)`` of rows ``[0, n)``; None where n is 0.
        pending: keys before RoPE of the rows after those, ``(B, Hkv, any, D)`` each.
        covered: rows ``[0, covered)`` are listed in ``offsets`` and ``key_ids`` (saap.9); both None before the first.
        capacity: what every list of keys fits into until the next `fold`.
        listed, padded: keys in ``key_ids`` and padded rows, of all heads and sequences.
        received: while a plan listens, the keys of the last write and where it put them.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.centroids, self.network = router.centroids, router.network
        self.ids: mx.array | None = None
        self.pending: list[mx.array] = []
        self.offsets: mx.array | None = None
        self.key_ids: mx.array | None = None
        self.covered = self.capacity = self.listed = self.padded = 0
        self.listening = False
        self.received: tuple[int, mx.array] | None = None

    @property
    def nbytes(self) -> int:
        arrays = [self.ids, self.offsets, self.key_ids, *self.pending]
        if self.router.centroids is None:
            arrays += [self.centroids, *(self.network or {}).values()]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def assigned(self) -> int:
        """Rows with ids."""
        return 0 if self.ids is None else self.ids.shape[2]

    @property
    def length(self) -> int:
        """Rows that are known."""
        return self.assigned + sum(rows.shape[2] for rows in self.pending)

    def receive(self, start: int, keys: mx.array) -> None:
        """The cache is about to write ``keys`` at row ``start``: what was there and behind it is gone."""
        self.rewind(start)
        if self.listening:
            self.received = (start, keys)

    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        while self.pending and self.length > length:
            rows = self.pending.pop()
            if (kept := length - self.length) > 0:
                self.pending.append(rows[:, :, :kept])
        if self.assigned > length:
            self.ids = None if self.ids is None or length == 0 else self.ids[..., :length]
        if self.covered > length:
            self.offsets = self.key_ids = None
            self.covered = 0

    def write(self, start: int, before: mx.array) -> mx.array | None:
        """Take in keys before RoPE that the cache has written at row ``start``; return ids if new ones want computing.

        Rows behind unknown ones are left unknown, and all where there are no centroids yet.
        """
        if start != self.length or self.centroids is None:
            return None
        self.pending.append(before)
        return self._assign_pending() if self.length - self.assigned >= TOGETHER else None

    def _assign_pending(self) -> mx.array | None:
        if not self.pending:
            return None
        pending, self.pending = self.pending, []
        return self._assign(pending[0] if len(pending) == 1 else mx.concatenate(pending, axis=2))

    def _assign(self, before: mx.array) -> mx.array:
        assert self.centroids is not None
        found = registry.load("saap_assign", "ops")(before, self.centroids).astype(mx.int16)  # MAX_BUCKETS fit
        self.ids = found if self.ids is None else mx.concatenate([self.ids, found], axis=2)
        return self.ids

    def complete(self, cache: SparseCache, config: SAAP) -> None:
        """Give every row of ``cache`` its id, fitting centroids first where there are none.

        Not for rows that are unknown where the router's source is ``irreversible``.
        """
        if self.centroids is None:
            self.centroids = self._fit(cache, config)
            if self.centroids is None:
                self._await_keys(cache)
                return
            self.ids = None  # of rows that were all padding
            self.network = kmeans_network(self.centroids, self.router.scale)
            mx.eval(self.centroids, self.network)
        self._assign_pending()
        turned_back = self.router.source.turned_back
        for start in range(self.assigned, cache.length, PIECE):
            stop = min(start + PIECE, cache.length)
            offset = start if cache.padding is None else start - cache.padding
            mx.eval(self._assign(turned_back(cache.keys[:, :, start:stop], offset)))

    def _await_keys(self, cache: SparseCache) -> None:
        """No row is in a bucket, and any may be visited; the next `fold` fits centroids if there are keys then."""
        B, Hkv, _, D = cache.keys.shape
        self.ids = mx.full((B, Hkv, cache.length), -1, mx.int16)
        self.network = kmeans_network(mx.zeros((Hkv, self.router.buckets, D), cache.keys.dtype), self.router.scale)

    def _fit(self, cache: SparseCache, config: SAAP) -> mx.array | None:
        """Centroids of the keys that the cache holds; None where all its rows are padding or sinks."""
        B, Hkv, _, D = cache.keys.shape
        padding: Any = [0] * B if cache.padding is None else cache.padding.tolist()
        rows = [(b, s) for b, first in enumerate(padding) for s in range(first + config.sink_tokens, cache.length)]
        if not rows:
            return None
        # Evenly spread over the text; some twice where there are fewer than buckets.
        C = self.router.buckets
        chosen = np.linspace(0, len(rows) - 1, min(max(len(rows), C), POINTS * C)).astype(np.int64)
        sequences, positions = np.array(rows, np.int32)[chosen].T
        # One sequence of one row each: every row has a position of its own.
        keys = cache.keys[mx.array(sequences), :, mx.array(positions)].reshape(-1, Hkv, 1, D)
        before = self.router.source.turned_back(keys, mx.array(positions - np.array(padding, np.int32)[sequences]))
        return kmeans.fit(before[:, :, 0].swapaxes(0, 1), C).astype(cache.keys.dtype)

    def due(self, S: int, config: SAAP) -> bool:
        """Whether the lists of a step at length ``S`` want a `fold` first."""
        pending = S - config.recent_tokens - self.covered
        return self.offsets is None or not 0 <= pending < config.fold_every

    def lists(
        self, queries_before: mx.array, S: int, config: SAAP, padding: mx.array | None, backend: str
    ) -> tuple[mx.array, mx.array]:
        """The keys that a step at length ``S`` attends (saap.8), (saap.10): ``indices`` and ``counts``."""
        route, expand = (registry.load(function, backend) for function in ("saap_route", "saap_indices"))
        visited = route(queries_before, probes=config.probes, **(self.network or {}))
        lists: tuple[mx.array, mx.array] = expand(
            visited,
            self.offsets,
            self.key_ids,
            length=S,
            covered=self.covered,
            sink_tokens=config.sink_tokens,
            capacity=self.capacity,
            left_padding=padding,
        )
        return lists


def fold(caches: list[SparseCache], S: int, config: SAAP) -> None:
    """List the keys that have left the window of a step at length ``S``, in all layers: one wait for the device.

    Args:
        caches: with an index each, of at least ``S - 1`` rows.
    """
    covered = max(S - config.recent_tokens, 0)
    found = [_list_keys(cache, index, covered, config) for cache, index in _indexed(caches)]
    numbers: Any = mx.stack([mx.stack(figures) for *_, figures in found]).tolist()
    for (_, index), (offsets, key_ids, _), (limit, listed, padded) in zip(
        _indexed(caches), found, numbers, strict=True
    ):
        mx.eval(offsets, key_ids)
        index.offsets, index.key_ids, index.covered = offsets, key_ids, covered
        index.listed, index.padded = listed, padded
        tail = config.recent_tokens + config.fold_every
        index.capacity = tail + min(config.sink_tokens + limit, covered)


def _indexed(caches: list[SparseCache]) -> Iterator[tuple[SparseCache, BucketIndex]]:
    for cache in caches:
        assert cache.index is not None
        yield cache, cache.index


def _list_keys(
    cache: SparseCache, index: BucketIndex, covered: int, config: SAAP
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """(saap.9) and what the host wants to know: keys in the ``probes`` largest buckets, in all, and padded rows."""
    index.complete(cache, config)
    assert index.ids is not None
    offsets, key_ids = registry.load("saap_index", "ops")(
        index.ids[..., :covered],
        buckets=index.router.buckets,
        sink_tokens=config.sink_tokens,
        left_padding=cache.padding,
    )
    sizes = mx.sort(offsets[..., 1:] - offsets[..., :-1], axis=-1)
    largest = sizes[..., -config.probes :].sum(axis=-1).max()
    padded = mx.array(0) if cache.padding is None else cache.padding.sum() * offsets.shape[1]
    return offsets, key_ids, [number.astype(mx.int32) for number in (largest, offsets[..., -1].sum(), padded)]
