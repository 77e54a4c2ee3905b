"""Run SparQ with MLX array operations, and quantize its scoring keys.

Equation numbers refer to docs/spec/sparq.md, (sparq.1) to (sparq.10) and (sparq.17) to (sparq.24).
"""

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
from ...core.packed_rows import Rows
from .config import Selection
from .low_rank import project
from .scoring_keys import CODE_BITS, GROUP, LARGEST, LARGEST_CODE, WORDS, KeyCodes


def sparq_logits(queries: mx.array, keys: Rows, selection: Selection) -> mx.array:
    """Compute approximate float32 logits ``(B, Hkv, G, S)`` of all keys from ``rank`` components.

    The logits of padding are undefined. If ``selection.keys_t`` is None, the logits are computed from ``keys``. In this
    case, a quantized KV cache is dequantized unless ``rank`` is D.
    """
    rank, keys_t = selection.rank, selection.keys_t
    if selection.projection is not None:
        queries, keys = project(selection.projection, queries, keys)
        keys = keys if isinstance(keys_t, KeyCodes) else keys[:]
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
    visible = None
    if selection.bias is not None:
        logits, valid = add_bias(logits, selection.bias.reshape(logits.shape), valid)
        visible = visible_keys(selection.bias, keys.shape[1])
    s_hat, _ = softmax_lse(logits, valid)
    scores, sizes = s_hat.sum(axis=2), {"top_k": selection.top_k, "local_window": selection.local_window}
    indices = top_k_select(scores, **sizes, left_padding=padding, visible=visible)
    # (sparq.24); if all keys are valid, no slot is empty
    shares = mx.take_along_axis(scores, indices if valid is None else mx.maximum(indices, 0), axis=-1)
    shares = shares if valid is None else mx.where(indices >= 0, shares, 0.0)
    recall = shares.sum(axis=-1) / s_hat.shape[2]

    # (sparq.8) approximate softmax mass of the selected keys
    chosen = mx.take_along_axis(s_hat, mx.maximum(indices, 0)[:, :, None, :], axis=-1)
    alpha = mx.where((indices >= 0)[:, :, None, :], chosen, 0.0).sum(axis=-1)
    return indices, alpha.reshape(queries.shape[:2]), recall


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
    out, lse = attend_indices(queries, keys, values, indices, scale=selection.scale, bias=selection.bias)
    if reallocate:
        assert value_mean is not None
        # (sparq.10) in float32, because bfloat16 rounds an alpha of 0.9996 to 1
        alpha = alpha[..., None, None]
        mean = mx.repeat(value_mean.astype(mx.float32), queries.shape[1] // keys.shape[1], axis=1)[:, :, None, :]
        mixed = alpha * out.astype(mx.float32) + (1.0 - alpha) * mean
        out = mx.where(lse[..., None] == -mx.inf, 0.0, mixed).astype(queries.dtype)
    return out, lse, recall


def masked_mean(rows: Rows, left_padding: mx.array | None, bias: mx.array | None = None) -> mx.array:
    """Return the float32 mean ``(B, Hkv, D)`` of ``rows (B, Hkv, S, D)`` over the valid keys (sparq.9).

    Rows that ``bias`` hides from all heads of a group do not count.
    """
    rows = rows[:].astype(mx.float32)
    if left_padding is None and bias is None:
        return rows.mean(axis=2)
    valid = mx.array(True) if left_padding is None else valid_keys(rows.shape[2], left_padding)[:, None]
    valid = valid if bias is None else valid & visible_keys(bias, rows.shape[1])
    count = mx.maximum(valid.sum(axis=2), 1)[..., None]
    return mx.where(valid[..., None], rows, 0.0).sum(axis=2) / count


def deviation(keys: Rows, left_padding: mx.array | None) -> mx.array:
    """Return the float32 standard deviation ``(B, Hkv, D)`` of each component over the valid keys (sparq.1)."""
    centered = keys[:].astype(mx.float32) - masked_mean(keys, left_padding)[:, :, None, :]
    return mx.sqrt(masked_mean(centered**2, left_padding))


def code_keys(keys: Rows, left_padding: mx.array | None) -> KeyCodes:
    """Quantize ``keys (B, Hkv, S, D)`` to int4 in groups of `GROUP` keys. Keys after the last full group are omitted.

    The first group begins at the first valid key of a sequence. With padding, a sequence may have fewer full groups
    than ``S // GROUP``. Its unused groups are 0.
    """
    keys = keys[:]
    if left_padding is None:
        return code_groups(keys)
    S = keys.shape[2]
    rows = mx.minimum(mx.arange(S) + left_padding[:, None], S - 1)
    coded = code_groups(mx.take_along_axis(keys, rows[:, None, :, None], axis=2))
    there = _full_groups(S, left_padding)
    lo, step = (mx.where(there, array, mx.array(0, mx.float16)) for array in (coded.lo, coded.step))
    words = mx.where(mx.repeat(there, WORDS, axis=-1), coded.codes, mx.array(0, mx.uint32))
    return KeyCodes(words, lo, step, mx.where(there.any(axis=-1), coded.center, 0))


def first_groups(coded: KeyCodes, keys: int) -> KeyCodes:
    """Return the full groups in the first ``keys`` rows of ``coded``."""
    groups = keys // GROUP
    return KeyCodes(coded.codes[..., : groups * WORDS], coded.lo[..., :groups], coded.step[..., :groups], coded.center)


def code_groups(keys: mx.array, center: mx.array | None = None) -> KeyCodes:
    """Quantize the full groups of ``keys (B, Hkv, S, D)``. All keys must be valid. The first group begins with key 0.

    Args:
        center: float32 ``(B, Hkv, D)`` center of earlier groups of the same sequences. If None, the center is computed
            from the first group.
    """
    B, Hkv, S, D = keys.shape
    groups = S // GROUP
    rows = keys[:, :, : groups * GROUP].astype(mx.float32).reshape(B, Hkv, groups, GROUP, D)
    least, most = rows.min(axis=3), rows.max(axis=3)
    if center is None:
        # (sparq.17)
        middle = least[:, :, 0] * 0.5 + most[:, :, 0] * 0.5 if groups else mx.zeros((B, Hkv, D))
        center = mx.where(mx.isfinite(middle), middle, 0)
    # (sparq.18) Rounding preserves order, so the smallest key has the smallest difference.
    least, most = least - center[:, :, None], most - center[:, :, None]
    # (sparq.19)
    odd = ~(mx.isfinite(least) & mx.isfinite(most))
    lo = mx.where(odd, mx.nan, mx.clip(least, -LARGEST, LARGEST)).astype(mx.float16)
    step = mx.where(odd, mx.nan, mx.minimum((most - least) / LARGEST_CODE, LARGEST)).astype(mx.float16)
    # (sparq.20)
    lows, steps = (array.astype(mx.float32)[:, :, :, None] for array in (lo, step))
    code = mx.round((rows - center[:, :, None, None] - lows) / steps)
    code = mx.where(steps > 0, mx.clip(code, 0, LARGEST_CODE), 0).astype(mx.uint32)
    per_word = 32 // CODE_BITS
    code = code.transpose(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP // per_word, per_word)
    words = (code << (mx.arange(per_word, dtype=mx.uint32) * CODE_BITS)).sum(axis=-1)
    return KeyCodes(words, lo.swapaxes(-1, -2), step.swapaxes(-1, -2), center)


def _full_groups(S: int, left_padding: mx.array) -> mx.array:
    """Return a mask ``(B, 1, 1, S // GROUP)``, True for the full groups of each sequence."""
    return (mx.arange(S // GROUP) < (S - left_padding)[:, None] // GROUP)[:, None, None]


def key_spread(coded: KeyCodes, keys: Rows, left_padding: mx.array | None) -> mx.array:
    """Estimate the standard deviation of each component, float32 ``(B, Hkv, D)``, from its int4 codes (sparq.22).

    If a sequence has no full group, the result is the exact standard deviation of its valid keys.
    """
    S = keys.shape[2]
    if S < GROUP:
        return deviation(keys, left_padding)
    middle, width = _middles(coded)
    if left_padding is None:
        return mx.sqrt(middle.var(axis=-1) + (width**2).mean(axis=-1) / 16)
    there = _full_groups(S, left_padding)
    count = mx.maximum(there.sum(axis=-1, keepdims=True), 1)

    def mean(array: mx.array) -> mx.array:
        return mx.where(there, array, 0).sum(axis=-1, keepdims=True) / count

    found = mx.sqrt(mean((middle - mean(middle)) ** 2) + mean(width**2) / 16).squeeze(-1)
    # If a sequence has no full group, all its valid keys are among the last GROUP keys.
    last = S - GROUP
    return mx.where(there.any(axis=-1), found, deviation(keys[:, :, last:], left_padding - last))


def _middles(coded: KeyCodes) -> tuple[mx.array, mx.array]:
    """Return the middle and the width of the value range of each group, both float32 ``(B, Hkv, D, groups)``."""
    width = coded.step.astype(mx.float32) * LARGEST_CODE
    return coded.lo.astype(mx.float32) + width / 2, width


def approximate_logits(
    queries: mx.array,
    components: mx.array,
    keys: Rows,
    coded: KeyCodes,
    left_padding: mx.array | None,
) -> mx.array:
    """Compute approximate float32 logits ``(B, Hkv, G, S)`` of all keys from int4 codes (sparq.21).

    Args:
        queries: float32 ``(B, Hkv, G, r)``, the selected components of the queries, already scaled.
        components: int32 ``(B, Hkv, r)`` indices of the selected components.
        keys: ``(B, Hkv, S, D)``; only keys after the last full group are read.
    """
    S = keys.shape[2]
    groups = S // GROUP
    last = groups * GROUP if left_padding is None else max(0, S - GROUP + 1)  # first key of the longest tail
    center = mx.take_along_axis(coded.center, components, axis=2)
    rows = mx.take_along_axis(keys[:, :, last:], components[:, :, None], axis=3).astype(mx.float32)
    tail = queries @ (rows - center[:, :, None]).swapaxes(-1, -2)
    if groups == 0:
        return tail
    codes, lo, step = (take_rows(array, components) for array in coded[:3])
    found = mx.quantized_matmul(queries, codes, step, lo, transpose=False, group_size=GROUP, bits=CODE_BITS)
    if left_padding is None:
        return mx.concatenate([found, tail], axis=-1)
    # Codes begin at the first valid key of a sequence. Move the logits to the positions of their keys.
    first = left_padding[:, None]
    place = mx.arange(S) - first
    found = mx.take_along_axis(found, mx.clip(place, 0, groups * GROUP - 1)[:, None, None], axis=-1)
    is_tail = place >= (S - first) // GROUP * GROUP
    return mx.where(is_tail[:, None, None], mx.pad(tail, [(0, 0)] * 3 + [(last, 0)]), found)
