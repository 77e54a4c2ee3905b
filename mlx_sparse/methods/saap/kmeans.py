"""Run spherical k-means with MLX array operations (docs/spec/saap.md, saap.1 and saap.2)."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from ...checks import ConfigError

ITERATIONS = 10
PRODUCTS_AT_ONCE = 1 << 25  # maximum number of key-centroid products in memory at once: 128 MiB


def saap_assign(keys: mx.array, centroids: mx.array) -> mx.array:
    """Assign each key ``(..., n, D)`` to the centroid ``(..., C, D)`` with the largest inner product (saap.1).

    Return int32 bucket ids ``(..., n)``. Ties go to the lower bucket. Keys that contain NaN or inf get bucket 0.
    """
    *heads, n, _ = keys.shape
    if n == 0:
        return mx.zeros((*heads, 0), mx.int32)
    step = max(PRODUCTS_AT_ONCE // (math.prod(heads) * centroids.shape[-2]), 1)
    directions = centroids.astype(mx.float32).swapaxes(-1, -2)
    ids = []
    for start in range(0, n, step):
        rows = keys[..., start : start + step, :].astype(mx.float32)
        best = mx.argmax(rows @ directions, axis=-1).astype(mx.int32)
        ids.append(mx.where(mx.isfinite(rows).all(axis=-1), best, 0))
        if n > step:
            mx.eval(ids[-1])  # keep the products of only one chunk in memory
    return ids[0] if len(ids) == 1 else mx.concatenate(ids, axis=-1)


def fit(keys: mx.array, buckets: int, *, seed: int = 0) -> mx.array:
    """Fit ``buckets`` float32 unit centroids ``(..., C, D)`` to ``keys (..., n, D)``.

    The first iteration starts from random keys.

    Raises:
        ConfigError: there are more buckets than keys.
    """
    centroids = keys[..., mx.array(start_points(keys.shape[-2], buckets, seed)), :].astype(mx.float32)
    centroids = _unit(centroids, mx.zeros_like(centroids))
    for _ in range(ITERATIONS):
        centroids = move(keys, centroids)
        mx.eval(centroids)
    return centroids


def move(keys: mx.array, centroids: mx.array) -> mx.array:
    """Run one k-means iteration: set each centroid to the normalized sum of the keys in its bucket (saap.2).

    If a bucket is empty or its sum is not finite, its centroid does not change.
    """
    *heads, C, D = centroids.shape
    ids = saap_assign(keys, centroids).reshape(-1, keys.shape[-2])
    rows = ids + C * mx.arange(len(ids))[:, None]
    total = mx.zeros((len(ids) * C, D)).at[rows.reshape(-1)].add(keys.astype(mx.float32).reshape(-1, D))
    return _unit(total.reshape(*heads, C, D), centroids)


def start_points(n: int, buckets: int, seed: int) -> np.ndarray:
    """Return ``buckets`` distinct random key indices below ``n`` in ascending order.

    Raises:
        ConfigError: there are more buckets than keys.
    """
    if buckets > n:
        raise ConfigError(f"buckets: expected at most the number of keys to cluster, {n:,}, got {buckets:,}.")
    return np.sort(np.random.default_rng(seed).choice(n, buckets, replace=False))


def _unit(vectors: mx.array, otherwise: mx.array) -> mx.array:
    length = mx.linalg.norm(vectors, axis=-1, keepdims=True)
    sound = (length > 0) & (length < mx.inf)
    return mx.where(sound, vectors / mx.where(sound, length, 1.0), otherwise)
