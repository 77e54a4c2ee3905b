"""Test values whose head dim is not that of the keys: a method treats every component of the values in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import OtherValues

from mlx_sparse import ShapeError
from mlx_sparse.checks import BackendUnavailable
from mlx_sparse.core import registry

CASE = OtherValues(2, 6, 2, 200, 32, "f32", padding=(0, 60), Dv=50)
PARTS = (slice(50), slice(20), slice(18, 50))  # ranges of components; the last has the head dim of the keys
SPARQ = {"rank": 8, "top_k": 32}
# Arguments of a decode method, and the number of values that a step moves.
DECODE: dict[str, tuple[dict[str, Any], int]] = {
    "dense": ({}, CASE.S + 1),
    "sparq": (SPARQ, 32 + 3),
    "sparq reallocate": (SPARQ | {"reallocate": True}, 32 + 3),
    "sparq int4": (SPARQ | {"key_bits": 4, "component_score": "query_key"}, 32 + 3),
    "streaming": ({"sink_tokens": 3, "recent_tokens": 20}, 23 + 1),
    "quest": ({"page_size": 8, "top_k": 30}, 32 + 1),
    "oracle_top_k": ({"top_k": 32}, 32 + 1),
    "flexgen": ({"top_k": 32}, 32 + 1),
    "h2o": ({"top_k": 32}, 32 + 1),
    "saap": ({"sink_tokens": 2, "recent_tokens": 9}, 0),  # depends on the buckets
}
PREFILL: dict[str, dict[str, Any]] = {
    "dense": {},
    "gather": {"share": 0.3, "chunk": 64, "samples": 16, "exact_tail": 10},
    "sample": {"block_size": 32, "alpha_column": 0.5, "alpha_slash": 0.5},
    "minference": {"vertical_tokens": 40, "slash_tokens": 40, "block_size": 32},
    "bigbird": {"block_size": 32},
    "hyperattention": {"bucket_size": 16, "sampled_keys": 16, "exact_rows": 64},
    "hash_sparse": {"buckets": 4},
}
STEPS = [
    (name, method, L)
    for name in ("oracle", "ops", "cpu")
    for L, methods in ((1, DECODE), (150, PREFILL))
    for method in methods
    if name in registry.backends_of(method.split()[0])
]


def call(backend: Any, method: str, L: int, part: slice) -> tuple[Any, ...]:
    """Run a method on some components of the values. Return the output and the `Stats`."""
    q, k, v = CASE.inputs(L=L)
    rng, more = np.random.default_rng(0), dict(DECODE[method][0] if L == 1 else PREFILL[method])
    if L == 1:
        more["left_padding"] = backend.integers(CASE.padding)
    if method == "h2o":
        more["scores"] = backend.array(rng.random(k.shape[:3]), "f32")
    if method == "saap":
        more["bucket_ids"] = backend.integers(rng.integers(0, 8, k.shape[:3]))
        more["visited"] = backend.integers(np.full((CASE.B, CASE.Hkv, 1), 3))
    rows = [backend.array(array, "f32") for array in (q, k, v[..., part])]
    attend = getattr(backend.functions, f"{method.split(maxsplit=1)[0]}_attention")
    out, *_, stats = attend(*rows, **more, return_stats=True, backend=backend.name)
    return backend.numpy(out), stats


@pytest.mark.parametrize(("backend", "method", "L"), STEPS, indirect=["backend"])
def test_a_method_attends_to_every_component_of_the_values_and_counts_it(backend: Any, method: str, L: int) -> None:
    (whole, wide), (first, narrow), (last, equal) = (call(backend, method, L, part) for part in PARTS)
    assert (whole.shape[3], first.shape[3]) == (50, 20)
    np.testing.assert_allclose(first, whole[..., PARTS[1]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(last, whole[..., PARTS[2]], rtol=0, atol=1e-5)
    for count in ("elements", "dense_elements"):
        rows = [(getattr(stats, count) - getattr(equal, count)) / n for stats, n in ((wide, 18), (narrow, -12))]
        assert rows[0] == pytest.approx(rows[1], rel=1e-3)  # prefill rounds a density
        if L == 1 and method != "saap":
            assert rows[0] == (DECODE[method][1] if count == "elements" else CASE.S + 1)
        elif L == 1:
            assert rows[0] in (CASE.S + 1, round(equal.density * CASE.S) + 1)


@pytest.mark.parametrize("backend", ["oracle", "ops", "cpu", "triton"], indirect=True)
def test_other_kernels_and_a_wrong_value_mean_are_refused(backend: Any) -> None:
    arrays = [backend.array(array, "f32") for array in CASE.inputs()]
    given = {"value_mean": backend.array(np.zeros((2, 2, 32)), "f32"), **SPARQ}
    refused, message = ShapeError, r"^value_mean: expected shape \(2, 2, 50\), got \(2, 2, 32\)\.$"
    if backend.name == "triton":
        refused, message = BackendUnavailable, "expected ops or cpu of mlx_sparse for values of head dim 50, got triton"
    with pytest.raises(refused, match=message):
        backend.functions.sparq_attention(*arrays, **given, backend=backend.name)
    assert "head dim of the keys (32), not 50" in str(registry.unsupported("metal", "sparq", 32, 3, Dv=50))
