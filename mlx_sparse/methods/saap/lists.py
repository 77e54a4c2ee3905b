"""List a cache's keys by SAAP bucket, and select keys for SAAP's decode steps (docs/spec/saap.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...core import registry
from .config import SAAP
from .ops import saap_index
from .state import BucketIndex, KeyLists, index_of

if TYPE_CHECKING:
    from ...cache.sparse_cache import SparseCache


def needs_rebuild(index: BucketIndex, first_rows: list[int], S: int, config: SAAP) -> bool:
    """Return True if a decode step at position ``S`` must call `rebuild_lists` first."""
    return index.lists is None or index.lists.covered != covered_rows(first_rows, S, config)


def attended_keys(
    index: BucketIndex, pre_rope_queries: mx.array, S: int, config: SAAP, padding: mx.array | None, backend: str
) -> tuple[mx.array, mx.array]:
    """Select the keys that a decode step at position ``S`` attends to (saap.8), (saap.10).

    Return int32 key indices ``(B, Hkv, capacity)``, padded with -1, and the number of valid indices ``(B, Hkv)``.
    """
    assert index.lists is not None
    route, expand = (registry.load(function, backend) for function in ("saap_route", "saap_indices"))
    network = dict(index.network or {})
    if index.router.centroids is None:
        # `saap_route` takes one network for the whole batch. Pass the sequences as further heads of one sequence.
        B, Hkv = network["out_weight"].shape[:2]
        pre_rope_queries = pre_rope_queries.reshape(1, -1, *pre_rope_queries.shape[2:])
        network = {name: weight.flatten(0, 1) for name, weight in network.items()}
        visited = route(pre_rope_queries, probes=config.probes, **network).reshape(B, Hkv, -1)
    else:
        visited = route(pre_rope_queries, probes=config.probes, **network)
    lists: tuple[mx.array, mx.array] = expand(
        visited,
        *index.lists.arrays,
        length=S,
        covered=index.lists.bounds,
        sink_tokens=config.sink_tokens,
        capacity=index.lists.capacity,
        left_padding=padding,
    )
    return lists


def covered_rows(first_rows: list[int], S: int, config: SAAP) -> list[int]:
    """Return the end of the listed rows of each sequence (`KeyLists.covered`) for a decode step at position ``S``.

    Keys in the recent window are not listed. The number of positions from the sequence's first key to the end of the
    listed rows is a multiple of ``merge_every``.
    """
    every = config.merge_every
    return [first + max(S - first - config.recent_tokens, 0) // every * every for first in first_rows]


def rebuild_lists(caches: list[SparseCache], S: int, config: SAAP, sequences: Iterable[int] | None = None) -> None:
    """Rebuild the lists of all ``caches`` for a decode step at position ``S``. Wait for the device only once.

    Args:
        caches: one cache per layer. The index of each cache must have at least ``S - 1`` rows.
        sequences: indices of the sequences that get centroids; None means all sequences with keys.
    """
    first_rows = caches[0].first_rows(caches)
    covered = covered_rows(first_rows, S, config)
    indexed = [(cache, index) for cache in caches if (index := index_of(cache)) is not None]
    found = [_list_keys(cache, index, covered, config, sequences) for cache, index in indexed]
    numbers: Any = mx.stack([counts for *_, counts in found]).tolist()
    for (_, index), (offsets, key_ids, _), (limits, listed) in zip(indexed, found, numbers, strict=True):
        mx.eval(offsets, key_ids)
        slots = [
            min(config.sink_tokens + limit, end - first)
            for limit, end, first in zip(limits, covered, first_rows, strict=True)
        ]
        bounds = covered[0] if len(set(covered)) == 1 else mx.array(covered, mx.int32)
        capacity = config.recent_tokens + config.merge_every + max(slots)
        index.lists = KeyLists(offsets, key_ids, covered, bounds, listed, capacity)


def _list_keys(
    cache: SparseCache, index: BucketIndex, covered: list[int], config: SAAP, sequences: Iterable[int] | None
) -> tuple[mx.array, mx.array, mx.array]:
    """Build a layer's lists (saap.9). Return ``offsets``, ``key_ids`` and int32 numbers of keys ``(2, B)``.

    For each sequence, the first number counts the keys in the ``probes`` largest buckets, as the maximum over KV heads.
    The second number counts the keys in all buckets, as the sum over KV heads.
    """
    index.complete(cache, config, sequences)
    B, Hkv, _, _ = cache.key_rows.shape
    last = max(covered)
    ids = mx.full((B, Hkv, last), -1, mx.int16) if index.ids is None else index.ids[..., :last]
    ids = mx.where(mx.arange(last) < mx.array(covered)[:, None, None], ids, -1)
    offsets, key_ids = saap_index(
        ids, buckets=index.router.buckets, sink_tokens=config.sink_tokens, left_padding=cache.padding
    )
    sizes = mx.sort(offsets[..., 1:] - offsets[..., :-1], axis=-1)
    largest = sizes[..., -config.probes :].sum(axis=-1).max(axis=-1)
    return offsets, key_ids, mx.stack([largest.astype(mx.int32), offsets[..., -1].sum(axis=-1).astype(mx.int32)])
