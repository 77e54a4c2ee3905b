"""Run the decode baselines that attend to lists of keys with native kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.cpu import attend_indices
from .ops import streaming_indices


def streaming_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, length: int | None = None, **window: Any
) -> tuple[mx.array, mx.array]:
    """Attend to the keys of `streaming_indices`, which has the other arguments."""
    (B, Hkv), S = keys.shape[:2], keys.shape[2] if length is None else length
    indices = streaming_indices(B, S, **window)
    indices = mx.broadcast_to(indices[:, None], (B, Hkv, indices.shape[1]))
    return attend_indices(queries, keys, values, indices, scale=scale, length=S)
