"""Operators whose several queries choose keys once, docs/spec/several.md: bodies and kernels against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import PRECISION, Array, Case
from fixtures_onnx import SETS
from mlx_sparse.onnx_export import lower
from mlx_sparse.onnx_export.table import VERIFY_QUERIES
from onnx_operators import (
    ATTRIBUTES,
    CACHES,
    Operator,
    attributes,
    by_runtime,
    coded_caches,
    filled_caches,
    from_ort,
    ort_value,
    padding,
    parameters,
    saap_settings,
    saap_weights,
)
from packed_caches import Form
from saap_cases import SaapCase

from mlx_sparse import ConfigError, onnx_export, oracle
from mlx_sparse.common.several import fold
from mlx_sparse.oracle.select import valid_keys
from mlx_sparse.oracle.sparq import masked_mean

KNOWING = [name for name, operator in onnx_export.OPERATORS.items() if VERIFY_QUERIES in operator.attributes]
OWN = [name for name in KNOWING if not onnx_export.OPERATORS[name].base]
# Queries, query heads and KV heads: G is 1, 4 and 8.
SIZES = [(2, 2, 2), (4, 8, 2), (16, 8, 1), (16, 4, 4), (3, 16, 2)]
by_size = pytest.mark.parametrize(("L", "Hq", "Hkv"), SIZES, ids=[f"L{L}-H{Hq}x{Hkv}" for L, Hq, Hkv in SIZES])
ROW_SETTINGS = ("top_k", "local_window", "reallocate", "group_reduce", "scale")


def assert_is_oracles(got: Array, case: Case, L: int, method: str, **how: Any) -> None:
    """The output is the oracle's, rounded once, and not dense attention."""
    arrays = case.inputs(L=L)
    expected = getattr(oracle, f"{method}_attention")(*arrays, left_padding=case.padding, verify="sparse", **how)
    dense = oracle.dense_attention(*arrays, left_padding=case.padding)
    once = 0 if case.dtype == "f32" else 2.0 ** -(PRECISION[case.dtype] + 1)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=once, atol=1e-5)
    assert np.abs(expected - dense).max() > 0.01


def new_tokens(case: Case, L: int) -> dict[str, Array]:
    q, k, v = case.inputs(L=L)
    return {"query": q, "key": k[:, :, -L:], "value": v[:, :, -L:], "left_padding": padding(case)}


def columns(case: Case, L: int) -> dict[str, Array]:
    """Inputs of `SparQAttention` for the last tokens."""
    _, k, v = case.inputs(L=L)
    return {**new_tokens(case, L), **filled_caches(case, k, v, case.S - L, case.S + 7)}


def codes(case: Case, L: int, key_bits: int) -> dict[str, Array]:
    """Inputs of `SparQCodedAttention`."""
    _, k, v = case.inputs(L=L)
    return {**new_tokens(case, L), **coded_caches(case, k, v, case.S - L, case.S + 7, key_bits)}


def rows(case: Case, L: int) -> dict[str, Array]:
    """Inputs of `SparQRowsAttention`."""
    given = columns(case, L)
    return {**given, "past_sums": given["past_sums"][:, :, :1]}


def pages(case: Case, L: int, page_size: int) -> dict[str, Array]:
    """Inputs of `QuestAttention`; bounds of pages that get a key hold NaN."""
    given, past = columns(case, L), case.S - L
    capacity = given["past_key"].shape[2]
    bounds = np.full((case.B, case.Hkv, 2, -(-capacity // page_size), case.D), np.nan)
    if full := past // page_size:
        k = case.inputs(L=L)[1][:, :, : full * page_size]
        bounds[:, :, :, :full] = np.stack(oracle.page_bounds(k, padding(case), page_size=page_size), axis=2)
    return {**given, "past_bounds": bounds}


def buckets(index: SaapCase, L: int) -> dict[str, Array]:
    """Inputs of `SaapAttention`."""
    case, given = index.step, columns(index.step, L)
    ids = np.zeros(given["past_key"].shape[:3], np.int16)
    ids[:, :, : case.S - L] = index.bucket_ids()[:, :, : case.S - L]
    before = {"query_before": case.inputs(seed=1, L=L)[0], "past_bucket_ids": ids, **saap_weights(index)}
    key_before = np.random.default_rng(5).normal(size=(case.B, case.Hkv, L, case.D)).astype(np.float32)
    return {**given, **before, "key_before": key_before}


def call(name: str, case: Case, L: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Settings of an operator, and inputs of which much is left out."""
    params = attributes(parameters(case, "reallocate"))
    index = SaapCase(case, "random", probes=3)
    named = {
        "SparQAttention": lambda: ({**CACHES, **params}, columns(case, L)),
        "SparQCodedAttention": lambda: ({**params, "key_bits": 4, "dense_below": 0}, codes(case, L, 4)),
        "SparQRowsAttention": lambda: ({**{key: params[key] for key in ROW_SETTINGS}, "dense_below": 0}, rows(case, L)),
        "SaapAttention": lambda: (saap_settings(index), buckets(index, L)),
        "QuestAttention": lambda: ({"page_size": 8, "top_k": 44, "scale": 0.125, "dense_below": 0}, pages(case, L, 8)),
    }
    return named[name]()


@pytest.mark.parametrize("setting", ["paper", "eval", "robust", "reallocate"])
@by_size
@by_runtime
def test_columns_are_chosen_from_once(runtime: str, L: int, Hq: int, Hkv: int, setting: str) -> None:
    case = Case(2, Hq, Hkv, 200 + L, 64, "f32", padding=(0, 90))
    params = parameters(case, setting)
    attend = Operator(runtime, "SparQAttention", "f32", verify_queries=16, **CACHES, **attributes(params))
    got = attend(**columns(case, L))
    assert_is_oracles(got["output"], case, L, "sparq", **params)
    dense = Operator(runtime, "SparQAttention", "f32", **CACHES, **attributes(params))(**columns(case, L))
    for name in got.keys() - {"output"}:
        np.testing.assert_allclose(got[name], dense[name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("setting", ["paper", "no-reallocate"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
def test_half_precision_is_rounded_once(runtime: str, setting: str, dtype: str) -> None:
    case = Case(1, 4, 4, 333, 80, dtype)
    params = parameters(case, setting)
    attend = Operator(runtime, "SparQAttention", dtype, verify_queries=16, **CACHES, **attributes(params))
    assert_is_oracles(attend(**columns(case, 5))["output"], case, 5, "sparq", **params)


# Keys that the first query sees, and padding: it fills a group of codes, another one does, none does; the same of the
# first group.
FILLING = [(192, 0), (191, 0), (195, 3), (230, 0), (64, 0), (67, 3), (63, 0), (50, 0)]


@pytest.mark.parametrize(("P", "first"), FILLING)
@pytest.mark.parametrize("key_bits", [8, 4])
@by_runtime
def test_codes_are_those_of_the_first_querys_keys(runtime: str, key_bits: int, P: int, first: int) -> None:
    for L, Hq, Hkv in ((4, 8, 2), (2, 2, 2), (16, 8, 1)):
        case = Case(2, Hq, Hkv, P + L - 1, 32, "f32", padding=(first, 0))
        few = {"top_k": 20, "local_window": 3, "key_bits": key_bits, "reallocate": L == 2}
        params = {**parameters(case, "robust"), **few}
        attend = Operator(runtime, "SparQCodedAttention", "f32", dense_below=0, verify_queries=16, **attributes(params))
        got = attend(**codes(case, L, key_bits))
        assert_is_oracles(got["output"], case, L, "sparq", **params)
        past = codes(case, L, key_bits)
        plain = {**attributes(params), "verify_queries": 0}
        dense = Operator(runtime, "SparQCodedAttention", "f32", dense_below=0, **plain)(**past)
        np.testing.assert_array_equal(got["present_key_codes"], dense["present_key_codes"])
        np.testing.assert_allclose(got["present_summary"], dense["present_summary"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", ["paper", "reallocate", "eval"])
@by_runtime
def test_whole_keys_are_chosen_from_once(runtime: str, setting: str) -> None:
    for L, Hq, Hkv in SIZES[:3]:
        case = Case(2, Hq, Hkv, 210, 64, "f32", padding=(50, 0))
        params = {**parameters(case, setting), "rank": 64, "component_score": "query"}
        how = {name: value for name, value in attributes(params).items() if name in ROW_SETTINGS}
        attend = Operator(runtime, "SparQRowsAttention", "f32", dense_below=0, verify_queries=16, **how)
        got = attend(**rows(case, L))
        assert_is_oracles(got["output"], case, L, "sparq", **params)
        v = case.inputs(L=L)[2].astype(np.float64)
        sums = masked_mean(v, valid_keys(2, 210, padding(case))) * (210 - padding(case))[:, None, None]
        np.testing.assert_allclose(got["present_sums"][:, :, 0], sums, rtol=1e-5)


@pytest.mark.parametrize("S", [200, 203, 208, 214])  # the new tokens lie in one page, or reach into the next two
@by_size
@by_runtime
def test_pages_are_chosen_once(runtime: str, L: int, Hq: int, Hkv: int, S: int) -> None:
    case = Case(2, Hq, Hkv, S, 64, "f32", padding=(0, 77))
    quest = {"page_size": 8, "top_k": 44}
    attend = Operator(runtime, "QuestAttention", "f32", scale=0.125, dense_below=0, verify_queries=16, **quest)
    given = pages(case, L, 8)
    got = attend(**given)
    assert_is_oracles(got["output"], case, L, "quest", **quest)
    dense = Operator(runtime, "QuestAttention", "f32", scale=0.125, dense_below=0, **quest)(**given)
    np.testing.assert_array_equal(got["present_bounds"], dense["present_bounds"])


@pytest.mark.parametrize("hidden", [None, 32])
@by_size
@by_runtime
def test_buckets_are_chosen_once(runtime: str, L: int, Hq: int, Hkv: int, hidden: int | None) -> None:
    case = Case(2, Hq, Hkv, 180, 64, "f32", padding=(0, 60))
    index = SaapCase(case, "random", hidden=hidden, probes=3)
    given = buckets(index, L)
    attend = Operator(runtime, "SaapAttention", "f32", verify_queries=16, **saap_settings(index))
    got = attend(**given)
    written = got["present_bucket_ids"][:, :, : case.S].astype(int)
    np.testing.assert_array_equal(written[:, :, -L:], oracle.saap_assign(given["key_before"], given["centroids"]))

    visited = oracle.saap_route(fold(given["query_before"]), probes=3, **index.network())
    chosen = {"bucket_ids": written, "visited": visited, **index.window}
    assert_is_oracles(got["output"], case, L, "saap", **chosen)


@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_in_few_bits_are_attended_to_once(runtime: str, bits: int) -> None:
    """The packed operators of bodies and kernels are the others over what their rows stand for."""
    case, L, form = Case(2, 8, 2, 210, 64, "f32", padding=(50, 0)), 5, Form(bits, 32, "f32")
    k, v = (form.held(array) for array in case.inputs(L=L)[1:])
    params = {**parameters(case, "no-reallocate"), "key_bits": 4}
    named = {
        "SparQRowsAttention": ({name: attributes(params)[name] for name in ROW_SETTINGS}, rows(case, L)),
        "SparQCodedAttention": (attributes(params), codes(case, L, 4)),
        "QuestAttention": ({"page_size": 8, "top_k": 44, "scale": 0.125}, pages(case, L, 8)),
    }
    for name, (settings, given) in named.items():
        numbers = {**given, "key": k[:, :, -L:], "value": v[:, :, -L:]}
        for state, held in (("past_key", k), ("past_value", v)):
            numbers[state] = given[state].copy()
            numbers[state][:, :, : case.S - L] = held[:, :, : case.S - L]
        if name == "QuestAttention":
            bounds = oracle.page_bounds(k[:, :, :200], padding(case), page_size=8)
            numbers["past_bounds"][:, :, :, :25] = np.stack(bounds, axis=2)
        if name == "SparQCodedAttention":
            held = coded_caches(case, k, v, case.S - L, case.S + 7, 4)
            numbers |= {state: held[state] for state in ("past_key_codes", "past_summary")}
        if name == "SparQRowsAttention":
            numbers["past_sums"] = np.zeros_like(numbers["past_sums"])
        packed = {**numbers, **{state: form.pack(given[state]) for state in ("past_key", "past_value")}}
        packed |= {"key": given["key"], "value": given["value"]}
        how = {"dense_below": 0, "verify_queries": 16, **settings}
        got = Operator(runtime, f"Packed{name}", "f32", **how, **form.attributes)(**packed)
        wanted = Operator(runtime, name, "f32", **how)(**numbers)
        np.testing.assert_allclose(got["output"], wanted["output"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
@pytest.mark.parametrize(
    ("L", "settings"),
    [
        (17, {"verify_queries": 16}),
        (5, {"verify_queries": 4}),
        (5, {"verify_queries": 1}),
        (5, {"verify_queries": 0}),
        (5, {"verify_queries": 16, "dense_below": 197}),  # the first of the queries sees 196 keys
        (5, {"verify_queries": 16, "top_k": 196}),
    ],
    ids=str,
)
def test_other_calls_are_dense(runtime: str, L: int, settings: dict[str, int]) -> None:
    case = Case(2, 8, 2, 200, 64, "f32", padding=(0, 90))
    q, k, v = case.inputs(L=L)
    how = {**CACHES, **attributes(parameters(case, "reallocate")), **settings}
    got = Operator(runtime, "SparQAttention", "f32", **how)(**columns(case, L))["output"]
    np.testing.assert_allclose(got, oracle.dense_attention(q, k, v, left_padding=case.padding), rtol=0, atol=1e-5)
    if settings.get("dense_below"):
        sparse = Operator(runtime, "SparQAttention", "f32", **{**how, "dense_below": 196})(**columns(case, L))["output"]
        assert np.abs(sparse - got).max() > 0.01


@by_runtime
def test_one_query_is_what_it_was(runtime: str) -> None:
    case = Case(2, 8, 2, 200, 64, "f16", padding=(0, 90))
    params = attributes(parameters(case, "reallocate"))
    outputs = [
        Operator(runtime, "SparQAttention", "f16", **CACHES, **params, verify_queries=most)(**columns(case, 1))
        for most in (0, 16)
    ]
    for name, array in outputs[0].items():
        np.testing.assert_array_equal(array, outputs[1][name])


@pytest.mark.parametrize("poison", [1e3, float("inf"), float("nan")])
@by_runtime
def test_padding_never_reaches_the_output(runtime: str, poison: float) -> None:
    """Row 0 has one valid key among the chosen ones, row 1 a query in the padding, row 2 is nothing else."""
    case, L = Case(3, 8, 2, 120, 64, "f32", padding=(115, 118, 130)), 5
    params = parameters(case, "paper")
    given = columns(case, L)
    for b, first in enumerate(case.padding or ()):
        for name in ("past_key", "past_value"):
            given[name][b, :, :first] = poison
        for name in ("key", "value"):
            given[name] = np.array(given[name])
            given[name][b, :, : max(0, first - (case.S - L))] = poison
    by_lane = given["past_key"].reshape(case.B, case.Hkv, -1, 64, case.D).swapaxes(-1, -2)
    given["past_key_t"] = by_lane.reshape(given["past_key"].shape)
    attend = Operator(runtime, "SparQAttention", "f32", verify_queries=16, **CACHES, **attributes(params))
    got = attend(**given)["output"]
    expected = oracle.dense_attention(*case.inputs(L=L), left_padding=case.padding)  # few keys: all are attended
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert (got[1, :, :3] == 0).all()
    assert (got[2] == 0).all()


@by_runtime
def test_rows_of_different_length_do_not_meet(runtime: str) -> None:
    case, L, past = Case(2, 8, 2, 200, 64, "f32"), 4, np.array([196, 90])
    params = parameters(case, "paper")
    q, k, v = case.inputs(L=L)
    cuts = [columns(replace(case, B=1, S=int(end)), L) for end in past + L]
    attend = Operator(runtime, "SparQAttention", "f32", verify_queries=16, **CACHES, **attributes(params))
    alone, together = [], {name: [] for name in cuts[0]}
    for b, end in enumerate(past):
        row = slice(b, b + 1)
        one = replace(case, B=1, S=int(end) + L)
        caches = filled_caches(one, k[row, :, : end + L], v[row, :, : end + L], int(end), 207)
        tokens = slice(int(end), int(end) + L)
        new = {"query": q[row], "key": k[row, :, tokens], "value": v[row, :, tokens], "left_padding": np.zeros(1)}
        alone.append(attend(**new, **caches)["output"])
        for name, array in {**new, **caches}.items():
            together[name].append(array)
    got = attend(**{name: np.concatenate(arrays) for name, arrays in together.items()})["output"]
    np.testing.assert_allclose(got, np.concatenate(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
def test_it_appends_in_place(runtime: str, name: str) -> None:
    """What a choice needs of the past is read before the past is gone."""
    settings, given = call(name, Case(2, 8, 2, 200, 64, "f32", padding=(0, 90)), 6)
    attend = Operator(runtime, name, "f32", verify_queries=16, **settings)
    expected = attend(**given)
    binding, values = attend.session.io_binding(), {}
    for tensor in attend.schema.inputs:
        values[tensor.name] = ort_value(np.array(given[tensor.name], attend.types[tensor.type]))
        binding.bind_ortvalue_input(tensor.name, values[tensor.name])
    binding.bind_output("output")
    for state in attend.schema.states:
        binding.bind_ortvalue_output(f"present_{state}", values[f"past_{state}"])
    attend.session.run_with_iobinding(binding)
    np.testing.assert_array_equal(from_ort(binding.get_outputs()[0]), expected["output"])
    for state in attend.schema.states:
        np.testing.assert_array_equal(from_ort(values[f"past_{state}"]), expected[f"present_{state}"])


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_and_any_number_of_threads_chooses_once(name: str, workers: int, limit: Any) -> None:
    """With work cut for 8 threads, the keys of a head are scored, searched and attended in parts."""
    limit(name, workers)
    case, L = Case(1, 6, 2, 9000, 32, "f32", padding=(1000,)), 7
    params = {**parameters(case, "reallocate"), "top_k": 600}
    attend = Operator("native", "SparQAttention", "f32", 2, verify_queries=16, **CACHES, **attributes(params))
    assert_is_oracles(attend(**columns(case, L))["output"], case, L, "sparq", **params)
    quest = {"page_size": 16, "top_k": 1600}
    attend = Operator("native", "QuestAttention", "f32", 2, scale=32**-0.5, dense_below=0, verify_queries=16, **quest)
    assert_is_oracles(attend(**pages(case, L, 16))["output"], case, L, "quest", **quest)


@pytest.mark.parametrize("name", KNOWING)
def test_a_node_without_it_and_its_body_are_what_they_were(name: str) -> None:
    """Neither names the attribute, so that files from before it are files of today."""
    settings = {key: value for key, value in ATTRIBUTES[name].items() if key != "verify_queries"}
    made = [onnx_export.operator_model(name, **settings, **more) for more in ({}, {"verify_queries": 0})]
    assert made[0].SerializeToString() == made[1].SerializeToString()
    assert b"verify_queries" not in made[0].SerializeToString()
    assert not any(function.name.endswith("OwnKeys") for function in made[0].functions)
    with_it = onnx_export.operator_model(name, **{**ATTRIBUTES[name], "verify_queries": 16})
    assert "verify_queries" in with_it.functions[-1].attribute
    assert {a.name: a.i for a in with_it.graph.node[0].attribute}["verify_queries"] == 16


@pytest.mark.parametrize("name", OWN)
def test_inlined_it_gives_the_same(name: str) -> None:
    settings, given = call(name, Case(2, 8, 2, 200, 64, "f32", padding=(0, 90)), 6)
    plain = Operator("onnxruntime", name, "f32", verify_queries=16, **settings)(**given)["output"]
    got = Operator("onnxruntime", name, "f32", lowered=lower.inline, verify_queries=16, **settings)(**given)["output"]
    np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("value", [-1, 17])
def test_a_number_of_queries_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="verify_queries: expected an integer of at least 0 and at most 16"):
        onnx_export.operator_model("QuestAttention", **{**ATTRIBUTES["QuestAttention"], "verify_queries": value})
