"""Compute exact attention over all keys or over a list of keys with native kernels, for all methods."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..native_call import Lists, attend, fill


def attend_indices(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    indices: mx.array,
    *,
    scale: float,
    length: int | None = None,
    counts: mx.array | None = None,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Attend to the listed keys of whole buffers (sparq.7). See `core.attend.ops.attend_indices`."""
    if indices.itemsize > 4:  # a number outside int32 may not wrap to a key index
        indices = mx.where((indices >= 0) & (indices < keys.shape[2]), indices, -1)
    lists = Lists(indices.shape[2])
    fill(lists, indices=indices.astype(mx.int32), counts=None if counts is None else counts.astype(mx.int32))
    return attend("indices", queries, keys, values, lists, scale=scale, length=length, bias=bias)


def attend_all(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    left_padding: mx.array | None = None,
    length: int | None = None,
    window: int = 0,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute dense causal attention. The queries are at the last L of the ``length`` positions.

    Args:
        window: number of last keys, up to its own position, that a query attends to; 0 for all keys.
        bias: for one query, ``(B, Hq, 1, length)`` numbers that are added to the logits (sparq.25).

    Returns:
        ``out (B, Hq, L, D)`` in the dtype of ``queries`` and float32 ``lse (B, Hq, L)``.
    """
    how: dict[str, Any] = {"scale": scale, "length": length, "left_padding": left_padding, "bias": bias}
    return attend("dense", queries, keys, values, window, **how)


def dense_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, left_padding: mx.array | None
) -> mx.array:
    """Compute dense causal attention. Return ``out (B, Hq, L, D)`` in the dtype of ``queries``."""
    return attend_all(queries, keys, values, scale=scale, left_padding=left_padding)[0]


def dense_lse(
    queries: mx.array, keys: mx.array, *, scale: float, left_padding: mx.array | None, bias: mx.array | None = None
) -> mx.array:
    """Return the float32 log-sum-exp ``(B, Hq, L)`` of dense causal attention."""
    return attend_all(queries, keys, keys, scale=scale, left_padding=left_padding, bias=bias)[1]
