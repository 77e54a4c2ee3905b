"""Build caches with two KV heads, fill them with random rows, and run decode steps over them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache, adopt
from mlx_sparse.methods import SparQ

H, D = 2, 8
ALL_BUFFERS = SparQ(rank=4, top_k=4, reallocate=True, component_score="query_key", key_bits=16, dense_below=0)
COLUMNS = SparQ(rank=4, top_k=4, reallocate=False, component_score="query", key_bits=16, dense_below=0)
PADDING = [3, 0, 1]


class Rows:
    """Random keys and values with a large mean in some channels, as after q/k-norm."""

    def __init__(self, B: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> None:
        self.B, self.dtype, self.random = B, dtype, np.random.default_rng(seed)
        self.mean = np.linspace(-30, 30, D)

    def __call__(self, count: int) -> tuple[mx.array, mx.array]:
        shape = (self.B, H, count, D)
        keys = mx.array(self.random.normal(self.mean, 1, shape), self.dtype)
        return keys, mx.array(self.random.normal(2, 1, shape), self.dtype)


def single() -> SparseKVCache:
    cache = KVCache()
    adopt(cache)
    assert isinstance(cache, SparseKVCache)
    return cache


def padded() -> SparseBatchKVCache:
    cache = BatchKVCache(PADDING)
    adopt(cache)
    assert isinstance(cache, SparseBatchKVCache)
    return cache


def batch_of(cache: Any) -> int:
    return 1 if isinstance(cache, KVCache) else len(PADDING)


def attend(cache: Any, config: SparQ = ALL_BUFFERS, heads: int = 2 * H) -> tuple[mx.array, mx.array]:
    queries = mx.random.normal((cache.keys.shape[0], heads, 1, D), key=mx.random.key(7)).astype(cache.keys.dtype)
    out, lse = cache.attend(queries, config, scale=D**-0.5, backend="ops")
    mx.eval(out, lse)
    return out, lse
