"""The ONNX operators on the runtimes under test: arrays in, arrays out, and what they must be."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from cases import CASES, SPARQ, Array, Case, assert_as_good_as_plain, every_parameter, plain_sparq, round_to
from hypothesis import HealthCheck, settings
from mlx_sparse.onnx_export.runtime import native
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from require import absent
from saap_cases import SaapCase

from mlx_sparse import onnx_export, oracle
from mlx_sparse.oracle.select import valid_keys
from mlx_sparse.oracle.sparq import deviation, masked_mean

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TYPES = {f"tensor({name})": np.dtype(kind) for name, kind in (("float", "f4"), ("int64", "i8"), ("int16", "i2"))}
# What native kernels say to a mistake.
ONE_LINE = re.compile(r"Status Message: \w+: \w+: expected [^\n]+, got [^\n]+\.$")
fuzz = settings(
    max_examples=int(os.environ.get("MLX_SPARSE_FUZZ", "150")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
LANES = 64  # keys per chunk of the caches under test
CACHES = {"lanes": LANES, "dense_below": 0}

_SPARQ: dict[str, float] = {
    "rank": 16,
    "top_k": 32,
    "local_window": 8,
    "reallocate": 0,
    "group_reduce": 0,
    "component_score": 0,
    "scale": 0.125,
}
_DENSE = {"scale": 0.125, "window": 0}
_SAMPLE: dict[str, float] = {
    "alpha_column": 0.9,
    "alpha_slash": 0.8,
    "chunks": 2,
    "block_size": 64,
    "scale": 0.125,
}
_CACHED_SPARQ = {**_SPARQ, **CACHES}
_CACHED_SAMPLE = {**_SAMPLE, "dense_prompt_below": 0}
# Some attributes of each operator, all of them valid.
ATTRIBUTES: dict[str, dict[str, float]] = {
    "SparQ": _SPARQ,
    "SparQAppend": {"lanes": LANES},
    "SparQAttention": _CACHED_SPARQ,
    "DenseAttention": _DENSE,
    "CachedAttention": _DENSE,
    "Append": {},
    "Sample": _SAMPLE,
    "SampleAttention": _CACHED_SAMPLE,
    "SampleSparQAttention": {**_CACHED_SPARQ, **_CACHED_SAMPLE},
    "SaapAttention": {"probes": 4, "sink_tokens": 2, "recent_tokens": 40, "scale": 0.125, "dense_below": 0},
}
parameters = every_parameter  # an operator's have no defaults

by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_setting = pytest.mark.parametrize("setting", SPARQ)
RUNTIMES = ("onnxruntime", "onnxruntime-compat", "reference", "native")
by_runtime = pytest.mark.parametrize("runtime", RUNTIMES)


def session(model: Any, kernels: str = "off", threads: int = 1) -> ort.InferenceSession:
    """A session of the model; ``kernels`` is "auto" to run nodes on the native kernels, "off" to run their bodies."""
    options = native.session_options(kernels)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # the errors under test come as exceptions
    options.enable_cpu_mem_arena = False  # every output is an allocation of its own, whose ends sanitizers watch
    return ort.InferenceSession(model.SerializeToString(), options)


def without_shapes(model: ModelProto) -> ModelProto:
    """The model as only native kernels check it: the runtime knows no shapes and no bodies."""
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
    """One operator with its attributes on one runtime: arrays by name in, arrays by name out."""

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
            feeds[tensor.name] = np.asarray(arrays[tensor.name]).astype(self.types[tensor.type])
        if self.reference:
            outputs = self.reference.run(None, feeds)
        else:
            values = self.session.run_with_ort_values(None, {name: ort_value(a) for name, a in feeds.items()})
            outputs = [from_ort(value) for value in values]
        return dict(zip([tensor.name for tensor in self.schema.outputs], outputs, strict=True))


def attributes(params: dict[str, Any]) -> dict[str, float]:
    """The attributes of a node that mean these parameters."""
    modes = {"softmax": 0, "logits": 1, "query": 0, "query_key": 1, True: 1, False: 0}
    return {
        name: modes[value] if name in ("reallocate", "group_reduce", "component_score") else value
        for name, value in params.items()
    }


def padding(case: Case) -> Array:
    return np.zeros(case.B, np.int64) if case.padding is None else np.array(case.padding)


def step(case: Case, q: Array, k: Array, v: Array) -> dict[str, Array]:
    """Inputs of `SparQ` for keys of exact length."""
    valid = valid_keys(case.B, case.S, padding(case))
    return {
        "query": q,
        "keys": k,
        "keys_t": k.swapaxes(-1, -2)[:, :, None],
        "values": v,
        "left_padding": padding(case),
        "length": np.full(case.B, case.S),
        "value_mean": masked_mean(v.astype(np.float64), valid),
        "deviation": deviation(k.astype(np.float64), valid),
    }


def select(case: Case, q: Array, k: Array, params: dict[str, Any]) -> oracle.SparQSelection:
    settings = {name: value for name, value in params.items() if name != "reallocate"}
    return oracle.sparq_select(q, k, left_padding=case.padding, **settings)


def assert_is_sparq(out: Array, case: Case, params: dict[str, Any], q: Array, k: Array, v: Array) -> None:
    """The output is SparQ attention, as exactly as a plain computation in its type."""
    expected = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    chosen = select(case, q, k, params).indices
    plain = plain_sparq(case, params, q, k, v, chosen)
    assert out.dtype == DTYPES[case.dtype]
    assert_as_good_as_plain(out, expected, plain, case.dtype)


def empty_caches(case: Case, tokens: int, poison: float = np.nan) -> dict[str, Array]:
    """Caches before the first token, with room for that many; what is not written yet holds poison."""
    capacity = -(-tokens // LANES) * LANES
    cache = np.full((case.B, case.Hkv, capacity, case.D), poison, DTYPES[case.dtype])
    return {
        **{name: cache.copy() for name in ("past_key", "past_key_t", "past_value")},
        "past_sums": np.zeros((case.B, case.Hkv, 3, case.D), np.float32),
        "past_length": np.zeros(case.B, np.int64),
    }


def filled_caches(case: Case, k: Array, v: Array, tokens: int, room: int) -> dict[str, Array]:
    """Caches of ``room`` or more slots that hold the first ``tokens`` keys and values, and poison."""
    caches = {**empty_caches(case, room), "past_length": np.full(case.B, tokens)}
    caches["past_key"][:, :, :tokens], caches["past_value"][:, :, :tokens] = k[:, :, :tokens], v[:, :, :tokens]
    by_lane = caches["past_key"].reshape(case.B, case.Hkv, -1, LANES, case.D).swapaxes(-1, -2)
    counted = (np.arange(tokens) >= padding(case)[:, None])[:, None, :, None]
    apart = k - masked_mean(k[:, :, :tokens], valid_keys(case.B, tokens, padding(case)))[:, :, None]
    sums = [np.where(counted, array[:, :, :tokens], 0).sum(axis=2) for array in (v, k, apart**2)]
    caches["past_key_t"] = by_lane.reshape(caches["past_key"].shape)
    return {**caches, "past_sums": np.stack(sums, axis=2).astype(np.float32)}


def saap_weights(case: SaapCase) -> dict[str, Array]:
    """Centroids and query networks as `SaapAttention` takes them."""
    n, network = case.step, case.network()
    return {
        "centroids": round_to(np.random.default_rng(4).normal(size=(n.Hkv, case.buckets, n.D)), case.weights),
        "hidden_weight": np.zeros((n.Hkv, n.D, 0)),
        "hidden_bias": np.zeros((n.Hkv, 0)),
        "out_bias": np.zeros((n.Hkv, case.buckets)),
        **network,
    }


def saap_settings(case: SaapCase) -> dict[str, Any]:
    """Arguments of `Operator` for `SaapAttention`; weights of type bfloat16 are kept in float32."""
    weights = "f16" if case.weights == "f16" else "f32"
    return {"probes": case.probes, **case.window, "scale": case.scale, "dense_below": 0, "weights": weights}


def saap_step(case: SaapCase, room: int = 9) -> dict[str, Array]:
    """Inputs of `SaapAttention` for the last token, with poison and numbers of buckets in free slots."""
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
    """Each key is in the bucket of the largest inner product, but for products that tie to float32 accuracy."""
    expected = oracle.saap_assign(keys, centroids)
    products = np.einsum("bhnd,hcd->bhnc", keys.astype(np.float64), centroids.astype(np.float64))
    terms = np.einsum("bhnd,hcd->bhnc", np.abs(keys), np.abs(centroids)).max(axis=-1)
    chosen, best = (np.take_along_axis(products, ids[..., None].astype(int), -1)[..., 0] for ids in (got, expected))
    assert (best - chosen <= 2 * keys.shape[-1] * 2.0**-24 * terms).all()
    assert (got == expected).mean() > 0.99


def advance(caches: dict[str, Array], got: dict[str, Array], tokens: int) -> dict[str, Array]:
    """The caches for the next call."""
    past = {name.replace("present", "past"): array for name, array in got.items() if name != "output"}
    return {**past, "past_length": caches["past_length"] + tokens}


def windowed_attention(q: Array, k: Array, v: Array, first: Array, window: int, scale: float) -> Array:
    """Attention in float64 where query i of L attends to keys p - window < j <= p, p = S - L + i."""
    L, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    p, j = np.arange(S - L, S)[:, None], np.arange(S)
    attended = (j <= p) & (j > p - window) & (j >= first[:, None, None, None])
    keys, values = (np.repeat(array.astype(np.float64), G, axis=1) for array in (k, v))
    logits = np.where(attended, scale * (q.astype(np.float64) @ keys.swapaxes(-1, -2)), -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300) @ values
