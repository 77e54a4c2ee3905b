"""Compute attention over lists of key blocks with native kernels, for all prefill methods."""

from __future__ import annotations

import mlx.core as mx

from ..native_call import Lists, attend, fill


def attend_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    blocks: mx.array,
    *,
    block_size: int,
    scale: float,
    length: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Attend to the listed key blocks of whole buffers (sample.8). See `core.blocks.ops.attend_blocks`."""
    if blocks.itemsize > 4:  # a number outside int32 may not wrap to a block index
        blocks = mx.where((blocks >= 0) & (blocks < keys.shape[2]), blocks, -1)
    lists = Lists(blocks.shape[3], block_size)
    fill(lists, indices=blocks.astype(mx.int32))
    return attend("blocks", queries, keys, values, lists, scale=scale, length=length)
