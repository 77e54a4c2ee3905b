"""SaapAttention against the oracle: its body on runtimes, and the native kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Array, Case
from mlx_sparse.onnx_export import compose
from onnx_operators import (
    DTYPES,
    Operator,
    advance,
    assert_same_assignment,
    by_runtime,
    from_ort,
    ort_value,
    padding,
    saap_settings,
    saap_step,
    saap_weights,
    windowed_attention,
)
from saap_cases import SAAP_CASES, SaapCase, assert_attends

from mlx_sparse import oracle

by_case = pytest.mark.parametrize("case", SAAP_CASES, ids=str)
SMALL = SaapCase(Case(2, 6, 2, 150, 64, "f32", padding=(0, 40)), "random")


def attention(runtime: str, case: SaapCase, **changes: Any) -> Operator:
    return Operator(runtime, "SaapAttention", case.step.dtype, **{**saap_settings(case), **changes})


def empty(case: SaapCase, room: int) -> dict[str, Array]:
    """Caches before the first token; what is not written yet holds poison and a bucket's number."""
    n = case.step
    return {
        **{name: np.full((n.B, n.Hkv, room, n.D), np.nan) for name in ("past_key", "past_value")},
        "past_bucket_ids": np.ones((n.B, n.Hkv, room), np.int16),
        "past_length": np.zeros(n.B, np.int64),
        "left_padding": padding(n),
    }


def before(case: SaapCase) -> tuple[Array, Array]:
    """Queries and keys (B, H, S, D) before RoPE."""
    rng, n = np.random.default_rng(6), case.step
    made = [rng.normal(size=(n.B, heads, n.S, n.D)) for heads in (n.Hq, n.Hkv)]
    return made[0].astype(np.float32), made[1].astype(np.float32)


@pytest.mark.parametrize("dtype, weights", [("f32", "f32"), ("f16", "f16"), ("bf16", "f16"), ("f16", "f32")])
@by_runtime
def test_buckets_are_chosen_when_keys_are_written(runtime: str, dtype: str, weights: str) -> None:
    """A prompt in pieces, then tokens one at a time."""
    case = replace(SMALL, step=replace(SMALL.step, dtype=dtype), weights=weights, buckets=40)
    rounded = DTYPES[dtype]
    q, k, v = (array.astype(rounded).astype(np.float32) for array in case.step.inputs(L=case.step.S))
    query_before, key_before = (array.astype(rounded).astype(np.float32) for array in before(case))
    attend, arrays, caches = attention(runtime, case), saap_weights(case), empty(case, case.step.S + 3)
    for start, stop in ((0, 60), (60, 147), (147, 148), (148, 149), (149, 150)):
        new = {"query": q, "key": k, "value": v, "query_before": query_before, "key_before": key_before}
        got = attend(**{name: array[:, :, start:stop] for name, array in new.items()}, **caches, **arrays)
        caches = {**caches, **advance(caches, got, stop - start)}
        if stop - start > 1:
            exact = windowed_attention(
                q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], padding(case.step), 999, 0.125
            )
            np.testing.assert_allclose(got["output"].astype(np.float32), exact, rtol=2e-2, atol=2e-2)
    ids = got["present_bucket_ids"]
    assert_same_assignment(ids[:, :, : case.step.S], key_before, arrays["centroids"])
    assert (ids[:, :, case.step.S :] == 1).all()
    last = {**case.network(), "queries": query_before[:, :, -1:], "probes": case.probes}
    chosen = {
        "bucket_ids": ids[:, :, : case.step.S],
        "visited": oracle.saap_route(**last),
        "left_padding": case.step.padding,
    }
    expected = oracle.saap_attention(q[:, :, -1:], k, v, **chosen, **case.window)
    dense = oracle.dense_attention(q[:, :, -1:], k, v, left_padding=case.step.padding)
    off = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2}[dtype]
    np.testing.assert_allclose(got["output"].astype(np.float32), expected, rtol=0, atol=off)
    assert np.abs(expected - dense).max() > 5 * off


@pytest.mark.parametrize("dense_below", [0, 150, 151])
@by_runtime
def test_one_query_is_dense_while_the_longest_row_is_short(runtime: str, dense_below: int) -> None:
    got = attention(runtime, SMALL, dense_below=dense_below)(**saap_step(SMALL))["output"]
    q, k, v = SMALL.inputs()
    if dense_below <= SMALL.step.S:
        assert_attends(got, None, SMALL)
        return
    np.testing.assert_allclose(got, oracle.dense_attention(q, k, v, left_padding=SMALL.step.padding), rtol=0, atol=1e-5)


@by_runtime
def test_rows_of_different_length_do_not_meet(runtime: str) -> None:
    case = replace(SMALL, step=replace(SMALL.step, padding=(3, 0)))
    q, k, v = case.inputs()
    given, past = saap_step(case), np.array([149, 60])
    given |= {"past_length": past, "key": k[[0, 1], :, past][:, :, None], "value": v[[0, 1], :, past][:, :, None]}
    for name in ("past_key", "past_value"):
        given[name] = np.where(
            np.arange(given[name].shape[2])[:, None] < past[:, None, None, None], given[name], np.nan
        )
    got = attention(runtime, case)(**given)["output"]
    visited = oracle.saap_route(case.queries_before(), probes=case.probes, **case.network())
    for b, S in enumerate(past + 1):
        row = slice(b, b + 1)
        chosen = {
            "bucket_ids": case.bucket_ids()[row, :, :S],
            "visited": visited[row],
            "left_padding": [padding(case.step)[b]],
        }
        expected = oracle.saap_attention(q[row], k[row, :, :S], v[row, :, :S], **chosen, **case.window)
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("poison", [1e3, float("inf"), float("nan")])
@by_runtime
def test_padded_keys_never_reach_the_output(runtime: str, poison: float) -> None:
    case = replace(SMALL, step=replace(SMALL.step, padding=(149, 45)))
    given = saap_step(case)
    for name in ("past_key", "past_value"):
        for row, first in enumerate(case.step.padding or ()):
            given[name][row, :, :first] = poison
    assert_attends(attention(runtime, case)(**given)["output"], None, case)


@by_runtime
def test_a_row_without_a_valid_key_gives_zeros(runtime: str) -> None:
    case = replace(SMALL, step=replace(SMALL.step, padding=(150, 0)))
    given = saap_step(case)
    given["past_key"][0], given["past_value"][0] = np.nan, np.nan
    assert (attention(runtime, case)(**given)["output"][0] == 0).all()


@pytest.mark.parametrize("name", ["sink_tokens", "recent_tokens"])
@by_runtime
def test_a_window_longer_than_any_text_is_dense_attention(runtime: str, name: str) -> None:
    q, k, v = SMALL.inputs()
    expected = oracle.dense_attention(q, k, v, left_padding=SMALL.step.padding)
    got = attention(runtime, SMALL, **{name: 2**63 - 1})(**saap_step(SMALL))["output"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
def test_caches_of_one_buffer_are_appended_to_in_place(runtime: str) -> None:
    given = saap_step(SMALL)
    attend = attention(runtime, SMALL)
    expected = attend(**given)
    binding, values = attend.session.io_binding(), {}
    for tensor in attend.schema.inputs:
        values[tensor.name] = ort_value(np.array(given[tensor.name], attend.types[tensor.type]))
        binding.bind_ortvalue_input(tensor.name, values[tensor.name])
    binding.bind_output("output")
    for name in ("key", "value", "bucket_ids"):
        binding.bind_ortvalue_output(f"present_{name}", values[f"past_{name}"])
    attend.session.run_with_iobinding(binding)
    np.testing.assert_array_equal(from_ort(binding.get_outputs()[0]), expected["output"])
    for name in ("key", "value", "bucket_ids"):
        np.testing.assert_array_equal(from_ort(values[f"past_{name}"]), expected[f"present_{name}"])


@by_runtime
def test_a_token_beyond_the_caches_is_an_error_of_the_runtime(runtime: str) -> None:
    given = saap_step(SMALL, room=0)
    for past in (150, -1):
        with pytest.raises(Exception, match=r"(?i)indice|past_length|bounds"):
            attention(runtime, SMALL)(**{**given, "past_length": np.full(2, past)})


@pytest.mark.parametrize("hidden", [None, 32], ids=["linear", "hidden"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime-compat", "reference"])
def test_lowered_it_equals_the_oracle(runtime: str, hidden: int | None) -> None:
    case = replace(SMALL, hidden=hidden)
    attend = attention(runtime, case, lowered=compose.inline)
    assert_attends(attend(**saap_step(case))["output"], None, case)


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("filling", ["skewed", "one"])
def test_any_number_of_threads_gives_the_same_answer(filling: str, workers: int, limit: Any) -> None:
    """With work cut for more threads, the list of a head is attended in parts."""
    limit(None, workers)
    case = SaapCase(Case(2, 6, 2, 5000, 64, "f32", padding=(0, 2500)), filling, recent_tokens=600)
    given = saap_step(case)
    outputs = [attention("native", case, threads=threads)(**given)["output"] for threads in (1, 2, 4)]
    assert_attends(outputs[0], None, case)
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
