"""Calls of several queries in array operations: docs/spec/several.md."""

from __future__ import annotations

import mlx.core as mx

from ..common.packed_rows import Rows
from .attend import merge, softmax_lse
from .select import valid_keys


def attend_own(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    out: mx.array,
    lse: mx.array,
    *,
    scale: float,
    left_padding: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """(several.3), (several.4): the keys behind the first query's, and what a step over those before them gave.

    Args:
        queries: ``(B, Hq, L, D)``.
        keys, values: ``(B, Hkv, S, D)``, of which the last ``L - 1`` rows are read.
        out, lse: ``(B, Hq * L, 1, D)`` and ``(B, Hq * L, 1)`` of the step.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, L)``.
    """
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    out, lse = out.reshape(B, Hq, L, D), lse.reshape(B, Hq, L)
    first = S - L + 1
    k, v = (rows[:, :, first:].astype(mx.float32) for rows in (keys, values))
    mask = (mx.arange(1, L) <= mx.arange(1, L)[:, None])[None]
    if left_padding is not None:
        valid = valid_keys(S, left_padding)[:, first:]
        mask = mask & valid[:, None]
        v = mx.where(valid[:, None, :, None], v, 0.0)  # padded rows may hold anything, and 0 * inf is NaN
    q = queries[:, :, 1:].reshape(B, Hkv, -1, L - 1, D).astype(mx.float32) * scale
    weights, own = softmax_lse(q @ k[:, :, None].swapaxes(-1, -2), mask[:, None, None])
    own_out = (weights @ v[:, :, None]).reshape(B, Hq, L - 1, D)
    later, later_lse = merge((out[:, :, 1:], lse[:, :, 1:]), (own_out, own.reshape(B, Hq, L - 1)))
    out = mx.concatenate([out[:, :, :1], later.astype(queries.dtype)], axis=2)
    return out, mx.concatenate([lse[:, :, :1], later_lse], axis=2)
