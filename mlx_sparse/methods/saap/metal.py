"""Run SAAP on the GPU (docs/spec/saap.md, equations (saap.5) to (saap.10)).

A decode step has three launches, which route the queries to buckets, list the keys, and attend to the listed keys. If a
list has more than 512 keys, it is split, and a fourth launch merges the results.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.attend.metal import attend_indices
from ...core.launch import LANES, Kernel, integer, padding_or_zeros, repeated
from .ops import list_keys
from .ops import saap_assign as saap_assign  # a matrix product and a maximum, once per key
from .ops import saap_index as saap_index  # once every few hundred tokens

MAX_THREADS, LANES_PER_UNIT = 512, 8
LIST_TILE, LIST_THREADS = 1024, 256

ROUTE = Kernel(
    "saap_route",
    "saap_route.h",
    ("queries", "hidden_weight", "hidden_bias", "out_weight", "out_bias", "probes"),
    ("units", "bits", "visited"),
)
INDICES = Kernel(
    "saap_indices",
    "saap_indices.h",
    ("visited", "offsets", "key_ids", "left_padding", "covered", "length", "sink_tokens", "capacity"),
    ("indices", "counts"),
)


def shape_of(G: int, *layers: int) -> tuple[int, int]:
    """Return the number of adjacent output units per lane and the number of threads per threadgroup.

    A lane holds one float32 sum for each unit and query head, at most 32 sums. Up to eight lanes share a unit.

    Args:
        layers: number of output units in each layer of the query network.
    """
    width = next(n for n in (4, 2, 1) if n * G <= 32 and all(units % n == 0 for units in layers))
    simdgroups = -(-LANES_PER_UNIT * max(layers) // (width * LANES))
    return width, min(simdgroups * LANES, MAX_THREADS)


def saap_route(
    queries: mx.array,
    *,
    out_weight: mx.array,
    out_bias: mx.array | None = None,
    hidden_weight: mx.array | None = None,
    hidden_bias: mx.array | None = None,
    probes: int,
) -> mx.array:
    """Select the buckets that each KV head visits (saap.8). See `methods.saap.oracle.saap_route`."""
    B, Hq, _, D = queries.shape
    Hkv, _, C = out_weight.shape
    G = Hq // Hkv
    hidden = () if hidden_weight is None else (hidden_weight.shape[2],)
    # MLX passes arrays of fewer than eight elements in the constant address space. There, the kernel can only load one
    # weight at a time.
    width, threads = shape_of(G, C, *hidden) if out_weight.size >= 8 else (1, LANES)
    inputs = {
        "queries": queries,
        "hidden_weight": _zeros(8) if hidden_weight is None else hidden_weight,
        "hidden_bias": _zeros(Hkv, *hidden) if hidden_bias is None else hidden_bias,
        "out_weight": out_weight,
        "out_bias": _zeros(Hkv, C) if out_bias is None else out_bias,
        "probes": integer(probes),
    }
    slots = (B, Hkv, probes)
    _, _, visited = ROUTE(
        inputs,
        [((B, Hkv, sum(hidden) + C, G), mx.float32), (slots, mx.uint32), (slots, mx.int32)],
        template={"D": D, "G": G, "WIDTH": width, "HIDDEN": bool(hidden)},
        groups=(1, Hkv, B),
        threads=threads,
    )
    return visited


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
    B, Hkv, slots = visited.shape
    if slots == 0:
        visited, slots = mx.full((B, Hkv, 1), -1, mx.int32), 1
    if key_ids.shape[2] == 0:
        key_ids = mx.zeros((B, Hkv, 1), mx.int32)
    inputs = {
        "visited": visited.astype(mx.int32),
        "offsets": offsets,
        "key_ids": key_ids,
        "left_padding": padding_or_zeros(left_padding, B),
        "length": integer(length),
        "covered": repeated(B, covered) if isinstance(covered, int) else covered,
        "sink_tokens": integer(min(sink_tokens, length)),
        "capacity": integer(capacity),
    }
    indices, counts = INDICES(
        inputs,
        [((B, Hkv, capacity), mx.int32), ((B, Hkv), mx.int32)],
        template={"SLOTS": slots},
        groups=(-(-capacity // LIST_TILE), Hkv, B),
        threads=LIST_THREADS,
    )
    return indices, counts


def saap_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, length: int | None = None, **visit: Any
) -> tuple[mx.array, mx.array, mx.array]:
    """Run a SAAP decode step over whole buffers. See `methods.saap.ops.saap_attention`."""
    S = keys.shape[2] if length is None else length
    indices, counts = list_keys(saap_indices, S, **visit)
    out, lse = attend_indices(queries, keys, values, indices, counts=counts, scale=scale, length=S)
    return out, lse, counts


@lru_cache(maxsize=64)
def _zeros(*shape: int) -> mx.array:
    """Return float16 zeros in place of missing weights or biases."""
    return mx.array(np.zeros(shape, np.float16))
