"""The parity statement for SAAP: every backend visits the same buckets, attends the same keys and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import combinations

import numpy as np
import pytest
from cases import Array, Case
from require import absent
from saap_cases import SaapCase, assert_attends, assert_same_buckets, visited

from mlx_sparse import oracle
from mlx_sparse.methods import registry, table

# Three types, groups of 1, 3, 4 and 7 query heads, padded and not, every filling, with a hidden layer and without.
CASES = [
    SaapCase(Case(1, 2, 2, 300, 64, "f32"), "random"),
    SaapCase(Case(2, 9, 3, 257, 64, "f32", padding=(5, 200)), "skewed", hidden=None),
    SaapCase(Case(1, 4, 1, 513, 80, "bf16"), "one", buckets=33, probes=5, hidden=48, weights="f16"),
    SaapCase(Case(2, 7, 1, 400, 128, "f16", padding=(0, 90)), "empty", buckets=64, probes=8, weights="f16"),
    SaapCase(Case(1, 8, 1, 640, 256, "bf16"), "balanced", buckets=40, probes=40),
]
Result = tuple[Array | None, Array]  # the visited buckets where a backend says them, and the output


def on_oracle(case: SaapCase) -> Result:
    q, k, v = case.inputs()
    given = {"bucket_ids": case.bucket_ids(), "visited": visited(case), "left_padding": case.step.padding}
    return visited(case), oracle.saap_attention(q, k, v, **given, **case.window)


def on_mlx(backend: str, case: SaapCase) -> Result:
    import mlx.core as mx
    from mlx_arrays import to_mlx, to_numpy

    import mlx_sparse

    network = {name: to_mlx(array, case.weights) for name, array in case.network().items()}
    before = to_mlx(case.queries_before(), case.step.dtype)
    chosen = mlx_sparse.saap_route(before, probes=case.probes, backend=backend, **network)
    queries, keys, values = (to_mlx(array, case.step.dtype) for array in case.inputs())
    padding = None if case.step.padding is None else mx.array(case.step.padding)
    given = {"bucket_ids": mx.array(case.bucket_ids()), "visited": chosen, "left_padding": padding}
    out = mlx_sparse.saap_attention(queries, keys, values, **given, backend=backend, **case.window)
    return np.array(chosen), to_numpy(out)


def on_triton(case: SaapCase) -> Result:
    import torch
    from torch_arrays import DEVICE, padding, to_numpy, to_torch

    from mlx_sparse import cuda_ref

    network = {name: to_torch(array, case.weights) for name, array in case.network().items()}
    chosen = cuda_ref.saap_route(to_torch(case.queries_before(), case.step.dtype), probes=case.probes, **network)
    queries, keys, values = (to_torch(array, case.step.dtype) for array in case.inputs())
    ids = torch.tensor(case.bucket_ids(), device=DEVICE)
    given = {"bucket_ids": ids, "visited": chosen, "left_padding": padding(case.step)}
    return to_numpy(chosen), to_numpy(cuda_ref.saap_attention(queries, keys, values, **given, **case.window))


def on_onnx(runtime: str, case: SaapCase) -> Result:
    from onnx_operators import Operator, saap_settings, saap_step

    attend = Operator(runtime, "SaapAttention", case.step.dtype, **saap_settings(case))
    return None, attend(**saap_step(case))["output"].astype(np.float32)


BACKENDS: dict[str, Callable[[SaapCase], Result]] = {
    "oracle": on_oracle,
    "ops": partial(on_mlx, "ops"),
    "metal": partial(on_mlx, "metal"),
    "triton": on_triton,
    "onnx": partial(on_onnx, "onnxruntime"),
    "ort": partial(on_onnx, "native"),
}
assert list(BACKENDS) == list(table.BACKENDS), "every backend states its parity"
result = cache(lambda backend, case: BACKENDS[backend](case))
by_case = pytest.mark.parametrize("case", CASES, ids=str)


@by_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_visits_and_computes_what_the_oracle_does(
    backend: str, case: SaapCase, request: pytest.FixtureRequest
) -> None:
    if backend == "metal":
        request.getfixturevalue("metal")  # on the GPU of a Mac, in the harness elsewhere
    elif reason := registry.unavailable(backend):
        absent(backend, reason)
    chosen, out = result(backend, case)
    if chosen is not None:
        assert_same_buckets(chosen, case)
    assert_attends(out, None, case)


@by_case
@pytest.mark.usefixtures("metal")
def test_all_backends_visit_the_same_buckets(case: SaapCase) -> None:
    present = [name for name in BACKENDS if name == "metal" or not registry.unavailable(name)]
    chosen = {name: found for name in present if (found := result(name, case)[0]) is not None}
    assert {"oracle", "ops", "metal"} <= chosen.keys()
    for left, right in combinations(chosen, 2):
        assert (chosen[left] == chosen[right]).all(), f"{left} and {right} visit different buckets"
