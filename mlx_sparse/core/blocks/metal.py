"""Compute attention over lists of key blocks on the GPU for all prefill methods (metal/attend_blocks.h)."""

from __future__ import annotations

import mlx.core as mx

from ..launch import Kernel, integer, of_one_type, real
from ..launch_split import attend_in_launches
from .layout import Layout

THREADGROUP_MEMORY = 32 << 10

ATTEND = Kernel(
    "attend_blocks", "attend_blocks.h", ("queries", "keys", "values", "blocks", "length", "scale"), ("out", "lse")
)


def tile_of(D: int, itemsize: int) -> tuple[int, int]:
    """Return how many query rows and how many keys a threadgroup stages.

    The numbers are the same as in MLX's prefill kernel, or smaller if the rows do not fit into threadgroup memory.
    """

    def fits(rows: int, keys: int) -> bool:
        padding = 16 // itemsize
        staged = max(D * (keys + padding), keys * (D + padding))
        return (rows * (D + padding) + staged) * itemsize <= THREADGROUP_MEMORY

    sizes = [(32, 32 if D < 128 else 16), (32, 16), (16, 16), (16, 8)]
    return next(size for size in sizes if fits(*size))


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
    """Attend to the listed key blocks of whole buffers (sample.8). See `core.blocks.ops.attend_blocks`.

    The buffers are not copied if queries, keys and values have the same type.
    """
    S = keys.shape[2] if length is None else length
    lists = _sorted_lists(blocks, Layout(queries.shape[2], S, 1, block_size))
    return attend_lists(queries, keys, values, lists, block_size=block_size, scale=scale, length=S)


def _sorted_lists(blocks: mx.array, layout: Layout) -> mx.array:
    """Convert block lists to ascending int32 lists without duplicates, padded with -1."""
    if blocks.shape[3] == 0:
        return mx.full((*blocks.shape[:3], 1), -1, mx.int32)
    none = layout.key_blocks
    ordered = mx.sort(mx.where((blocks >= 0) & (blocks < none), blocks, none).astype(mx.int32), axis=-1)
    again = mx.concatenate([mx.zeros_like(ordered[..., :1]) - 1, ordered[..., :-1]], axis=-1) == ordered
    ordered = mx.sort(mx.where(again, none, ordered), axis=-1)
    return mx.where(ordered < none, ordered, -1)


def attend_lists(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    blocks: mx.array,
    *,
    block_size: int,
    scale: float,
    length: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute `attend_blocks` for lists that are ascending, have no duplicates and end at the first -1."""
    S, dtype = keys.shape[2] if length is None else length, queries.dtype
    queries, keys, values = of_one_type(queries, keys, values)
    B, Hq, _, D = queries.shape
    rows, staged = tile_of(D, keys.itemsize)
    template = {"T": queries.dtype, "D": D, "BLOCK": block_size, "ROWS": rows, "KEYS": staged}

    def attend(queries: mx.array, blocks: mx.array, length: int) -> tuple[mx.array, mx.array]:
        inputs = {
            "queries": queries,
            "keys": keys,
            "values": values,
            "blocks": blocks,
            "length": integer(length),
            "scale": real(scale),
        }
        out, lse = ATTEND(
            inputs,
            [(queries.shape, queries.dtype), (queries.shape[:3], mx.float32)],
            template=template,
            groups=(blocks.shape[2] * block_size // rows, Hq, B),
            threads=rows * 4,
        )
        return out, lse

    out, lse = attend_in_launches(attend, queries, blocks, S=S, block_size=block_size)
    return out.astype(dtype), lse
