"""The project's parity statement: on the same inputs every backend chooses the same keys and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from cases import SPARQ, Array, Case, assert_as_good_as_plain, assert_same_choice, every_parameter, plain_sparq
from require import absent

from mlx_sparse import oracle
from mlx_sparse.methods import registry, table


class BlindHead(Case):
    """A case in which a query head is zero in all components that the others of its group choose."""

    def __str__(self) -> str:
        return f"{super().__str__()}-blind-head"

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        queries, keys, values = super().inputs(seed, L)
        others = np.abs(queries[:, 1 : self.Hq // self.Hkv]).sum(axis=(1, 2))
        least = np.argsort(np.argsort(others, axis=-1), axis=-1) < self.D // 4
        # A power of 2, so that nothing is rounded, and so small that it changes nobody's choice.
        queries[:, 0] = np.where(least[:, None], queries[:, 0] / 64, 0)
        return queries, keys, values


# Three types, groups of 1, 3, 4, 7 and 8 query heads, padded and not.
CASES = [
    Case(1, 4, 4, 513, 80, "f32"),
    Case(2, 9, 3, 257, 64, "f32", padding=(5, 256)),
    Case(2, 8, 2, 127, 64, "f16", padding=(0, 100)),
    Case(2, 7, 1, 400, 128, "f16", padding=(399, 17)),
    Case(1, 8, 2, 300, 80, "bf16"),
    Case(1, 8, 1, 640, 256, "bf16"),
    BlindHead(1, 6, 2, 90, 64, "f32"),
]
SELECTION = ("rank", "top_k", "local_window", "group_reduce", "scale")
Result = tuple[Array, Array]  # the chosen keys, and the output


def on_oracle(case: Case, params: dict[str, Any]) -> Result:
    q, k, v = case.inputs()
    selection = {name: params[name] for name in (*SELECTION, "component_score")}
    indices = oracle.sparq_select(q, k, left_padding=case.padding, **selection).indices
    return indices, oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)


def on_mlx(backend: str, case: Case, params: dict[str, Any]) -> Result:
    import mlx.core as mx
    from mlx_arrays import to_mlx, to_numpy

    import mlx_sparse
    from mlx_sparse.kernels.sparq import sparq_select

    queries, keys, values = (to_mlx(array, case.dtype) for array in case.inputs())
    padding = None if case.padding is None else mx.array(case.padding)
    select = sparq_select if backend == "metal" else registry.load("sparq_select", backend)
    weighted = params["component_score"] == "query_key"
    chosen = select(
        queries,
        keys,
        keys_t=None,
        component_weight=registry.load("deviation", backend)(keys, padding) if weighted else None,
        left_padding=padding,
        **{name: params[name] for name in SELECTION},
    )
    out = mlx_sparse.sparq_attention(queries, keys, values, left_padding=padding, backend=backend, **params)
    return np.array(chosen[0]), to_numpy(out)


def on_triton(case: Case, params: dict[str, Any]) -> Result:
    from mlx_sparse.cuda_ref.api import steps
    from mlx_sparse.cuda_ref.launchers import sparq
    from torch_arrays import padding, to_numpy, to_torch

    from mlx_sparse import cuda_ref

    queries, keys, values = (to_torch(array, case.dtype) for array in case.inputs())
    weighted = params["component_score"] == "query_key"
    indices, _ = sparq.sparq_select(
        queries,
        keys.transpose(-1, -2),
        component_weight=steps.deviation(keys, padding(case)) if weighted else None,
        left_padding=padding(case),
        **{name: params[name] for name in SELECTION},
    )
    out = cuda_ref.sparq_attention(queries, keys, values, left_padding=padding(case), **params)
    return to_numpy(indices), to_numpy(out)


def on_onnx(runtime: str, case: Case, params: dict[str, Any]) -> Result:
    from onnx_operators import Operator, attributes, step

    got = Operator(runtime, "SparQ", case.dtype, **attributes(params))(**step(case, *case.inputs()))
    return got["indices"], got["output"].astype(np.float32)


BACKENDS: dict[str, Callable[[Case, dict[str, Any]], Result]] = {
    "oracle": on_oracle,
    "ops": partial(on_mlx, "ops"),
    "metal": partial(on_mlx, "metal"),
    "triton": on_triton,
    "onnx": partial(on_onnx, "onnxruntime"),
    "ort": partial(on_onnx, "native"),
}
assert list(BACKENDS) == list(table.BACKENDS), "every backend states its parity"


@cache
def result(backend: str, case: Case, setting: str) -> Result:
    return BACKENDS[backend](case, every_parameter(case, setting))


@cache
def selected(case: Case, setting: str) -> oracle.SparQSelection:
    q, k, _ = case.inputs()
    params = every_parameter(case, setting)
    del params["reallocate"]
    return oracle.sparq_select(q, k, left_padding=case.padding, **params)


by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_setting = pytest.mark.parametrize("setting", SPARQ)


@by_setting
@by_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_chooses_and_computes_what_the_oracle_does(
    backend: str, case: Case, setting: str, request: pytest.FixtureRequest
) -> None:
    if backend == "metal":
        request.getfixturevalue("metal")  # on the GPU of a Mac, in the harness elsewhere
    elif reason := registry.unavailable(backend):
        absent(backend, reason)
    q, k, v = case.inputs()
    params = every_parameter(case, setting)
    indices, out = result(backend, case, setting)
    expected = selected(case, setting)
    assert_same_choice(indices, expected.indices, expected.scores)
    plain = plain_sparq(case, params, q, k, v, expected.indices)
    exact = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    assert_as_good_as_plain(out, exact, plain, case.dtype)


@by_setting
@by_case
@pytest.mark.usefixtures("metal")
def test_all_backends_choose_the_same_keys(case: Case, setting: str) -> None:
    present = [name for name in BACKENDS if name == "metal" or not registry.unavailable(name)]
    for left, right in combinations(present, 2):
        found = (result(name, case, setting)[0] for name in (left, right))
        assert_same_choice(*found, selected(case, setting).scores)
