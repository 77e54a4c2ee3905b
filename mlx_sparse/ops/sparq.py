"""SparQ attention: docs/spec/sparq.md, equations (sparq.1) to (sparq.10), (sparq.21)."""

from __future__ import annotations

import mlx.core as mx

from ..methods.scoring_keys import KeyCodes
from .attend import attend_indices, exact_logits, group_queries, softmax_lse
from .key_codes import approximate_logits
from .packed_rows import Rows
from .select import take_rows, top_k_select, valid_keys


def sparq_logits(
    queries: mx.array,
    keys: Rows,
    *,
    rank: int,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    keys_t: mx.array | KeyCodes | None,
) -> mx.array:
    """Approximate logits of every key from ``rank`` components, float32 ``(B, Hkv, G, S)``; those of padding are any.

    Args:
        component_weight: float32 ``(B, Hkv, D)`` spread of the keys for ``component_score="query_key"``; None for the
            paper's rule.
        keys_t: ``(B, Hkv, D, S)`` component-major keys or their codes. Without them scores come from the rows of
            ``keys``: with a ``rank`` of D nothing of packed rows is unpacked.
    """
    B = queries.shape[0]
    Hkv, D = keys.shape[1], keys.shape[3]
    q = group_queries(queries, Hkv)

    # (sparq.1) one score per component, shared by the group; (sparq.2) the r largest
    component = mx.abs(q).sum(axis=2)
    if component_weight is not None:
        component = component * component_weight
    component = mx.where(mx.isnan(component), mx.inf, component)
    i1 = mx.argpartition(-component, kth=rank - 1, axis=-1)[..., :rank] if rank < D else mx.arange(D)[None, None]
    i1 = mx.broadcast_to(i1, (B, Hkv, rank))

    # (sparq.3) approximate logits
    q_r = mx.take_along_axis(q, i1[:, :, None, :], axis=-1)
    factor = mx.array(scale, mx.float32)
    if component_weight is None:
        total = mx.abs(q).sum(axis=-1, keepdims=True)
        covered = mx.abs(q_r).sum(axis=-1, keepdims=True)
        coverage = covered / mx.where(covered > 0, total, 1.0)
        factor = factor * mx.rsqrt(mx.where(covered > 0, coverage, 1.0))
    if isinstance(keys_t, KeyCodes):
        return approximate_logits(q_r * factor, i1, keys, keys_t, left_padding)
    if keys_t is not None:
        return (q_r * factor) @ take_rows(keys_t, i1).astype(mx.float32)
    if rank == D:
        return exact_logits(q * factor, keys)
    return exact_logits(q_r * factor, mx.take_along_axis(keys[:], i1[:, :, None], axis=3))


def sparq_select(
    queries: mx.array,
    keys: Rows,
    *,
    rank: int,
    top_k: int,
    local_window: int,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    keys_t: mx.array | KeyCodes | None,
) -> tuple[mx.array, mx.array]:
    """Choose the keys of one decode step by their `sparq_logits`, whose arguments these are.

    Returns:
        ``indices (B, Hkv, min(top_k, S))`` and float32 ``alpha (B, Hq)``.
    """
    S = keys.shape[2]
    logits = sparq_logits(
        queries,
        keys,
        rank=rank,
        component_weight=component_weight,
        scale=scale,
        left_padding=left_padding,
        keys_t=keys_t,
    )
    # (sparq.4) approximate attention, (sparq.5) summed over the group, (sparq.6) the keys
    valid = None if left_padding is None else valid_keys(S, left_padding)[:, None, None, :]
    s_hat, _ = softmax_lse(logits, valid)
    scores = s_hat.sum(axis=2)
    indices = top_k_select(scores, top_k=top_k, local_window=local_window, left_padding=left_padding)

    # (sparq.8) their approximate mass
    chosen = mx.take_along_axis(s_hat, mx.maximum(indices, 0)[:, :, None, :], axis=-1)
    alpha = mx.where((indices >= 0)[:, :, None, :], chosen, 0.0).sum(axis=-1)
    return indices, alpha.reshape(queries.shape[:2])


def sparq_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    rank: int,
    top_k: int,
    local_window: int,
    reallocate: bool,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    keys_t: mx.array | KeyCodes | None,
    value_mean: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """One decode step: ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``.

    Args:
        value_mean: ``(B, Hkv, D)``; needed to reallocate.
    """
    indices, alpha = sparq_select(
        queries,
        keys,
        rank=rank,
        top_k=top_k,
        local_window=local_window,
        component_weight=component_weight,
        scale=scale,
        left_padding=left_padding,
        keys_t=keys_t,
    )
    out, lse = attend_indices(queries, keys, values, indices, scale=scale)
    if reallocate:
        assert value_mean is not None
        # (sparq.10) in float32: in bfloat16 an alpha of .9996 rounds to 1
        alpha = alpha[..., None, None]
        mean = mx.repeat(value_mean.astype(mx.float32), queries.shape[1] // keys.shape[1], axis=1)[:, :, None, :]
        mixed = alpha * out.astype(mx.float32) + (1.0 - alpha) * mean
        out = mx.where(lse[..., None] == -mx.inf, 0.0, mixed).astype(queries.dtype)
    return out, lse


def masked_mean(rows: Rows, left_padding: mx.array | None) -> mx.array:
    """(sparq.9) float32 mean of ``rows (B, Hkv, S, D)`` over the valid keys: ``(B, Hkv, D)``."""
    rows = rows[:].astype(mx.float32)
    if left_padding is None:
        return rows.mean(axis=2)
    S = rows.shape[2]
    count = mx.maximum(S - left_padding, 1)[:, None, None]
    return mx.where(valid_keys(S, left_padding)[:, None, :, None], rows, 0.0).sum(axis=2) / count


def deviation(keys: Rows, left_padding: mx.array | None) -> mx.array:
    """(sparq.1) float32 standard deviation of each component over the valid keys: ``(B, Hkv, D)``."""
    centred = keys[:].astype(mx.float32) - masked_mean(keys, left_padding)[:, :, None, :]
    return mx.sqrt(masked_mean(centred**2, left_padding))
