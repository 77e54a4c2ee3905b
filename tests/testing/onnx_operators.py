"""Run the ONNX operators on each runtime under test, and check their outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
import reference
from cases import SOME_CASES, Array, Case, assert_as_good_as_plain, every_parameter, plain_sparq, round_to
from mlx_sparse.onnx_export.operators import CODE_RECORD, coded_axes
from mlx_sparse.onnx_export.runtime import native
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from require import absent
from saap_cases import SaapCase

from mlx_sparse import onnx_export, oracle
from mlx_sparse.core.select.oracle import valid_keys
from mlx_sparse.methods.sparq.oracle import coded_groups, deviation, masked_mean
from mlx_sparse.methods.sparq.scoring_keys import GROUP, KeyCodes

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in (("float", "f4"), ("int64", "i8"), ("int16", "i2"), ("uint8", "u1"))
}
LANES = 64  # keys per component-major chunk in the tests
CACHES = {"lanes": LANES, "dense_below": 0}


def least(name: str) -> dict[str, float]:
    """Return a dict from each attribute of the operator ``name`` to the smallest valid integer, or 0.5 for floats."""
    given = onnx_export.OPERATORS[name].attributes[1:]
    return {a.name: a.choices[0] if a.choices else 0.5 if a.type is float else a.low or 0 for a in given}


parameters = every_parameter  # attributes of ONNX operators have no defaults

by_case = pytest.mark.parametrize("case", SOME_CASES, ids=str)
RUNTIMES = ("onnxruntime", "onnxruntime-compat", "reference", "native")
by_runtime = pytest.mark.parametrize("runtime", RUNTIMES)


def session(model: Any, kernels: str = "off", threads: int = 1) -> ort.InferenceSession:
    """Create an ONNX Runtime session. ``kernels`` is "auto" for the native kernels or "off" for function bodies."""
    options = native.session_options(kernels)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # do not log errors, which are raised as exceptions
    options.enable_cpu_mem_arena = False  # separate allocations, so that sanitizers check their bounds
    return ort.InferenceSession(model.SerializeToString(), options)


def without_shapes(model: ModelProto) -> ModelProto:
    """Remove shapes and function bodies from a model, so that only the native kernels check the inputs."""
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.Clear()
        info.type.tensor_type.ClearField("shape")
    del model.functions[:]
    return model


def ort_value(array: Array) -> ort.OrtValue:
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), 16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def from_ort(value: ort.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    size = int(np.prod(value.shape()))
    bits = (ctypes.c_uint16 * size).from_address(value.data_ptr())
    return np.frombuffer(bits, np.uint16).view(ml_dtypes.bfloat16).reshape(value.shape()).copy()


class Operator:
    """An operator with fixed attributes on one runtime. Calls map named inputs to a dict from output name to array."""

    def __init__(
        self,
        runtime: str,
        name: str,
        dtype: str,
        threads: int = 1,
        lowered: Callable[[ModelProto], ModelProto] = lambda model: model,
        weights: str = "f32",
        **settings: Any,
    ) -> None:
        if runtime == "native" and (reason := native.unavailable()):
            absent("ort", reason)
        profile = onnx_export.COMPAT if runtime == "onnxruntime-compat" else onnx_export.DEFAULT
        types = {"dtype": DTYPES[dtype].name, "weights": DTYPES[weights].name}
        model = lowered(onnx_export.operator_model(name, **types, profile=profile, **settings))
        self.schema = onnx_export.OPERATORS[name]
        self.types = {**TYPES, "T": DTYPES[dtype], "W": DTYPES[weights]}
        self.reference = ReferenceEvaluator(model) if runtime == "reference" else None
        kernels = "auto" if runtime == "native" else "off"
        self.session = None if runtime == "reference" else session(model, kernels, threads)

    def __call__(self, **arrays: Array) -> dict[str, Array]:
        feeds = {}
        for tensor in self.schema.inputs:
            feeds[tensor.name] = np.asarray(arrays[tensor.name]).astype(self.types[tensor.type], copy=False)
        if self.reference:
            outputs = self.reference.run(None, feeds)
        else:
            values = self.session.run_with_ort_values(None, {name: ort_value(a) for name, a in feeds.items()})
            outputs = [from_ort(value) for value in values]
        return dict(zip([tensor.name for tensor in self.schema.outputs], outputs, strict=True))


def attributes(params: dict[str, Any]) -> dict[str, float]:
    """Convert a method's parameters to node attributes."""
    modes = {"query": 0, "query_key": 1, True: 1, False: 0}
    return {
        name: modes[value] if name in ("reallocate", "component_score") else value
        for name, value in params.items()
        if name != "key_bits"  # key_bits selects the operator
    }


def padding(case: Case) -> Array:
    return np.zeros(case.B, np.int64) if case.padding is None else np.array(case.padding)


def step(case: Case, q: Array, k: Array, v: Array) -> dict[str, Array]:
    """Return the inputs for a `SparQ` node as a dict from name to array. The buffers have no free slots."""
    return {
        "query": q,
        "keys": k,
        "keys_t": k.swapaxes(-1, -2)[:, :, None],
        "values": v,
        "left_padding": padding(case),
        "length": np.full(case.B, case.S),
        "value_mean": masked_mean(v, padding(case)),
        "deviation": deviation(k, padding(case)),
    }


def records_of(coded: KeyCodes, full: list[int], room: int) -> Array:
    """Return the int4 code records for caches with ``room`` slots.

    Sequence b has ``full[b]`` full groups. The other groups contain NaN.
    """
    *before, groups = coded.lo.shape
    made = np.full((*before, coded_axes(room)["groups"], CODE_RECORD), 0x7E, np.uint8)
    for at, array in ((0, coded.lo), (2, coded.step)):
        made[..., :groups, at : at + 2] = np.ascontiguousarray(array)[..., None].view(np.uint8)
    made[..., :groups, 4:] = coded.codes.reshape(*coded.lo.shape, GROUP // 2)
    for b, count in enumerate(full):
        made[b, :, :, count:] = 0x7E
    return made.reshape(len(made), -1, *made.shape[-2:])


def coded_caches(case: Case, k: Array, v: Array, tokens: int, room: int) -> dict[str, Array]:
    """Return caches with ``room`` slots. The first ``tokens`` slots are filled, and the others contain NaN."""
    caches = {**empty_codes(case, room), "past_length": np.full(case.B, tokens)}
    k, v = (np.asarray(array[:, :, :tokens], np.float32) for array in (k, v))
    caches["past_key"][:, :, :tokens], caches["past_value"][:, :, :tokens] = k, v
    valid = valid_keys(case.B, tokens, padding(case))
    coded = oracle.sparq.code_keys(k, left_padding=padding(case))
    exact = np.where(valid[:, None, :, None], k, 0).astype(np.float64)
    spread = oracle.key_spread(coded, exact, left_padding=padding(case))
    total = np.where(valid[:, None, :, None], v, 0).sum(axis=2)
    summary = np.stack([total, coded.center, spread], axis=2).reshape(case.B, -1, case.D).astype(np.float32)
    full = [count for _, count in coded_groups(case.B, tokens, padding(case))]
    return {**caches, "past_key_codes": records_of(coded, full, room), "past_summary": summary}


def coded_step(case: Case) -> dict[str, Array]:
    """Return the inputs for a `SparQCoded` node as a dict from name to array. The buffers have no free slots."""
    q, k, v = case.inputs()
    caches = coded_caches(case, k, v, case.S, case.S)
    states = {"key_codes": caches["past_key_codes"], "summary": caches["past_summary"]}
    valid = {"left_padding": padding(case), "length": np.full(case.B, case.S)}
    return {"query": q, "keys": k, "values": v, **states, **valid}


def appended_codes(runtime: str, case: Case) -> dict[str, Array]:
    """Append the keys of a case with `SparQCodedAttention` in up to three chunks. Return the last call's outputs."""
    _, k, v = case.inputs()
    settings = {**attributes(every_parameter(case, "paper")), "dense_below": 0}
    attend = Operator(runtime, "SparQCodedAttention", case.dtype, **settings)
    caches, ends = empty_codes(case, case.S), sorted({case.S // 9, case.S - case.S // 20, case.S} - {0})
    for start, stop in pairwise((0, *ends)):
        rows = np.zeros((case.B, case.Hq, stop - start, case.D))
        new = {"query": rows, "key": k[:, :, start:stop], "value": v[:, :, start:stop], "left_padding": padding(case)}
        got = attend(**new, **caches)
        caches = advance(caches, got, stop - start)
    return got


def unpacked(states: dict[str, Array], case: Case) -> list[Array]:
    """Convert the outputs of `SparQCodedAttention` to the arrays of `KeyCodes`. The codes are uint8.

    The entries of groups that are not full are 0.
    """
    rows = states["present_key_codes"]
    records = rows.reshape(case.B, case.Hkv, case.D, *rows.shape[-2:])[:, :, :, : case.S // GROUP].copy()
    for b, (_, count) in enumerate(coded_groups(case.B, case.S, padding(case))):
        records[b, :, :, count:] = 0
    lo, step = (np.ascontiguousarray(records[..., at : at + 2]).view(np.float16)[..., 0] for at in (0, 2))
    codes = records[..., 4:].reshape(*records.shape[:3], -1)
    return [codes, lo, step, states["present_summary"][:, 1::3]]


def select(case: Case, q: Array, k: Array, params: dict[str, Any]) -> oracle.SparQSelection:
    settings = {name: value for name, value in params.items() if name != "reallocate"}
    return reference.sparq_select(q, k, left_padding=case.padding, **settings)


def assert_is_sparq(out: Array, case: Case, params: dict[str, Any], q: Array, k: Array, v: Array) -> None:
    """Assert that a SparQ output is as accurate as a plain computation in the same dtype."""
    expected = reference.sparq_attention(q, k, v, left_padding=case.padding, **params)
    chosen = select(case, q, k, params).indices
    plain = plain_sparq(case, params, q, k, v, chosen)
    assert out.dtype == DTYPES[case.dtype]
    assert_as_good_as_plain(out, expected, plain, case.dtype)


def empty_caches(case: Case, tokens: int, poison: float = np.nan) -> dict[str, Array]:
    """Return empty caches with at least ``tokens`` slots. All slots contain ``poison``."""
    capacity = -(-tokens // LANES) * LANES
    cache = np.full((case.B, case.Hkv, capacity, case.D), poison, DTYPES[case.dtype])
    return {
        **{name: cache.copy() for name in ("past_key", "past_key_t", "past_value")},
        "past_sums": np.zeros((case.B, case.Hkv, 3, case.D), np.float32),
        "past_length": np.zeros(case.B, np.int64),
    }


def empty_codes(case: Case, tokens: int, poison: float = np.nan) -> dict[str, Array]:
    """Return empty caches of `SparQCodedAttention` with ``tokens`` slots. All slots contain ``poison``."""
    cache = np.full((case.B, case.Hkv, tokens, case.D), poison, DTYPES[case.dtype])
    summary = np.full((case.B, 3 * case.Hkv, case.D), poison, np.float32)
    summary[:, 0::3] = 0
    return {
        **{name: cache.copy() for name in ("past_key", "past_value")},
        "past_key_codes": np.full(
            (case.B, case.Hkv * case.D, coded_axes(tokens)["groups"], CODE_RECORD), 0x7E, np.uint8
        ),
        "past_summary": summary,
        "past_length": np.zeros(case.B, np.int64),
    }


def filled_caches(case: Case, k: Array, v: Array, tokens: int, room: int) -> dict[str, Array]:
    """Return caches with at least ``room`` slots. The first ``tokens`` slots are filled, and the others contain NaN."""
    caches = {**empty_caches(case, room), "past_length": np.full(case.B, tokens)}
    caches["past_key"][:, :, :tokens], caches["past_value"][:, :, :tokens] = k[:, :, :tokens], v[:, :, :tokens]
    by_lane = caches["past_key"].reshape(case.B, case.Hkv, -1, LANES, case.D).swapaxes(-1, -2)
    counted = (np.arange(tokens) >= padding(case)[:, None])[:, None, :, None]
    apart = k - masked_mean(k[:, :, :tokens], padding(case))[:, :, None]
    sums = [np.where(counted, array[:, :, :tokens], 0).sum(axis=2) for array in (v, k, apart**2)]
    caches["past_key_t"] = by_lane.reshape(caches["past_key"].shape)
    return {**caches, "past_sums": np.stack(sums, axis=2).astype(np.float32)}


def saap_weights(case: SaapCase) -> dict[str, Array]:
    """Return the centroids and query networks of a case as inputs for a `SaapAttention` node."""
    n, network = case.step, case.network()
    return {
        "centroids": round_to(np.random.default_rng(4).normal(size=(n.Hkv, case.buckets, n.D)), case.weights),
        "hidden_weight": np.zeros((n.Hkv, n.D, 0)),
        "hidden_bias": np.zeros((n.Hkv, 0)),
        "out_bias": np.zeros((n.Hkv, case.buckets)),
        **network,
    }


def saap_settings(case: SaapCase) -> dict[str, Any]:
    """Return the arguments of `Operator` for a `SaapAttention` node. If the weights are bfloat16, use float32."""
    weights = "f16" if case.weights == "f16" else "f32"
    return {"probes": case.probes, **case.window, "scale": case.scale, "dense_below": 0, "weights": weights}


def saap_step(case: SaapCase, room: int = 9) -> dict[str, Array]:
    """Return the inputs for a `SaapAttention` node at the last token, with ``room`` free slots after this token.

    In free slots, keys and values are NaN, and bucket numbers are valid.
    """
    n, (q, k, v) = case.step, case.inputs()
    past = case.step.S - 1
    caches = [
        np.pad(array[:, :, :past], ((0, 0), (0, 0), (0, 1 + room), (0, 0)), constant_values=np.nan) for array in (k, v)
    ]
    ids = np.zeros((n.B, n.Hkv, n.S + room), np.int16)
    ids[:, :, :past] = case.bucket_ids()[:, :, :past]
    return {
        **{"query": q, "key": k[:, :, past:], "value": v[:, :, past:], "query_before": case.queries_before()},
        "key_before": round_to(np.random.default_rng(5).normal(size=(n.B, n.Hkv, 1, n.D)), n.dtype),
        **{"past_key": caches[0], "past_value": caches[1], "past_bucket_ids": ids},
        **{"past_length": np.full(n.B, past), "left_padding": padding(n)},
        **saap_weights(case),
    }


def assert_same_assignment(got: Array, keys: Array, centroids: Array) -> None:
    """Assert that each key is assigned to the bucket with the largest inner product, apart from float32 ties."""
    expected = oracle.saap.saap_assign(keys, centroids)
    products = np.einsum("bhnd,hcd->bhnc", keys.astype(np.float64), centroids.astype(np.float64))
    terms = np.einsum("bhnd,hcd->bhnc", np.abs(keys), np.abs(centroids)).max(axis=-1)
    chosen, best = (np.take_along_axis(products, ids[..., None].astype(int), -1)[..., 0] for ids in (got, expected))
    assert (best - chosen <= 2 * keys.shape[-1] * 2.0**-24 * terms).all()
    assert (got == expected).mean() > 0.99


def advance(caches: dict[str, Array], got: dict[str, Array], tokens: int) -> dict[str, Array]:
    """Return the caches for the next call.

    ``caches`` and ``got`` are inputs and outputs of the last call, and ``tokens`` is its number of tokens.
    """
    past = {name.replace("present", "past"): array for name, array in got.items() if name != "output"}
    return {**past, "past_length": caches["past_length"] + tokens}


def windowed_attention(q: Array, k: Array, v: Array, first: Array, window: int, scale: float) -> Array:
    """Compute sliding-window attention in float64. The query at position p attends to keys p - window < j <= p.

    The L queries are at the last L of the S positions. Keys before ``first[b]`` are padding.
    """
    L, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    p, j = np.arange(S - L, S)[:, None], np.arange(S)
    attended = (j <= p) & (j > p - window) & (j >= first[:, None, None, None])
    keys, values = (np.repeat(array.astype(np.float64), G, axis=1) for array in (k, v))
    logits = np.where(attended, scale * (q.astype(np.float64) @ keys.swapaxes(-1, -2)), -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300) @ values
