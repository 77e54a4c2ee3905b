"""Compute exact attention over listed keys on the GPU for all decode methods (metal/attend.h)."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..launch import (
    LANES,
    LAUNCH_CACHE_SIZE,
    Kernel,
    Launch,
    RowFormat,
    integer,
    parts_of,
    real,
    repeated,
    row_template,
    unread,
)
from ..packed_rows import Rows
from ..select.metal import ITEMS
from .metal_rows import GROUPS, UNSPLIT, merging
from .metal_rows import attend_rows as attend_rows  # the registry finds it here

# MLX's own kernels compute dense attention. `dense_lse` is no part of a decode step.
from .ops import dense_attention as dense_attention
from .ops import dense_lse as dense_lse

TILE = 128  # list entries per tile: ATTEND_TILE

_ROWS = ("keys", "values")
_GIVEN = ("bias", "length", "scale")
_COUNTED = ("indices", "counts", *_GIVEN)
_MIXED = ("indices", "logits", "softmax", "value_mean", *_GIVEN)
_CANDIDATES = ("candidate_bits", "candidate_indices", *_GIVEN)
ATTEND = Kernel("attend_indices", "attend.h", ("queries", *_ROWS, *_COUNTED), ("out", "lse"))
REALLOCATE = Kernel("attend_reallocate", "attend.h", ("queries", *_ROWS, *_MIXED), ("out", "lse", "alpha"))
_RESULTS = ("out", "lse", "recall")
CANDIDATES = Kernel("attend_candidates", "attend_candidates.h", ("queries", *_ROWS, *_CANDIDATES), _RESULTS)


class Reallocation(NamedTuple):
    """Inputs for mixing in the mean value (sparq.10).

    Attributes:
        logits: float32 ``(B, Hkv * G // n, stride, n)`` approximate logits (sparq.3) of ``stride >= S`` keys, for ``n``
            query heads at a time.
        softmax: float32 ``(B, Hkv, G, 2)``, the largest logit and ``1 / sum(exp(logit - largest))`` per query head.
        value_mean: float32 ``(B, Hkv, D)`` mean of the valid values.
    """

    logits: mx.array
    softmax: mx.array
    value_mean: mx.array


class Listed(NamedTuple):
    """Sizes and parameters of a launch over a list of keys.

    Attributes:
        length: number of keys in the KV cache.
        biased: True if a bias is added to the logits.
    """

    B: int
    Hq: int
    Hkv: int
    D: int
    dtype: mx.Dtype
    length: int
    scale: float
    row_format: RowFormat
    biased: bool


def splits_of(N: int, lists: int) -> int:
    """Return the number of threadgroups that share a list of ``N`` entries. ``lists`` is the number of lists."""
    if N <= UNSPLIT:
        return 1
    part = max(2 * TILE, -(-N * lists // GROUPS // TILE) * TILE)
    return -(-N // part)


@cache
def heads_of(D: int, G: int) -> tuple[int, int]:
    """Return the number of query heads and the number of SIMD groups per threadgroup.

    The sums of a lane must fit into registers. For each chunk of 128 components, a lane holds four float32 sums per
    head and loads four rows at once, or two rows if D exceeds 256. With 512 threads, each thread has about 100
    registers, and Metal refuses to launch a kernel that needs more. If a query group needs too many registers even with
    256 threads, it is divided among threadgroups. Each threadgroup then reads all keys and values.
    """
    chunks = -(-D // 128)
    rows = 4 if chunks <= 2 else 2
    heads = next(n for n in range(G, 0, -1) if G % n == 0 and (n == 1 or 4 * chunks * (n + rows) <= 96))
    return heads, 16 if 4 * chunks * (heads + rows) <= 48 else 8


def _narrow(indices: mx.array, keys: int) -> mx.array:
    """Convert indices to int32. A 64-bit index outside ``[0, keys)`` becomes -1 instead of wrapping to a key index."""
    if indices.dtype == mx.int32:
        return indices
    if indices.itemsize > 4:
        indices = mx.where((indices >= 0) & (indices < keys), indices, -1)
    return indices.astype(mx.int32)


def attend_indices(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    indices: mx.array,
    *,
    scale: float,
    length: int | None = None,
    counts: mx.array | None = None,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Attend to the listed keys of whole buffers (sparq.7). See `core.attend.ops.attend_indices`.

    Both buffers are arrays, or both are quantized with the same bits and group size.
    """
    B, Hq, _, _ = queries.shape
    if indices.shape[2] == 0:
        return mx.zeros_like(queries), mx.full((B, Hq, 1), -mx.inf)
    how: dict[str, Any] = {"scale": scale, "length": length, "counts": counts, "bias": bias}
    out, lse = attend_listed(queries, (keys, values), indices, **how)
    return out, lse


def attend_listed(
    queries: mx.array,
    rows: tuple[Rows, Rows],
    indices: mx.array,
    *,
    scale: float,
    length: int | None = None,
    counts: mx.array | None = None,
    bias: mx.array | None = None,
    reallocation: Reallocation | None = None,
) -> list[mx.array]:
    """Compute `attend_indices` for lists that have at least one slot.

    Args:
        rows: keys and values.
        reallocation: inputs for mixing in the mean value (sparq.10), or None. Cannot be combined with ``counts``.

    Returns:
        ``out`` and ``lse``. If ``reallocation`` is given, also float32 ``alpha (B, Hq, 1)`` (sparq.8).
    """
    B, Hq, _, D = queries.shape
    (Hkv, capacity), N = rows[0].shape[1:3], indices.shape[2]
    length = capacity if length is None else length
    counted, scored = counts is not None, 0 if reallocation is None else reallocation.logits.shape[3]
    (key_parts, row_format), (value_parts, other) = map(parts_of, rows)
    assert row_format == other
    listed = _narrow(indices, capacity)
    used = repeated(1, 0) if counts is None else counts.astype(mx.int32)
    sizes = Listed(B, Hq, Hkv, D, queries.dtype, length, scale, row_format, bias is not None)
    launch, added = _attending(sizes, N, counted, scored), unread() if bias is None else bias
    given = queries, *key_parts, *value_parts, listed
    if reallocation is not None:
        assert counts is None
        results = launch(*given, *reallocation, added)
    else:
        results = launch(*given, used, added)
    if splits_of(N, B * Hkv) > 1:
        mean = [] if reallocation is None else [reallocation.value_mean]
        results = merging(B, Hkv, Hq // Hkv, D, queries.dtype, scored > 0)(*results, *mean)
    return results


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _attending(n: Listed, N: int, counted: bool, scored: int) -> Launch:
    """Build the launch of `attend_indices` for lists of ``N`` entries.

    ``scored`` is the last size of the logits in `Reallocation`, or 0 without reallocation.

    Each list is divided among ``splits`` threadgroups (`splits_of`). The outputs are float32
    ``out (B, Hkv, splits, G, D)`` and ``lse (B, Hkv, splits, G)``. If ``scored`` is not 0, the third output is
    ``alpha`` in the shape of ``lse``. If there is only one split, the outputs have the same shapes and types as in
    `attend_listed`.
    """
    B, Hq, Hkv, D, dtype, length, scale, row_format, biased = n
    G, splits, mixed = Hq // Hkv, splits_of(N, B * Hkv), scored > 0
    heads, simdgroups = heads_of(D, G)
    statistic = ((B, Hq, 1) if splits == 1 else (B, Hkv, splits, G), mx.float32)
    template = {"D": D, "G": G, "HEADS": heads, "SIMDGROUPS": simdgroups, **row_template(row_format), "BIAS": biased}
    return Launch(
        (REALLOCATE if mixed else ATTEND).of_rows(row_format),
        [((*statistic[0], D), dtype if splits == 1 else mx.float32), *[statistic] * (1 + mixed)],
        [integer(length), real(scale)],
        template=template | ({"SCORED": scored} if mixed else {"COUNTED": counted}),
        groups=(splits, Hq // heads, B),
        threads=simdgroups * LANES,
    )


def takes_candidates(D: int, G: int, candidates: int, top_k: int) -> bool:
    """Return True if one threadgroup of `attend_candidates` can load all candidates and attend to ``top_k`` keys."""
    return top_k <= UNSPLIT and candidates <= ITEMS * LANES * heads_of(D, G)[1]


def attend_candidates(n: Listed, top_k: int) -> Launch:
    """Build the launch that selects the best ``top_k`` candidates from a `top_k_launch` and attends to them.

    The outputs are ``out`` and ``lse`` of `attend_indices`, and float32 ``recall (B, Hkv)`` (sparq.24).
    """
    B, Hq, Hkv, D, dtype, length, scale, row_format, biased = n
    G = Hq // Hkv
    heads, simdgroups = heads_of(D, G)
    template = {"D": D, "G": G, "HEADS": heads, "SIMDGROUPS": simdgroups, "SLOTS": top_k, "BIAS": biased}
    return Launch(
        CANDIDATES.of_rows(row_format),
        [((B, Hq, 1, D), dtype), ((B, Hq, 1), mx.float32), ((B, Hkv), mx.float32)],
        [integer(length), real(scale)],
        template=template | row_template(row_format),
        groups=(1, Hq // heads, B),
        threads=simdgroups * LANES,
    )
