"""Attend on the GPU: exact attention over an index list, shared by every method (metal/attend.h)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from ..common.packed_rows import Rows
from .launch import LANES, Kernel, integer, real, row_inputs
from .select import ITEMS

TILE = 128  # list entries worked off together: ATTEND_TILE
UNSPLIT = 512  # a list up to this length is not worth a second launch
GROUPS = 512  # threadgroups that fill the largest GPU several times

_ROWS = ("keys", "values")
_PACKED = ("key_codes", "key_scales", "key_biases", "value_codes", "value_scales", "value_biases")
_COUNTED = ("indices", "counts", "length", "scale")
_MIXED = ("indices", "length", "scale", "logits", "softmax", "value_mean")
_CANDIDATES = ("candidate_bits", "candidate_indices", "length", "scale")
ATTEND = Kernel("attend_indices", "attend.h", ("queries", *_ROWS, *_COUNTED), ("out", "lse"))
ATTEND_PACKED = Kernel("attend_indices_packed", "attend.h", ("queries", *_PACKED, *_COUNTED), ("out", "lse"))
REALLOCATE = Kernel("attend_reallocate", "attend.h", ("queries", *_ROWS, *_MIXED), ("out", "lse", "alpha"))
REALLOCATE_PACKED = Kernel(
    "attend_reallocate_packed", "attend.h", ("queries", *_PACKED, *_MIXED), ("out", "lse", "alpha")
)
CANDIDATES = Kernel("attend_candidates", "attend_candidates.h", ("queries", *_ROWS, *_CANDIDATES), ("out", "lse"))
CANDIDATES_PACKED = Kernel(
    "attend_candidates_packed", "attend_candidates.h", ("queries", *_PACKED, *_CANDIDATES), ("out", "lse")
)
MERGE = Kernel("merge_parts", "merge.h", ("part_out", "part_lse"), ("out", "lse"))
MERGE_REALLOCATE = Kernel(
    "merge_reallocate", "merge.h", ("part_out", "part_lse", "part_alpha", "value_mean"), ("out", "lse", "alpha")
)


@dataclass(frozen=True)
class Reallocation:
    """What mixing in the mean value needs.

    Attributes:
        logits: float32 ``(B, Hkv, stride, G)`` approximate logits (sparq.3) of ``stride >= S`` keys.
        softmax: float32 ``(B, Hkv, G, 2)``, their largest and one over the sum of ``exp(logit - largest)``.
        value_mean: float32 ``(B, Hkv, D)``.
    """

    logits: mx.array
    softmax: mx.array
    value_mean: mx.array


def splits_of(N: int, lists: int) -> int:
    """Threadgroups that share a list of ``N`` entries when there are ``lists`` of them."""
    if N <= UNSPLIT:
        return 1
    part = max(2 * TILE, -(-N * lists // GROUPS // TILE) * TILE)
    return -(-N // part)


def heads_of(D: int, G: int) -> tuple[int, int]:
    """Query heads per threadgroup and its SIMD groups, so that what a lane keeps stays in registers.

    A lane keeps four float32 sums per head and 128 components, and four rows in flight. Metal refuses to launch more
    threads than the registers of a kernel allow: 512 threads leave about 100 each. A group too large for 256 threads
    is shared out; its keys and values are then read once per part.
    """
    chunks = -(-D // 128)
    heads = next(n for n in range(G, 0, -1) if G % n == 0 and (n == 1 or 4 * chunks * (n + 4) <= 96))
    return heads, 16 if 4 * chunks * (heads + 4) <= 48 else 8


def _narrow(indices: mx.array, keys: int) -> mx.array:
    """As int32; 64-bit numbers past its range must not come back as keys."""
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
    reallocation: Reallocation | None = None,
) -> tuple[mx.array, mx.array]:
    """Exact attention of one query per head over the listed keys (sparq.7).

    Args:
        queries: ``(B, Hq, 1, D)``.
        keys, values: ``(B, Hkv, capacity, D)`` with ``length`` rows in use; whole buffers, which are not copied. Either
            none or both are packed, in the same form.
        indices: ``(B, Hkv, N)`` int32; ``-1``, or any number that is no key's, = empty slot.
        counts: ``(B, Hkv)`` slots of each list that are in use: only those are shared out among the threadgroups.
            None: all.
        reallocation: mix in the mean value (sparq.10); not with ``counts``.

    Returns:
        ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``; 0 and -inf where every slot
        is empty.
    """
    B, Hq, _, D = queries.shape
    if indices.shape[2] == 0:
        return mx.zeros_like(queries), mx.full((B, Hq, 1), -mx.inf)
    how: dict[str, Any] = {"length": length, "counts": counts, "reallocation": reallocation}
    results = parts(queries, keys, values, indices, scale=scale, **how)
    if results[0].shape[2] > 1:
        results = _merge(results, queries.dtype, reallocation)
    return results[0].reshape(B, Hq, 1, D), results[1].reshape(B, Hq, 1)


def takes_candidates(D: int, G: int, candidates: int, top_k: int) -> bool:
    """Whether `attend_candidates` reads so many candidates once, and one threadgroup works off the list."""
    return top_k <= UNSPLIT and candidates <= ITEMS * LANES * heads_of(D, G)[1]


def attend_candidates(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    bits: mx.array,
    indices: mx.array,
    *,
    top_k: int,
    scale: float,
    length: int,
) -> tuple[mx.array, mx.array]:
    """`attend_indices` of the best ``top_k`` of the candidates ``(B, Hkv, N)``, of `select.candidates`."""
    B, Hq, _, D = queries.shape
    Hkv = keys.shape[1]
    G = Hq // Hkv
    heads, simdgroups = heads_of(D, G)
    rows, form = _row_inputs(keys, values)
    out, lse = (CANDIDATES_PACKED if form else CANDIDATES)(
        {
            **rows,
            "queries": queries,
            "candidate_bits": bits,
            "candidate_indices": indices,
            "length": integer(length),
            "scale": real(scale),
        },
        [((B, Hkv, 1, G, D), queries.dtype), ((B, Hkv, 1, G), mx.float32)],
        template={"D": D, "G": G, "HEADS": heads, "SIMDGROUPS": simdgroups, "SLOTS": top_k, **form},
        groups=(1, Hkv * G // heads, B),
        threads=simdgroups * LANES,
    )
    return out.reshape(B, Hq, 1, D), lse.reshape(B, Hq, 1)


def parts(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    indices: mx.array,
    *,
    scale: float,
    length: int | None = None,
    counts: mx.array | None = None,
    reallocation: Reallocation | None = None,
) -> list[mx.array]:
    """The first launch of `attend_indices`: each of ``splits`` threadgroups attends its part of the list.

    Returns:
        ``out (B, Hkv, splits, G, D)``, float32 if there are several splits, and float32 ``lse (B, Hkv, splits, G)``;
        with a reallocation also ``alpha``, like ``lse``, and one split is mixed already.
    """
    B, Hq, _, D = queries.shape
    Hkv, capacity = keys.shape[1:3]
    G = Hq // Hkv
    heads, simdgroups = heads_of(D, G)
    splits = splits_of(indices.shape[2], B * Hkv)
    rows, form = _row_inputs(keys, values)
    inputs = {
        **rows,
        "queries": queries,
        "indices": _narrow(indices, capacity),
        "length": integer(capacity if length is None else length),
        "scale": real(scale),
    }
    statistic = ((B, Hkv, splits, G), mx.float32)
    outputs = [((B, Hkv, splits, G, D), queries.dtype if splits == 1 else mx.float32), statistic]
    template = {"D": D, "G": G, "HEADS": heads, "SIMDGROUPS": simdgroups, **form}
    kernel = ATTEND_PACKED if form else ATTEND
    if reallocation is not None:
        assert counts is None
        kernel = REALLOCATE_PACKED if form else REALLOCATE
        inputs |= vars(reallocation)
        outputs.append(statistic)
    else:
        inputs["counts"] = _no_counts() if counts is None else counts.astype(mx.int32)
        template["COUNTED"] = counts is not None
    return kernel(
        inputs,
        outputs,
        template=template,
        groups=(splits, Hkv * G // heads, B),
        threads=simdgroups * LANES,
    )


def _row_inputs(keys: Rows, values: Rows) -> tuple[dict[str, mx.array], dict[str, int]]:
    """Both as inputs, and their form as template parameters if they are packed."""
    inputs, form = row_inputs("key", keys)
    more, other = row_inputs("value", values)
    assert form == other
    return inputs | more, form


def _merge(results: list[mx.array], dtype: mx.Dtype, reallocation: Reallocation | None) -> list[mx.array]:
    B, Hkv, _, G, D = results[0].shape
    inputs = dict(zip(("part_out", "part_lse", "part_alpha"), results, strict=False))
    statistic = ((B, Hkv * G, 1), mx.float32)
    outputs = [((B, Hkv * G, 1, D), dtype), statistic]
    kernel = MERGE
    if reallocation is not None:
        kernel = MERGE_REALLOCATE
        inputs["value_mean"] = reallocation.value_mean
        outputs.append(statistic)
    return kernel(inputs, outputs, template={"O": dtype, "D": D, "G": G}, groups=(1, Hkv * G, B), threads=D)


@cache
def _no_counts() -> mx.array:
    return mx.array([0], mx.int32)
