"""Run gathered prefill with the native dense kernel (docs/spec/gather.md)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.cpu import attend_all
from ...core.packed_rows import PackedRows, Rows
from .ops import Result, gather_with


def gather_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    scale: float,
    sinks: mx.array | None = None,
    length: int | None = None,
    **settings: Any,
) -> Result:
    """Run gathered prefill over whole buffers. See `methods.gather.ops.gather_attention`."""
    length = keys.shape[2] if length is None else length
    return gather_with(_attend, queries, keys, values, scale=scale, sinks=sinks, length=length, **settings)


def _attend(queries: mx.array, keys: Rows, values: Rows, *, scale: float, length: int) -> tuple[mx.array, mx.array]:
    if isinstance(keys, PackedRows):
        keys, values = keys[:, :, :length], values[:, :, :length]
    return attend_all(queries, keys, values, scale=scale, length=length)  # type: ignore[arg-type]
