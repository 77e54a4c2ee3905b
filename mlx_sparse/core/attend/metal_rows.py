"""Compute dense attention for large query groups on the GPU's matrix units (metal/attend_rows.h).

All launches that divide the keys into parts merge the results of the parts with `merging` (metal/merge.h).
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..launch import LANES, LAUNCH_CACHE_SIZE, Kernel, Launch, integer, of_one_type, padding_or_zeros, real
from ..registry import METAL_ROWS

UNSPLIT = 512  # maximum length of a list that one threadgroup attends to, so that no merge is needed
GROUPS = 512  # number of threadgroups that fills the largest GPU several times
SIDE = 8  # query rows per SIMD group
# Minimum number of keys per query row in a split. A split reads a key row and a value row for each key. It writes one
# float32 row for each query row, which the merge reads again. At this minimum and in float16, the rows that the splits
# write add an eighth to the bytes moved.
KEYS_PER_ROW = 16

MERGE = Kernel("merge_parts", "merge.h", ("part_out", "part_lse"), ("out", "lse"))
MERGE_REALLOCATE = Kernel(
    "merge_reallocate", "merge.h", ("part_out", "part_lse", "part_alpha", "value_mean"), ("out", "lse", "alpha")
)
_ROWS = ("queries", "keys", "values")
ROWS = Kernel("attend_rows", "attend_rows.h", (*_ROWS, "left_padding", "length", "scale"), ("out", "lse"))


def shape_of(D: int, itemsize: int, rows: int) -> tuple[int, int]:
    """Return the number of query rows per threadgroup, and the number of keys that a threadgroup stages at once.

    A lane holds D / 4 components of its query and D / 4 sums. The registers suffice for 512 threads (128 rows) if D is
    at most 128, otherwise for 256 threads (64 rows). A larger query group is divided among threadgroups. The staged
    keys leave enough threadgroup memory for two threadgroups per GPU core.
    """
    shares = -(-rows // (METAL_ROWS if D <= 128 else METAL_ROWS // 2))
    padding = 16 // itemsize
    staged = max(D * (32 + padding), 32 * (D + padding)) * itemsize
    return -(-rows // shares // SIDE) * SIDE, 32 if staged <= 16 << 10 else 16


def splits_of(N: int, lists: int, rows: int) -> int:
    """Return the number of threadgroups that share ``N`` keys of a KV head.

    Args:
        lists: number of query groups in the batch, B * Hkv.
        rows: number of query rows per query group.
    """
    return min(-(-N // max(UNSPLIT, -(-N * lists // GROUPS))), max(N // (KEYS_PER_ROW * rows), 1))


def attend_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    length: int | None = None,
    left_padding: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute exact causal attention of a few queries to all valid keys of whole buffers.

    The buffers are not copied if both have the same type. `registry.unsupported` must accept the head dim and the
    ``Hq // Hkv * L`` rows of a group.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, L)``. For queries before the first
        valid key, ``out`` is 0 and ``lse`` is -inf.
    """
    B, Hq, L, D = queries.shape
    Hkv, capacity = keys.shape[1:3]
    keys, values = of_one_type(keys, values)
    length = capacity if length is None else length
    rows, padding = Hq // Hkv * L, padding_or_zeros(left_padding, B)
    launch = _attending(B, Hkv, rows, D, queries.dtype, keys.dtype, length, scale)
    out, lse = launch(queries, keys, values, padding)
    if splits_of(length, B * Hkv, rows) > 1:
        out, lse = merging(B, Hkv, rows, D, queries.dtype)(out, lse)
    return out.reshape(queries.shape), lse.reshape(B, Hq, L)


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _attending(
    B: int, Hkv: int, rows: int, D: int, dtype: mx.Dtype, row_type: mx.Dtype, length: int, scale: float
) -> Launch:
    """Build the launch of `attend_rows` over ``length`` keys.

    The outputs are ``out (B, Hkv, splits, rows, D)`` and float32 ``lse (B, Hkv, splits, rows)``. If there are several
    splits, ``out`` is float32.
    """
    splits, (in_group, staged) = splits_of(length, B * Hkv, rows), shape_of(D, row_type.size, rows)
    statistic = (B, Hkv, splits, rows)
    return Launch(
        ROWS,
        [((*statistic, D), dtype if splits == 1 else mx.float32), (statistic, mx.float32)],
        [integer(length), real(scale)],
        template={"T": row_type, "D": D, "ROWS": in_group, "KEYS": staged},
        groups=(splits, Hkv * -(-rows // in_group), B),
        threads=in_group // SIDE * LANES,
    )


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def merging(B: int, Hkv: int, G: int, D: int, dtype: mx.Dtype, mixed: bool = False) -> Launch:
    """Build the launch that merges the attention results for ``splits`` parts of the keys.

    The inputs are float32 ``out (B, Hkv, splits, G, D)`` and ``lse (B, Hkv, splits, G)``. The outputs are
    ``out (B, Hkv * G, 1, D)`` and ``lse (B, Hkv * G, 1)``. If ``mixed`` is True, the launch also mixes in the
    mean value (sparq.10).
    """
    Hq = Hkv * G
    statistic = ((B, Hq, 1), mx.float32)
    return Launch(
        MERGE_REALLOCATE if mixed else MERGE,
        [((B, Hq, 1, D), dtype), *[statistic] * (1 + mixed)],
        template={"O": dtype, "D": D, "G": G},
        groups=(1, Hq, B),
        threads=D,
    )
