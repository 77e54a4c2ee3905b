"""Run SampleAttention on the GPU (docs/spec/sample.md, equations (sample.1) to (sample.8)).

Two kernels score the sampled rows, MLX operations select the key blocks, and one kernel attends to the selected blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from ...core.blocks.layout import Layout
from ...core.blocks.metal import THREADGROUP_MEMORY, attend_lists
from ...core.blocks.ops import select_blocks
from ...core.launch import LANES, Kernel, integer, of_one_type, real
from ...core.launch_split import MAX_WORK

SIDE = 8  # rows of a matrix in registers
SUM_THREADS, SUMMED_BLOCKS = 256, 32
GROUPS = 1024  # number of threadgroups that fills the largest GPU several times

SCORES = Kernel(
    "sample_scores",
    "sample_scores.h",
    ("queries", "keys", "samples", "regions", "length", "first_head", "scale"),
    ("partials", "totals"),
)
SUMS = Kernel(
    "sample_sums", "sample_scores.h", ("partials", "totals", "samples", "regions", "offset"), ("column", "slash")
)


def shape_of(rows: int, D: int, itemsize: int) -> dict[str, int]:
    """Return the kernel's template parameters for samples of ``rows`` queries, as a dict from name to number.

    ``FRAGMENTS`` is the number of tiles of eight queries per SIMD group. ``SIMDGROUPS`` is the number of SIMD groups,
    and ``KEYS`` is the number of staged keys. A SIMD group keeps its queries in registers as 8x8 matrices. Each lane
    has two float32 numbers of each matrix, and at most 64 numbers in total.
    """
    fragments = 2 if D <= 128 and rows > 32 else 1
    simdgroups = min(8, -(-rows // (SIDE * fragments)))
    keys = 32 if D * (32 * itemsize + 16) <= THREADGROUP_MEMORY else 16
    return {"FRAGMENTS": fragments, "SIMDGROUPS": simdgroups, "KEYS": keys}


def sample_scores(
    queries: mx.array,
    keys: mx.array,
    *,
    chunks: int,
    block_size: int,
    scale: float,
    rows: int | None = None,
    length: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Sum the softmax weights of the sampled queries in each region. See `methods.sample.oracle.sample_scores`."""
    queries, keys = of_one_type(queries, keys)
    B, Hq, L, D = queries.shape
    Hkv, capacity = keys.shape[1:3]
    layout = Layout(L, capacity if length is None else length, chunks, block_size, rows)
    sampled = max(stop - start for start, stop in (region.sample for region in layout.regions))
    work = B * Hq // Hkv * len(layout.regions) * sampled * layout.S * D
    heads = max(MAX_WORK // work, 1)
    done: list[list[mx.array]] = []
    for first in range(0, Hkv, heads):
        if done:
            mx.async_eval(*done[-1])  # type: ignore[no-untyped-call]  # ends the command buffer without waiting
        done.append(_scores(queries, keys, layout, sampled, scale, (first, min(first + heads, Hkv))))
    shape = (B, Hq, len(layout.regions), layout.key_blocks)
    column, slash = (mx.concatenate(list(parts), axis=1).reshape(shape) for parts in zip(*done, strict=True))
    return column, slash


def _scores(
    queries: mx.array, keys: mx.array, layout: Layout, sampled: int, scale: float, heads: tuple[int, int]
) -> list[mx.array]:
    """Compute ``column`` and ``slash (B, n, G, C, Nk)`` for the n KV heads from ``heads[0]`` to ``heads[1] - 1``."""
    B, Hq, _, D = queries.shape
    G, count, C = Hq // keys.shape[1], heads[1] - heads[0], len(layout.regions)
    shape = shape_of(sampled, D, queries.itemsize)
    tile = SIDE * shape["FRAGMENTS"] * shape["SIMDGROUPS"]
    tiles = -(-sampled // tile)
    samples = B * count * G * C
    splits = min(layout.key_blocks, -(-GROUPS // (samples * tiles)))
    inputs = {
        "queries": queries,
        "keys": keys,
        "samples": _samples(tuple(region.sample for region in layout.regions)),
        "regions": integer(C),
        "length": integer(layout.S),
        "first_head": integer(heads[0]),
        "scale": real(scale),
        "offset": integer(layout.S - layout.L),
    }
    leading = (B, count, G, C)
    inputs["partials"], inputs["totals"] = SCORES(
        inputs,
        [((*leading, layout.key_blocks, tiles * tile, 2), mx.float32), ((*leading, splits, tiles * tile), mx.float32)],
        template={"T": queries.dtype, "D": D, "G": G, "BLOCK": layout.block_size, **shape},
        groups=(tiles * G * C, splits, B * count),
        threads=shape["SIMDGROUPS"] * LANES,
    )
    return SUMS(
        inputs,
        [((*leading, layout.key_blocks), mx.float32)] * 2,
        template={"ROWS": tiles * tile, "BLOCK": layout.block_size},
        groups=(-(-layout.key_blocks // SUMMED_BLOCKS), samples, 1),
        threads=SUM_THREADS,
    )


@lru_cache(maxsize=64)
def _samples(samples: tuple[tuple[int, int], ...]) -> mx.array:
    """Convert the sampled row ranges ``[start, stop)`` of C regions to an int32 array ``(max(C, 4), 2)``.

    The array has at least eight elements, because MLX passes smaller arrays in the constant address space.
    """
    numbers = [*samples, *[(0, 0)] * (4 - len(samples))]
    return mx.array(numbers, mx.int32)


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
    column, slash = sample_scores(queries, keys, chunks=chunks, block_size=block_size, scale=scale, length=layout.S)
    return select_blocks(column, slash, layout, alpha_column=alpha_column, alpha_slash=alpha_slash)


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
    out, lse = attend_lists(queries, keys, values, blocks, block_size=block_size, scale=scale, length=length)
    return out, lse, blocks
