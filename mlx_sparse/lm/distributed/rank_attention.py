"""Run decode steps and prefill chunks over the keys of all ranks.

Functions for decode steps take ``queries (B, Hq, 1, D)``. They return float32 ``out (B, Hq, 1, D)`` and
``lse (B, Hq, 1)``. Write the token's key and value to the cache before the call.

In a prefill chunk, each rank has all queries, keys and values of the chunk. All queries attend to the older keys that
the rank stores. On each rank, a different part of the queries attends to the keys of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

from ...cache.sharded_cache import BLOCK, ShardedKVCache
from ...methods import Method, Prefill, Sample, SparQ, Streaming, registry
from ...methods.block_layout import Layout
from ...methods.quest import Quest
from ...methods.sparq import Selection
from ...ops import block_select
from ...ops.attend import attend_rows, softmax_lse
from ...ops.blocks import batch_size, wait_for
from ...ops.quest import page_bounds, page_keys, page_scores
from ...ops.sample import masses_of
from ...ops.select import LARGEST
from ...ops.sparq import sparq_logits
from .exchange import Exchange, join
from .sharded_sparq import ShardedSparQ

Attended = tuple[mx.array, mx.array]


def dense_step(queries: mx.array, cache: ShardedKVCache, *, scale: float, exchange: Exchange) -> Attended:
    """Run a dense decode step over the keys of all ranks."""
    return exchange.merge(*attend_rows(queries, *cache.own_rows(), scale=scale, causal=False))


def local_step(
    queries: mx.array, cache: ShardedKVCache, config: Method, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Run a decode step in which each rank selects keys separately, by the method from `Method.for_shard`."""
    own = config.for_shard(exchange.size, forced_rows(cache, config.always_attended[1]))
    assert own is not None
    if cache.length <= own.attended:
        return dense_step(queries, cache, scale=scale, exchange=exchange)
    out, lse = cache.attend(queries, own, scale=scale, backend=backend)
    return exchange.merge(out.astype(mx.float32), lse)


def sparq(
    queries: mx.array, cache: ShardedKVCache, config: SparQ, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Run a SparQ decode step. Select the same keys as an unsharded SparQ step, by approximate weights of all keys."""
    B, Hkv, _, D = cache.key_rows.shape
    G = queries.shape[1] // Hkv
    parameters = config.parameters(G)
    state = cache.aux_states.get(config.name)
    if not isinstance(state, ShardedSparQ):
        state = ShardedSparQ()
        cache.add_state(config.name, state)
    known = state.shared(cache, config, exchange)
    logits = mx.zeros((B, Hkv, G, 0))
    if cache.length:
        keys, _ = cache.own_rows()
        selection = Selection(config.rank, config.top_k, 0, scale, **known)
        logits = sparq_logits(queries, keys, selection)
    # (sparq.4), (sparq.5), (sparq.6) over the keys of all ranks
    weights, lse = softmax_lse(logits, None) if cache.length else (logits, mx.full((B, Hkv, G), -mx.inf))
    s_hat = weights * mx.exp(lse - exchange.logsumexp(lse))[..., None]
    forced = forced_rows(cache, parameters["local_window"])
    indices, counts = select(s_hat.sum(axis=2), exchange, top_k=config.top_k, forced=forced)
    if cache.length and indices.shape[2]:
        # (sparq.24) among the keys on this rank, because the share of all keys would need one more message per layer
        chosen = mx.take_along_axis(weights.sum(axis=2), mx.minimum(indices, cache.length - 1), axis=-1)
        state.recall = mx.where(indices < cache.length, chosen, 0.0).sum(axis=-1) / G
    out, lse = exchange.merge(*_attend(queries, cache, indices, counts, scale=scale, backend=backend))
    if parameters["reallocate"]:
        # (sparq.8) to (sparq.10)
        alpha = mx.zeros((B, Hkv, G))
        if cache.length:
            selected = mx.take_along_axis(s_hat, mx.minimum(indices, cache.length - 1)[:, :, None], axis=-1)
            alpha = mx.where((indices < cache.length)[:, :, None], selected, 0.0).sum(axis=-1)
        mean = state.value_mean(cache)
        both = exchange.add(mx.concatenate([alpha.reshape(B, -1), mean.reshape(B, -1)], axis=1))
        alpha, mean = both[:, : Hkv * G].reshape(B, -1, 1, 1), both[:, Hkv * G :].reshape(B, Hkv, 1, D)
        out = alpha * out + (1.0 - alpha) * mx.repeat(mean, G, axis=1)
    return out, lse


def quest(
    queries: mx.array, cache: ShardedKVCache, config: Quest, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Run a Quest decode step. Select the same pages as an unsharded Quest step. No page spans two ranks."""
    B, Hkv, _, _ = cache.key_rows.shape
    page, S = config.page_size, cache.length
    current = forced_rows(cache, 1)  # 1 if this rank stores the last position, else 0
    scores = mx.zeros((B, Hkv, 0))
    if S:
        before = (S - 1) // page
        last = list(page_bounds(cache.key_rows[..., before * page : S, :], None, page_size=page))
        if before:
            state = cache.state_of(config.name)
            assert state is not None
            bounds = state.read(cache, config, queries.shape[1] // Hkv, whole=False)
            earlier = (bounds[name][:, :, :before] for name in ("page_min", "page_max"))
            last = [mx.concatenate(list(parts), axis=2) for parts in zip(earlier, last, strict=True)]
        scores = page_scores(queries, *last)
    pages, _ = select(scores, exchange, top_k=-(-config.top_k // page), forced=current)
    # Empty slots of `pages` are numbers after the last page, and have no keys.
    indices = page_keys(pages, None, page_size=page, length=S)
    return exchange.merge(*_attend(queries, cache, indices, None, scale=scale, backend=backend))


def streaming(
    queries: mx.array, cache: ShardedKVCache, config: Streaming, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Run a StreamingLLM decode step, which attends to the first and last positions. The ranks exchange no scores."""
    B, Hkv, _, _ = cache.key_rows.shape
    sinks = cache.shard.before(min(config.sink_tokens, cache.position))
    recent = max(cache.length - forced_rows(cache, config.recent_tokens), sinks)
    rows = np.concatenate([np.arange(sinks), np.arange(recent, cache.length)]).astype(np.int32)
    indices = mx.broadcast_to(mx.array(rows), (B, Hkv, len(rows)))
    return exchange.merge(*_attend(queries, cache, indices, None, scale=scale, backend=backend))


def select(scores: mx.array, exchange: Exchange, *, top_k: int, forced: int) -> tuple[mx.array, mx.array]:
    """Select the ``top_k`` keys with the largest scores on all ranks, as `top_k_select` does on one device.

    Args:
        scores: float32 ``(B, Hkv, n)`` scores of the keys on this rank, comparable between ranks.
        forced: number of this rank's last keys that are always selected.

    Returns:
        int32 ``indices (B, Hkv, top_k)`` of the selected keys on this rank, in ascending order. Empty slots contain
        ``n``. The second array, int32 ``(B, Hkv)``, is the number of selected keys on this rank.
    """
    B, Hkv, n = scores.shape
    width = min(top_k, n)
    scores = mx.where(scores < LARGEST, scores, LARGEST)  # NaN too
    scores = mx.where(mx.arange(n) >= n - forced, mx.inf, scores)
    order = mx.argpartition(-scores, kth=width - 1, axis=-1)[..., :width] if width < n else mx.arange(n)
    order = mx.broadcast_to(order, (B, Hkv, width)).astype(mx.int32)
    best = _padded(mx.take_along_axis(scores, order, axis=-1), top_k, -mx.inf)
    everyone = mx.moveaxis(exchange.gather(best), 0, 2).reshape(B, Hkv, -1)
    # All ranks have the same scores in the same order, so they break ties in the same way.
    winners = mx.argpartition(-everyone, kth=top_k - 1, axis=-1)[..., :top_k]
    won = mx.put_along_axis(mx.zeros(everyone.shape, mx.bool_), winners, mx.array(True), axis=-1)
    mine = won[..., exchange.rank * top_k :][..., :top_k] & (best > -mx.inf)
    indices = mx.sort(mx.where(mine, _padded(order, top_k, n), n), axis=-1)
    return indices, mine.sum(axis=-1).astype(mx.int32)


def forced_rows(cache: ShardedKVCache, last: int) -> int:
    """Return the number of rows on this rank that belong to the last ``last`` positions of the sequence."""
    return cache.length - cache.shard.before(max(cache.position - last, 0))


def _padded(array: mx.array, length: int, value: float) -> mx.array:
    behind = length - array.shape[-1]
    return mx.pad(array, [(0, 0), (0, 0), (0, behind)], constant_values=value) if behind else array


def _attend(
    queries: mx.array, cache: ShardedKVCache, indices: mx.array, counts: mx.array | None, *, scale: float, backend: str
) -> Attended:
    """Attend to this rank's rows ``indices``, and return float32 ``out`` and ``lse``."""
    if cache.length == 0 or indices.shape[2] == 0:
        return no_attention(queries)
    keys, values, length = cache.rows(backend)
    attend = registry.load("attend_indices", backend)
    out, lse = attend(queries, keys, values, indices, scale=scale, counts=counts, **length)
    return out.astype(mx.float32), lse


def no_attention(queries: mx.array) -> Attended:
    """Return the result of attention over no keys, which is 0 for ``out`` and -inf for ``lse``."""
    return mx.zeros(queries.shape), mx.full(queries.shape[:3], -mx.inf)


# Decode steps that select the same keys as without sharding. SAAP needs no such function: it only uses the query.
STEPS: Mapping[str, Callable[..., Attended]] = {"sparq": sparq, "quest": quest, "streaming": streaming}


def dense_chunk(queries: mx.array, cache: ShardedKVCache, *, scale: float, exchange: Exchange) -> Attended:
    """Run dense causal attention for a prefill chunk. Return float32 ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``."""
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
    """Select blocks ``(B, Hq, R, Nk)`` by block scores summed over all ranks, as an unsharded model selects them."""
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
            # (sample.3) softmax over the keys of all ranks. Each weight goes to the column of its position.
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
    """Attend to the selected ``blocks``. Return float32 ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``.

    The chunk must begin at a block boundary.
    """
    keys, values = cache.keys_and_values()
    B, Hq, L, _ = queries.shape
    S, R = cache.position, blocks.shape[2]
    attend = registry.load("attend_blocks", backend)
    before = cache.shard.before(S - L)
    parts: list[Attended] = []
    if before:
        # Append the keys of the chunk, so that row blocks have the same numbers as in the whole sequence. The block
        # lists do not contain the appended keys.
        places = np.full((S - L) // block_size + R + 1, -1, np.int32)
        own = cache.shard.positions(0, before)[::block_size] // block_size
        places[own] = np.arange(len(own))
        given = (
            mx.concatenate([own[:, :, :before], rows], axis=2)
            for own, rows in zip(cache.own_rows(), (keys, values), strict=True)
        )
        listed = mx.take(mx.array(places), blocks)  # -1 selects the last entry, which is empty
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
    """Return True if each block of a chunk with ``L`` queries and ``S`` keys belongs to a single rank."""
    return BLOCK % config.block_size == 0 and (S - L) % BLOCK == 0


def _within(part: Attended, place: slice, L: int) -> Attended:
    """Pad results for the queries in the slice ``place`` to ``L`` queries. The added queries attend to no keys."""
    out, lse = part
    around = [(0, 0), (0, 0), (place.start, L - place.stop)]
    return mx.pad(out, [*around, (0, 0)]), mx.pad(lse, around, constant_values=-mx.inf)
