"""Run Quest: select pages with MLX array operations, and attend with native kernels (docs/spec/quest.md)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.cpu import attend_indices
from .ops import quest_select, with_bounds


def quest_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, length: int | None = None, **selection: Any
) -> tuple[mx.array, mx.array]:
    """Run a Quest decode step. Return ``out (B, Hq, 1, D)`` in the dtype of ``queries`` and float32 ``lse (B, Hq, 1)``.

    Args:
        keys, values: ``(B, Hkv, capacity, D)`` buffers, which are not copied. The first ``length`` rows are in use.
        selection: the other arguments of `quest_select`. Page bounds are computed if they are absent.
    """
    used = keys if length is None else keys[:, :, :length]
    indices = quest_select(queries, used, **with_bounds(used, selection))
    return attend_indices(queries, keys, values, indices, scale=scale, length=length)
