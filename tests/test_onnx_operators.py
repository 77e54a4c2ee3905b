"""The ONNX operators against the oracle: bodies on a stock runtime and the reference evaluator, native kernels."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from cases import Case, assert_as_good_as_plain, assert_same_choice, plain_attention
from mlx_lm.models.base import create_causal_mask
from onnx.inliner import inline_local_functions
from onnx_operators import (
    CACHES,
    DTYPES,
    LANES,
    Operator,
    advance,
    assert_is_sparq,
    attributes,
    by_case,
    by_runtime,
    by_setting,
    empty_caches,
    filled_caches,
    from_ort,
    ort_value,
    padding,
    parameters,
    select,
    session,
    step,
    windowed_attention,
)

from mlx_sparse import onnx_export, oracle
from mlx_sparse.oracle.select import valid_keys
from mlx_sparse.oracle.sparq import deviation


@by_setting
@by_case
@by_runtime
def test_sparq_equals_the_oracle(runtime: str, case: Case, setting: str) -> None:
    q, k, v = case.inputs()
    params = parameters(case, setting)
    got = Operator(runtime, "SparQ", case.dtype, **attributes(params))(**step(case, q, k, v))
    expected = select(case, q, k, params)
    assert got["indices"].dtype == np.int32
    assert_same_choice(got["indices"], expected.indices, expected.scores)
    assert_is_sparq(got["output"], case, params, q, k, v)


@pytest.mark.parametrize("setting", ["paper", "eval", "reallocate", "own-scale"])
@by_case
@by_runtime
def test_sparq_attention_after_a_prompt_equals_the_oracle(runtime: str, case: Case, setting: str) -> None:
    q, k, v = case.inputs()
    params = parameters(case, setting)
    attend = Operator(runtime, "SparQAttention", case.dtype, **CACHES, **attributes(params))
    caches = empty_caches(case, case.S + 70)
    prompt = case.S - 1
    if prompt:
        queries = np.repeat(q, prompt, axis=2)
        got = attend(query=queries, key=k[:, :, :-1], value=v[:, :, :-1], left_padding=padding(case), **caches)
        caches = advance(caches, got, prompt)
    got = attend(query=q, key=k[:, :, -1:], value=v[:, :, -1:], left_padding=padding(case), **caches)
    assert_is_sparq(got["output"], case, params, q, k, v)
    chunked = got["present_key_t"].reshape(case.B, case.Hkv, -1, case.D, LANES)
    key_t = chunked.swapaxes(-1, -2).reshape(got["present_key"].shape)
    for written, given in ((got["present_key"], k), (key_t, k), (got["present_value"], v)):
        np.testing.assert_array_equal(written[:, :, : case.S].astype(np.float32), given)


@by_case
@by_runtime
def test_dense_attention_equals_the_oracle(runtime: str, case: Case) -> None:
    q, k, v = case.inputs()
    scale = case.D**-0.5
    attend = Operator(runtime, "DenseAttention", case.dtype, scale=scale, window=0)
    got = attend(query=q, keys=k, values=v, left_padding=padding(case), length=np.full(case.B, case.S))["output"]
    expected = oracle.dense_attention(q, k, v, left_padding=case.padding)
    everything = np.broadcast_to(np.arange(case.S), (case.B, case.Hkv, case.S))
    everything = np.where(everything >= padding(case)[:, None, None], everything, -1)
    plain = plain_attention(q, k, v, everything, scale, case.dtype)
    assert_as_good_as_plain(got, expected, plain, case.dtype)


@pytest.mark.parametrize("window", [1, 7, 64, 90, 1000])
@pytest.mark.parametrize("L", [1, 12])
@by_runtime
def test_a_window_keeps_the_last_positions(runtime: str, L: int, window: int) -> None:
    case = Case(2, 6, 2, 90, 64, "f32", padding=(0, 85))
    q, k, v = case.inputs(L=L)
    expected = windowed_attention(q, k, v, padding(case), window, 0.125)
    stale = np.full((2, 2, 38, 64), np.nan)
    given = {"query": q, "left_padding": padding(case)}
    attend = Operator(runtime, "DenseAttention", "f32", scale=0.125, window=window)
    k[1, :, :85], v[1, :, :85] = np.nan, np.nan
    keys, values = (np.concatenate([array, stale], axis=2) for array in (k, v))
    got = attend(keys=keys, values=values, length=np.full(2, case.S), **given)
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-5)

    attend = Operator(runtime, "CachedAttention", "f32", scale=0.125, window=window)
    past = {"past_key": keys.copy(), "past_value": values.copy(), "past_length": np.full(2, case.S - L)}
    past["past_key"][:, :, case.S - L :], past["past_value"][:, :, case.S - L :] = np.nan, np.nan
    got = attend(key=k[:, :, -L:], value=v[:, :, -L:], **past, **given)
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got["present_key"], keys.astype(np.float32))
    np.testing.assert_array_equal(got["present_value"], values.astype(np.float32))


@pytest.mark.parametrize("window", [1, 5, 40])
def test_the_window_is_that_of_mlx_lm(window: int) -> None:
    case = Case(1, 2, 1, 40, 64, "f32")
    q, k, v = case.inputs(L=9)
    mask = np.array(create_causal_mask(9, case.S - 9, window_size=window))
    given = {"query": q, "keys": k, "values": v, "left_padding": padding(case), "length": np.full(1, case.S)}
    attend = Operator("onnxruntime", "DenseAttention", "f32", scale=0.125, window=window)
    expected = mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=0.125, mask=mx.array(mask))
    np.testing.assert_allclose(attend(**given)["output"], np.array(expected), rtol=0, atol=1e-5)


@by_runtime
def test_windows_of_rows_of_different_length_do_not_meet(runtime: str) -> None:
    case = Case(2, 4, 2, 100, 64, "f32")
    q, k, v = case.inputs(L=3)
    length = np.array([100, 20])
    attend = Operator(runtime, "DenseAttention", "f32", scale=0.125, window=8)
    poisoned = np.where(np.arange(100)[:, None] < length[:, None, None, None], 0, np.nan)
    got = attend(query=q, keys=k + poisoned, values=v + poisoned, left_padding=padding(case), length=length)["output"]
    for b, S in enumerate(length):
        row = slice(b, b + 1)
        expected = windowed_attention(q[row], k[row, :, :S], v[row, :, :S], np.zeros(1), 8, 0.125)
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dense_below", [0, 200, 201, 1000])
@by_runtime
def test_one_query_is_dense_while_the_longest_row_is_short(runtime: str, dense_below: int) -> None:
    case = Case(2, 6, 2, 200, 64, "f32", padding=(0, 20))
    q, k, v = case.inputs()
    params = {**parameters(case, "paper"), "top_k": 8, "local_window": 2}
    attend = Operator(runtime, "SparQAttention", "f32", lanes=LANES, dense_below=dense_below, **attributes(params))
    caches = empty_caches(case, case.S)
    queries = np.repeat(q, case.S - 1, axis=2)
    got = attend(query=queries, key=k[:, :, :-1], value=v[:, :, :-1], left_padding=padding(case), **caches)
    caches = advance(caches, got, case.S - 1)
    got = attend(query=q, key=k[:, :, -1:], value=v[:, :, -1:], left_padding=padding(case), **caches)
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
    caches = empty_caches(case, 384)
    for start, stop in ((0, 120), (120, 249), (249, 250)):
        new = {"key": k[:, :, start:stop], "value": v[:, :, start:stop], "left_padding": padding(case)}
        got = attend(query=np.repeat(q, stop - start, axis=2), **new, **caches)
        caches = advance(caches, got, stop - start)
    plane = np.full((2, 2, 384 * 80), np.nan, np.float32)
    j, d = np.meshgrid(np.arange(250), np.arange(80), indexing="ij")
    plane[:, :, ((j // lanes) * 80 + d) * lanes + j % lanes] = k
    np.testing.assert_array_equal(got["present_key_t"].reshape(plane.shape), plane)
    assert_is_sparq(got["output"], case, params, q, k, v)


@pytest.mark.parametrize("L", [2, 5])
@by_runtime
def test_several_queries_are_attended_densely_and_causally(runtime: str, L: int) -> None:
    case = Case(2, 6, 2, 70, 64, "f32", padding=(0, 30))
    q, k, v = case.inputs(L=L)
    attend = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(parameters(case, "paper")))
    caches = empty_caches(case, 128)
    start = case.S - L
    got = attend(
        query=np.repeat(q[:, :, :1], start, axis=2),
        key=k[:, :, :start],
        value=v[:, :, :start],
        left_padding=padding(case),
        **caches,
    )
    caches = advance(caches, got, start)
    got = attend(query=q, key=k[:, :, start:], value=v[:, :, start:], left_padding=padding(case), **caches)
    expected = oracle.dense_attention(q, k, v, left_padding=case.padding)
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


@pytest.mark.parametrize("poison", [1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("setting", ["paper", "reallocate", "eval"])
@by_runtime
def test_padded_rows_never_reach_the_output(runtime: str, setting: str, poison: float) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(290, 7))
    q, k, v = case.inputs()
    params = parameters(case, setting)
    clean = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    dense = oracle.dense_attention(q, k, v, left_padding=case.padding)
    given = step(case, q, k, v)
    for row, first in enumerate(case.padding or ()):
        k[row, :, :first] = poison
        v[row, :, :first] = poison
    given = {**given, "keys": k, "keys_t": k.swapaxes(-1, -2)[:, :, None], "values": v}
    got = Operator(runtime, "SparQ", "f32", **attributes(params))(**given)
    np.testing.assert_allclose(got["output"], clean, rtol=0, atol=1e-5)

    length = np.full(case.B, case.S)
    attend = Operator(runtime, "DenseAttention", "f32", scale=params["scale"], window=0)
    got = attend(query=q, keys=k, values=v, left_padding=padding(case), length=length)
    np.testing.assert_allclose(got["output"], dense, rtol=0, atol=1e-5)

    attend = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(params))
    caches = empty_caches(case, 384, poison)
    queries = np.repeat(q, case.S - 1, axis=2)
    got = attend(query=queries, key=k[:, :, :-1], value=v[:, :, :-1], left_padding=padding(case), **caches)
    caches = advance(caches, got, case.S - 1)
    got = attend(query=q, key=k[:, :, -1:], value=v[:, :, -1:], left_padding=padding(case), **caches)
    np.testing.assert_allclose(got["output"], clean, rtol=0, atol=1e-5)


@by_case
@by_runtime
def test_keeping_every_key_is_dense_attention(runtime: str, case: Case) -> None:
    q, k, v = case.inputs()
    given = step(case, q, k, v)
    params = {**parameters(case, "reallocate"), "rank": 2, "top_k": case.S, "local_window": 0}
    sparse = Operator(runtime, "SparQ", case.dtype, **attributes(params))(**given)
    dense = Operator(runtime, "DenseAttention", case.dtype, scale=params["scale"], window=0)(
        **{name: given[name] for name in ("query", "keys", "values", "left_padding", "length")}
    )
    every = np.where(np.arange(case.S) >= padding(case)[:, None], np.arange(case.S), -1)
    np.testing.assert_array_equal(np.sort(sparse["indices"]), np.sort(every)[:, None].repeat(case.Hkv, axis=1))
    assert_is_sparq(sparse["output"], case, params, q, k, v)
    assert_is_sparq(dense["output"], case, params, q, k, v)


@by_runtime
def test_rank_D_is_oracle_top_k(runtime: str) -> None:
    case = Case(1, 8, 2, 300, 64, "f32")
    q, k, v = case.inputs()
    params = {**parameters(case, "no-reallocate"), "rank": 64, "top_k": 40, "local_window": 10}
    got = Operator(runtime, "SparQ", "f32", **attributes(params))(**step(case, q, k, v))
    np.testing.assert_allclose(got["output"], oracle.oracle_top_k_attention(q, k, v, top_k=40), rtol=0, atol=1e-6)


@pytest.mark.parametrize("setting", ["paper", "reallocate", "eval"])
@by_runtime
def test_a_row_without_a_valid_key_gives_zeros(runtime: str, setting: str) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(300, 0))
    q, k, v = case.inputs()
    k[0], v[0] = np.nan, np.nan
    given = {**step(case, q, np.nan_to_num(k), np.nan_to_num(v)), "keys": k, "values": v}
    got = Operator(runtime, "SparQ", "f32", **attributes(parameters(case, setting)))(**given)
    assert (got["output"][0] == 0).all()
    assert (got["indices"][0] == -1).all()


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


@by_runtime
def test_queries_in_the_padding_give_zeros_and_what_is_not_written_is_not_read(runtime: str) -> None:
    case = Case(2, 6, 2, 20, 64, "f32", padding=(0, 15))
    q, k, v = case.inputs(L=12)
    stale = np.full((2, 2, 8, 64), np.nan)
    keys, values = (np.concatenate([array, stale], axis=2) for array in (k, v))
    keys[1, :, :15], values[1, :, :15] = np.nan, np.nan
    attend = Operator(runtime, "DenseAttention", "f32", scale=0.125, window=0)
    got = attend(query=q, keys=keys, values=values, left_padding=padding(case), length=np.full(2, case.S))["output"]
    expected = oracle.dense_attention(q, k, v, left_padding=case.padding)
    assert (expected[1, :, :7] == 0).all()
    assert (got[1, :, :7] == 0).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@by_runtime
def test_contexts_of_several_blocks_are_put_together(runtime: str) -> None:
    # The bodies read 256 keys of each head or 8 chunks at a time here: the first block of row 1 has no valid key, the
    # last one ends in chunks that do not exist.
    case = Case(2, 8, 8, 1300, 64, "f32", padding=(3, 700))
    q, k, v = case.inputs(L=3)
    stale = np.full((2, 8, 44, 64), np.nan)
    keys, values = (np.concatenate([array, stale], axis=2) for array in (k, v))
    keys[1, :, :700], values[1, :, :700] = np.nan, np.nan
    given = {"left_padding": padding(case), "keys": keys, "values": values}
    for window in (0, 600):
        attend = Operator(runtime, "DenseAttention", "f32", scale=0.125, window=window)
        got = attend(query=q, length=np.full(2, case.S), **given)["output"]
        expected = windowed_attention(q, k, v, padding(case), window or case.S, 0.125)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)

    q = q[:, :, :1]
    for setting in ("paper", "eval"):
        params = {**parameters(case, setting), "rank": 64}
        chunked = keys.reshape(2, 8, -1, LANES, 64).swapaxes(-1, -2)
        attend = Operator(runtime, "SparQ", "f32", **attributes(params))
        got = attend(**{**step(case, q, k, v), **given, "keys_t": chunked})
        expected = select(case, q, k, params)
        assert_same_choice(got["indices"], expected.indices, expected.scores)
        assert_is_sparq(got["output"], case, params, q, k, v)


@pytest.mark.parametrize("setting", ["paper", "reallocate", "eval"])
@by_runtime
def test_rows_of_different_length_do_not_meet_in_several_blocks(runtime: str, setting: str) -> None:
    case = Case(2, 8, 8, 1300, 64, "f32")
    q, k, v = case.inputs()
    params = {**parameters(case, setting), "rank": 64}
    lengths = (1300, 900)
    stale = np.arange(1344)[:, None] >= np.array(lengths)[:, None, None, None]
    keys, values = (np.where(stale, np.nan, np.pad(a, ((0, 0), (0, 0), (0, 44), (0, 0)))) for a in (k, v))
    rows = [(Case(1, 8, 8, S, 64, "f32"), slice(b, b + 1)) for b, S in enumerate(lengths)]
    alone = [step(one, *(array[row, :, : one.S] for array in (q, k, v))) for one, row in rows]
    given = {name: np.concatenate([each[name] for each in alone]) for name in ("value_mean", "deviation", "length")}
    keys_t = keys.reshape(2, 8, -1, LANES, 64).swapaxes(-1, -2)
    attend = Operator(runtime, "SparQ", "f32", **attributes(params))
    got = attend(query=q, keys=keys, keys_t=keys_t, values=values, left_padding=padding(case), **given)["output"]
    for one, row in rows:
        expected = oracle.sparq_attention(q[row], k[row, :, : one.S], v[row, :, : one.S], **params)
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


@by_runtime
def test_a_zero_query_attends_uniformly(runtime: str) -> None:
    case = Case(1, 2, 2, 300, 64, "f32")
    q, k, v = case.inputs()
    params = parameters(case, "paper")
    got = Operator(runtime, "SparQ", "f32", **attributes(params))(**step(case, 0 * q, k, v))
    np.testing.assert_allclose(got["output"], oracle.sparq_attention(0 * q, k, v, **params), rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("inlined", [False, True], ids=["functions", "inlined"])
def test_nodes_of_one_model_share_a_body_and_keep_their_attributes(inlined: bool) -> None:
    case = Case(1, 4, 2, 300, 64, "f32")
    q, k, v = case.inputs()
    settings = [{**parameters(case, "no-reallocate"), "rank": 4}, {**parameters(case, "robust"), "top_k": 50}]
    model = onnx_export.operator_model("SparQ", **attributes(settings[0]))
    inputs = list(model.graph.node[0].input)
    model.graph.node.append(onnx_export.node("SparQ", inputs, ["output_2", "indices_2"], **attributes(settings[1])))
    for output in list(model.graph.output):
        model.graph.output.add().CopyFrom(output)
        model.graph.output[-1].name += "_2"
    onnx_export.check(model)
    if inlined:
        model = inline_local_functions(model)
        assert not any(node.domain for node in model.graph.node)
    given = step(case, q, k, v)
    feeds = {info.name: given[info.name] for info in model.graph.input}
    feeds = {name: a if a.dtype == np.int64 else a.astype(np.float32) for name, a in feeds.items()}
    got = session(model).run(["output", "output_2"], feeds)
    for out, params in zip(got, settings, strict=True):
        assert_is_sparq(out, case, params, q, k, v)


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
    caches = empty_caches(case, case.S)
    edges = [*range(0, 4000, 500), 3999, 4000]
    for start, stop in pairwise(edges):
        new = {"key": k[:, :, start:stop], "value": v[:, :, start:stop], "left_padding": padding(case)}
        got = attend(query=np.repeat(q, stop - start, axis=2), **new, **caches)
        caches = advance(caches, got, stop - start)
    spread = np.sqrt(got["present_sums"][:, :, 2] / (case.S - padding(case))[:, None, None])
    np.testing.assert_allclose(spread, deviation(k, valid_keys(case.B, case.S, padding(case))), rtol=1e-3)
    expected = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    np.testing.assert_allclose(got["output"], expected, rtol=0, atol=1e-2)  # logits of thousands
