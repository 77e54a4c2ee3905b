"""Test top-k selection on the backends with a kernel: any length, and ties to the lower index."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import Array, covering

from mlx_sparse import oracle
from mlx_sparse.core.select import metal

# S, top_k and local_window. The kernels select in tiles of 1024 to 4096 scores, then among the best of all tiles.
SIZES = [
    *((1, 1, 0), (5, 9, 2), (15, 1, 1), (16, 37, 9), (17, 3000, 100), (20, 40, 30), (31, 31, 31), (77, 20, 5)),
    *((300, 1, 0), (300, 128, 32), (1023, 128, 0), (1024, 37, 9), (1025, 3000, 100), (4096, 128, 32), (4097, 128, 0)),
    *((5000, 1, 1), (5000, 3000, 100), (8193, 128, 32), (9000, 3000, 10), (9000, 5000, 10), (40_000, 700, 100)),
]


def with_holes(scores: Array) -> Array:
    rng = np.random.default_rng(0)
    holes = np.where(rng.random(scores.shape) < 0.6, -np.inf, scores)
    return np.where(rng.random(scores.shape) < 0.1, np.copysign(np.nan, scores), holes)


# Scores computed from normally distributed numbers.
KINDS: dict[str, Any] = {
    "distinct": lambda s: s,
    "few values": np.round,
    "not finite": with_holes,
    "softmax": lambda s: np.exp(4 * s),
    "equal": np.zeros_like,
    "signed zeros": lambda s: np.where(s > 0, 0.0, -0.0),
    "negative": lambda s: -np.abs(s) - 1,
    "last bit": lambda s: np.float32(1) + np.round(s) * np.float32(2**-23),
    "subnormal": lambda s: np.round(s) * np.float32(2**-149),
    "only -inf": lambda s: np.full_like(s, -np.inf),
    "some -inf": lambda s: np.where(s > 0.5, s, -np.inf),
    "infinite": lambda s: np.where(s > 1, np.inf, s),
}
ARMS = [("triton", kind, sizes) for sizes, kind in covering(SIZES, list(KINDS))]
# The Metal function selects among more candidates than it returns.
ARMS += [("metal", kind, sizes) for sizes, kind in covering([n for n in SIZES if n[0] > n[1]], list(KINDS))]
ARMS += [("triton", kind, sizes) for kind, sizes in product(KINDS, [(700, 50, 20), (2500, 50, 0), (2500, 1500, 3)])]


def select(backend: Any, scores: Array, padding: Array | None, *, top_k: int, local_window: int) -> Array:
    if backend.name == "triton":
        how: Any = {"left_padding": backend.integers(padding), "top_k": top_k, "local_window": local_window}
        return backend.numpy(backend.load("top_k_select")(backend.array(scores, "f32"), **how))
    # On Metal, a candidate has bits in the order of the scores: 0 if it is invalid, and all bits in the local window.
    bits = np.where(scores == 0, 0, np.where(np.isnan(scores), np.inf, scores)).astype(np.float32).view(np.uint32)
    bits = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    bits[scores == -np.inf] = 0
    bits[..., scores.shape[2] - local_window :] = 0xFFFFFFFF
    for row, first in zip(bits, padding if padding is not None else [0], strict=True):
        row[:, :first] = 0
    indices = np.broadcast_to(np.arange(scores.shape[2]), scores.shape)
    return backend.numpy(metal.merge(backend.integers(bits, "uint32"), backend.integers(indices), top_k)[1])


@pytest.mark.parametrize(("backend", "kind", "sizes"), ARMS, ids=str, indirect=["backend"])
def test_the_largest_are_selected_with_ties_to_the_lower_index(
    backend: Any, kind: str, sizes: tuple[int, int, int]
) -> None:
    S, top_k, local_window = sizes
    scores = KINDS[kind](np.random.default_rng(S).normal(size=(2, 2, S)).astype(np.float32)).astype(np.float32)
    how = {"top_k": top_k, "local_window": local_window}
    padding = np.array([0, S // 3])
    found = select(backend, scores, padding, **how)
    np.testing.assert_array_equal(found, oracle.top_k_select(scores, left_padding=padding, **how))


@pytest.mark.parametrize("backend", ["metal"], indirect=True)
def test_a_million_scores_are_searched(backend: Any) -> None:
    scores = np.random.default_rng(0).normal(size=(1, 1, 1_000_000)).astype(np.float32)
    how = {"top_k": 128, "local_window": 32}
    np.testing.assert_array_equal(select(backend, scores, None, **how), oracle.top_k_select(scores, **how))
