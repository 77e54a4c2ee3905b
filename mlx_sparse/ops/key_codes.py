"""Keys in few bits: docs/spec/sparq.md, equations (sparq.17) to (sparq.22)."""

from __future__ import annotations

import mlx.core as mx

from ..common.key_codes import GROUP, LARGEST, KeyCodes
from .select import take_rows, valid_keys


def code_keys(
    keys: mx.array, left_padding: mx.array | None, *, key_bits: int, centre: mx.array | None = None
) -> KeyCodes:
    """Code the full groups of ``keys (B, Hkv, S, D)``, the first of which begins with the first row.

    Args:
        left_padding: ``(B,)`` first valid key of each row, negative where that lies before these rows.
        centre: of the groups before these rows; None where there are none.
    """
    B, Hkv, S, D = keys.shape
    groups, largest = S // GROUP, 2**key_bits - 1
    rows = keys[:, :, : groups * GROUP].astype(mx.float32).reshape(B, Hkv, groups, GROUP, D)
    least, most = rows.min(axis=3), rows.max(axis=3)
    valid = some = mx.array(True)
    if left_padding is not None:
        valid = valid_keys(groups * GROUP, left_padding).reshape(B, 1, groups, GROUP, 1)
        some = valid.any(axis=3)
        # Invalid keys may be NaN, which a minimum passes on.
        least, most = mx.where(valid, rows, mx.inf).min(axis=3), mx.where(valid, rows, -mx.inf).max(axis=3)
    centre = _centre(least, most, left_padding, centre)
    # (sparq.18): rounding keeps the order, so the least of the differences is that of the least
    least, most = (mx.where(some, bound - centre[:, :, None], 0) for bound in (least, most))
    # (sparq.19)
    odd = ~(mx.isfinite(least) & mx.isfinite(most))
    lo = mx.where(odd, mx.nan, mx.clip(least, -LARGEST, LARGEST)).astype(mx.float16)
    step = mx.where(odd, mx.nan, mx.minimum((most - least) / largest, LARGEST)).astype(mx.float16)
    # (sparq.20)
    lows, steps = (array.astype(mx.float32)[:, :, :, None] for array in (lo, step))
    code = mx.round((rows - centre[:, :, None, None] - lows) / steps)
    code = mx.where(valid & (steps > 0), mx.clip(code, 0, largest), 0).astype(mx.uint32)
    per_word = 32 // key_bits
    code = code.transpose(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP // per_word, per_word)
    words = (code << (mx.arange(per_word, dtype=mx.uint32) * key_bits)).sum(axis=-1)
    return KeyCodes(words, lo.swapaxes(-1, -2), step.swapaxes(-1, -2), centre)


def _centre(least: mx.array, most: mx.array, left_padding: mx.array | None, centre: mx.array | None) -> mx.array:
    """(sparq.17) from the bounds ``(B, Hkv, groups, D)`` of keys; kept where a group before these had a valid key."""
    B, Hkv, groups, D = least.shape
    if groups == 0:
        return mx.zeros((B, Hkv, D), mx.float32) if centre is None else centre
    if left_padding is None:
        if centre is not None:
            return centre
        found = least[:, :, 0] * 0.5 + most[:, :, 0] * 0.5
    else:
        first = mx.clip(left_padding // GROUP, 0, groups - 1)[:, None, None, None]
        least, most = (mx.take_along_axis(bound, first, axis=2).squeeze(2) for bound in (least, most))
        found = least * 0.5 + most * 0.5  # inf - inf without a valid key
    found = mx.where(mx.isfinite(found), found, 0)
    if centre is None or left_padding is None:
        return found
    return mx.where((left_padding < 0)[:, None, None], centre, found)


def key_spread(coded: KeyCodes, keys: mx.array, left_padding: mx.array | None, *, key_bits: int) -> mx.array:
    """(sparq.22) of each component over the valid ones of ``keys (B, Hkv, S, D)``: float32 ``(B, Hkv, D)``."""
    from .sparq import deviation

    groups = coded.lo.shape[-1]
    tail = groups * GROUP
    if groups == 0:
        return deviation(keys, left_padding)
    lo = coded.lo.astype(mx.float32)
    width = coded.step.astype(mx.float32) * (2**key_bits - 1)
    middle = lo + width / 2
    if left_padding is None:
        return mx.sqrt(middle.var(axis=-1) + (width**2).mean(axis=-1) / 16)
    there = valid_keys(tail, left_padding)[:, None, None, GROUP - 1 :: GROUP]
    count = mx.maximum(there.sum(axis=-1, keepdims=True), 1)

    def mean(array: mx.array) -> mx.array:
        return mx.where(there, array, 0).sum(axis=-1, keepdims=True) / count

    found = mx.sqrt(mean((middle - mean(middle)) ** 2) + mean(width**2) / 16).squeeze(-1)
    # Where nothing valid is coded, all valid keys are in the tail.
    return mx.where(there.any(axis=-1), found, deviation(keys[:, :, tail:], left_padding - tail))


def approximate_logits(
    queries: mx.array, components: mx.array, keys: mx.array, coded: KeyCodes, *, key_bits: int
) -> mx.array:
    """(sparq.21) without its factor, or with it if the queries have it: float32 ``(B, Hkv, G, S)``.

    Args:
        queries: float32 ``(B, Hkv, G, r)``, of these components.
        components: ``(B, Hkv, r)`` int32.
        keys: ``(B, Hkv, S, D)``, of which only the tail is read.
    """
    tail = coded.lo.shape[-1] * GROUP
    parts = []
    if tail:
        codes, lo, step = (take_rows(array, components) for array in coded[:3])
        parts.append(mx.quantized_matmul(queries, codes, step, lo, transpose=False, group_size=GROUP, bits=key_bits))
    if tail < keys.shape[2]:
        rows = mx.take_along_axis(keys[:, :, tail:], components[:, :, None], axis=3).astype(mx.float32)
        centre = mx.take_along_axis(coded.centre, components, axis=2)
        parts.append(queries @ (rows - centre[:, :, None]).swapaxes(-1, -2))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
