"""Run SAAP with native kernels (docs/spec/saap.md). Routing and assignment are those of `ops`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.attend.cpu import attend_indices
from ...core.native_call import Buckets, fill, run
from .ops import list_keys
from .ops import saap_assign as saap_assign
from .ops import saap_route as saap_route


def saap_indices(
    visited: mx.array,
    offsets: mx.array,
    key_ids: mx.array,
    *,
    length: int,
    covered: int | mx.array,
    sink_tokens: int,
    capacity: int,
    left_padding: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """List the keys that a decode step attends to (saap.10). See `methods.saap.oracle.saap_indices`."""
    B, Hkv, n = visited.shape
    rows = mx.full((B,), covered, mx.int32) if isinstance(covered, int) else covered.astype(mx.int32)
    padding = None if left_padding is None else left_padding.astype(mx.int32)
    indices, counts = np.empty((B, Hkv, capacity), np.int32), np.empty((B, Hkv), np.int32)
    call = Buckets(B, Hkv, n, offsets.shape[2] - 1, key_ids.shape[2], capacity, length, min(sink_tokens, length))
    fill(
        call,
        visited=visited.astype(mx.int32),
        offsets=offsets,
        key_ids=key_ids,
        covered=rows,
        left_padding=padding,
        indices=indices,
        counts=counts,
    )
    run("buckets", call)
    return mx.array(indices), mx.array(counts)


def saap_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, length: int | None = None, **visit: Any
) -> tuple[mx.array, mx.array, mx.array]:
    """Run a SAAP decode step over whole buffers. See `methods.saap.ops.saap_attention`."""
    S = keys.shape[2] if length is None else length
    indices, counts = list_keys(saap_indices, S, **visit)
    out, lse = attend_indices(queries, keys, values, indices, counts=counts, scale=scale, length=S)
    return out, lse, counts
