"""Run SparQ with MLX array operations (docs/spec/sparq.md, sparq.1 to sparq.10 and sparq.21)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.ops import attend_indices, exact_logits, group_queries, softmax_lse
from ...core.packed_rows import Rows
from ...core.select.ops import take_rows, top_k_select, valid_keys
from .config import Selection
from .ops_codes import approximate_logits
from .scoring_keys import KeyCodes


def sparq_logits(queries: mx.array, keys: Rows, selection: Selection) -> mx.array:
    """Compute approximate float32 logits ``(B, Hkv, G, S)`` of all keys from ``rank`` components.

    The logits of padding are undefined. If ``selection.keys_t`` is None, the logits are computed from ``keys``. In this
    case, a quantized KV cache is dequantized unless ``rank`` is D.
    """
    rank, keys_t = selection.rank, selection.keys_t
    B = queries.shape[0]
    Hkv, D = keys.shape[1], keys.shape[3]
    q = group_queries(queries, Hkv)

    # (sparq.1) score of each component, summed over the group; (sparq.2) selection of the r largest
    component = mx.abs(q).sum(axis=2)
    if selection.component_weight is not None:
        component = component * selection.component_weight
    component = mx.where(mx.isnan(component), mx.inf, component)
    i1 = mx.argpartition(-component, kth=rank - 1, axis=-1)[..., :rank] if rank < D else mx.arange(D)[None, None]
    i1 = mx.broadcast_to(i1, (B, Hkv, rank))

    # (sparq.3) approximate logits
    q_r = mx.take_along_axis(q, i1[:, :, None, :], axis=-1)
    factor = mx.array(selection.scale, mx.float32)
    if selection.component_weight is None:
        total = mx.abs(q).sum(axis=-1, keepdims=True)
        covered = mx.abs(q_r).sum(axis=-1, keepdims=True)
        coverage = covered / mx.where(covered > 0, total, 1.0)
        factor = factor * mx.rsqrt(mx.where(covered > 0, coverage, 1.0))
    if isinstance(keys_t, KeyCodes):
        return approximate_logits(q_r * factor, i1, keys, keys_t, selection.left_padding)
    if keys_t is not None:
        return (q_r * factor) @ take_rows(keys_t, i1).astype(mx.float32)
    if rank == D:
        return exact_logits(q * factor, keys)
    return exact_logits(q_r * factor, mx.take_along_axis(keys[:], i1[:, :, None], axis=3))


def sparq_select(queries: mx.array, keys: Rows, selection: Selection) -> tuple[mx.array, mx.array, mx.array]:
    """Select the keys of one decode step with `sparq_logits`.

    Returns:
        int32 key ``indices (B, Hkv, min(top_k, S))``, the approximate attention recall ``alpha (B, Hq)``, and
        ``recall (B, Hkv)``. ``recall`` is the mean of ``alpha`` over the query heads of a KV head (sparq.24).
    """
    logits, padding = sparq_logits(queries, keys, selection), selection.left_padding
    # (sparq.4) approximate attention, (sparq.5) sum over the group, (sparq.6) selection of the keys
    valid = None if padding is None else valid_keys(keys.shape[2], padding)[:, None, None, :]
    s_hat, _ = softmax_lse(logits, valid)
    scores, sizes = s_hat.sum(axis=2), {"top_k": selection.top_k, "local_window": selection.local_window}
    indices = top_k_select(scores, **sizes, left_padding=padding)
    recall = selected_share(scores, indices, s_hat.shape[2], padding)

    # (sparq.8) approximate softmax mass of the selected keys
    chosen = mx.take_along_axis(s_hat, mx.maximum(indices, 0)[:, :, None, :], axis=-1)
    alpha = mx.where((indices >= 0)[:, :, None, :], chosen, 0.0).sum(axis=-1)
    return indices, alpha.reshape(queries.shape[:2]), recall


def selected_share(scores: mx.array, indices: mx.array, G: int, left_padding: mx.array | None) -> mx.array:
    """Return the selected keys' share ``(B, Hkv)`` of the group ``scores (B, Hkv, S)`` (sparq.24)."""
    if left_padding is None:  # without padding, no slot is empty
        return mx.take_along_axis(scores, indices, axis=-1).sum(axis=-1) / G
    chosen = mx.take_along_axis(scores, mx.maximum(indices, 0), axis=-1)
    return mx.where(indices >= 0, chosen, 0.0).sum(axis=-1) / G


def sparq_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    reallocate: bool,
    value_mean: mx.array | None,
    **parameters: Any,
) -> tuple[mx.array, ...]:
    """Run one decode step of SparQ.

    Args:
        reallocate: if True, add ``value_mean``, weighted by the softmax mass of the skipped keys (sparq.10).
        value_mean: ``(B, Hkv, D)`` mean of the valid values; required if ``reallocate`` is True.
        parameters: the fields of `Selection`.

    Returns:
        ``out (B, Hq, 1, D)`` in the dtype of ``queries``, float32 ``lse (B, Hq, 1)``, and the estimated attention
        ``recall (B, Hkv)`` (sparq.24).
    """
    selection = Selection(**parameters)
    indices, alpha, recall = sparq_select(queries, keys, selection)
    out, lse = attend_indices(queries, keys, values, indices, scale=selection.scale)
    if reallocate:
        assert value_mean is not None
        # (sparq.10) in float32, because bfloat16 rounds an alpha of 0.9996 to 1
        alpha = alpha[..., None, None]
        mean = mx.repeat(value_mean.astype(mx.float32), queries.shape[1] // keys.shape[1], axis=1)[:, :, None, :]
        mixed = alpha * out.astype(mx.float32) + (1.0 - alpha) * mean
        out = mx.where(lse[..., None] == -mx.inf, 0.0, mixed).astype(queries.dtype)
    return out, lse, recall


def masked_mean(rows: Rows, left_padding: mx.array | None) -> mx.array:
    """Return the float32 mean ``(B, Hkv, D)`` of ``rows (B, Hkv, S, D)`` over the valid keys (sparq.9)."""
    rows = rows[:].astype(mx.float32)
    if left_padding is None:
        return rows.mean(axis=2)
    S = rows.shape[2]
    count = mx.maximum(S - left_padding, 1)[:, None, None]
    return mx.where(valid_keys(S, left_padding)[:, None, :, None], rows, 0.0).sum(axis=2) / count


def deviation(keys: Rows, left_padding: mx.array | None) -> mx.array:
    """Return the float32 standard deviation ``(B, Hkv, D)`` of each component over the valid keys (sparq.1)."""
    centered = keys[:].astype(mx.float32) - masked_mean(keys, left_padding)[:, :, None, :]
    return mx.sqrt(masked_mean(centered**2, left_padding))
