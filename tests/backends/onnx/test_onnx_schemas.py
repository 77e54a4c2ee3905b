"""Check the schemas of the ONNX operators: shape inference, invalid graphs and the reference page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx_operators import least
from operators_page import page

from mlx_sparse import ConfigError, onnx_export

ROOT = Path(__file__).parents[3]
BAD_GRAPH = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)

by_operator = pytest.mark.parametrize("name", onnx_export.OPERATORS)
BODIES = [name for name, operator in onnx_export.OPERATORS.items() if operator.has_body]
by_body = pytest.mark.parametrize("name", BODIES)
by_profile = pytest.mark.parametrize("profile", [onnx_export.DEFAULT, onnx_export.COMPAT], ids=["default", "compat"])


def model(name: str = "SparQAttention", **settings: Any) -> onnx.ModelProto:
    return onnx_export.operator_model(name, **{**least(name), **settings})


def shapes(infos: Any) -> dict[str, list[int | str | None]]:
    return {
        info.name: [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in info.type.tensor_type.shape.dim
        ]
        for info in infos
    }


@by_profile
@by_operator
def test_models_have_the_opset_and_ir_of_their_profile(name: str, profile: onnx_export.Profile) -> None:
    made = model(name, profile=profile)
    assert made.ir_version == profile.ir
    for holder in (made, *made.functions):
        versions = {opset.domain: opset.version for opset in holder.opset_import}
        assert versions[""] == profile.opset
        assert versions.get("mlx_sparse", 1) == 1


@by_operator
def test_a_node_has_every_attribute_and_the_body_has_no_default(name: str) -> None:
    made, schema = model(name), onnx_export.OPERATORS[name]
    expected = [attribute.name for attribute in schema.attributes]
    assert sorted(attribute.name for attribute in made.graph.node[0].attribute) == sorted(expected)
    if not schema.has_body:
        assert not made.functions
        return
    body = onnx_export.function(name)
    assert list(body.attribute) == expected
    assert not body.attribute_proto
    assert list(body.input) == [tensor.name for tensor in schema.inputs]
    assert list(body.output) == [tensor.name for tensor in schema.outputs]


@by_body
def test_nodes_in_a_body_pass_on_every_attribute(name: str) -> None:
    def check(nodes: Any) -> None:
        for node in nodes:
            if node.domain == "mlx_sparse":
                assert {a.name for a in node.attribute} == set(onnx_export.function(node.op_type).attribute)
                # Dense attention of a sparse operator has the constant window 0.
                literal = {a.name for a in node.attribute if not a.ref_attr_name}
                assert literal <= {"window"} - set(onnx_export.function(name).attribute)
            for attribute in node.attribute:
                check(attribute.g.node)

    check(onnx_export.function(name).node)


@by_body
def test_bodies_have_no_unused_nodes(name: str) -> None:
    body = onnx_export.function(name)
    used, made = set(body.output), []

    def walk(nodes: Any) -> None:
        for node in nodes:
            used.update(node.input)
            made.append(list(node.output))
            for attribute in node.attribute:
                used.update(output.name for output in attribute.g.output)
                walk(attribute.g.node)

    walk(body.node)
    assert [outputs for outputs in made if not used & set(outputs)] == []


@by_body
def test_the_body_gives_the_types_and_shapes_of_the_schema(name: str) -> None:
    """Compare the declared shapes with shape inference by the function body and by the schema."""
    declared = model(name, sizes={"B": 2, "Hq": 8, "Hkv": 2, "D": 64})
    bare = onnx.ModelProto()
    bare.CopyFrom(declared)
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    through_body = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True)
    with onnx_export.registered():
        through_schema = onnx.shape_inference.infer_shapes(bare, strict_mode=True)
    for found in (through_body, through_schema):
        for want, got in zip(declared.graph.output, found.graph.output, strict=True):
            assert got.type.tensor_type.elem_type == want.type.tensor_type.elem_type
            dims = [None if str(dim).startswith("unk__") else dim for dim in shapes([got])[got.name]]
            # The number of keys of TopK is computed, so inference through the function body leaves these axes open.
            if not (want.name in ("indices", "blocks") and found is through_body):
                assert dims == shapes([want])[want.name]


def test_the_runtime_infers_output_shapes() -> None:
    session = ort.InferenceSession(model("SparQAttention", sizes={"D": 64}).SerializeToString())
    assert session.get_outputs()[0].shape == ["B", "Hq", "L", 64]
    assert session.get_outputs()[2].shape == ["B", "Hkv", "C", 64]


def test_registration_leaves_nothing_behind() -> None:
    with onnx_export.registered():
        assert onnx.defs.has("SparQ", "mlx_sparse")
    assert not onnx.defs.has("SparQ", "mlx_sparse")


@pytest.mark.parametrize(
    ("settings", "message"), json.loads(Path(__file__).with_suffix(".json").read_text())["wrong arguments"], ids=str
)
def test_a_wrong_argument_is_a_one_line_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        model(**settings)
    assert "\n" not in str(caught.value)


def test_a_missing_attribute_input_or_operator_is_a_one_line_error() -> None:
    with pytest.raises(
        ConfigError, match="DenseAttention: expected the attributes scale, spec, window, got others: scale, window"
    ):
        onnx_export.operator_model("DenseAttention")
    names = [tensor.name for tensor in onnx_export.OPERATORS["DenseAttention"].inputs]
    with pytest.raises(ConfigError, match="DenseAttention: expected the inputs query, keys"):
        onnx_export.node("DenseAttention", [*names[:3], "", names[4]], ["output"], scale=1.0, window=0)
    with pytest.raises(ConfigError, match=r"operator: expected one of SparQ, .*Attention, got 'Sparq'"):
        onnx_export.function("Sparq")


def rank_of(made: onnx.ModelProto) -> onnx.AttributeProto:
    return next(a for a in made.graph.node[0].attribute if a.name == "rank")


def set_length(made: onnx.ModelProto, index: int, length: int) -> None:
    made.graph.input[index].type.tensor_type.shape.dim[3].dim_value = length


SPOILED: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "an attribute too many": lambda m: m.graph.node[0].attribute.append(onnx.helper.make_attribute("window", 3)),
    "an attribute too few": lambda m: m.graph.node[0].attribute.pop(),
    "a float for an integer": lambda m: rank_of(m).CopyFrom(onnx.helper.make_attribute("rank", 2.0)),
    "an input too few": lambda m: m.graph.node[0].input.pop(),
    "an input too many": lambda m: m.graph.node[0].input.append("query"),
    "no domain": lambda m: m.opset_import.pop(),
    "functions of another opset": lambda m: setattr(m.opset_import[0], "version", 20),
    "mixed types": lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", onnx.TensorProto.FLOAT16),
    "two head dims": lambda m: [set_length(m, 0, 64), set_length(m, 3, 80)],
    "an axis too few": lambda m: m.graph.input[4].type.tensor_type.shape.dim.pop(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_bad_graph_is_refused(spoil: Callable[[onnx.ModelProto], None]) -> None:
    made = model("SparQAttention")
    spoil(made)
    with pytest.raises(BAD_GRAPH):
        onnx_export.check(made)


def test_a_node_without_body_or_kernel_is_refused_by_the_runtime() -> None:
    made = model("SparQAttention")
    made.ClearField("functions")
    with pytest.raises(Exception, match="SparQAttention"):
        ort.InferenceSession(made.SerializeToString())


def test_the_reference_page_is_up_to_date() -> None:
    written = (ROOT / "docs/spec/operators.md").read_text(encoding="utf-8")
    assert written == page(), "run python tests/testing/operators_page.py > docs/spec/operators.md"
