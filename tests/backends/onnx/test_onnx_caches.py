"""Compare the ONNX operators over caches with the oracle, as function bodies and as native kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import reference
from cases import Array, Case
from onnx_operators import (
    CACHES,
    LANES,
    Operator,
    advance,
    assert_is_sparq,
    attributes,
    by_case,
    by_runtime,
    coded_caches,
    empty_caches,
    empty_codes,
    filled_caches,
    padding,
    parameters,
)

from mlx_sparse.methods.sparq.oracle import deviation

Caches = dict[str, Array]


def feed(attend: Operator, case: Case, arrays: tuple[Array, Array, Array], caches: Caches, *ends: int) -> Caches:
    """Append queries, keys and values in chunks up to each of ``ends``, and return the outputs of the last chunk."""
    q, k, v = arrays
    for start, stop in pairwise((0, *ends)):
        queries = np.repeat(q, stop - start, axis=2) if q.shape[2] == 1 else q[:, :, start:stop]
        new = {"key": k[:, :, start:stop], "value": v[:, :, start:stop], "left_padding": padding(case)}
        got = attend(query=queries, **new, **caches)
        caches = advance(caches, got, stop - start)
    return got


@pytest.mark.parametrize("setting", ["paper", "odd-sizes", "reallocate"])
@by_case
@by_runtime
def test_sparq_attention_after_a_prompt_equals_the_oracle(runtime: str, case: Case, setting: str) -> None:
    q, k, v = case.inputs()
    params = parameters(case, setting)
    attend = Operator(runtime, "SparQAttention", case.dtype, **CACHES, **attributes(params))
    ends = sorted({case.S - 1, case.S} - {0})
    got = feed(attend, case, (q, k, v), empty_caches(case, case.S + 70), *ends)
    assert_is_sparq(got["output"], case, params, q, k, v)
    chunked = got["present_key_t"].reshape(case.B, case.Hkv, -1, case.D, LANES)
    key_t = chunked.swapaxes(-1, -2).reshape(got["present_key"].shape)
    for written, given in ((got["present_key"], k), (key_t, k), (got["present_value"], v)):
        np.testing.assert_array_equal(written[:, :, : case.S].astype(np.float32), given)


@by_case
def test_int4_sparq_attention_after_a_prompt_equals_the_oracle(case: Case) -> None:
    q, k, v = case.inputs()
    params = {**parameters(case, "robust"), "key_bits": 4}
    attend = Operator("native", "SparQCodedAttention", case.dtype, dense_below=0, **attributes(params))
    got = feed(attend, case, (q, k, v), empty_codes(case, case.S + 70), case.S // 2, case.S - 1, case.S)
    assert_is_sparq(got["output"], case, params, q, k, v)
    for name, array in (("present_key", k), ("present_value", v)):
        np.testing.assert_array_equal(got[name][:, :, : case.S].astype(np.float32), array)
    summary = coded_caches(case, k, v, case.S, case.S)["past_summary"]
    np.testing.assert_allclose(got["present_summary"], summary, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense_below", [100, 101])
@by_runtime
def test_longest_row_decides_if_a_step_is_sparse(runtime: str, dense_below: int) -> None:
    case = Case(2, 4, 2, 100, 64, "f32")
    q, k, v = case.inputs()
    params = {**parameters(case, "paper"), "top_k": 8, "local_window": 2}
    attend = Operator(runtime, "SparQAttention", "f32", lanes=LANES, dense_below=dense_below, **attributes(params))
    past = np.array([99, 60])
    caches = {**filled_caches(case, k, v, 99, case.S), "past_length": past}
    new = {name: array[np.arange(2), :, past][:, :, None] for name, array in (("key", k), ("value", v))}
    got = attend(query=q, **new, left_padding=padding(case), **caches)["output"]
    for b, S in enumerate(past + 1):
        row = slice(b, b + 1)
        given = q[row], k[row, :, :S], v[row, :, :S]
        expected = (
            reference.dense_attention(*given) if dense_below > 100 else reference.sparq_attention(*given, **params)
        )
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ends", [(60, 99, 100), (30, 90, 99, 100), (98, 99, 100)])
@by_runtime
def test_states_are_computed_from_all_keys_once_steps_are_sparse(runtime: str, ends: tuple[int, ...]) -> None:
    case = Case(2, 4, 2, 100, 64, "f32", padding=(0, 20))
    q, k, v = case.inputs()
    params = {**parameters(case, "robust"), "top_k": 8, "local_window": 2, "reallocate": True}
    attend = Operator(runtime, "SparQAttention", "f32", lanes=LANES, dense_below=99, **attributes(params))
    caches = empty_caches(case, case.S)
    caches["past_sums"][:] = np.nan  # not read below `dense_below`
    got = feed(attend, case, (q, k, v), caches, *ends)
    assert_is_sparq(got["output"], case, params, q, k, v)


@by_runtime
def test_a_row_writes_only_its_own_states_and_begins_with_empty_statistics(runtime: str) -> None:
    case = Case(2, 4, 2, 100, 64, "f32")
    q, k, v = case.inputs()
    attend = Operator(
        runtime, "SparQAttention", "f32", lanes=1, dense_below=0, **attributes(parameters(case, "robust"))
    )
    caches = {**filled_caches(case, k, v, 99, case.S), "past_length": np.array([99, 0])}
    caches["past_key_t"][1], caches["past_sums"][1] = 7, np.nan  # of an earlier sequence
    new = {"key": k[:, :, 99:], "value": v[:, :, 99:], "left_padding": padding(case)}
    got = attend(query=q, **new, **caches)
    np.testing.assert_array_equal(got["present_key_t"][1, :, 0], k[1, :, 99])
    assert (got["present_key_t"][1, :, 1:] == 7).all()
    sums = np.stack([v[1, :, 99], k[1, :, 99], np.zeros((2, 64))], axis=1)
    np.testing.assert_allclose(got["present_sums"][1], sums, rtol=1e-6)


@pytest.mark.parametrize("lanes", [1, 64, 192, 384])
@by_runtime
def test_component_major_keys_have_the_documented_layout(runtime: str, lanes: int) -> None:
    case = Case(2, 4, 2, 250, 80, "f32")
    q, k, v = case.inputs()
    params = parameters(case, "robust")
    attend = Operator(runtime, "SparQAttention", "f32", lanes=lanes, dense_below=0, **attributes(params))
    got = feed(attend, case, (q, k, v), empty_caches(case, 384), 120, 249, 250)
    plane = np.full((2, 2, 384 * 80), np.nan, np.float32)
    j, d = np.meshgrid(np.arange(250), np.arange(80), indexing="ij")
    plane[:, :, ((j // lanes) * 80 + d) * lanes + j % lanes] = k
    np.testing.assert_array_equal(got["present_key_t"].reshape(plane.shape), plane)
    assert_is_sparq(got["output"], case, params, q, k, v)


@by_runtime
def test_deviation_is_accurate_for_components_far_from_zero(runtime: str) -> None:
    # Keys with large means, as in models with key biases: float32 sums of k and k^2 would lose the deviation.
    case = Case(2, 2, 2, 4000, 64, "f32", padding=(0, 600))
    rng = np.random.default_rng(0)
    q, k, v = case.inputs()
    far = np.arange(64) < 32
    k = (np.where(far, 300, 0) + np.where(far, 0.02, 1) * rng.standard_normal(k.shape)).astype(np.float32)
    q = np.where(far, 10, 1) * q
    params = {**parameters(case, "robust"), "rank": 32, "reallocate": False}
    attend = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(params))
    got = feed(attend, case, (q, k, v), empty_caches(case, case.S), *range(500, 4000, 500), 3999, 4000)
    spread = np.sqrt(got["present_sums"][:, :, 2] / (case.S - padding(case))[:, None, None])
    np.testing.assert_allclose(spread, deviation(k, padding(case)), rtol=1e-3)
    expected = reference.sparq_attention(q, k, v, left_padding=case.padding, **params)
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-2)  # logits of thousands
