"""The parity statement for prompts: every backend of SampleAttention attends the same blocks and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import combinations

import numpy as np
import pytest
from cases import Array, assert_as_good_as_plain
from require import absent
from sample_cases import SampleCase, assert_same_blocks, plain_blocks_attention, selection

from mlx_sparse import oracle
from mlx_sparse.methods import registry, table

# Three types, groups of 1, 3, 4 and 7 query heads, whole prompts and pieces, all block sizes, ragged ends.
CASES = [
    SampleCase(1, 2, 2, 200, 520, 64, "f32", 128, alpha_column=0.4, alpha_slash=0.4),
    SampleCase(1, 3, 1, 250, 400, 64, "f16", 32, chunks=3),
    SampleCase(1, 4, 1, 130, 500, 80, "bf16", 64, alpha_column=0.3, alpha_slash=0.95),
    SampleCase(1, 7, 1, 100, 330, 128, "bf16", 32, alpha_column=0.5, alpha_slash=0.5),
    SampleCase(2, 2, 2, 129, 333, 96, "f32", 32, chunks=2),
]
Result = tuple[Array, Array]  # the attended blocks, and the output


def on_oracle(case: SampleCase) -> Result:
    q, k, v = case.inputs()
    return selection(case).blocks, oracle.sample_attention(q, k, v, **case.parameters)


def on_mlx(backend: str, case: SampleCase) -> Result:
    from mlx_arrays import to_mlx, to_numpy

    import mlx_sparse

    queries, keys, values = (to_mlx(array, case.dtype) for array in case.inputs())
    blocks = mlx_sparse.sample_select(queries, keys, backend=backend, **case.parameters)
    out = mlx_sparse.sample_attention(queries, keys, values, backend=backend, **case.parameters)
    return np.array(blocks), to_numpy(out)


def on_triton(case: SampleCase) -> Result:
    from torch_arrays import to_numpy, to_torch

    from mlx_sparse import cuda_ref

    queries, keys, values = (to_torch(array, case.dtype) for array in case.inputs())
    blocks = cuda_ref.sample_select(queries, keys, **case.parameters)
    return to_numpy(blocks), to_numpy(cuda_ref.sample_attention(queries, keys, values, **case.parameters))


def on_onnx(runtime: str, case: SampleCase) -> Result:
    from onnx_operators import Operator

    q, k, v = case.inputs()
    attend = Operator(runtime, "Sample", case.dtype, **case.parameters)
    got = attend(query=q, keys=k, values=v, length=np.array([case.S]))
    return got["blocks"], got["output"].astype(np.float32)


BACKENDS: dict[str, Callable[[SampleCase], Result]] = {
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
def test_a_backend_attends_and_computes_what_the_oracle_does(
    backend: str, case: SampleCase, request: pytest.FixtureRequest
) -> None:
    if backend == "metal":
        request.getfixturevalue("metal")  # on the GPU of a Mac, in the harness elsewhere
    elif reason := registry.unavailable(backend):
        absent(backend, reason)
    q, k, v = case.inputs()
    blocks, out = result(backend, case)
    expected = selection(case)
    assert_same_blocks(blocks, case, expected)
    exact = oracle.sample_attention(q, k, v, **case.parameters)
    assert_as_good_as_plain(out, exact, plain_blocks_attention(case, q, k, v, expected.blocks), case.dtype)


@by_case
@pytest.mark.usefixtures("metal")
def test_all_backends_attend_the_same_blocks(case: SampleCase) -> None:
    present = [name for name in BACKENDS if name == "metal" or not registry.unavailable(name)]
    lists = {name: oracle.block_mask(result(name, case)[0], case.layout.key_blocks) for name in present}
    for left, right in combinations(present, 2):
        assert (lists[left] == lists[right]).all(), f"{left} and {right} attend different blocks"


@pytest.mark.parametrize("change", [{}, {"alpha_column": 1.0}], ids=["sampled", "dense"])
def test_what_is_moved_is_counted_alike(change: dict[str, float]) -> None:
    import mlx.core as mx

    import mlx_sparse

    case = CASES[0]
    options = {**case.parameters, **change, "return_stats": True}
    _, expected = oracle.sample_attention(*case.inputs(), **options)
    _, stats = mlx_sparse.sample_attention(*map(mx.array, case.inputs()), backend="ops", **options)
    assert (stats.elements, stats.dense_elements) == (expected.elements, expected.dense_elements)
