"""Which keys of all ranks a decode step attends, and the share of each rank."""

from __future__ import annotations

import mlx.core as mx

from ...cache.slice_cache import SlicedKVCache
from ...ops.select import LARGEST
from .exchange import Exchange


def choose(scores: mx.array, exchange: Exchange, *, top_k: int, forced: int) -> tuple[mx.array, mx.array]:
    """`top_k_select` over the keys of all ranks, from their scores and those of the others' best.

    Args:
        scores: float32 ``(B, Hkv, n)`` of this rank's keys, comparable between ranks.
        forced: the last of them that are chosen whatever they score.

    Returns:
        int32 ``indices (B, Hkv, top_k)`` of this rank's keys, ascending, then ``n``; ``counts (B, Hkv)`` of them.
    """
    B, Hkv, n = scores.shape
    kept = min(top_k, n)
    scores = mx.where(scores < LARGEST, scores, LARGEST)  # NaN too
    scores = mx.where(mx.arange(n) >= n - forced, mx.inf, scores)
    order = mx.argpartition(-scores, kth=kept - 1, axis=-1)[..., :kept] if kept < n else mx.arange(n)
    order = mx.broadcast_to(order, (B, Hkv, kept)).astype(mx.int32)
    best = _padded(mx.take_along_axis(scores, order, axis=-1), top_k, -mx.inf)
    everyone = mx.moveaxis(exchange.gather(best), 0, 2).reshape(B, Hkv, -1)
    # The same numbers in the same order everywhere: where scores are equal, all ranks prefer the same keys.
    winners = mx.argpartition(-everyone, kth=top_k - 1, axis=-1)[..., :top_k]
    won = mx.put_along_axis(mx.zeros(everyone.shape, mx.bool_), winners, mx.array(True), axis=-1)
    mine = won[..., exchange.rank * top_k :][..., :top_k] & (best > -mx.inf)
    indices = mx.sort(mx.where(mine, _padded(order, top_k, n), n), axis=-1)
    return indices, mine.sum(axis=-1).astype(mx.int32)


def forced_rows(cache: SlicedKVCache, last: int) -> int:
    """How many of the ``last`` positions are rows of this rank."""
    return cache.length - cache.shares.before(max(cache.position - last, 0))


def _padded(array: mx.array, length: int, value: float) -> mx.array:
    behind = length - array.shape[-1]
    return mx.pad(array, [(0, 0), (0, 0), (0, behind)], constant_values=value) if behind else array
