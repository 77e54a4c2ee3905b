"""Run the decode baselines (docs/spec/sparq.md, "Baselines", and docs/spec/quest.md)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.ops import (
    add_bias,
    attend_indices,
    exact_logits,
    group_queries,
    softmax_lse,
    take_rows,
    top_k_select,
    valid_keys,
    visible_keys,
)
from ...core.blocks.ops import batch_size, causal_scores, wait_for
from ...core.packed_rows import Rows

# Second largest float32. Scores of earlier pages are clipped to it, because `top_k_select` clips +inf to the largest.
SECOND_LARGEST = 3.4028232635611926e38


def streaming_indices(
    B: int, S: int, *, sink_tokens: int, recent_tokens: int, left_padding: mx.array | None
) -> mx.array:
    """List the first ``sink_tokens`` and the last ``recent_tokens`` valid keys, int32 ``(B, n)``, padded with -1.

    S must be larger than ``sink_tokens + recent_tokens``.
    """
    first = mx.zeros((B, 1), mx.int32) if left_padding is None else left_padding[:, None].astype(mx.int32)
    slots = mx.concatenate([first + mx.arange(sink_tokens), mx.arange(S - recent_tokens, S) + 0 * first], axis=1)
    # With padding, a sink can be in the recent window, and the window can begin before the first valid key.
    is_sink = mx.arange(sink_tokens + recent_tokens) < sink_tokens
    valid = mx.where(is_sink, slots < S - recent_tokens, slots >= first)
    indices = mx.sort(mx.where(valid, slots, S), axis=-1)
    return mx.where(indices < S, indices, -1).astype(mx.int32)


def streaming_attention(
    queries: mx.array, keys: Rows, values: Rows, *, scale: float, **window: Any
) -> tuple[mx.array, mx.array]:
    """Attend to the keys of `streaming_indices`, which has the other arguments."""
    B, Hkv, S, _ = keys.shape
    indices = streaming_indices(B, S, **window)
    indices = mx.broadcast_to(indices[:, None], (B, Hkv, indices.shape[1]))
    return attend_indices(queries, keys, values, indices, scale=scale)


def oracle_top_k_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    top_k: int,
    local_window: int,
    scale: float,
    left_padding: mx.array | None,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Attend to the keys that SparQ would select if the scores were exact."""
    weights, _ = exact_weights(queries, keys, scale=scale, left_padding=left_padding, bias=bias)
    how: dict[str, Any] = {"top_k": top_k, "local_window": local_window, "left_padding": left_padding}
    visible = None if bias is None else visible_keys(bias, keys.shape[1])
    indices = top_k_select(weights.sum(axis=2), **how, visible=visible)
    return attend_indices(queries, keys, values, indices, scale=scale, bias=bias)


def flexgen_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    top_k: int,
    scale: float,
    left_padding: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Attend to the keys with the largest softmax weights. See `methods.baselines.oracle.flexgen_attention`.

    The returned log-sum-exp is over the selected keys only.
    """
    weights, lse = exact_weights(queries, keys, scale=scale, left_padding=left_padding)
    indices = top_k_select(weights.sum(axis=2), top_k=top_k, local_window=0, left_padding=left_padding)
    filled = (indices >= 0)[:, :, None, :]
    rows = mx.maximum(indices, 0)
    kept = mx.where(filled, mx.take_along_axis(weights, rows[:, :, None, :], axis=-1), 0.0)
    values_n = take_rows(values, rows).astype(mx.float32)
    out = kept @ mx.where((indices >= 0)[..., None], values_n, 0.0)
    kept_lse = mx.log(kept.sum(axis=-1)) + lse
    return out.reshape(*queries.shape[:3], -1).astype(queries.dtype), kept_lse.reshape(queries.shape[:3])


def h2o_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    scores: mx.array,
    top_k: int,
    local_window: int,
    scale: float,
    left_padding: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run one decode step of H2O. Return ``out``, ``lse`` and the new scores, which are -inf for evicted keys."""
    B, Hkv, S = scores.shape
    scores = scores.astype(mx.float32)
    indices = top_k_select(scores, top_k=top_k, local_window=local_window, left_padding=left_padding)
    out, lse = attend_indices(queries, keys, values, indices, scale=scale)
    filled = indices >= 0
    rows = mx.maximum(indices, 0)
    keys_n = take_rows(keys, rows).astype(mx.float32)
    weights, _ = softmax_lse((group_queries(queries, Hkv) * scale) @ keys_n.swapaxes(-1, -2), filled[:, :, None, :])
    received = mx.take_along_axis(scores, rows, axis=-1) + weights.mean(axis=2)
    # Empty slots write to an additional slot S, which is removed.
    updated = mx.full((B, Hkv, S + 1), -mx.inf)
    updated = mx.put_along_axis(updated, mx.where(filled, indices, S), received, axis=-1)
    return out, lse, updated[..., :S]


def h2o_scores(queries: mx.array, keys: Rows, *, scale: float, left_padding: mx.array | None) -> mx.array:
    """Return the initial float32 ``scores`` for `h2o_attention`. See `methods.baselines.oracle.h2o_scores`."""
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    grouped = queries.reshape(B, Hkv, Hq // Hkv, L, D).astype(mx.float32) * scale
    keys = keys[:][:, :, None].astype(mx.float32)
    step = batch_size(B * Hq * S)
    received = mx.zeros((B, Hkv, S))
    for first in range(0, L, step):
        stop = min(first + step, L)
        end = S - L + stop
        scores = causal_scores(wait_for([received], grouped[..., first:stop, :]), keys[..., :end, :])
        if left_padding is not None:
            scores = mx.where(valid_keys(end, left_padding)[:, None, None, None], scores, -mx.inf)
        # Same as `softmax_lse`, but a matrix product normalizes the weights, to avoid a second array of their size.
        top = mx.max(scores, axis=-1, keepdims=True)
        top = mx.where(top == -mx.inf, 0.0, mx.where(mx.isnan(top), mx.inf, top))
        exps = mx.exp(scores - top)
        sums = exps.sum(axis=-1, keepdims=True)
        share = mx.where(sums > 0, 1.0 / sums, 0.0).swapaxes(-1, -2)
        total = (share @ exps).sum(axis=(2, 3)) / (Hq // Hkv)
        received = received + mx.pad(total, [(0, 0), (0, 0), (0, S - end)])
    return received if left_padding is None else mx.where(valid_keys(S, left_padding)[:, None], received, -mx.inf)


def exact_weights(
    queries: mx.array, keys: Rows, *, scale: float, left_padding: mx.array | None, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the float32 softmax weights ``(B, Hkv, G, S)`` and log-sum-exp ``(B, Hkv, G)`` of dense attention."""
    S = keys.shape[2]
    logits = exact_logits(group_queries(queries, keys.shape[1]) * scale, keys)
    valid = None if left_padding is None else valid_keys(S, left_padding)[:, None, None, :]
    if bias is not None:
        logits, valid = add_bias(logits, bias.reshape(logits.shape), valid)
    return softmax_lse(logits, valid)


def page_bounds(keys: Rows, left_padding: mx.array | None, *, page_size: int) -> tuple[mx.array, mx.array]:
    """Return the component-wise minimum and maximum of the keys in each page (quest.1), both ``(B, Hkv, P, D)``.

    The first page of a sequence begins at its first valid key. Empty pages have the bounds +inf and -inf.
    """
    keys = keys[:]
    B, Hkv, S, D = keys.shape
    bounds = []
    for nothing, reduce in ((mx.inf, mx.min), (-mx.inf, mx.max)):
        rows = keys
        if left_padding is not None:
            moved = (mx.arange(S) + left_padding[:, None])[:, None, :, None]
            rows = mx.take_along_axis(keys, mx.minimum(moved, S - 1), axis=2)
            rows = mx.where(moved < S, rows, mx.array(nothing, keys.dtype))
        if S % page_size:
            rows = mx.pad(rows, [(0, 0), (0, 0), (0, -S % page_size), (0, 0)], constant_values=nothing)
        bounds.append(reduce(rows.reshape(B, Hkv, -1, page_size, D), axis=3))
    return bounds[0], bounds[1]


def quest_select(
    queries: mx.array, keys: Rows, *, page_size: int, top_k: int, left_padding: mx.array | None
) -> mx.array:
    """Select ``K = ceil(top_k / page_size)`` pages, and return int32 key indices ``(B, Hkv, K * page_size)`` (quest.5).

    Empty slots contain -1. There must be more than K pages.
    """
    B, Hkv, S, _ = keys.shape
    bounds = page_bounds(keys, left_padding, page_size=page_size)
    low, high = (bound.swapaxes(-1, -2).astype(mx.float32) for bound in bounds)
    q = group_queries(queries, Hkv)
    upper = mx.maximum(q, 0) @ high + mx.minimum(q, 0) @ low  # (quest.2)
    scores = mx.where(mx.isnan(upper), mx.inf, upper).max(axis=2)  # (quest.3)
    first = mx.zeros((B, 1, 1), mx.int32) if left_padding is None else left_padding[:, None, None]
    current, page = (S - 1 - first) // page_size, mx.arange(scores.shape[2])
    # Only the current page of each sequence has +inf, so it is always selected (quest.4).
    scores = mx.where(page < current, mx.minimum(scores, SECOND_LARGEST), mx.where(page == current, mx.inf, -mx.inf))
    pages = top_k_select(scores, top_k=-(-top_k // page_size), local_window=0, left_padding=None)[..., None]
    listed = pages * page_size + mx.arange(page_size) + first[..., None]
    return mx.where((pages >= 0) & (listed < S), listed, -1).astype(mx.int32).reshape(B, Hkv, -1)


def quest_attention(
    queries: mx.array, keys: Rows, values: Rows, *, scale: float, **selection: Any
) -> tuple[mx.array, mx.array]:
    """Attend to the keys of `quest_select`, which has the other arguments."""
    return attend_indices(queries, keys, values, quest_select(queries, keys, **selection), scale=scale)
