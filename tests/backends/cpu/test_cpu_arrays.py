"""Test how MLX arrays reach the native kernels: views, types, function transformations and the backend "auto"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import Case
from mlx_arrays import to_mlx
from require import absent

import mlx_sparse
from mlx_sparse import BackendUnavailable, native
from mlx_sparse.core import native_call, registry

if reason := registry.unavailable("cpu"):
    absent("cpu", reason)

CASE = Case(2, 4, 2, 150, 64, "f16")
SPARQ = {"rank": 16, "top_k": 32}


def arrays(case: Case = CASE, L: int = 1) -> list[mx.array]:
    return [to_mlx(array, case.dtype) for array in case.inputs(L=L)]


# Views with the numbers of an array: a slice of a longer buffer, other strides, negative strides, one head for two.
VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "slice": lambda x: mx.pad(x, [(0, 0), (0, 0), (3, 9), (0, 0)], constant_values=mx.nan)[:, :, 3 : 3 + x.shape[2]],
    "head dim": lambda x: mx.pad(x, [(0, 0)] * 3 + [(0, 7)], constant_values=mx.nan)[..., : x.shape[3]],
    "axes": lambda x: mx.contiguous(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0),
    "reversed": lambda x: mx.contiguous(x[:, ::-1, ::-1])[:, ::-1, ::-1],
    "broadcast": lambda x: mx.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("L", [1, 40])
def test_views_give_the_results_of_contiguous_arrays(view: str, L: int) -> None:
    views = [VIEWS[view](array) for array in arrays(L=L)]
    copies = [mx.array(np.array(array)) for array in views]
    lists = mx.array(np.tile([0, 3, -1, 70], (2, 2, 1)))
    spread = mx.stack([lists, lists + 1], axis=3)[..., 0]
    if L == 1:
        runs = [mlx_sparse.dense_attention, partial(mlx_sparse.sparq_attention, **SPARQ)]
    else:
        blocks = partial(mlx_sparse.attend_blocks, blocks=mx.zeros((2, 4, 2, 1), mx.int32), block_size=32)
        runs = [mlx_sparse.dense_attention, blocks, partial(mlx_sparse.sample_attention, block_size=32)]
    results = [[run(*given, backend="cpu") for run in runs] for given in (views, copies)]
    if L == 1:
        for result, given, indices in zip(results, (views, copies), (spread, lists), strict=True):
            result.append(mlx_sparse.attend_indices(*given, indices, backend="cpu"))
    for found, wanted in zip(*results, strict=True):
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        assert all(mx.array_equal(*pair).item() for pair in pairs)


def test_numbers_above_64_bits_do_not_wrap() -> None:
    given: dict[str, Any] = {"block_size": 32, "alpha_column": 0.3, "alpha_slash": 0.3, "backend": "cpu"}
    q, k, v = arrays(L=120)
    wide, most = (mlx_sparse.sample_attention(q, k, v, chunks=chunks, **given) for chunks in (2**64 + 1, 100))
    assert mx.array_equal(wide, most)
    assert not mx.array_equal(wide, mlx_sparse.sample_attention(q, k, v, chunks=1, **given))


def test_a_value_mean_of_another_type_is_converted() -> None:
    mean = mx.random.normal((2, 2, 64)).astype(mx.float16)
    how: dict[str, Any] = {**SPARQ, "reallocate": True, "backend": "cpu"}
    each = (mlx_sparse.sparq_attention(*arrays(), value_mean=x, **how) for x in (mean, mean.astype(mx.float32)))
    assert mx.array_equal(*each)


# --- The choice of the backend ----------------------------------------------------------------------------------------


def test_auto_runs_native_kernels_unless_they_do_not_support_the_arrays() -> None:
    for function in ("dense", "sparq", "saap", "sample", "streaming", "attend_indices", "attend_blocks"):
        assert registry.resolve("auto", function, D=80, G=3) == "cpu"
        assert registry.resolve("auto", function, D=64, G=1, bits=4) == "ops"
    for method in ("h2o", "quest"):
        assert registry.resolve("auto", method, D=64, G=1) == "ops"
        with pytest.raises(BackendUnavailable, match=rf"expected auto or ops, got cpu \(it does not support {method}"):
            registry.require("cpu", method)
    q, k, v = (array.astype(mx.float64) for array in arrays())
    assert mx.array_equal(*(mlx_sparse.dense_attention(q, k, v, backend=name) for name in ("auto", "ops")))
    with pytest.raises(
        BackendUnavailable, match=r"got cpu \(its kernels take float32, float16 and bfloat16, not float64"
    ):
        mlx_sparse.dense_attention(q, k, v, backend="cpu")
    with pytest.raises(BackendUnavailable, match=r"got cpu \(its kernels do not read quantized KV caches"):
        mlx_sparse.dense_attention(
            q, *(mlx_sparse.PackedRows.of(x, bits=4, group_size=64) for x in arrays()[1:]), backend="cpu"
        )


def test_auto_runs_array_operations_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "path", lambda: None)
    assert registry.resolve("auto", "sparq", D=64, G=1) == "ops"
    with pytest.raises(BackendUnavailable, match=r"expected auto or ops, got cpu \(the library .* was not built"):
        registry.resolve("cpu", "sparq", D=64, G=1)


TRANSFORMED: dict[str, Callable[[Callable[[mx.array], mx.array], mx.array], mx.array]] = {
    "grad": lambda loss, q: mx.grad(loss)(q),
    "checkpoint": lambda loss, q: mx.grad(mx.checkpoint(loss))(q),
    "jvp": lambda loss, q: mx.jvp(loss, [q], [mx.ones_like(q)])[1][0],
    "compile": lambda loss, q: mx.compile(loss)(q),
    "vmap": lambda loss, q: mx.vmap(loss)(mx.stack([q, 2 * q])),
    "grad of one number": lambda loss, q: mx.grad(lambda x: loss(q * x))(mx.array(2.0, q.dtype)),
    "eager": lambda loss, q: loss(q),
}


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_function_transformations_run_array_operations(name: str, compiles: bool) -> None:
    """Gradients through native kernels would be 0, because MLX does not see what they compute."""
    q, k, v = arrays(Case(1, 4, 2, 60, 64, "f32"))

    def loss(backend: str) -> Callable[[mx.array], mx.array]:
        return lambda q: mlx_sparse.dense_attention(q, k, v, backend=backend).sum()

    if not compiles:
        mx.disable_compile()
    try:
        found, wanted = (TRANSFORMED[name](loss(backend), q) for backend in ("auto", "ops"))
        assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert (wanted != 0).any()
        if name == "eager" or (name == "compile" and not compiles):
            return
        with pytest.raises(
            BackendUnavailable, match=r"got cpu \(it does not run inside mx.compile, mx.vmap or mx.grad\)"
        ):
            TRANSFORMED[name](loss("cpu"), q)
        attend = registry.load("dense", "cpu")
        message = "backend: expected ops inside mx.compile, mx.vmap and mx.grad, got cpu."
        with pytest.raises(BackendUnavailable, match=message):
            TRANSFORMED[name](lambda q: attend(q, k, v, scale=0.1, left_padding=None).sum(), q)
    finally:
        mx.enable_compile()


def test_arrays_of_new_types_are_not_traced() -> None:
    """Test the first call for a type and a number of axes, which MLX compiles."""
    for array in (mx.array(1), mx.zeros((0, 3)), mx.zeros((1,) * 7, mx.bfloat16), mx.zeros((2, 3))[:, ::2]):
        assert [native_call.traced(array) for _ in range(3)] == [False] * 3
