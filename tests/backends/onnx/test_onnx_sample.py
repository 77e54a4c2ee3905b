"""Compare the ONNX operators of SampleAttention with the oracle, as function bodies and as native kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from cases import Array, Case
from onnx_operators import LANES, Operator, attributes, by_runtime, parameters
from sample_cases import SampleCase

# Decode steps are always dense, which does not affect prefill.
SPARQ = {**attributes(parameters(Case(2, 6, 2, 400, 64, "f32"), "robust")), "lanes": LANES, "dense_below": 1 << 20}
SPARSE = SampleCase(2, 6, 2, 200, 400, 64, "f32", 32, chunks=2)


def with_stale_keys(case: SampleCase, k: Array, v: Array) -> dict[str, Array]:
    """Return buffers that are longer than the keys, with NaN in free slots."""
    stale = np.full((case.B, case.Hkv, 21, case.D), np.nan)
    return {"keys": np.concatenate([k, stale], axis=2), "values": np.concatenate([v, stale], axis=2)}


def sample(runtime: str, case: SampleCase, threads: int = 1) -> dict[str, Array]:
    q, k, v = case.inputs()
    attend = Operator(runtime, "Sample", case.dtype, threads, **case.parameters)
    return attend(query=q, length=np.array([case.S]), **with_stale_keys(case, k, v))


@pytest.mark.parametrize("alphas", [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0)], ids=str)
@by_runtime
def test_an_alpha_of_1_is_dense_attention(runtime: str, alphas: tuple[float, float]) -> None:
    case = replace(SPARSE, alpha_column=alphas[0], alpha_slash=alphas[1])
    q, k, v = case.inputs()
    got = sample(runtime, case)
    dense = Operator(runtime, "DenseAttention", "f32", scale=case.scale, window=0)
    lengths = {"left_padding": np.zeros(case.B), "length": np.full(case.B, case.S)}
    np.testing.assert_array_equal(got["output"], dense(query=q, **with_stale_keys(case, k, v), **lengths)["output"])
    layout = case.layout
    rows = np.arange(layout.first_block, layout.key_blocks)[:, None]
    causal = np.where(np.arange(layout.key_blocks) <= rows, np.arange(layout.key_blocks), -1)
    np.testing.assert_array_equal(got["blocks"], np.broadcast_to(causal, got["blocks"].shape))


@pytest.mark.parametrize(("more", "expected"), [(5e-7, [0, 1, 3, 4, -1, -1]), (2e-6, [0, 1, 2, 3, 4, -1])], ids=str)
@by_runtime
def test_ties_go_to_the_lower_block_up_to_alpha_minus_1e_6(runtime: str, more: float, expected: list[int]) -> None:
    case = SampleCase(1, 1, 1, 192, 192, 64, "f32", 32)
    # All keys are equal: five columns have equal mass, and five bins too, the first of which is selected.
    share = float(np.mean(32 / np.arange(161, 193)))
    case = replace(case, alpha_column=2 * share + more, alpha_slash=0.01)
    q = np.ones((1, 1, 192, 64))
    attend = Operator(runtime, "Sample", "f32", **case.parameters)
    got = attend(query=q, length=np.array([192]), **with_stale_keys(case, 0 * q, q))
    assert got["blocks"][0, 0, 4].tolist() == expected


def settings_of(case: SampleCase, below: int = 0) -> dict[str, Any]:
    return {**case.parameters, "dense_prompt_below": below}


@pytest.mark.parametrize(
    ("name", "below", "padding", "past", "is_sampled"),
    [
        ("SampleAttention", 400, [0, 0], [200, 200], True),
        ("SampleSparQAttention", 401, [0, 0], [200, 200], False),
        ("SampleAttention", 0, [0, 3], [200, 200], False),
        ("SampleSparQAttention", 0, [0, 0], [200, 150], False),
    ],
    ids=["long-enough", "too-short", "padded", "rows-of-two-lengths"],
)
@by_runtime
def test_a_chunk_is_dense_if_it_cannot_be_sampled(
    runtime: str, name: str, below: int, padding: list[int], past: list[int], is_sampled: bool
) -> None:
    case = SPARSE
    q, k, v = case.inputs()
    with_sparq = name == "SampleSparQAttention"
    settings = {**(SPARQ if with_sparq else {}), **settings_of(case, below)}
    attend = Operator(runtime, name, "f32", **settings)
    caches = {"past_key": np.full((2, 2, 448, 64), np.nan), "past_value": np.full((2, 2, 448, 64), np.nan)}
    if with_sparq:
        caches |= {"past_key_t": np.zeros((2, 2, 448, 64)), "past_sums": np.zeros((2, 2, 3, 64))}
    new = {"key": np.empty((2, 2, 200, 64)), "value": np.empty((2, 2, 200, 64))}
    for b, start in enumerate(past):
        for what, array in (("key", k), ("value", v)):
            caches[f"past_{what}"][b, :, :start] = array[b, :, :start]
            new[what][b] = array[b, :, start : start + 200]
    got = attend(query=q, left_padding=np.array(padding), past_length=np.array(past), **new, **caches)["output"]
    for b, start in enumerate(past):
        row, S = slice(b, b + 1), start + 200
        given = q[row], k[row, :, :S], v[row, :, :S]
        expected = reference.dense_attention(*given, left_padding=padding[row])
        sampled = reference.sample_attention(*given, **case.parameters)
        assert np.abs(expected - sampled).max() > 1e-2
        np.testing.assert_allclose(got[row], sampled if is_sampled else expected, rtol=0, atol=2e-5)


def test_any_number_of_threads_gives_the_same_answer() -> None:
    one, two, four = (sample("native", SPARSE, threads) for threads in (1, 2, 4))
    for other in (two, four):
        np.testing.assert_array_equal(one["output"], other["output"])
        np.testing.assert_array_equal(one["blocks"], other["blocks"])
