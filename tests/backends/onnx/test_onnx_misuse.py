"""Check that native kernels reject invalid inputs and attributes with a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
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


def zeros(shapes: dict[str, list[int]]) -> dict[str, Any]:
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def prompt() -> dict[str, Any]:
    q, k, v = PROMPT.inputs()
    return {"query": q, "keys": k, "values": v, "length": [PROMPT.S]}


def cached(empty: Any = empty_caches) -> dict[str, Any]:
    """Return a token and caches of 128 slots. With `empty_codes`, the caches have int4 scoring keys."""
    case = Case(1, 2, 2, 65, 64, "f32")
    q, k, v = case.inputs()
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:], "left_padding": padding(case)}
    return {**new, **empty(case, 128)}


# Valid settings and inputs by operator.
GOOD: dict[str, tuple[dict[str, Any], Any]] = {
    "SparQ": (PAPER, lambda: step(STEP, *STEP.inputs())),
    "SparQAttention": ({**CACHES, **PAPER}, cached),
    "SparQCoded": (PAPER, lambda: coded_step(STEP)),
    "SparQCodedAttention": ({**PAPER, "dense_below": 0}, lambda: cached(empty_codes)),
    "CachedAttention": (DENSE, cached),
    "Sample": (PROMPT.parameters, prompt),
    "SaapAttention": (saap_settings(BUCKETS), lambda: saap_step(BUCKETS)),
}
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
INPUTS = TABLES["inputs"]


@pytest.mark.parametrize(("name", "wrong", "message"), INPUTS, ids=[f"{n}-{row[0]}" for n, row in enumerate(INPUTS)])
def test_inputs_that_do_not_fit_are_refused(name: str, wrong: dict[str, Any], message: str) -> None:
    settings, inputs = GOOD[name]
    given = {**inputs(), **zeros(wrong.get("shapes", {})), **wrong.get("values", {})}
    with pytest.raises(Exception, match=f"{name}: {message}"):
        Operator("native", name, "f32", lowered=without_shapes, **settings)(**given)


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


ATTRIBUTES = TABLES["attributes"]
SETTINGS = {
    "SparQAttention": {**CACHES, **PAPER},
    "SparQCodedAttention": GOOD["SparQCodedAttention"][0],
    "SampleAttention": {**PROMPT.parameters, "dense_prompt_below": 0},
}


@pytest.mark.parametrize(("name", "wrong", "message"), ATTRIBUTES, ids=str)
def test_invalid_attributes_are_refused(name: str, wrong: dict[str, Any], message: str) -> None:
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
