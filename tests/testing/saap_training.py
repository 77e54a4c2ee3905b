"""Build random texts and buckets for the training of SAAP."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_sparse.tools.train.rows import Distances, Texts

Array = npt.NDArray[Any]
D, BUCKETS = 16, 12
S, HEADS, GROUP, WINDOWS = 150, 2, 3, 2
DISTANCES = Distances(sink_tokens=2, recent_tokens=40, farthest_top=20)


def texts(seed: int = 0, *, every: int = 1) -> Texts:
    """Return the float16 queries and keys of random texts, with different rows before and after RoPE."""
    random = np.random.default_rng(seed)

    def array(heads: int, n: int) -> Array:
        return random.normal(size=(WINDOWS, heads, n, D)).astype(np.float16)

    positions = np.tile(np.arange(0, S, every), (WINDOWS, 1))
    n = positions.shape[1]
    return Texts(array(HEADS, S), array(HEADS, S), array(HEADS * GROUP, n), array(HEADS * GROUP, n), positions, 0.6)


def bucket_ids(seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, BUCKETS, (WINDOWS, HEADS, S)).astype(np.int32)
