"""k-means of one KV head's keys for the artefact: by Faiss where it is installed, by MLX otherwise."""

from __future__ import annotations

import importlib.util

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...ops.kmeans import ITERATIONS, fit, start_points

POINTS = 256  # keys per bucket that k-means looks at, as Faiss does

Array = npt.NDArray[np.float32]


def fit_centroids(keys: Array, buckets: int, *, seed: int = 0, by: str | None = None) -> Array:
    """Unit centroids ``(C, D)`` of ``keys (n, D)`` without sinks; either library starts at the same keys.

    Args:
        by: "faiss" or "mlx"; None for Faiss where it is installed.

    Raises:
        ConfigError: more buckets than keys.
    """
    if len(keys) > POINTS * buckets:
        keys = keys[np.sort(np.random.default_rng(seed).choice(len(keys), POINTS * buckets, replace=False))]
    if (by or library()) == "mlx":
        return np.array(fit(mx.array(keys), buckets, seed=seed))
    import faiss

    start = keys[start_points(len(keys), buckets, seed)]
    kmeans = faiss.Kmeans(
        keys.shape[1],
        buckets,
        niter=ITERATIONS,
        spherical=True,
        max_points_per_centroid=POINTS,
        min_points_per_centroid=1,
    )
    kmeans.train(np.ascontiguousarray(keys), init_centroids=np.ascontiguousarray(start))
    return np.asarray(kmeans.centroids, np.float32)


def library() -> str:
    """The library that computes k-means here: "faiss" or "mlx"."""
    return "faiss" if importlib.util.find_spec("faiss") else "mlx"
