"""Quantized scoring keys (int4): docs/spec/sparq.md, equations (sparq.17) to (sparq.22)."""

from __future__ import annotations

import mlx.core as mx

from ..methods.scoring_keys import CODE_BITS, GROUP, LARGEST, LARGEST_CODE, WORDS, KeyCodes
from .packed_rows import Rows
from .select import take_rows


def code_keys(keys: Rows, left_padding: mx.array | None) -> KeyCodes:
    """Code the full groups of each sequence of ``keys (B, Hkv, S, D)``; further slots are 0.

    Args:
        left_padding: ``(B,)`` first valid key of each sequence, where its first group begins.
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
    return KeyCodes(words, lo, step, mx.where(there.any(axis=-1), coded.centre, 0))


def code_groups(keys: mx.array, centre: mx.array | None = None) -> KeyCodes:
    """Code the full groups of valid ``keys (B, Hkv, S, D)``; the first group begins with the first key.

    Args:
        centre: float32 ``(B, Hkv, D)`` of the earlier groups; None if these groups are the first.
    """
    B, Hkv, S, D = keys.shape
    groups = S // GROUP
    rows = keys[:, :, : groups * GROUP].astype(mx.float32).reshape(B, Hkv, groups, GROUP, D)
    least, most = rows.min(axis=3), rows.max(axis=3)
    if centre is None:
        # (sparq.17)
        middle = least[:, :, 0] * 0.5 + most[:, :, 0] * 0.5 if groups else mx.zeros((B, Hkv, D))
        centre = mx.where(mx.isfinite(middle), middle, 0)
    # (sparq.18): rounding keeps the order, so the smallest difference belongs to the smallest key
    least, most = least - centre[:, :, None], most - centre[:, :, None]
    # (sparq.19)
    odd = ~(mx.isfinite(least) & mx.isfinite(most))
    lo = mx.where(odd, mx.nan, mx.clip(least, -LARGEST, LARGEST)).astype(mx.float16)
    step = mx.where(odd, mx.nan, mx.minimum((most - least) / LARGEST_CODE, LARGEST)).astype(mx.float16)
    # (sparq.20)
    lows, steps = (array.astype(mx.float32)[:, :, :, None] for array in (lo, step))
    code = mx.round((rows - centre[:, :, None, None] - lows) / steps)
    code = mx.where(steps > 0, mx.clip(code, 0, LARGEST_CODE), 0).astype(mx.uint32)
    per_word = 32 // CODE_BITS
    code = code.transpose(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP // per_word, per_word)
    words = (code << (mx.arange(per_word, dtype=mx.uint32) * CODE_BITS)).sum(axis=-1)
    return KeyCodes(words, lo.swapaxes(-1, -2), step.swapaxes(-1, -2), centre)


def _full_groups(S: int, left_padding: mx.array) -> mx.array:
    """Return a bool mask ``(B, 1, 1, S // GROUP)`` of the full groups of each sequence."""
    return (mx.arange(S // GROUP) < (S - left_padding)[:, None] // GROUP)[:, None, None]


def key_spread(coded: KeyCodes, keys: Rows, left_padding: mx.array | None) -> mx.array:
    """Return the deviation of each component over the valid keys (sparq.22): float32 ``(B, Hkv, D)``."""
    from .sparq import deviation

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
    # A sequence without a coded group has all its valid keys at the end.
    last = S - GROUP
    return mx.where(there.any(axis=-1), found, deviation(keys[:, :, last:], left_padding - last))


def group_moments(coded: KeyCodes) -> mx.array:
    """Return the running statistics of some groups for (sparq.22), float32 ``(3, B, Hkv, D)``.

    They are the mean of the middles, the sum of their squared distances from the mean, and the sum of the squared
    widths.
    """
    middle, width = _middles(coded)
    mean = middle.mean(axis=-1)
    return mx.stack([mean, ((middle - mean[..., None]) ** 2).sum(axis=-1), (width**2).sum(axis=-1)])


def _middles(coded: KeyCodes) -> tuple[mx.array, mx.array]:
    """Return middle and width of the range of each coded group: float32 ``(B, Hkv, D, groups)``."""
    width = coded.step.astype(mx.float32) * LARGEST_CODE
    return coded.lo.astype(mx.float32) + width / 2, width


def approximate_logits(
    queries: mx.array,
    components: mx.array,
    keys: Rows,
    coded: KeyCodes,
    left_padding: mx.array | None,
) -> mx.array:
    """Return approximate logits (sparq.21), float32 ``(B, Hkv, G, S)``; the caller scales the queries.

    Args:
        queries: float32 ``(B, Hkv, G, r)`` at these components.
        components: ``(B, Hkv, r)`` int32.
        keys: ``(B, Hkv, S, D)``; only the keys of the unfilled group are read.
    """
    S = keys.shape[2]
    groups = S // GROUP
    last = groups * GROUP if left_padding is None else max(0, S - GROUP + 1)  # the first key of the longest tail
    centre = mx.take_along_axis(coded.centre, components, axis=2)
    rows = mx.take_along_axis(keys[:, :, last:], components[:, :, None], axis=3).astype(mx.float32)
    tail = queries @ (rows - centre[:, :, None]).swapaxes(-1, -2)
    if groups == 0:
        return tail
    codes, lo, step = (take_rows(array, components) for array in coded[:3])
    found = mx.quantized_matmul(queries, codes, step, lo, transpose=False, group_size=GROUP, bits=CODE_BITS)
    if left_padding is None:
        return mx.concatenate([found, tail], axis=-1)
    # The codes of a sequence begin at its first valid key.
    first = left_padding[:, None]
    place = mx.arange(S) - first
    found = mx.take_along_axis(found, mx.clip(place, 0, groups * GROUP - 1)[:, None, None], axis=-1)
    is_tail = place >= (S - first) // GROUP * GROUP
    return mx.where(is_tail[:, None, None], mx.pad(tail, [(0, 0)] * 3 + [(last, 0)]), found)
