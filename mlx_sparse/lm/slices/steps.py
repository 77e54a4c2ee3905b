"""One decode step over the keys of all ranks, method by method: each rank reads its own.

Every function takes ``queries (B, Hq, 1, D)``, whose keys and values have been written, and returns what all ranks
attend together, float32 ``out (B, Hq, 1, D)`` and ``lse (B, Hq, 1)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

from ...cache.slice_cache import SlicedKVCache
from ...methods import Method, SparQ, Streaming, registry
from ...methods.quest import Quest
from ...methods.sparq import Selection
from ...ops.attend import attend_rows, softmax_lse
from ...ops.quest import page_bounds, page_keys, page_scores
from ...ops.sparq import sparq_logits
from .choice import choose, forced_rows
from .exchange import Exchange
from .sparq_slice import SparQSlice

Attended = tuple[mx.array, mx.array]


def dense(queries: mx.array, cache: SlicedKVCache, *, scale: float, exchange: Exchange) -> Attended:
    """Every key."""
    return exchange.merge(*attend_rows(queries, *cache.own_rows(), scale=scale, causal=False))


def local(
    queries: mx.array, cache: SlicedKVCache, config: Method, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """The keys that each rank chooses as if there were no others (`Method.of_share`)."""
    own = config.of_share(exchange.size, forced_rows(cache, config.always[1]))
    assert own is not None
    if cache.length <= own.attended:
        return dense(queries, cache, scale=scale, exchange=exchange)
    out, lse = cache.attend(queries, own, scale=scale, backend=backend)
    return exchange.merge(out.astype(mx.float32), lse)


def sparq(
    queries: mx.array, cache: SlicedKVCache, config: SparQ, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """The keys that one process would choose: by approximate weights that are shares of all keys."""
    B, Hkv, _, D = cache.key_rows.shape
    G = queries.shape[1] // Hkv
    parameters = config.parameters(G)
    state = cache.beside.get(config.name)
    if not isinstance(state, SparQSlice):
        state = SparQSlice()
        cache.hold(config.name, state)
    known = state.shared(cache, config, G, exchange)
    logits = mx.zeros((B, Hkv, G, 0))
    if cache.length:
        keys, _ = cache.own_rows()
        how = Selection(config.rank, config.top_k, 0, scale, **known)
        logits = sparq_logits(queries, keys, how)
    # (sparq.4), (sparq.5), (sparq.6) over the keys of all ranks
    weights, lse = softmax_lse(logits, None) if cache.length else (logits, mx.full((B, Hkv, G), -mx.inf))
    s_hat = weights * mx.exp(lse - exchange.logsumexp(lse))[..., None]
    forced = forced_rows(cache, parameters["local_window"])
    indices, counts = choose(s_hat.sum(axis=2), exchange, top_k=config.top_k, forced=forced)
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
    queries: mx.array, cache: SlicedKVCache, config: Quest, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """The pages that one process would choose: none is on two ranks, and the current one is on one."""
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
    pages, _ = choose(scores, exchange, top_k=-(-config.top_k // page), forced=current)
    # Slots of no page name pages behind the last: keys that are not there.
    indices = page_keys(pages, None, page_size=page, length=S)
    return exchange.merge(*_attend(queries, cache, indices, None, scale=scale, backend=backend))


def streaming(
    queries: mx.array, cache: SlicedKVCache, config: Streaming, *, scale: float, backend: str, exchange: Exchange
) -> Attended:
    """The first positions and the last: nobody has to ask."""
    B, Hkv, _, _ = cache.key_rows.shape
    sinks = cache.shares.before(min(config.sink_tokens, cache.position))
    recent = max(cache.length - forced_rows(cache, config.recent_tokens), sinks)
    rows = np.concatenate([np.arange(sinks), np.arange(recent, cache.length)]).astype(np.int32)
    indices = mx.broadcast_to(mx.array(rows), (B, Hkv, len(rows)))
    return exchange.merge(*_attend(queries, cache, indices, None, scale=scale, backend=backend))


def _attend(
    queries: mx.array, cache: SlicedKVCache, indices: mx.array, counts: mx.array | None, *, scale: float, backend: str
) -> Attended:
    """Exact attention over rows of this rank; float32."""
    if cache.length == 0 or indices.shape[2] == 0:
        return nothing(queries)
    keys, values, length = cache.rows(backend)
    attend = registry.load("attend_indices", backend)
    out, lse = attend(queries, keys, values, indices, scale=scale, counts=counts, **length)
    return out.astype(mx.float32), lse


def nothing(queries: mx.array) -> Attended:
    """No keys."""
    return mx.zeros(queries.shape), mx.full(queries.shape[:3], -mx.inf)


# By method, with the keys that one process would choose. What SAAP visits follows from the query alone: its hooks do.
STEPS: Mapping[str, Callable[..., Attended]] = {"sparq": sparq, "quest": quest, "streaming": streaming}
