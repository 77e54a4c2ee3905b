"""What callers should not pass but may: the Metal kernels neither race nor read what is not there, and hide no NaN."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import Case
from msl import Metal

import mlx_sparse
from mlx_sparse.kernels import attend, launch, saap, sparq


def inputs(case: Case) -> list[mx.array]:
    return [mx.array(array) for array in case.inputs()]


@pytest.mark.parametrize("score", ["query", "query_key"])
@pytest.mark.parametrize("spoiled", ["query", "key"])
def test_nan_in_a_component_is_no_fault(metal: Metal, spoiled: str, score: str) -> None:
    case = Case(1, 4, 2, 300, 64, "f32")
    q, k, v = case.inputs()
    (q if spoiled == "query" else k)[0, 0, 0, [5, 9]] = np.nan
    out = mlx_sparse.sparq_attention(
        *map(mx.array, (q, k, v)), rank=16, top_k=32, component_score=score, backend="metal"
    )
    assert np.isfinite(np.array(out)[0, 2:]).all()  # the other KV head


def test_the_smallest_keys_are_attended(metal: Metal) -> None:
    """With fewer than eight elements MLX would pass them in the constant address space; the registry refuses those."""
    q, k, v = inputs(Case(1, 1, 1, 1, 8, "f32"))
    out, _ = mlx_sparse.attend_indices(q, k, v, mx.zeros((1, 1, 1), mx.int32), backend="metal")
    np.testing.assert_allclose(np.array(out), np.array(v), rtol=0, atol=1e-6)


def test_shared_constants_serve_every_thread() -> None:
    """A lazy array belongs to the thread that made it; what threads share must hold its value already."""
    shared: list[Any] = [launch._zeros, sparq._no_weight, attend._no_counts, saap._zeros]
    sizes = [(7,), (), (), (2, 5)]

    def made() -> list[mx.array]:
        return [make(*size) for make, size in zip(shared, sizes, strict=True)]

    for make in shared:
        make.cache_clear()
    maker = threading.Thread(target=made)
    maker.start()
    maker.join()
    try:
        mx.eval([array + 1 for array in made()])
    finally:
        for make in shared:
            make.cache_clear()
