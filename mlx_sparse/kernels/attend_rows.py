"""Dense attention of a large query group on the matrix units (metal/attend_rows.h)."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..methods.registry import METAL_ROWS
from .launch import KEPT, LANES, Kernel, Launch, integer, of_one_type, padding_or_zeros, real
from .merge import GROUPS, UNSPLIT, merging

SIDE = 8  # rows of a SIMD group
# A split writes a float32 row for each query row, which the merge reads again. Each of its keys is two rows to read.
# With this many keys per query row, the results of the splits add an eighth to the bytes moved in float16.
KEYS_PER_ROW = 16

_ROWS = ("queries", "keys", "values")
ROWS = Kernel("attend_rows", "attend_rows.h", (*_ROWS, "left_padding", "length", "scale"), ("out", "lse"))


def supports(D: int, rows: int) -> bool:
    """Return True if the kernels support ``D`` and a query group of ``rows``. They stage 16 components at a time."""
    return D % 16 == 0 and D <= 256 and rows <= METAL_ROWS


def shape_of(D: int, itemsize: int, rows: int) -> tuple[int, int]:
    """Return the query rows of a threadgroup and the keys that it stages.

    A lane holds D / 4 numbers of its query and D / 4 sums. Up to D = 128 the registers suffice for 512 threads, above
    for 256; more than 64 rows are then divided among threadgroups. The staged keys leave room for a second threadgroup
    on a core.
    """
    shares = -(-rows // (METAL_ROWS if D <= 128 else METAL_ROWS // 2))
    padding = 16 // itemsize
    staged = max(D * (32 + padding), 32 * (D + padding)) * itemsize
    return -(-rows // shares // SIDE) * SIDE, 32 if staged <= 16 << 10 else 16


def splits_of(N: int, lists: int, rows: int) -> int:
    """Return the number of threadgroups per query group, for ``lists`` groups of ``rows`` over ``N`` keys."""
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
    """Compute exact causal attention of a few queries over all valid keys.

    Args:
        queries: ``(B, Hq, L, D)``, at positions ``length - L ..``; `supports` must accept ``D`` and ``Hq // Hkv * L``.
        keys, values: ``(B, Hkv, capacity, D)`` with ``length`` rows in use; whole buffers, which are not copied if both
            have one type.
        left_padding: ``(B,)`` first valid key of each sequence.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, L)``; 0 and -inf for queries before
        the first valid key.
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


@lru_cache(maxsize=KEPT)
def _attending(
    B: int, Hkv: int, rows: int, D: int, dtype: mx.Dtype, row_type: mx.Dtype, length: int, scale: float
) -> Launch:
    """Build the launch over ``length`` keys.

    The outputs are ``out (B, Hkv, splits, rows, D)``, float32 if there are several splits, and float32
    ``lse (B, Hkv, splits, rows)``.
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
