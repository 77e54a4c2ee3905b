"""Models lowered for runtimes without local functions, or without open sizes: the same values from less of ONNX."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_models
from cases import Array, Case
from exported import COLUMNS, SPARQ, exported
from mlx_lm.convert import convert
from mlx_sparse.onnx_export import Runner, export, lower
from onnx_operators import (
    ATTRIBUTES,
    CACHES,
    Operator,
    advance,
    assert_is_sparq,
    attributes,
    filled_caches,
    padding,
    parameters,
    windowed_attention,
)

from mlx_sparse import ConfigError, onnx_export

CAPACITY = 512
DENSE = {"scale": 0.125, "window": 0}
METHODS = {"dense": "dense", "sparq": SPARQ, "columns": COLUMNS}
SHAPES = {"D": 64, "Hq": 6, "Hkv": 2}
Lower = Callable[[onnx.ModelProto], onnx.ModelProto]

by_runtime = pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime-compat", "reference"])


def every_node(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    found = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += every_node(attribute.g)
    return found


def sizes(model: onnx.ModelProto) -> set[Any]:
    """Axis lengths in the model after inference: numbers, symbols, and None for open ones.

    Values are not propagated: onnx takes a matrix of integers for a vector there, and refuses to add it to another.
    """
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    dims = [d for i in (*inferred.input, *inferred.output, *inferred.value_info) for d in i.type.tensor_type.shape.dim]
    return {dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims}


def decode(attend: Operator, case: Case, q: Array, k: Array, v: Array, start: int) -> Array:
    """The outputs of one run a token, the caches already holding the tokens before ``start``."""
    caches = filled_caches(case, k, v, start, CAPACITY)
    outputs = []
    for i in range(start, case.S):
        new = {"key": k[:, :, i : i + 1], "value": v[:, :, i : i + 1], "left_padding": padding(case)}
        got = attend(query=q[:, :, i : i + 1], **new, **caches)
        caches = {**caches, **advance(caches, got, 1)}
        outputs.append(got["output"])
    return np.concatenate(outputs, axis=2)


LOWERED: dict[str, Lower] = {"inline": lower.inline, "static": partial(lower.static, batch=2, capacity=CAPACITY)}
by_lowering = pytest.mark.parametrize("lowered", LOWERED.values(), ids=LOWERED)


@pytest.mark.parametrize("setting", ["paper", "reallocate", "eval"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@by_lowering
@by_runtime
def test_lowered_sparq_attention_equals_the_oracle(runtime: str, lowered: Lower, dtype: str, setting: str) -> None:
    case = Case(2, 6, 2, 290, 64, dtype, padding=(0, 50))
    q, _, _ = case.inputs(L=case.S)
    _, k, v = case.inputs()
    params = parameters(case, setting)
    attend = Operator(runtime, "SparQAttention", dtype, lowered=lowered, sizes=SHAPES, **CACHES, **attributes(params))
    got = decode(attend, case, q, k, v, case.S - 3)
    for i in range(1, 4):
        at = Case(2, 6, 2, case.S + 1 - i, 64, dtype, padding=case.padding)
        last = slice(at.S - 1, at.S)
        assert_is_sparq(got[:, :, -i][:, :, None], at, params, q[:, :, last], k[:, :, : at.S], v[:, :, : at.S])


@pytest.mark.parametrize("window", [0, 40])
@by_lowering
@by_runtime
def test_lowered_dense_attention_is_attention(runtime: str, lowered: Lower, window: int) -> None:
    case = Case(2, 6, 2, 290, 64, "f32", padding=(0, 285))
    q, _, _ = case.inputs(L=case.S)
    _, k, v = case.inputs()
    start = case.S - 10
    expected = windowed_attention(q[:, :, start:], k, v, padding(case), window or case.S, 0.125)
    settings = {"scale": 0.125, "window": window}
    attend = Operator(runtime, "CachedAttention", "f32", lowered=lowered, sizes=SHAPES, **settings)
    np.testing.assert_allclose(decode(attend, case, q, k, v, start), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dense_below", [0, CAPACITY + 1], ids=["sparse", "dense"])
@pytest.mark.parametrize("profile", [onnx_export.DEFAULT, onnx_export.COMPAT], ids=["default", "compat"])
def test_a_static_model_has_numbers_for_sizes_and_no_control_flow(
    profile: onnx_export.Profile, dense_below: int
) -> None:
    params = {"lanes": 64, "dense_below": dense_below, **attributes(parameters(Case(2, 6, 2, 9, 64, "f32"), "robust"))}
    made = lower.static(
        onnx_export.operator_model("SparQAttention", sizes=SHAPES, profile=profile, **params), 2, CAPACITY
    )
    assert not {"Loop", "If", "Range", "Shape", "Constant"} & {node.op_type for node in every_node(made.graph)}
    assert ("TopK" in {node.op_type for node in made.graph.node}) == (dense_below == 0)
    assert all(isinstance(size, int) for size in sizes(made))
    assert [opset.domain for opset in made.opset_import] == [""]
    assert made.ir_version == profile.ir
    assert not made.functions
    used = {name for node in made.graph.node for name in node.input}
    assert {tensor.name for tensor in made.graph.initializer} <= used  # runtimes warn of others


@pytest.mark.parametrize("name", onnx_export.OPERATORS)
def test_an_inlined_model_has_nothing_of_the_domain_and_keeps_its_names(name: str) -> None:
    model = onnx_export.operator_model(name, **ATTRIBUTES[name])
    made = lower.inline(model)
    onnx.checker.check_model(made, full_check=True)
    assert not made.functions
    assert [opset.domain for opset in made.opset_import] == [""]
    assert not any(node.domain for node in every_node(made.graph))
    assert list(made.graph.input) == list(model.graph.input)
    assert list(made.graph.output) == list(model.graph.output)


@pytest.mark.parametrize(
    ("batch", "capacity", "shapes", "message"),
    [
        (0, 64, SHAPES, "batch: expected an integer of at least 1, got 0"),
        (2, 0, SHAPES, "capacity: expected an integer of at least 1, got 0"),
        (2, 64, {}, "model: expected a number for axis Hq of query, got none"),
        (2, 64, {**SHAPES, "C": 128}, "capacity: expected 128 as in past_key, got 64"),
    ],
)
def test_a_size_that_does_not_fit_gets_one_clear_line(
    batch: int, capacity: int, shapes: dict[str, int], message: str
) -> None:
    model = onnx_export.operator_model("CachedAttention", sizes=shapes, **DENSE)
    with pytest.raises(ConfigError, match=message) as caught:
        lower.static(model, batch, capacity)
    assert "\n" not in str(caught.value)


def test_a_model_without_bodies_is_refused() -> None:
    model = onnx_export.operator_model("CachedAttention", **DENSE)
    model.ClearField("functions")
    with pytest.raises(ConfigError, match="model: expected a body for CachedAttention, got none"):
        lower.inline(model)


def logits_after(folder: Path, tokens: Array) -> Array:
    """Logits after feeding the tokens one by one."""
    model = Runner(folder, native="off", batch=len(tokens))
    for column in tokens.T:
        logits = model.step(column[:, None])
    return logits.copy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported tiny models; the weights of one have 4 bits."""
    home = tmp_path_factory.mktemp("quantised")
    source = tiny_models.write(home / "source", intermediate_size=96)
    convert(str(source), str(home / "4-bit"), quantize=True, q_bits=4, q_group_size=32)
    export(str(home / "4-bit"), home / "exported", method=SPARQ, max_length=CAPACITY)
    whole = {name: exported(method, max_length=CAPACITY) for name, method in METHODS.items()}
    return {**whole, "sparq-4-bit": home / "exported"}


@by_lowering
@pytest.mark.parametrize("which", [*METHODS, "sparq-4-bit"])
def test_a_whole_model_keeps_its_logits_its_names_and_its_data_file(
    folders: dict[str, Path], which: str, lowered: Lower, tmp_path: Path
) -> None:
    folder = folders[which]
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    made = lowered(model)
    assert [info.name for info in made.graph.input] == [info.name for info in model.graph.input]
    assert [info.name for info in made.graph.output] == [info.name for info in model.graph.output]
    assert {p.key: p.value for p in made.metadata_props} == {p.key: p.value for p in model.metadata_props}
    weights, kept = (
        {t.name: t for t in each.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
        for each in (model, made)
    )
    assert weights
    assert kept == weights
    if lowered is not lower.inline:
        assert not {"Loop", "If"} & {node.op_type for node in every_node(made.graph)}
        assert all(isinstance(size, int) for size in sizes(made))
    shutil.copy(folder / "model.onnx.data", tmp_path)
    onnx.save(made, tmp_path / "model.onnx")
    tokens = np.random.default_rng(0).integers(0, 64, (2, 70))  # the last of them are after a full group
    expected, got = (logits_after(place, tokens) for place in (folder, tmp_path))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
