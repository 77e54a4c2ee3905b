"""Prefill chunks over the keys of all ranks.

Every rank has the chunk's queries, keys and values. It attends its own older keys for all queries, and the keys of the
chunk for its part of the queries.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...cache.sharded_cache import BLOCK, ShardedKVCache
from ...methods import Prefill, Sample, registry
from ...methods.block_layout import Layout
from ...ops import block_select
from ...ops.attend import attend_rows, softmax_lse
from ...ops.blocks import batch_size, wait_for
from ...ops.sample import masses_of
from .exchange import Exchange, join

Attended = tuple[mx.array, mx.array]


def dense(queries: mx.array, cache: ShardedKVCache, *, scale: float, exchange: Exchange) -> Attended:
    """Attend causally; return float32 ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``."""
    keys, values = cache.keys_and_values()
    L = queries.shape[2]
    before = cache.shard.before(cache.position - L)
    older = attend_rows(queries, *(rows[:, :, :before] for rows in cache.own_rows()), scale=scale, causal=False)
    part = cache.shard.span(L)
    given = (rows[:, :, : part.stop] for rows in (keys, values))
    inner = attend_rows(queries[:, :, part], *given, scale=scale, causal=True)
    return exchange.merge(*join([older, _within(inner, part, L)]))


def sample_select(
    queries: mx.array, cache: ShardedKVCache, config: Sample, *, scale: float, exchange: Exchange
) -> mx.array:
    """Return the blocks that one process would select, ``(B, Hq, R, Nk)``: block scores are sums over all ranks."""
    B, Hq, L, _ = queries.shape
    S, keys = cache.position, cache.own_rows()[0]
    G = Hq // keys.shape[1]
    layout = Layout(L, S, config.chunks, config.block_size)
    places = cache.shard.positions(0, cache.length)
    done: list[mx.array] = []
    for start, stop in (region.sample for region in layout.regions):
        end, first = S - L + stop, S - L + start
        own = int(np.searchsorted(places, end))
        seen = mx.array(places[:own] <= np.arange(first, end)[:, None])
        step = batch_size(B * (stop - start) * end)
        for head in range(0, Hq, step):
            heads = [number // G for number in range(head, min(head + step, Hq))]
            q = wait_for(done, queries[:, head : head + step, start:stop]).astype(mx.float32) * scale
            k = mx.take(keys[:, :, :own], mx.array(heads), axis=1).astype(mx.float32)
            scores = q @ k.swapaxes(-1, -2) if own else mx.zeros((*q.shape[:3], 0))
            weights, lse = softmax_lse(scores, seen) if own else (scores, mx.full(q.shape[:3], -mx.inf))
            # (sample.3) shares of all keys, in the columns of their positions
            weights = weights * mx.exp(lse - exchange.logsumexp(lse))[..., None]
            whole = mx.zeros((*q.shape[:3], end))
            whole[..., mx.array(places[:own])] = weights
            done.append(masses_of(whole, layout))
    masses = exchange.add(mx.concatenate(done, axis=1)).reshape(B, -1, Hq, 2, layout.key_blocks)
    column, slash = (masses[:, :, :, kind].swapaxes(1, 2) for kind in (0, 1))
    alphas = {"alpha_column": config.alpha_column, "alpha_slash": config.alpha_slash}
    return block_select.select(column, slash, layout, width=layout.key_blocks, **alphas)


def attend_blocks(
    queries: mx.array,
    cache: ShardedKVCache,
    blocks: mx.array,
    *,
    block_size: int,
    scale: float,
    backend: str,
    exchange: Exchange,
) -> Attended:
    """Attend the listed blocks as `dense` attends all keys, for a chunk that begins with a block."""
    keys, values = cache.keys_and_values()
    B, Hq, L, _ = queries.shape
    S, R = cache.position, blocks.shape[2]
    attend = registry.load("attend_blocks", backend)
    before = cache.shard.before(S - L)
    parts: list[Attended] = []
    if before:
        # The chunk's keys follow the rank's older keys, in no list: with them the row blocks are those of the whole
        # sequence.
        places = np.full((S - L) // block_size + R + 1, -1, np.int32)
        own = cache.shard.positions(0, before)[::block_size] // block_size
        places[own] = np.arange(len(own))
        given = (
            mx.concatenate([own[:, :, :before], rows], axis=2)
            for own, rows in zip(cache.own_rows(), (keys, values), strict=True)
        )
        listed = mx.take(mx.array(places), blocks)  # -1 is the last place, an empty one
        parts.append(attend(queries, *given, listed, block_size=block_size, scale=scale))
    rows = cache.shard.span(R)
    part = slice(rows.start * block_size, min(rows.stop * block_size, L))
    if part.stop > part.start:
        listed = mx.maximum(blocks[:, :, rows] - (S - L) // block_size, -1)
        given = (array[:, :, : part.stop] for array in (keys, values))
        inner = attend(queries[:, :, part], *given, listed, block_size=block_size, scale=scale)
        parts.append(_within(inner, part, L))
    parts = [(out.astype(mx.float32), lse) for out, lse in parts]
    return exchange.merge(*(join(parts) if parts else (mx.zeros(queries.shape), mx.full((B, Hq, L), -mx.inf))))


def fits(config: Prefill, L: int, S: int) -> bool:
    """Return True if every block of the chunk is a whole block of one rank."""
    return BLOCK % config.block_size == 0 and (S - L) % BLOCK == 0


def _within(part: Attended, place: slice, L: int) -> Attended:
    """Return the results of some of the queries as those of all, with no keys for the others."""
    out, lse = part
    around = [(0, 0), (0, 0), (place.start, L - place.stop)]
    return mx.pad(out, [*around, (0, 0)]), mx.pad(lse, around, constant_values=-mx.inf)
