"""What MLX's methods are compared with: dense attention and a plain read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....cache.kv_cache import SparseKVCache
from ..core import Sample, wrong

Array = npt.NDArray[np.float64]
Dense = Callable[[mx.array, mx.array, mx.array], mx.array]

PIECE = 512  # queries that dense attention takes at a time on a CPU: it leaves out what is above the diagonal


def timed(run: Callable[[], Any]) -> Callable[[int], Sample]:
    """A step that makes arrays, timed until all are evaluated."""

    def step(turn: int) -> Sample:
        start = time.perf_counter()
        mx.eval(run())
        return Sample(time.perf_counter() - start)

    return step


def dense_ways(dtype: mx.Dtype, L: int) -> dict[str, Dense]:
    """Ways to attend densely on this device, of which the fastest in a run counts.

    On a CPU MLX's own attention is not: in half precision above all, plain products are faster, and for a prompt a few
    queries at a time.
    """
    ways: dict[str, Dense] = {"mlx": fused}
    if mx.default_device().type != mx.cpu:
        return ways
    if L > 1:
        return ways | ({"mlx, in pieces": in_pieces} if L > PIECE else {})
    ways["products"] = products
    if dtype != mx.float32:
        ways["float32 products"] = float32_products
    return ways


def fused(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """As mlx-lm runs it."""
    mask = "causal" if queries.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)


def products(queries: mx.array, keys: mx.array, values: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Two matrix products and a softmax, for one query per head."""
    B, Hq, _, D = queries.shape
    Hkv = keys.shape[1]
    q, k, v = (array.astype(dtype or array.dtype) for array in (queries, keys, values))
    scores = (q.reshape(B, Hkv, Hq // Hkv, D) * D**-0.5) @ k.swapaxes(-1, -2)
    return (mx.softmax(scores, axis=-1, precise=True) @ v).reshape(queries.shape).astype(queries.dtype)


def float32_products(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """`products` of arrays that are widened first."""
    return products(queries, keys, values, mx.float32)


def in_pieces(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """`fused` for a few queries of a prompt at a time, each over the keys up to its own."""
    L, S = queries.shape[2], keys.shape[2]
    found = []
    for start in range(0, L, PIECE):
        stop = min(start + PIECE, L)
        end = S - L + stop
        found.append(fused(queries[:, :, start:stop], keys[:, :, :end], values[:, :, :end]))
        mx.eval(found)  # one at a time: its scores are large
    return mx.concatenate(found, axis=2)


def read(cache: SparseKVCache) -> list[mx.array]:
    """Look at every byte of the keys and values in use: the sums of their words."""
    kind = mx.uint32 if cache.keys.shape[-1] * cache.keys.itemsize % 4 == 0 else mx.uint16
    return [array.view(kind)[:, :, : cache.length].sum() for array in (cache.keys, cache.values)]


def cache_of(keys: mx.array, values: mx.array, length: int | None = None) -> SparseKVCache:
    """A cache that holds the first ``length`` of these rows, or all."""
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, length or keys.shape[2]
    mx.eval(keys, values)
    return cache


def double(array: mx.array) -> Array:
    """As float64."""
    return np.array(array.astype(mx.float32), np.float64)


def wrong_result(out: Array, right: Array, error: float, dtype: mx.Dtype) -> str | None:
    """What is wrong with ``out``: it may be off by twice dense attention's ``error`` and one unit in the last place."""
    allowed = 2 * error + float(mx.finfo(dtype).eps) * float(np.abs(right).max())
    return wrong(float(np.abs(out - right).max()), allowed)


def normal(B: int, heads: int, length: int, D: int, dtype: mx.Dtype) -> mx.array:
    """Random rows ``(B, heads, length, D)``."""
    return mx.random.normal((B, heads, length, D), dtype=dtype)
