"""What native kernels say to inputs and attributes that do not fit: one line, before anything is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from cases import Case
from mlx_sparse.onnx_export.runtime import native
from onnx_operators import (
    CACHES,
    Operator,
    attributes,
    coded_step,
    empty_caches,
    empty_codes,
    padding,
    parameters,
    saap_settings,
    saap_step,
    session,
    step,
    without_shapes,
)
from require import absent
from saap_cases import SaapCase
from sample_cases import SampleCase

from mlx_sparse import onnx_export

STEP = Case(2, 6, 2, 300, 64, "f32")
PAPER = attributes(parameters(STEP, "paper"))
PROMPT = SampleCase(2, 6, 2, 200, 400, 64, "f32", 32, chunks=2)
BUCKETS = SaapCase(Case(2, 6, 2, 150, 64, "f32", padding=(0, 40)), "random")
DENSE = {"scale": 0.125, "window": 0}


def zeros(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def prompt() -> dict[str, Any]:
    q, k, v = PROMPT.inputs()
    return {"query": q, "keys": k, "values": v, "length": [PROMPT.S]}


def cached() -> dict[str, Any]:
    """A token and caches of 128 slots."""
    case = Case(1, 2, 2, 65, 64, "f32")
    q, k, v = case.inputs()
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:], "left_padding": padding(case)}
    return {**new, **empty_caches(case, 65)}


def cached_codes() -> dict[str, Any]:
    """A token and caches of 128 slots, with codes."""
    case = Case(1, 2, 2, 65, 64, "f32")
    q, k, v = case.inputs()
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:], "left_padding": padding(case)}
    return {**new, **empty_codes(case, 128)}


# Settings and inputs that fit, by operator.
GOOD: dict[str, tuple[dict[str, Any], Any]] = {
    "SparQ": (PAPER, lambda: step(STEP, *STEP.inputs())),
    "SparQAttention": ({**CACHES, **PAPER}, cached),
    "SparQCoded": (PAPER, lambda: coded_step(STEP)),
    "SparQCodedAttention": ({**PAPER, "dense_below": 0}, cached_codes),
    "CachedAttention": (DENSE, cached),
    "Sample": (PROMPT.parameters, prompt),
    "SaapAttention": (saap_settings(BUCKETS), lambda: saap_step(BUCKETS)),
}
INPUTS: list[tuple[str, dict[str, Any], str]] = [
    ("SparQ", {"length": [0, 301]}, r"length: expected 0 to 300 .*, got 301\."),
    ("SparQ", {"length": [-1, 300]}, r"length: expected 0 to 300 .*, got -1\."),
    ("SparQ", {"left_padding": [0, -3]}, r"left_padding: expected 0 to \d+ .*, got -3\."),
    ("SparQ", {"left_padding": [0]}, r"left_padding: expected shape \(2\), got \(1\)\."),
    ("SparQ", zeros(keys=(2, 5, 300, 64)), r"query: expected a multiple of Hkv=5 heads, got 6\."),
    ("SparQ", zeros(keys=(2, 2, 300, 32)), r"keys: expected shape \(2, any, any, 64\), got \(2, 2, 300, 32\)\."),
    ("SparQ", zeros(values=(2, 2, 299, 64)), r"values: expected shape \(2, 2, 300, 64\), got \(2, 2, 299, 64\)\."),
    ("SparQ", zeros(keys_t=(2, 2, 4, 64, 64)), r"length: expected 0 to 256 .*, got 300\."),
    ("SparQ", zeros(query=(2, 6, 2, 64)), r"query: expected shape \(2, 6, 1, 64\), got \(2, 6, 2, 64\)\."),
    ("SparQ", zeros(deviation=(2, 2, 63)), r"deviation: expected shape \(2, 2, 64\), got \(2, 2, 63\)\."),
    ("SparQCoded", {"length": [0, 301]}, r"length: expected 0 to 300 .*, got 301\."),
    (
        "SparQCoded",
        zeros(key_codes=(2, 128, 5, 68)),
        r"key_codes: expected shape \(2, 128, 5, 36\), got \(2, 128, 5, 68\)\.",
    ),
    ("SparQCoded", zeros(key_codes=(2, 128, 4, 36)), r"key_codes: expected shape \(2, 128, 5, 36\), got \(2, 128, 4"),
    ("SparQCoded", zeros(summary=(2, 2, 64)), r"summary: expected shape \(2, 6, 64\), got \(2, 2, 64\)\."),
    (
        "SparQCodedAttention",
        zeros(past_key_codes=(1, 128, 1, 36)),
        r"past_key_codes: expected shape \(1, 128, 2, 36\), got \(1, 128, 1, 36\)\.",
    ),
    (
        "SparQAttention",
        zeros(query=(1, 2, 129, 64), key=(1, 2, 129, 64), value=(1, 2, 129, 64)),
        r"key: expected at most the capacity C=128 of tokens, got 129\.",
    ),
    (
        "SparQAttention",
        zeros(query=(1, 2, 0, 64), key=(1, 2, 0, 64), value=(1, 2, 0, 64)),
        r"key: expected shape \(any, any, any, any\), got \(1, 2, 0, 64\)\.",
    ),
    (
        "SparQAttention",
        zeros(query=(1, 2, 4, 64)),
        r"key: expected shape \(1, 2, 4, 64\), got \(1, 2, 1, 64\)\.",
    ),
    ("SparQCodedAttention", zeros(past_summary=(1, 2, 64)), r"past_summary: expected shape \(1, 6, 64\), got"),
    ("SparQCodedAttention", {"past_length": [128]}, r"past_length: expected 0 to 127 .*, got 128\."),
    (
        "CachedAttention",
        zeros(key=(1, 2, 129, 64), value=(1, 2, 129, 64)),
        r"key: expected at most the capacity C=128 of tokens, got 129\.",
    ),
    ("Sample", {"length": [401]}, r"length: expected 200 to 400 .*, got 401\."),
    ("Sample", {"length": [199]}, r"length: expected 200 to 400 .*, got 199\."),
    ("Sample", {"length": [400, 400]}, r"length: expected shape \(1\), got \(2\)\."),
    ("Sample", zeros(query=(2, 6, 401, 64)), r"query: expected at most the capacity C=400 of tokens, got 401\."),
    ("Sample", zeros(query=(2, 5, 200, 64)), r"query: expected a multiple of Hkv=2 heads, got 5\."),
    ("Sample", zeros(values=(2, 2, 400, 32)), r"values: expected shape \(2, 2, 400, 64\), got \(2, 2, 400, 32\)\."),
    ("SaapAttention", zeros(past_bucket_ids=(2, 2, 158)), r"past_bucket_ids: expected shape \(2, 2, 159\), got"),
    (
        "SaapAttention",
        zeros(key_before=(2, 2, 2, 64)),
        r"key_before: expected shape \(2, 2, 1, 64\), got \(2, 2, 2, 64",
    ),
    (
        "SaapAttention",
        zeros(query_before=(2, 2, 1, 64)),
        r"query_before: expected shape \(2, 6, 1, 64\), got \(2, 2, 1",
    ),
    ("SaapAttention", zeros(centroids=(2, 3, 64)), r"probes: expected at most the 3 buckets, got 4\."),
    ("SaapAttention", zeros(centroids=(2, 16, 63)), r"centroids: expected shape \(2, any, 64\), got \(2, 16, 63\)\."),
    ("SaapAttention", zeros(centroids=(2, 32768, 64)), r"centroids: expected at most 32767 buckets, got 32768\."),
    ("SaapAttention", zeros(hidden_weight=(2, 64)), r"hidden_weight: expected shape \(2, 64, 1\), got \(2, 64\)\."),
    ("SaapAttention", zeros(hidden_weight=(2, 64, 0)), r"hidden_bias: expected shape \(2, 0\), got \(2, 32\)\."),
    ("SaapAttention", zeros(out_weight=(2, 64, 16)), r"out_weight: expected shape \(2, 32, 16\), got \(2, 64, 16\)\."),
    ("SaapAttention", zeros(out_bias=(2, 15)), r"out_bias: expected shape \(2, 16\), got \(2, 15\)\."),
    ("SaapAttention", {"past_length": [149, 159]}, r"past_length: expected 0 to 158 .*, got 159\."),
]


@pytest.mark.parametrize(("name", "wrong", "message"), INPUTS, ids=[f"{n}-{row[0]}" for n, row in enumerate(INPUTS)])
def test_inputs_that_do_not_fit_are_refused(name: str, wrong: dict[str, Any], message: str) -> None:
    settings, inputs = GOOD[name]
    with pytest.raises(Exception, match=f"{name}: {message}"):
        Operator("native", name, "f32", lowered=without_shapes, **settings)(**{**inputs(), **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 65}, r"rank: expected at most the head dim D=64, got 65\."),
        ({"lanes": 48}, r"lanes: expected a divisor of the capacity C=128, got 48\."),
    ],
    ids=["rank", "lanes"],
)
def test_sizes_and_attributes_that_contradict_each_other_are_refused(wrong: dict[str, Any], message: str) -> None:
    settings, inputs = GOOD["SparQAttention"]
    with pytest.raises(Exception, match=f"SparQAttention: {message}"):
        Operator("native", "SparQAttention", "f32", **{**settings, **wrong})(**inputs())


FRACTION = "expected a number above 0 and at most 1"
ATTRIBUTES: list[tuple[str, dict[str, Any], str]] = [
    ("SparQAttention", {"spec": 2}, r"spec: expected 1, which this library knows, got 2\."),
    ("SparQAttention", {"rank": 0}, r"rank: expected 1 to \d+, got 0\."),
    ("SparQAttention", {"top_k": -4}, r"top_k: expected 1 to \d+, got -4\."),
    ("SparQAttention", {"local_window": 33}, r"local_window: expected at most top_k=32, which includes it, got 33\."),
    ("SparQAttention", {"reallocate": 2}, r"reallocate: expected 0 to 1, got 2\."),
    ("SparQAttention", {"lanes": 0}, r"lanes: expected 1 to \d+, got 0\."),
    ("SparQAttention", {"dense_below": -1}, r"dense_below: expected 0 to \d+, got -1\."),
    ("SparQAttention", {"scale": float("nan")}, r"scale: expected a finite number, got nan\."),
    ("SparQAttention", {"rank": None}, r"rank: expected an integer attribute, got none\."),
    ("SparQAttention", {"scale": None}, r"scale: expected a float attribute, got none\."),
    ("SampleAttention", {"spec": 2}, r"spec: expected 1, which this library knows, got 2\."),
    ("SampleAttention", {"alpha_column": 0.0}, rf"alpha_column: {FRACTION}, got 0\.0+\."),
    ("SampleAttention", {"alpha_slash": 1.5}, rf"alpha_slash: {FRACTION}, got 1\.50*\."),
    ("SampleAttention", {"alpha_slash": float("nan")}, rf"alpha_slash: {FRACTION}, got -?nan\."),
    ("SampleAttention", {"alpha_slash": None}, r"alpha_slash: expected a float attribute, got none\."),
    ("SampleAttention", {"chunks": 0}, r"chunks: expected 1 to \d+, got 0\."),
    ("SampleAttention", {"block_size": 256}, r"block_size: expected 32 to 128, got 256\."),
    ("SampleAttention", {"block_size": 96}, r"block_size: expected 32, 64 or 128, got 96\."),
    ("SampleAttention", {"dense_prompt_below": -1}, r"dense_prompt_below: expected 0 to \d+, got -1\."),
    ("SampleAttention", {"dense_prompt_below": None}, r"dense_prompt_below: expected an integer attribute, got none\."),
]
SETTINGS = {
    "SparQAttention": {**CACHES, **PAPER},
    "SparQCodedAttention": GOOD["SparQCodedAttention"][0],
    "SampleAttention": {**PROMPT.parameters, "dense_prompt_below": 0},
}


@pytest.mark.parametrize(("name", "wrong", "message"), ATTRIBUTES, ids=str)
def test_attributes_of_another_meaning_are_refused(name: str, wrong: dict[str, Any], message: str) -> None:
    if reason := native.unavailable():
        absent("ort", reason)
    model = onnx_export.operator_model(name, **SETTINGS[name])
    ((attribute, value),) = wrong.items()
    node = model.graph.node[0]
    for there in [there for there in node.attribute if there.name == attribute]:
        node.attribute.remove(there)
    if value is not None:
        node.attribute.append(onnx.helper.make_attribute(attribute, value))
    with pytest.raises(Exception, match=f"{name}: {message}"):
        session(model, "auto")
