"""Test queries, keys and values of different types: the output is exact and has the type of the queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from cases import Array, covering, round_to, ulp
from mlx_arrays import DTYPES, to_mlx, to_numpy
from sample_cases import SampleCase, selection

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.core import registry

PROMPT = SampleCase(1, 4, 2, 150, 230, 64, "f32", 32, chunks=2)
PREFILL: dict[str, dict[str, Any]] = {
    "dense_attention": {"scale": PROMPT.scale},
    "sample_attention": PROMPT.parameters,
    "minference_attention": {"vertical_tokens": 40, "slash_tokens": 40, "block_size": 32},
    "bigbird_attention": {"block_size": 32},
    "streaming_prefill_attention": {"sink_tokens": 32, "window": 0.2, "block_size": 32},
}
DECODE: dict[str, dict[str, Any]] = {
    "dense_attention": {},
    "sparq_attention": {"rank": 16, "top_k": 32},
    "saap_attention": {"sink_tokens": 1, "recent_tokens": 20},
    "streaming_attention": {"sink_tokens": 4, "recent_tokens": 60},
    "oracle_top_k_attention": {"top_k": 32},
    "flexgen_attention": {"top_k": 32},
}
PAIRS = list(permutations(DTYPES, 2))
MIXES = [*[(queries, other, other) for queries, other in PAIRS], ("f16", "f16", "bf16")]
# Only some mixes run on Metal, because the harness compiles a kernel for each mix.
ARMS = [*((name, mix) for name in ("ops", "cpu") for mix in MIXES), *(("metal", mix) for mix in MIXES[::3])]


def with_functions(functions: Iterable[str], on_metal: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize `ops` and `cpu` with all pairs of function and type mix, and Metal with some pairs."""
    rows = [(name, function, mix) for name in ("ops", "cpu") for function in functions for mix in MIXES]
    rows = [row for row in rows if row[0] in registry.backends_of(row[1].removesuffix("_attention"))]
    rows += [("metal", function, mix) for mix, function in covering(MIXES, on_metal)]
    ids = ["-".join((backend, function, *mix)) for backend, function, mix in rows]
    return pytest.mark.parametrize(("backend", "function", "mix"), rows, ids=ids, indirect=["backend"])


def numbers(L: int) -> list[Array]:
    """Return queries, keys and values that every type represents exactly."""
    q, k, v = (round_to(round_to(array, "f16"), "bf16") for array in PROMPT.inputs())
    return [q[:, :, -L:], k, v]


def assert_attends_alike(out: mx.array, expected: Array, mix: tuple[str, ...]) -> None:
    """Assert that the output has the queries' type, and errors within the rounding of the least precise type."""
    assert out.dtype == DTYPES[mix[0]]
    coarsest = "bf16" if "bf16" in mix else "f16"
    assert (np.abs(to_numpy(out) - expected) <= 4 * ulp(np.abs(expected).max(), coarsest)).all()


@with_functions(PREFILL, ["dense_attention", "sample_attention"])
def test_prompts_take_any_types(backend: Any, function: str, mix: tuple[str, str, str]) -> None:
    arrays = numbers(PROMPT.L)
    expected = getattr(reference, function)(*arrays, **PREFILL[function])
    given = [to_mlx(array, dtype) for array, dtype in zip(arrays, mix, strict=True)]
    assert_attends_alike(
        getattr(mlx_sparse, function)(*given, **PREFILL[function], backend=backend.name), expected, mix
    )


@pytest.mark.parametrize(("backend", "mix"), ARMS, ids=str, indirect=["backend"])
def test_lists_of_blocks_take_any_types(backend: Any, mix: tuple[str, str, str]) -> None:
    arrays = numbers(PROMPT.L)
    blocks = selection(PROMPT).blocks
    expected, expected_lse = oracle.attend_blocks(*arrays, blocks, block_size=32, scale=PROMPT.scale)
    given = [to_mlx(array, dtype) for array, dtype in zip(arrays, mix, strict=True)]
    out, lse = mlx_sparse.attend_blocks(
        *given, mx.array(blocks), block_size=32, scale=PROMPT.scale, backend=backend.name
    )
    assert_attends_alike(out, expected, mix)
    np.testing.assert_allclose(np.array(lse), expected_lse, rtol=0, atol=1e-4)


@with_functions(DECODE, ["dense_attention", "sparq_attention", "saap_attention"])
def test_decoding_takes_any_types(backend: Any, function: str, mix: tuple[str, str, str]) -> None:
    arrays = numbers(1)
    parameters = dict(DECODE[function])
    listed: dict[str, Array] = {}
    if function == "saap_attention":
        ids = np.random.default_rng(0).integers(0, 8, size=(1, PROMPT.Hkv, PROMPT.S))
        listed = {"bucket_ids": ids.astype(np.int32), "visited": np.array([[[1, 4], [0, 6]]], np.int32)}
    expected = getattr(reference, function)(*arrays, **parameters, **listed)
    given = [to_mlx(array, dtype) for array, dtype in zip(arrays, mix, strict=True)]
    parameters |= {name: mx.array(array) for name, array in listed.items()}
    assert_attends_alike(getattr(mlx_sparse, function)(*given, **parameters, backend=backend.name), expected, mix)
