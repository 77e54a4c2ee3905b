"""Check properties of ONNX operators that tests/core does not have: windows, loops, shared function bodies."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from cases import Case, assert_same_selection
from onnx.inliner import inline_local_functions
from onnx_operators import (
    LANES,
    Operator,
    assert_is_sparq,
    attributes,
    by_runtime,
    padding,
    parameters,
    select,
    session,
    step,
    windowed_attention,
)

from mlx_sparse import onnx_export


@pytest.mark.parametrize(("L", "window"), [(1, 1), (1, 64), (12, 7), (12, 1000)])
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


@by_runtime
def test_windows_of_rows_of_different_length(runtime: str) -> None:
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


@by_runtime
def test_contexts_of_several_blocks_are_merged(runtime: str) -> None:
    # With these sizes the function bodies read 256 keys of each head or 8 chunks at a time. The first block of row 1
    # has no valid key, and the last block exceeds the number of chunks.
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
    for setting in ("paper", "odd-sizes"):
        params = {**parameters(case, setting), "rank": 64}
        chunked = keys.reshape(2, 8, -1, LANES, 64).swapaxes(-1, -2)
        attend = Operator(runtime, "SparQ", "f32", **attributes(params))
        got = attend(**{**step(case, q, k, v), **given, "keys_t": chunked})
        expected = select(case, q, k, params)
        assert_same_selection(got["indices"], expected.indices, expected.scores)
        assert_is_sparq(got["output"], case, params, q, k, v)


@pytest.mark.parametrize("setting", ["paper", "reallocate", "odd-sizes"])
@by_runtime
def test_rows_of_different_length_in_several_blocks(runtime: str, setting: str) -> None:
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
        expected = reference.sparq_attention(q[row], k[row, :, : one.S], v[row, :, : one.S], **params)
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


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
