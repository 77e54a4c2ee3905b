"""The ONNX operators over caches in few bits, against the oracle on what the rows stand for: bodies, native kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import Array, Case
from fixtures_onnx import SETS
from mlx_sparse.onnx_export import lower
from onnx_operators import (
    DTYPES,
    Operator,
    advance,
    assert_is_sparq,
    attributes,
    by_runtime,
    empty_codes,
    from_ort,
    ort_value,
    padding,
    parameters,
    saap_settings,
    saap_step,
    unpacked,
    windowed_attention,
)
from packed_caches import Form, PackedCase, packed_cases
from saap_cases import SaapCase
from sample_cases import SampleCase

from mlx_sparse import oracle

by_case = pytest.mark.parametrize("case", packed_cases(), ids=str)
SMALL = PackedCase(2, 6, 2, 200, 64, "f32", padding=(0, 20), bits=4, group_size=32)
ROWS = ("top_k", "local_window", "reallocate", "group_reduce", "scale")


def by_rows(runtime: str, case: PackedCase, params: dict[str, Any], dense_below: int = 0, **how: Any) -> Operator:
    given = {name: value for name, value in attributes(params).items() if name in ROWS}
    return Operator(
        runtime, "PackedSparQRowsAttention", case.dtype, dense_below=dense_below, **given, **case.form.attributes, **how
    )


def feed(attend: Operator, case: Case, caches: dict[str, Array], *ends: int) -> dict[str, Array]:
    """The outputs for the last of pieces of keys and values, up to each of ``ends``; all queries are the same."""
    q, k, v = case.inputs()
    for start, stop in pairwise((0, *ends)):
        new = {"key": k[:, :, start:stop], "value": v[:, :, start:stop], "left_padding": padding(case)}
        got = attend(query=np.repeat(q, stop - start, axis=2), **new, **caches)
        caches = advance(caches, got, stop - start)
    return got


def strange_rows(D: int, dtype: str) -> Array:
    """Rows (2, 2, n, D) of numbers of all sizes, and such as leave nothing to choose from."""
    rng = np.random.default_rng(0)
    size = rng.choice([1e-7, 1e-4, 1, 30], (2, 2, 40, 1))
    rows = size * rng.standard_normal((2, 2, 40, D)) + rng.choice([0, 3, -20], (2, 2, 40, 1))
    rows[:, :, 0], rows[:, :, 1], rows[:, :, 2], rows[:, :, 3] = 0, 2.5, -2.5, 1e-8
    rows[:, :, 4] = np.arange(D)  # halves of a step, which are rounded to even
    rows[:, :, 5] = np.abs(rows[:, :, 5])
    rows[:, :, 6] = -np.abs(rows[:, :, 6])
    return rows.astype(DTYPES[dtype])


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@by_runtime
def test_rows_are_packed_as_mlx_packs_them(runtime: str, dtype: str, bits: int, group_size: int) -> None:
    import mlx.core as mx
    from mlx_arrays import to_mlx

    form, rows = Form(bits, group_size, dtype), strange_rows(128, dtype)
    with mx.stream(mx.cpu):
        codes, *ranges = mx.quantize(to_mlx(rows.astype(np.float32), dtype), group_size=group_size, bits=bits)
        stacked = np.array(mx.stack(ranges, axis=-1).astype(mx.float32)).astype(DTYPES[dtype])
    expected = np.concatenate([np.array(part).view(np.uint8).reshape(2, 2, 40, -1) for part in (codes, stacked)], -1)
    np.testing.assert_array_equal(form.pack(rows), expected)
    append = Operator(runtime, "PackedCachedAttention", dtype, scale=0.1, window=0, **form.attributes)
    past = np.full((2, 2, 48, form.width(128)), 0x5A, np.uint8)
    new = {"query": rows, "key": rows, "value": rows[:, :, ::-1], "left_padding": np.zeros(2)}
    got = append(**new, past_key=past, past_value=past, past_length=np.array([0, 8]))
    for b, start in enumerate((0, 8)):
        place = slice(start, start + 40)
        for name, wanted in (("present_key", expected), ("present_value", expected[:, :, ::-1])):
            np.testing.assert_array_equal(got[name][b, :, place], wanted[b])
            assert (np.delete(got[name][b], np.r_[place], axis=1) == 0x5A).all()


@pytest.mark.parametrize("setting", ["rank-D", "eval", "appendix_b"])
@by_case
@by_runtime
def test_sparq_chooses_by_the_rows_and_attends_to_them(runtime: str, case: PackedCase, setting: str) -> None:
    q, k, v = case.inputs()
    params = {**parameters(case, setting), "rank": case.D}
    ends = sorted({case.S - 1, case.S} - {0})
    got = feed(by_rows(runtime, case, params), case, case.empty(case.S + 9, **case.sums), *ends)
    for name, rows in (("present_key", k), ("present_value", v)):
        np.testing.assert_array_equal(got[name][:, :, : case.S], case.form.pack(rows))
    held = case.form.held(k), case.form.held(v)
    assert_is_sparq(got["output"], case, params, q, *held)
    valid = np.arange(case.S) >= padding(case)[:, None]
    sums = np.where(valid[:, None, :, None], held[1].astype(np.float64), 0).sum(axis=2, keepdims=True)
    np.testing.assert_allclose(got["present_sums"], sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("setting", ["robust", "reallocate"])
@by_case
@by_runtime
def test_a_copy_is_coded_from_what_the_rows_stand_for(runtime: str, case: PackedCase, setting: str) -> None:
    q, k, v = case.inputs()
    held = case.form.held(k), case.form.held(v)
    settings = {**attributes(parameters(case, setting)), "key_bits": 4, "dense_below": 0}
    attend = Operator(runtime, "PackedSparQCodedAttention", case.dtype, **settings, **case.form.attributes)
    states = {n: a for n, a in empty_codes(case, case.S, 4).items() if n in ("past_key_codes", "past_summary")}
    got = feed(attend, case, case.empty(case.S, **states), *sorted({case.S // 3, case.S - 1, case.S} - {0}))
    wanted = oracle.code_keys(held[0], key_bits=4, left_padding=case.padding)
    for found, array in zip(unpacked(got, case), wanted, strict=True):
        np.testing.assert_array_equal(found, array)
    assert_is_sparq(got["output"], case, {**parameters(case, setting), "key_bits": 4}, q, *held)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("name", "workers", "S"), [*((name, 1, 300) for name in SETS), (SETS[-1], 8, 4200)])
def test_every_instruction_set_reads_packed_rows(name: str, workers: int, S: int, bits: int, limit: Any) -> None:
    """With work cut for 8 threads, the keys of a head are scored in parts."""
    limit(name, workers)
    for dtype, group_size in (("f32", 32), ("f16", 64), ("bf16", 32)):
        case = PackedCase(1, 10, 2, S, 64, dtype, padding=(7,), bits=bits, group_size=group_size)
        q, k, v = case.inputs()
        params = {**parameters(case, "rank-D"), "top_k": 140}
        got = feed(by_rows("native", case, params), case, case.empty(S, **case.sums), S - 1, S)
        np.testing.assert_array_equal(got["present_key"], case.form.pack(k))
        assert_is_sparq(got["output"], case, params, q, case.form.held(k), case.form.held(v))


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("L", [1, 7])
@by_case
@by_runtime
def test_attention_is_exact_over_what_the_rows_stand_for(runtime: str, case: PackedCase, L: int, window: int) -> None:
    L = min(L, case.S)
    q, k, v = case.inputs(L=L)
    attend = Operator(
        runtime, "PackedCachedAttention", case.dtype, scale=case.D**-0.5, window=window, **case.form.attributes
    )
    caches = case.empty(case.S + 3)
    if case.S > L:
        before = {"query": q[:, :, :1].repeat(case.S - L, axis=2), "left_padding": padding(case)}
        got = attend(**before, key=k[:, :, :-L], value=v[:, :, :-L], **caches)
        caches = advance(caches, got, case.S - L)
    got = attend(query=q, key=k[:, :, -L:], value=v[:, :, -L:], left_padding=padding(case), **caches)
    expected = windowed_attention(q, case.form.held(k), case.form.held(v), padding(case), window or 10**9, case.D**-0.5)
    tolerance = {"f32": 2e-5, "f16": 2e-3, "bf16": 2e-2}[case.dtype]
    np.testing.assert_allclose(got["output"].astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dense_below", [0, 200, 201])
@by_runtime
def test_one_query_is_dense_while_the_longest_row_is_short(runtime: str, dense_below: int) -> None:
    q, k, v = SMALL.inputs()
    held = SMALL.form.held(k), SMALL.form.held(v)
    params = {**parameters(SMALL, "rank-D"), "top_k": 8, "local_window": 2}
    got = feed(by_rows(runtime, SMALL, params, dense_below), SMALL, SMALL.empty(200, **SMALL.sums), 199, 200)
    sparse = oracle.sparq_attention(q, *held, left_padding=SMALL.padding, **params)
    dense = oracle.dense_attention(q, *held, left_padding=SMALL.padding)
    assert np.abs(sparse - dense).max() > 1e-2
    np.testing.assert_allclose(got["output"], dense if dense_below > 200 else sparse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@by_runtime
def test_quest_takes_bounds_and_keys_from_the_rows(runtime: str, bits: int) -> None:
    case = PackedCase(2, 6, 2, 150, 64, "f16", padding=(3, 40), bits=bits)
    q, k, v = case.inputs()
    held = case.form.held(k), case.form.held(v)
    settings = {"page_size": 16, "top_k": 32, "scale": 0.125, "dense_below": 0}
    bounds = {"past_bounds": np.full((2, 2, 2, 10, 64), np.nan, np.float16)}
    attend = Operator(runtime, "PackedQuestAttention", "f16", **settings, **case.form.attributes)
    got = feed(attend, case, case.empty(160, **bounds), 149, 150)
    plain = Operator(runtime, "QuestAttention", "f16", **settings)
    caches = {name: np.zeros((2, 2, 160, 64), np.float16) for name in ("past_key", "past_value")}
    given = {"query": np.repeat(q, 150, axis=2), "key": held[0], "value": held[1], "left_padding": padding(case)}
    wanted = plain(**given, **caches, past_length=np.zeros(2), **bounds)["present_bounds"]
    np.testing.assert_array_equal(got["present_bounds"].view(np.uint16), wanted.view(np.uint16))
    exact = oracle.quest_attention(q, *held, page_size=16, top_k=32, scale=0.125, left_padding=case.padding)
    np.testing.assert_allclose(got["output"].astype(float), exact, rtol=3e-3, atol=3e-3)


@by_runtime
def test_saap_attends_to_the_rows_of_its_buckets(runtime: str) -> None:
    case = SaapCase(Case(2, 6, 2, 150, 64, "f32", padding=(0, 40)), "random")
    form, given = Form(4, 64, "f32"), saap_step(case)
    packed = {name: form.pack(np.nan_to_num(given[name])) for name in ("past_key", "past_value")}
    step = {**given, **packed}
    attend = Operator(runtime, "PackedSaapAttention", "f32", **saap_settings(case), **form.attributes)
    rows = {name: form.held(np.nan_to_num(given[name])) for name in ("key", "value", "past_key", "past_value")}
    wanted = Operator(runtime, "SaapAttention", "f32", **saap_settings(case))(**{**given, **rows})
    np.testing.assert_allclose(attend(**step)["output"], wanted["output"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@by_runtime
def test_a_sampled_prompt_attends_to_what_its_rows_stand_for(runtime: str, bits: int) -> None:
    prompt, form = (
        SampleCase(1, 4, 2, 401, 401, 64, "f32", 32, alpha_column=0.6, alpha_slash=0.5, chunks=2),
        Form(bits, 32, "f32"),
    )
    q, k, v = prompt.inputs()
    settings = {**prompt.parameters, "dense_prompt_below": 0}
    attend = Operator(runtime, "PackedSampleAttention", "f32", **settings, **form.attributes)
    past = np.full((1, 2, 448, form.width(64)), 0x7F, np.uint8)
    caches = {"past_key": past, "past_value": past, "past_length": np.zeros(1, np.int64)}
    for start, stop in ((0, 200), (200, 401)):
        new = {name: array[:, :, start:stop] for name, array in (("query", q), ("key", k), ("value", v))}
        got = attend(**new, left_padding=np.zeros(1), **caches)
        caches = advance(caches, got, stop - start)
        taken = q[:, :, start:stop], form.held(k)[:, :, :stop], form.held(v)[:, :, :stop]
        expected = oracle.sample_attention(*taken, **prompt.parameters)
        assert np.abs(expected - oracle.dense_attention(*taken)).max() > 1e-2
        np.testing.assert_allclose(got["output"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["inlined", "static"])
@pytest.mark.parametrize("name", ["rows", "dense"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime-compat", "reference"])
def test_lowered_it_says_the_same(runtime: str, name: str, form: str) -> None:
    q, k, v = SMALL.inputs()
    held = SMALL.form.held(k), SMALL.form.held(v)
    params = {**parameters(SMALL, "rank-D"), "top_k": 8, "local_window": 2}
    row = SMALL.form.width(64)
    sizes = {"B": 2, "Hq": 6, "Hkv": 2, "L": 1, "D": 64, "C": 256, "row": row} if form == "static" else {}
    how = {"lowered": (lambda m: lower.static(m, 2, 256)) if form == "static" else lower.inline, "sizes": sizes}
    if name == "rows":
        attend = by_rows(runtime, SMALL, params, **how)
        expected = oracle.sparq_attention(q, *held, left_padding=SMALL.padding, **params)
    else:
        settings = {"scale": params["scale"], "window": 0, **SMALL.form.attributes}
        attend = Operator(runtime, "PackedCachedAttention", "f32", **settings, **how)
        expected = oracle.dense_attention(q, *held, left_padding=SMALL.padding)
    caches = SMALL.empty(256, **(SMALL.sums if name == "rows" else {}))
    caches["past_key"][:, :, :199] = SMALL.form.pack(k)[:, :, :199]
    caches["past_value"][:, :, :199] = SMALL.form.pack(v)[:, :, :199]
    caches["past_length"][:] = 199
    new = {"key": k[:, :, 199:], "value": v[:, :, 199:], "left_padding": padding(SMALL)}
    np.testing.assert_allclose(attend(query=q, **new, **caches)["output"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("runtime", ["onnxruntime", "native"])
def test_caches_bound_to_input_and_output_are_appended_in_place(runtime: str) -> None:
    case = PackedCase(1, 4, 2, 100, 64, "f16", bits=4)
    q, k, v = case.inputs()
    params = parameters(case, "rank-D")
    attend = by_rows(runtime, case, params)
    values = {name: ort_value(array) for name, array in case.empty(100, **case.sums).items()}
    values |= {"query": ort_value(q.astype(np.float16)), "left_padding": ort_value(padding(case))}
    for i in range(case.S):
        new = {"key": k[:, :, i : i + 1], "value": v[:, :, i : i + 1]}
        values |= {name: ort_value(array.astype(np.float16)) for name, array in new.items()}
        values["past_length"] = ort_value(np.full(1, i))
        binding = attend.session.io_binding()
        for tensor in attend.schema.inputs:
            binding.bind_ortvalue_input(tensor.name, values[tensor.name])
        binding.bind_output("output")
        for tensor in attend.schema.outputs[1:]:
            binding.bind_ortvalue_output(tensor.name, values[tensor.name.replace("present", "past")])
        attend.session.run_with_iobinding(binding)
    np.testing.assert_array_equal(from_ort(values["past_key"]), case.form.pack(k))
    assert_is_sparq(from_ort(binding.get_outputs()[0]), case, params, q, case.form.held(k), case.form.held(v))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@by_runtime
def test_what_is_no_number_stays_none_and_padding_reaches_no_output(runtime: str, poison: float) -> None:
    q, k, v = SMALL.inputs()
    k[1, :, :20], v[1, :, :20] = poison, poison  # padding
    k[0, 0, 50, 40] = poison  # a valid key of the first KV head, in its second group of 32
    packed = SMALL.form.pack(k)
    spoiled = SMALL.form.unpack(packed, 64)[0, 0, 50]
    assert np.isnan(spoiled[32:]).all() and np.isfinite(spoiled[:32]).all()
    attend = by_rows(runtime, SMALL, {**parameters(SMALL, "rank-D"), "reallocate": True})
    got = attend(
        query=np.repeat(q, 200, axis=2), key=k, value=v, left_padding=padding(SMALL), **SMALL.empty(200, **SMALL.sums)
    )
    np.testing.assert_array_equal(got["present_key"], packed)
    assert np.isfinite(got["output"][1, :, 20:]).all()
    assert np.isfinite(got["output"][0, 3:]).all()
    assert np.isnan(got["output"][0, :3, 50:]).all()
    assert np.isfinite(got["present_sums"]).all()


@by_runtime
def test_a_row_of_padding_only_gives_zeros(runtime: str) -> None:
    case = PackedCase(2, 6, 2, 41, 64, "f32", padding=(41, 0), bits=8)
    params = {**parameters(case, "appendix_b"), "rank": 64, "top_k": 4}
    got = feed(by_rows(runtime, case, params), case, case.empty(41, **case.sums), 40, 41)
    assert (got["output"][0] == 0).all()
    assert (got["present_sums"][0] == 0).all()
    assert np.isfinite(got["output"][1]).all()
