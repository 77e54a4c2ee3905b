"""Implement int4 scoring keys with MLX array operations (docs/spec/sparq.md, sparq.17 to sparq.22)."""

from __future__ import annotations

import mlx.core as mx

from ...core.packed_rows import Rows
from ...core.select.ops import take_rows
from .scoring_keys import CODE_BITS, GROUP, LARGEST, LARGEST_CODE, WORDS, KeyCodes


def code_keys(keys: Rows, left_padding: mx.array | None) -> KeyCodes:
    """Quantize ``keys (B, Hkv, S, D)`` to int4 in groups of `GROUP` keys. Keys after the last full group are omitted.

    If a sequence has padding, it may have fewer full groups than ``S // GROUP``. Its unused groups are 0.

    Args:
        left_padding: ``(B,)`` index of the first valid key of each sequence, where the first group begins.
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
    from .ops import deviation

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
