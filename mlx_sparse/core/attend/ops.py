"""Select keys by score, and compute exact softmax attention over all keys or over a list of keys, for all methods."""

from __future__ import annotations

import mlx.core as mx

from ..blocks.ops import batch_size, causal_scores, wait_for, zero_sinks
from ..packed_rows import PackedRows, Rows

LARGEST = 3.4028234663852886e38  # largest finite float32


def valid_keys(S: int, left_padding: mx.array) -> mx.array:
    """Return a mask ``(B, S)``, True for key j of sequence b if ``j >= left_padding[b]``."""
    return mx.arange(S) >= left_padding[:, None]


def take_rows(array: Rows, rows: mx.array) -> mx.array:
    """Gather the rows of ``array (B, H, N, M)`` at the indices ``rows (B, H, n)`` into ``(B, H, n, M)``.

    On a CPU, indexing copies whole rows and takes 0.3 ms for 96 rows of 16,384 numbers. `mx.take_along_axis` copies
    single elements and takes 11 ms.
    """
    B, H, _ = rows.shape
    return array[mx.arange(B)[:, None, None], mx.arange(H)[None, :, None], rows]


def add_bias(logits: mx.array, bias: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Add ``bias`` to float32 ``logits`` of the same shape (sparq.25).

    Return the sums, and ``mask`` without the keys that the bias hides.
    """
    seen = ~is_hidden(bias)
    return logits + bias.astype(mx.float32), seen if mask is None else seen & mask


def is_hidden(bias: mx.array) -> mx.array:
    """Return a bool mask, True if a number is -inf or the lowest finite number of its type (sparq.26)."""
    return bias <= mx.finfo(bias.dtype).min


def visible_keys(bias: mx.array, Hkv: int) -> mx.array:
    """Return a mask ``(B, Hkv, S)`` of the keys that ``bias (B, Hq, 1, S)`` hides from some heads at most."""
    B, Hq, _, S = bias.shape
    return ~is_hidden(bias).reshape(B, Hkv, Hq // Hkv, S).all(axis=2)


def top_k_select(
    scores: mx.array,
    *,
    top_k: int,
    local_window: int,
    left_padding: mx.array | None,
    visible: mx.array | None = None,
) -> mx.array:
    """Select keys by their float32 scores (sparq.6). See `core.select.oracle.top_k_select`. Ties go to any index."""
    S = scores.shape[-1]
    n = min(top_k, S)
    # A score of +inf always selects a local key. Adding 1 to its score would not be enough, because probabilities
    # summed over the group can exceed 1. Other scores are clipped to the largest finite number.
    scores = mx.where(scores < LARGEST, scores, LARGEST)
    if visible is None:
        local = mx.arange(S) >= S - local_window
    else:
        local = mx.cumsum(visible.astype(mx.int32), axis=-1, reverse=True) <= local_window
    scores = mx.where(local, mx.inf, scores)
    if visible is not None:
        scores = mx.where(visible, scores, -mx.inf)
    if left_padding is not None:
        scores = mx.where(valid_keys(S, left_padding)[:, None, :], scores, -mx.inf)
    order = mx.argpartition(-scores, kth=n - 1, axis=-1)[..., :n] if n < S else mx.arange(S)
    order = mx.broadcast_to(order, (*scores.shape[:2], n)).astype(mx.int32)
    chosen = mx.take_along_axis(scores, order, axis=-1) > -mx.inf
    indices = mx.sort(mx.where(chosen, order, S), axis=-1)
    return mx.where(indices < S, indices, -1)


def group_queries(queries: mx.array, Hkv: int) -> mx.array:
    """Reshape ``queries (B, Hq, 1, D)`` to ``(B, Hkv, G, D)`` and convert them to float32."""
    B, Hq, _, D = queries.shape
    return queries.reshape(B, Hkv, Hq // Hkv, D).astype(mx.float32)


def softmax_lse(scores: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return the softmax and log-sum-exp over the last axis, restricted to keys where ``mask`` is True.

    If ``mask`` is False for a whole row, the weights of the row are 0 and its log-sum-exp is -inf. If a row has NaN or
    +inf scores, the weights of these scores are NaN and all other weights are 0.
    """
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    top = mx.max(scores, axis=-1, keepdims=True)
    top = mx.where(top == -mx.inf, 0.0, mx.where(mx.isnan(top), mx.inf, top))
    exps = mx.exp(scores - top)
    total = mx.sum(exps, axis=-1, keepdims=True)
    lse = (mx.log(total) + top).squeeze(-1)
    return exps / mx.where(total > 0, total, 1.0), lse


def exact_logits(queries: mx.array, keys: Rows) -> mx.array:
    """Return float32 logits ``(B, Hkv, G, S)`` of float32 ``queries (B, Hkv, G, D)``.

    If the keys are quantized, they are not dequantized first.
    """
    if isinstance(keys, PackedRows):
        group_size, bits = keys.group_size, keys.bits
        return mx.quantized_matmul(queries, *keys.parts, transpose=True, group_size=group_size, bits=bits)
    return queries @ keys.swapaxes(-1, -2).astype(mx.float32)


def attend_indices(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    indices: mx.array,
    *,
    scale: float,
    counts: mx.array | None = None,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute exact attention of one query per head over the listed keys (sparq.7).

    Args:
        queries: ``(B, Hq, 1, D)``.
        keys, values: ``(B, Hkv, S, D)``. If they are quantized, only the listed rows are dequantized.
        indices: ``(B, Hkv, N)`` int32 key indices. A number that is not a key index, such as -1, is an empty slot.
        counts: ``(B, Hkv)`` number of used slots at the start of each list. If None, all slots are used.
        bias: ``(B, Hq, 1, S)`` numbers that are added to the logits of all keys (sparq.25).

    Returns:
        ``out (B, Hq, 1, D)`` in the dtype of ``queries`` and float32 ``lse (B, Hq, 1)``. If a list has only empty
        slots, its out is 0 and its lse is -inf.
    """
    filled = (indices >= 0) & (indices < keys.shape[2])
    if counts is not None:
        filled = filled & (mx.arange(indices.shape[2]) < counts[..., None])
    rows = mx.where(filled, indices, 0)
    keys_n = take_rows(keys, rows).astype(mx.float32)
    values_n = take_rows(values, rows).astype(mx.float32)
    q, mask = group_queries(queries, keys.shape[1]) * scale, filled[:, :, None, :]
    logits = q @ keys_n.swapaxes(-1, -2)
    if bias is not None:
        of_group = bias.reshape(*logits.shape[:3], -1)
        listed = mx.broadcast_to(rows[:, :, None], logits.shape)
        logits, mask = add_bias(logits, mx.take_along_axis(of_group, listed, axis=-1), mask)
        filled = mask.any(axis=2)
    # Empty slots gather row 0, which may be padding with NaN. Zero the values, because 0 * NaN is NaN.
    values_n = mx.where(filled[..., None], values_n, 0.0)
    weights, lse = softmax_lse(logits, mask)
    out = weights @ values_n
    return out.reshape(*queries.shape[:3], -1).astype(queries.dtype), lse.reshape(queries.shape[:3])


def dense_attention(
    queries: mx.array, keys: Rows, values: Rows, *, scale: float, left_padding: mx.array | None
) -> mx.array:
    """Compute dense causal attention with MLX's kernel. The queries are at the last L of the S positions."""
    keys, values = keys[:], values[:]
    L, S, dtype = queries.shape[2], keys.shape[2], queries.dtype
    mask: mx.array | str | None = "causal" if L > 1 else None
    if left_padding is not None:
        valid = valid_keys(S, left_padding)[:, None, None]
        mask = valid & (mx.arange(S) <= mx.arange(S - L, S)[:, None])
        # Padding may contain any number, and 0 * inf is NaN.
        keys, values = (mx.where(valid.swapaxes(-1, -2), rows, 0) for rows in (keys, values))
    sinks = zero_sinks(queries.shape[1], dtype)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return out.astype(dtype)


def dense_lse(
    queries: mx.array, keys: Rows, *, scale: float, left_padding: mx.array | None, bias: mx.array | None = None
) -> mx.array:
    """Return the float32 log-sum-exp ``(B, Hq, L)`` of dense causal attention. Attention recall is computed from it.

    For one query, ``bias (B, Hq, 1, S)`` is added to the logits (sparq.25).
    """
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    grouped = queries.reshape(B, Hkv, Hq // Hkv, L, D).astype(mx.float32) * scale
    keys = keys[:][:, :, None].astype(mx.float32)
    step = batch_size(B * Hq * S)
    done: list[mx.array] = []
    for first in range(0, L, step):
        stop = min(first + step, L)
        end = S - L + stop
        scores = causal_scores(wait_for(done, grouped[..., first:stop, :]), keys[..., :end, :])
        if left_padding is not None:
            scores = mx.where(valid_keys(end, left_padding)[:, None, None, None], scores, -mx.inf)
        if bias is not None:
            scores, mask = add_bias(scores, bias.reshape(scores.shape), None)
            scores = mx.where(mask, scores, -mx.inf)
        done.append(mx.logsumexp(scores, axis=-1))
    return mx.concatenate(done, axis=-1).reshape(B, Hq, L)
