"""The ONNX operators that keep caches, against the oracle: bodies on runtimes, native kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cases import Array, Case
from onnx_operators import (
    CACHES,
    DTYPES,
    LANES,
    Operator,
    advance,
    assert_is_sparq,
    assert_same_assignment,
    attributes,
    by_case,
    by_runtime,
    coded_caches,
    empty_caches,
    empty_codes,
    filled_caches,
    from_ort,
    ort_value,
    padding,
    parameters,
    saap_settings,
    saap_weights,
    unpacked,
)
from saap_cases import SaapCase
from sample_cases import SampleCase

from mlx_sparse import oracle
from mlx_sparse.methods.scoring_keys import KeyCodes
from mlx_sparse.oracle.select import valid_keys
from mlx_sparse.oracle.sparq import deviation

Caches = dict[str, Array]


def feed(attend: Operator, case: Case, arrays: tuple[Array, Array, Array], caches: Caches, *ends: int) -> Caches:
    """The outputs for the last of pieces of queries, keys and values, up to each of ``ends``; one query is all."""
    q, k, v = arrays
    for start, stop in pairwise((0, *ends)):
        queries = np.repeat(q, stop - start, axis=2) if q.shape[2] == 1 else q[:, :, start:stop]
        new = {"key": k[:, :, start:stop], "value": v[:, :, start:stop], "left_padding": padding(case)}
        got = attend(query=queries, **new, **caches)
        caches = advance(caches, got, stop - start)
    return got


@pytest.mark.parametrize("setting", ["paper", "eval", "reallocate"])
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


@pytest.mark.parametrize("dense_below", [0, 200, 201, 1000])
@by_runtime
def test_one_query_is_dense_while_the_longest_row_is_short(runtime: str, dense_below: int) -> None:
    case = Case(2, 6, 2, 200, 64, "f32", padding=(0, 20))
    q, k, v = case.inputs()
    params = {**parameters(case, "paper"), "top_k": 8, "local_window": 2}
    attend = Operator(runtime, "SparQAttention", "f32", lanes=LANES, dense_below=dense_below, **attributes(params))
    got = feed(attend, case, (q, k, v), empty_caches(case, case.S), case.S - 1, case.S)
    sparse = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    dense = oracle.dense_attention(q, k, v, left_padding=case.padding)
    assert np.abs(sparse - dense).max() > 1e-2
    expected = dense if case.S < dense_below else sparse
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dense_below", [100, 101])
@by_runtime
def test_the_longest_row_decides_for_all(runtime: str, dense_below: int) -> None:
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
        expected = oracle.dense_attention(*given) if dense_below > 100 else oracle.sparq_attention(*given, **params)
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lanes", [1, 64, 192, 384])
@by_runtime
def test_component_major_keys_lie_as_documented_and_are_read_so(runtime: str, lanes: int) -> None:
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


@pytest.mark.parametrize("L", [2, 5])
@by_runtime
def test_several_queries_are_attended_densely_and_causally(runtime: str, L: int) -> None:
    case = Case(2, 6, 2, 70, 64, "f32", padding=(0, 30))
    q, k, v = case.inputs(L=case.S)
    attend = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(parameters(case, "paper")))
    got = feed(attend, case, (q, k, v), empty_caches(case, 128), case.S - L, case.S)
    expected = oracle.dense_attention(q[:, :, -L:], k, v, left_padding=case.padding)
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-5)


@by_runtime
def test_a_sequence_is_decoded_token_by_token_in_rows_of_different_length(runtime: str) -> None:
    case = Case(2, 6, 2, 90, 64, "f32", padding=(3, 0))
    _, k, v = case.inputs()
    q, _, _ = case.inputs(L=case.S)
    params = {**parameters(case, "reallocate"), "top_k": 16, "local_window": 4}
    attend = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(params))
    caches = empty_caches(case, 100)
    behind = 40  # row 1 starts when row 0 has 40 tokens
    got = attend(
        query=q[:, :, :behind], key=k[:, :, :behind], value=v[:, :, :behind], left_padding=padding(case), **caches
    )
    caches = advance(caches, got, np.array([behind, 0]))
    caches["past_sums"] = caches["past_sums"] * np.array([1, 0], np.float32)[:, None, None, None]
    for i in range(40):
        at = np.array([behind + i, i])
        new = [array[np.arange(2), :, at][:, :, None] for array in (q, k, v)]
        got = attend(query=new[0], key=new[1], value=new[2], left_padding=padding(case), **caches)
        caches = advance(caches, got, 1)
        for b in range(2):
            row = slice(b, b + 1)
            expected = oracle.sparq_attention(
                new[0][row], k[row, :, : at[b] + 1], v[row, :, : at[b] + 1], left_padding=padding(case)[row], **params
            )
            np.testing.assert_allclose(got["output"][row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("setting", ["reallocate", "robust"])
@pytest.mark.parametrize("tokens", [0, 40])
@by_runtime
def test_a_row_of_padding_only_gives_zeros(runtime: str, tokens: int, setting: str) -> None:
    case = Case(2, 6, 2, 41, 64, "f32", padding=(41, 0))
    q, k, v = case.inputs()
    k[0], v[0] = np.nan, np.nan
    params = {**parameters(case, setting), "top_k": 4, "local_window": 1, "reallocate": True}
    attend = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(params))
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:]}
    got = attend(**new, left_padding=padding(case), **filled_caches(case, k, v, tokens, 64))
    assert (got["output"][0] == 0).all()
    assert (got["present_sums"][0] == 0).all()
    assert np.isfinite(got["output"][1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
def test_caches_bound_to_input_and_output_are_appended_in_place(runtime: str, dtype: str) -> None:
    case = Case(1, 4, 2, 200, 64, dtype)
    q, k, v = case.inputs()
    params = parameters(case, "robust")
    attend = Operator(runtime, "SparQAttention", dtype, **CACHES, **attributes(params))
    arrays = {
        "query": q[:, :, :1].astype(DTYPES[dtype]),
        "key": k[:, :, :1].astype(DTYPES[dtype]),
        "value": v[:, :, :1].astype(DTYPES[dtype]),
        "left_padding": padding(case),
        **empty_caches(case, case.S),
    }
    values = {name: ort_value(array) for name, array in arrays.items()}
    for i in range(case.S):
        new = {"key": k[:, :, i : i + 1], "value": v[:, :, i : i + 1]}
        values |= {name: ort_value(array.astype(DTYPES[dtype])) for name, array in new.items()}
        values["past_length"] = ort_value(np.full(1, i))
        binding = attend.session.io_binding()
        for tensor in attend.schema.inputs:
            binding.bind_ortvalue_input(tensor.name, values[tensor.name])
        binding.bind_output("output")
        for tensor in attend.schema.outputs[1:]:
            binding.bind_ortvalue_output(tensor.name, values[tensor.name.replace("present", "past")])
        attend.session.run_with_iobinding(binding)
    assert_is_sparq(from_ort(binding.get_outputs()[0]), case, params, q, k, v)
    written = from_ort(values["past_key"])[:, :, : case.S]
    np.testing.assert_array_equal(written.astype(np.float32), k)


@pytest.mark.parametrize("name", ["Append", "CachedAttention", "SparQAttention"])
@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
def test_a_token_outside_the_caches_is_refused(runtime: str, name: str, L: int) -> None:
    case = Case(1, 2, 2, 65, 64, "f32")
    q, k, v = case.inputs(L=L)
    settings = {
        "Append": {},
        "CachedAttention": {"scale": 0.125, "window": 0},
        "SparQAttention": {**CACHES, **attributes(parameters(case, "paper"))},
    }
    attend = Operator(runtime, name, "f32", **settings[name])
    for past in (65 - L, -1):
        caches = {**empty_caches(case, 64, 0.0), "past_length": np.array([past])}
        with pytest.raises(Exception, match=r"past_length: expected 0 to \d+ " if runtime == "native" else "(?i)indic"):
            attend(query=q, key=k[:, :, -L:], value=v[:, :, -L:], left_padding=padding(case), **caches)


@by_runtime
def test_components_far_from_zero_keep_their_deviation(runtime: str) -> None:
    # As in models whose keys have biases: float32 sums of k and k^2 would lose the deviation here.
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
    np.testing.assert_allclose(spread, deviation(k, valid_keys(case.B, case.S, padding(case))), rtol=1e-3)
    expected = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-2)  # logits of thousands


@pytest.mark.parametrize("setting", ["robust", "reallocate"])
def test_groups_are_coded_when_they_are_full(setting: str) -> None:
    """By a step, by a few tokens that begin in mid-group, and several by a prompt; every step chooses by them."""
    case = Case(2, 4, 2, 330, 64, "f32", padding=(0, 100))
    _, k, v = case.inputs()
    q, _, _ = case.inputs(L=case.S)
    k[1, :, :100] = np.nan
    params = {**parameters(case, setting), "top_k": 24, "local_window": 4}
    attend = Operator("native", "SparQCodedAttention", "f32", dense_below=0, **attributes(params))
    caches = empty_codes(case, case.S + 9)
    for start, stop in pairwise((0, 30, 31, 126, 127, 128, 129, 163, 164, 188, 195, 196, 328, 329, 330)):
        new = {name: array[:, :, start:stop] for name, array in (("query", q), ("key", k), ("value", v))}
        got = attend(**new, left_padding=padding(case), **caches)
        caches = advance(caches, got, stop - start)
        given = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
        expected = oracle.sparq_attention(*given, left_padding=case.padding, key_bits=4, **params)
        np.testing.assert_allclose(got["output"], expected, rtol=0, atol=2e-5, err_msg=str(stop))
    wanted = oracle.code_keys(k, left_padding=case.padding)
    for name, found, array in zip(KeyCodes._fields, unpacked(got, case), wanted, strict=True):
        np.testing.assert_array_equal(found, array, err_msg=name)
    exact = oracle.sparq_attention(*given, left_padding=case.padding, **params)
    assert np.abs(expected - exact).max() > 1e-4


def test_rows_of_different_length_fill_their_groups_apart() -> None:
    case = Case(3, 4, 2, 192, 64, "f32", padding=(0, 70, 0))
    q, k, v = case.inputs()
    params = {**parameters(case, "robust"), "top_k": 24, "local_window": 4}
    attend = Operator("native", "SparQCodedAttention", "f32", dense_below=0, **attributes(params))
    lengths = np.array([128, 192, 75])
    rows = [coded_caches(case, k, v, int(end), 192) for end in lengths - 54]
    caches = {name: np.stack([each[name][b] for b, each in enumerate(rows)]) for name in rows[0]}
    for L, past in ((53, lengths - 54), (1, lengths - 1)):
        at = past[:, None] + np.arange(L)
        new = {n: np.stack([a[b][:, at[b]] for b in range(3)]) for n, a in (("key", k), ("value", v))}
        got = attend(
            query=np.repeat(q, L, axis=2), **new, left_padding=padding(case), **{**caches, "past_length": past}
        )
        caches = advance(caches, got, L)
    for b, end in enumerate(lengths):
        row = slice(b, b + 1)
        expected = oracle.sparq_attention(
            q[row], k[row, :, :end], v[row, :, :end], left_padding=padding(case)[row], key_bits=4, **params
        )
        np.testing.assert_allclose(got["output"][row], expected, rtol=0, atol=2e-5)


@by_runtime
def test_a_sampled_prompt_is_followed_by_saap(runtime: str) -> None:
    """Keys of all pieces get their buckets; a step attends as `SaapAttention` does, or exactly in short contexts."""
    case = SaapCase(Case(1, 4, 2, 401, 64, "f32"), "random", sink_tokens=1, recent_tokens=20)
    prompt = SampleCase(1, 4, 2, 401, 401, 64, "f32", 32, alpha_column=0.6, alpha_slash=0.5, chunks=2)
    q, k, v = prompt.inputs()
    rng = np.random.default_rng(0)
    before = {name: rng.normal(size=array.shape).astype(np.float32) for name, array in (("query", q), ("key", k))}
    arrays = saap_weights(case)
    settings = {**saap_settings(case), **prompt.parameters, "dense_prompt_below": 0}
    attend, late = (
        Operator(runtime, "SampleSaapAttention", "f32", **{**settings, "dense_below": below}) for below in (401, 402)
    )
    caches = {
        **{name: np.full((1, 2, 448, 64), np.nan) for name in ("past_key", "past_value")},
        "past_bucket_ids": np.ones((1, 2, 448), np.int16),
        "past_length": np.zeros(1, np.int64),
    }

    def given(start: int, stop: int) -> dict[str, Array]:
        new = {"query": q, "key": k, "value": v, "query_before": before["query"], "key_before": before["key"]}
        return {**{name: array[:, :, start:stop] for name, array in new.items()}, "left_padding": np.zeros(1)}

    for start, stop in ((0, 200), (200, 400)):
        got = attend(**given(start, stop), **caches, **arrays)
        caches = advance(caches, got, 200)
        taken = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
        expected = oracle.sample_attention(*taken, **prompt.parameters)
        assert np.abs(expected - oracle.dense_attention(*taken)).max() > 1e-2
        np.testing.assert_allclose(got["output"], expected, rtol=0, atol=2e-5)
    step = {**given(400, 401), **caches, **arrays}
    got = attend(**step)
    ids = got["present_bucket_ids"]
    assert_same_assignment(ids[:, :, :401], before["key"], arrays["centroids"])
    assert (ids[:, :, 401:] == 1).all()
    visited = oracle.saap_route(before["query"][:, :, 400:], **case.network(), probes=case.probes)
    expected = oracle.saap_attention(q[:, :, 400:], k, v, bucket_ids=ids[:, :, :401], visited=visited, **case.window)
    dense = oracle.dense_attention(q[:, :, 400:], k, v)
    assert np.abs(expected - dense).max() > 1e-3
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(late(**step)["output"], dense, rtol=0, atol=1e-5)
