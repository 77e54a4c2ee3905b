"""Time of one decode step: SparQ against MLX's dense attention, interleaved in one run.

A step goes through several layers, each with a cache of its own, as in a model: on a GPU a single small attention would
drown in the cost of `mx.eval`, and one cache used again and again would stay in the chip's last-level cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import registry
from ..cache import SparseKVCache
from ..config import SparQ
from ..machine import memory
from .dense import Shape

Array = npt.NDArray[np.float64]

WORKING_SET = 256 << 20  # bytes of K and V that a step goes through if it can: more than a last-level cache
MOST_LAYERS = 32
WARM_UP = 2
LARGEST_SHARE = 0.6  # of the memory of the machine
GAP = 60.0  # logits by which planted keys stand out, so that they hold all of the attention by a few components too


@dataclass(frozen=True)
class Row:
    """One shape, type and length.

    Attributes:
        dense, sparse: microseconds per layer and step: first quartile, median, third quartile; None with a ``note``.
        note: why there are no times.
        failed: the result was wrong.
    """

    dtype: str
    shape: Shape
    S: int
    method: str
    backend: str
    layers: int
    dense: tuple[float, ...] | None = None
    sparse: tuple[float, ...] | None = None
    note: str | None = None
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = vars(self) | vars(self.shape) | {"shape": str(self.shape)}
        if self.dense and self.sparse:
            row["ratio"] = self.dense[1] / self.sparse[1]
        return row


def measure(shape: Shape, S: int, dtype: str, config: SparQ, backend: str, repeat: int) -> Row:
    """Check the method's result, then time it."""
    backend = registry.resolve(backend, "sparq", D=shape.D, G=shape.G)
    kind = getattr(mx, dtype)
    size = 2 * shape.Hkv * S * shape.D * kind.size
    layers = max(1, min(MOST_LAYERS, WORKING_SET // size))
    row = partial(Row, dtype, shape, S, str(config), backend, layers)
    if config.attended >= S:
        return row(note=f"dense: all of {S} keys are attended")
    needed = 1.5 * size * layers
    if needed > LARGEST_SHARE * memory():
        return row(note=f"needs {needed / 1e9:.0f} GB of this machine's {memory() / 1e9:.0f} GB")
    wrong = parity(shape, S, kind, config, backend)
    gc.collect()  # its arrays, before the next ones
    if wrong:
        return row(note=wrong, failed=True)
    dense, sparse = times(shape, S, kind, config, backend, layers, repeat)
    return row(dense=dense, sparse=sparse)


def times(
    shape: Shape, S: int, dtype: mx.Dtype, config: SparQ, backend: str, layers: int, repeat: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Quartiles of microseconds per layer, dense and sparse, in turns."""
    queries = normal(shape.Hq, 1, shape.D, dtype)
    caches = [cache_of(*(normal(shape.Hkv, S, shape.D, dtype) for _ in "kv")) for _ in range(layers)]
    return in_turns(queries, caches, lambda out, cache: sparse_attention(out, cache, config, backend), repeat)


def in_turns(
    queries: mx.array, caches: list[SparseKVCache], attend: Callable[[mx.array, SparseKVCache], mx.array], repeat: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Quartiles of microseconds per layer of a step through ``caches``, dense and by ``attend``."""

    def through(attention: Callable[[mx.array, SparseKVCache], mx.array]) -> float:
        out = queries  # what a layer returns is the next one's query
        start = time.perf_counter()
        for cache in caches:
            out = attention(out, cache)
        mx.eval(out)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        through(dense_attention), through(attend)
    pairs = [(through(dense_attention), through(attend)) for _ in range(repeat)]
    spread = [quantiles(side, method="inclusive") for side in zip(*pairs, strict=True)]
    first, second = (tuple(1e6 * t / len(caches) for t in quartiles) for quartiles in spread)
    return first, second


def parity(shape: Shape, S: int, dtype: mx.Dtype, config: SparQ, backend: str) -> str | None:
    """What is wrong with the method's result; None if nothing is.

    All of the attention is on as many planted keys as the method can choose, so its answer must be dense attention's:
    that of plain float64 attention over the planted keys alone.
    """
    window = config.top_k // 4 if config.local_window is None else config.local_window
    base = mx.random.normal((1, shape.Hkv, 1, shape.D))
    noise = mx.random.normal((1, shape.Hkv, shape.G, shape.D))
    queries = (base + 0.5 * noise).reshape(1, shape.Hq, 1, shape.D).astype(dtype)
    keys, values = (normal(shape.Hkv, S, shape.D, dtype) for _ in "kv")
    count = max(1, config.top_k - window)
    planted = mx.array([i * (S - window) // count for i in range(count)])
    keys[:, :, planted] += (base * (GAP * shape.D**0.5 / (base**2).sum(axis=-1, keepdims=True))).astype(dtype)
    cache = cache_of(keys, values)

    rows = [double(mx.take(array, planted, axis=2)[0]) for array in (keys, values)]
    expected = plain(double(queries).reshape(shape.Hkv, shape.G, shape.D), *rows).reshape(shape.Hq, shape.D)

    def error(out: mx.array) -> float:
        return float(np.abs(double(out).reshape(expected.shape) - expected).max())

    ulp = mx.finfo(dtype).eps * float(np.abs(expected).max())
    allowed = 2 * error(dense_attention(queries, cache)) + ulp
    found = error(sparse_attention(queries, cache, config, backend))
    return None if found <= allowed else f"wrong result: error {found:.1e}, allowed {allowed:.1e}"


def dense_attention(queries: mx.array, cache: SparseKVCache) -> mx.array:
    """Attention as mlx-lm runs it."""
    scale = queries.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(queries, cache.keys, cache.values, scale=scale)


def sparse_attention(queries: mx.array, cache: SparseKVCache, config: SparQ, backend: str) -> mx.array:
    """Attention as an enabled model runs it; what the cache keeps beside the keys is built in the first call."""
    return cache.attend(queries, config, scale=queries.shape[-1] ** -0.5, backend=backend)[0]


def table(rows: Sequence[Row]) -> str:
    """The rows for people; times are per layer, medians with quartiles."""
    lines = [
        "| type | query heads | KV heads | D | S | layers | dense, us | sparq, us | dense / sparq |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.dtype, row.shape.Hq, row.shape.Hkv, row.shape.D, row.S, row.layers]
        if row.dense and row.sparse:
            cells += [spread_of(row.dense), spread_of(row.sparse), f"{row.dense[1] / row.sparse[1]:.2f}"]
        else:
            cells += [row.note, "", ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def spread_of(quartiles: tuple[float, ...]) -> str:
    """Median and quartiles."""
    low, middle, high = (f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in quartiles)
    return f"{middle} ({low} to {high})"


def normal(heads: int, length: int, D: int, dtype: mx.Dtype) -> mx.array:
    """Rows ``(1, heads, length, D)``."""
    return mx.random.normal((1, heads, length, D), dtype=dtype)


def double(array: mx.array) -> Array:
    """As float64."""
    return np.array(array.astype(mx.float32), np.float64)


def plain(queries: Array, keys: Array, values: Array) -> Array:
    """Attention of (heads, G, D) over (heads, N, D) in NumPy."""
    scores = queries @ keys.swapaxes(1, 2) * keys.shape[2] ** -0.5
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mean: Array = weights @ values / weights.sum(axis=2, keepdims=True)
    return mean


def cache_of(keys: mx.array, values: mx.array) -> SparseKVCache:
    """A cache that holds these rows."""
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
    mx.eval(keys, values)
    return cache
