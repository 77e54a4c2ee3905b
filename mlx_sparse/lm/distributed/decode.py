"""Decode steps over the keys of all ranks, by method.

Every function takes ``queries (B, Hq, 1, D)``, whose keys and values have been written, and returns attention over the
keys of all ranks, float32 ``out (B, Hq, 1, D)`` and ``lse (B, Hq, 1)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

from ...cache.sharded_cache import ShardedKVCache
from ...methods import Method, SparQ, Streaming, registry
from ...methods.quest import Quest
from ...methods.sparq import Selection
from ...ops.attend import attend_rows, softmax_lse
from ...ops.quest import page_bounds, page_keys, page_scores
from ...ops.select import LARGEST
from ...ops.sparq import sparq_logits
from .exchange import Exchange
from .sharded_sparq import ShardedSparQ

Attended = tuple[mx.array, mx.array]


def dense(queries: mx.array, cache: ShardedKVCache, *, scale: float, exchange: Exchange) -> Attended:
    """Attend every key."""
    return exchange.merge(*attend_rows(queries, *cache.own_rows(), scale=scale, causal=False))


def local(
    queries: mx.array, cache: ShardedKVCache, config: Method, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Attend the keys that each rank selects among its own (`Method.for_shard`)."""
    own = config.for_shard(exchange.size, forced_rows(cache, config.always_attended[1]))
    assert own is not None
    if cache.length <= own.attended:
        return dense(queries, cache, scale=scale, exchange=exchange)
    out, lse = cache.attend(queries, own, scale=scale, backend=backend)
    return exchange.merge(out.astype(mx.float32), lse)


def sparq(
    queries: mx.array, cache: ShardedKVCache, config: SparQ, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Attend the keys that one process would select, by approximate weights over the keys of all ranks."""
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
        how = Selection(config.rank, config.top_k, 0, scale, **known)
        logits = sparq_logits(queries, keys, how)
    # (sparq.4), (sparq.5), (sparq.6) over the keys of all ranks
    weights, lse = softmax_lse(logits, None) if cache.length else (logits, mx.full((B, Hkv, G), -mx.inf))
    s_hat = weights * mx.exp(lse - exchange.logsumexp(lse))[..., None]
    forced = forced_rows(cache, parameters["local_window"])
    indices, counts = select(s_hat.sum(axis=2), exchange, top_k=config.top_k, forced=forced)
    out, lse = exchange.merge(*_attend(queries, cache, indices, counts, scale=scale, backend=backend))
    if parameters["reallocate"]:
        # (sparq.8) to (sparq.10)
        alpha = mx.zeros((B, Hkv, G))
        if cache.length:
            chosen = mx.take_along_axis(s_hat, mx.minimum(indices, cache.length - 1)[:, :, None], axis=-1)
            alpha = mx.where((indices < cache.length)[:, :, None], chosen, 0.0).sum(axis=-1)
        mean = state.value_mean(cache)
        both = exchange.add(mx.concatenate([alpha.reshape(B, -1), mean.reshape(B, -1)], axis=1))
        alpha, mean = both[:, : Hkv * G].reshape(B, -1, 1, 1), both[:, Hkv * G :].reshape(B, Hkv, 1, D)
        out = alpha * out + (1.0 - alpha) * mx.repeat(mean, G, axis=1)
    return out, lse


def quest(
    queries: mx.array, cache: ShardedKVCache, config: Quest, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Attend the pages that one process would select. No page is on two ranks."""
    B, Hkv, _, _ = cache.key_rows.shape
    page, S = config.page_size, cache.length
    current = forced_rows(cache, 1)  # whether the last position is here
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
    # Empty slots name pages after the last one: keys that do not exist.
    indices = page_keys(pages, None, page_size=page, length=S)
    return exchange.merge(*_attend(queries, cache, indices, None, scale=scale, backend=backend))


def streaming(
    queries: mx.array, cache: ShardedKVCache, config: Streaming, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """Attend the first and the last positions, which all ranks know."""
    B, Hkv, _, _ = cache.key_rows.shape
    sinks = cache.shard.before(min(config.sink_tokens, cache.position))
    recent = max(cache.length - forced_rows(cache, config.recent_tokens), sinks)
    rows = np.concatenate([np.arange(sinks), np.arange(recent, cache.length)]).astype(np.int32)
    indices = mx.broadcast_to(mx.array(rows), (B, Hkv, len(rows)))
    return exchange.merge(*_attend(queries, cache, indices, None, scale=scale, backend=backend))


def select(scores: mx.array, exchange: Exchange, *, top_k: int, forced: int) -> tuple[mx.array, mx.array]:
    """Select the best keys of all ranks, as `top_k_select` does, from the scores of each rank's best.

    Args:
        scores: float32 ``(B, Hkv, n)`` of this rank's keys, comparable between ranks.
        forced: number of last keys that are always selected.

    Returns:
        int32 ``indices (B, Hkv, top_k)`` of this rank's keys, ascending, then ``n``; their numbers ``(B, Hkv)``.
    """
    B, Hkv, n = scores.shape
    kept = min(top_k, n)
    scores = mx.where(scores < LARGEST, scores, LARGEST)  # NaN too
    scores = mx.where(mx.arange(n) >= n - forced, mx.inf, scores)
    order = mx.argpartition(-scores, kth=kept - 1, axis=-1)[..., :kept] if kept < n else mx.arange(n)
    order = mx.broadcast_to(order, (B, Hkv, kept)).astype(mx.int32)
    best = _padded(mx.take_along_axis(scores, order, axis=-1), top_k, -mx.inf)
    everyone = mx.moveaxis(exchange.gather(best), 0, 2).reshape(B, Hkv, -1)
    # All ranks see the same numbers in the same order, so that they resolve ties alike.
    winners = mx.argpartition(-everyone, kth=top_k - 1, axis=-1)[..., :top_k]
    won = mx.put_along_axis(mx.zeros(everyone.shape, mx.bool_), winners, mx.array(True), axis=-1)
    mine = won[..., exchange.rank * top_k :][..., :top_k] & (best > -mx.inf)
    indices = mx.sort(mx.where(mine, _padded(order, top_k, n), n), axis=-1)
    return indices, mine.sum(axis=-1).astype(mx.int32)


def forced_rows(cache: ShardedKVCache, last: int) -> int:
    """Return how many of the ``last`` positions are rows of this rank."""
    return cache.length - cache.shard.before(max(cache.position - last, 0))


def _padded(array: mx.array, length: int, value: float) -> mx.array:
    behind = length - array.shape[-1]
    return mx.pad(array, [(0, 0), (0, 0), (0, behind)], constant_values=value) if behind else array


def _attend(
    queries: mx.array, cache: ShardedKVCache, indices: mx.array, counts: mx.array | None, *, scale: float, backend: str
) -> Attended:
    """Attend rows of this rank exactly; float32."""
    if cache.length == 0 or indices.shape[2] == 0:
        return nothing(queries)
    keys, values, length = cache.rows(backend)
    attend = registry.load("attend_indices", backend)
    out, lse = attend(queries, keys, values, indices, scale=scale, counts=counts, **length)
    return out.astype(mx.float32), lse


def nothing(queries: mx.array) -> Attended:
    """Return attention over no keys."""
    return mx.zeros(queries.shape), mx.full(queries.shape[:3], -mx.inf)


# By method, with the keys that one process would select. SAAP's hooks select by the query alone.
STEPS: Mapping[str, Callable[..., Attended]] = {"sparq": sparq, "quest": quest, "streaming": streaming}
