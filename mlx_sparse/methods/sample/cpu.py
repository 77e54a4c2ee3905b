"""Run SampleAttention with native kernels (docs/spec/sample.md)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.blocks.cpu import attend_blocks
from ...core.blocks.layout import Layout
from ...core.native_call import Lists, fill, run, sizes


def sample_select(
    queries: mx.array,
    keys: mx.array,
    *,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
    length: int | None = None,
) -> mx.array:
    """Select key blocks for each row block (sample.7). Return ascending int32 ``(B, Hq, R, Nk)``, padded with -1."""
    layout = Layout(queries.shape[2], keys.shape[2] if length is None else length, chunks, block_size)
    blocks = np.empty((*queries.shape[:2], layout.row_blocks, layout.key_blocks), np.int32)
    call, lists = sizes(queries, keys, scale, length), Lists(layout.key_blocks, block_size)
    fill(call, queries=queries, keys=keys, values=keys)
    fill(lists, indices=blocks)
    # A number of regions above 64 bits would wrap.
    run("sample", call, lists, alpha_column, alpha_slash, min(chunks, layout.row_blocks))
    return mx.array(blocks)


def sample_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    block_size: int,
    scale: float,
    length: int | None = None,
    **selection: Any,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run SampleAttention over whole buffers. See `methods.sample.ops.sample_attention`."""
    blocks = sample_select(queries, keys, block_size=block_size, scale=scale, length=length, **selection)
    out, lse = attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale, length=length)
    return out, lse, blocks
