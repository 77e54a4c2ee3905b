"""Nodes, functions and one-node models of the operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import isfinite
from numbers import Real
from pathlib import Path

import onnx
import onnx.parser

from mlx_sparse.checks import ConfigError, check_choice, check_int, check_local_window, check_rank, check_share, meant

from .domain import DEFAULT, DOMAIN, SPEC, VERSION, Profile
from .formal import Operator, Tensor
from .operators import FUNCTIONS, KV, OPERATORS, PACKED, PROMPTS
from .schemas import registered
from .several import choose_once
from .table import VERIFY_QUERIES

BODIES = Path(__file__).parent / "bodies"
TYPES = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
WEIGHT_TYPES = ("float32", "float16")


def operator(name: str) -> Operator:
    """The operator of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in OPERATORS:
        raise ConfigError(f"operator: expected one of {', '.join(OPERATORS)}, got {name!r}.{meant(name, OPERATORS)}")
    return OPERATORS[name]


def element(kind: str, **own: str) -> int:
    """ONNX's number of a tensor's type, ``own`` of those that are open."""
    if kind in own:
        return TYPES[own[kind]]
    return int(onnx.TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper()))


def function(name: str, profile: Profile = DEFAULT, *, several: bool = False) -> onnx.FunctionProto:
    """The body of an operator, or one of `FUNCTIONS`, in standard operators and in functions that it calls.

    With ``several`` it is that of nodes with ``verify_queries``, where the operator knows such.
    """
    if name.startswith(PACKED):
        return _over_packed_rows(function(name.removeprefix(PACKED), profile, several=several))
    base = name if name in FUNCTIONS else operator(name).base or name
    made = onnx.parser.parse_function((BODIES / f"{base}.onnxtxt").read_text(encoding="utf-8"))
    for opset in made.opset_import:
        if opset.domain == "":
            opset.version = profile.opset  # a function and its model must agree on it
    if several and base in OPERATORS and VERIFY_QUERIES in operator(base).attributes:
        choose_once(made)
    if base != name:
        _sample_prompts(made, operator(name), several)
    return made


def _sample_prompts(body: onnx.FunctionProto, made: Operator, several: bool) -> None:
    """Make the body that of ``made``: `PROMPTS` takes the place of exact attention to the caches."""
    body.name = made.name
    body.attribute[:] = [attribute.name for attribute in made.attributes if several or not attribute.optional]
    [node] = [node for node in calls(body) if node.op_type == "DenseAttention" and node.input[1] == "present_key"]
    types = {attribute.name: attribute.type for attribute in made.attributes}
    node.op_type = PROMPTS
    node.ClearField("attribute")
    for name in function(PROMPTS).attribute:
        kind = onnx.AttributeProto.INT if types[name] is int else onnx.AttributeProto.FLOAT
        node.attribute.add(name=name, ref_attr_name=name, type=kind)


def _over_packed_rows(body: onnx.FunctionProto) -> onnx.FunctionProto:
    """Make the body one that keeps rows in few bits: it packs new ones, and unpacks what it reads.

    Rows of caches are the values that are named ``key``, ``value`` or ``..stored``.
    """
    body.name = PACKED + body.name
    body.attribute.extend(attribute.name for attribute in KV)
    if DOMAIN not in {opset.domain for opset in body.opset_import}:
        body.opset_import.add(domain=DOMAIN, version=VERSION)
    new = {name: f"{name}_stored" for name in ("key", "value") if f"past_{name}" in body.input and name in body.input}
    for graph in graphs(body):
        for node in graph.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            if _reads_rows(node):
                node.CopyFrom(_of_rows("Unpack", node.input[0], node.output[0]))
            elif node.domain == DOMAIN and _has_rows(node.op_type):
                node.op_type = PACKED + node.op_type
                node.attribute.extend(_of_rows("Unpack", "", "").attribute)
    for i, (name, packed) in enumerate(new.items()):
        body.node.insert(i, _of_rows("Pack", name, packed))
    return body


def _of_rows(name: str, rows: str, made: str) -> onnx.NodeProto:
    """A node that is told by the attributes of its function how rows are packed."""
    node = onnx.helper.make_node(name, [rows], [made], domain=DOMAIN)
    for attribute in KV:
        node.attribute.add(name=attribute.name, ref_attr_name=attribute.name, type=onnx.AttributeProto.INT)
    return node


def _reads_rows(node: onnx.NodeProto) -> bool:
    to_float = any(attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT for attribute in node.attribute)
    return node.op_type == "Cast" and to_float and node.input[0].endswith("stored")


@cache
def _has_rows(name: str) -> bool:
    """Whether the body of that name, or one that it calls, reads rows of caches."""
    nodes = [node for graph in graphs(function(name)) for node in graph.node]
    return any(_reads_rows(node) or (node.domain == DOMAIN and _has_rows(node.op_type)) for node in nodes)


def functions(names: Iterable[str], profile: Profile = DEFAULT, *, several: bool = False) -> list[onnx.FunctionProto]:
    """The bodies of these operators and of all that they call, each after those that it calls; ``several`` as above."""
    found: dict[str, onnx.FunctionProto] = {}
    for name in names:
        body = function(name, profile, several=several)
        called = functions([node.op_type for node in calls(body)], profile)
        found |= {each.name: each for each in (*called, body) if each.name not in found}
    return list(found.values())


def bodies(nodes: Iterable[onnx.NodeProto], profile: Profile = DEFAULT) -> list[onnx.FunctionProto]:
    """The functions that these nodes need, of which one operator's all have ``verify_queries`` or none."""
    own = [node for node in nodes if node.domain == DOMAIN]
    several = any(attribute.name == VERIFY_QUERIES.name for node in own for attribute in node.attribute)
    return functions(dict.fromkeys(node.op_type for node in own), profile, several=several)


def graphs(holder: onnx.FunctionProto | onnx.GraphProto) -> Iterator[onnx.FunctionProto | onnx.GraphProto]:
    """The graph or function, and the graphs inside its nodes."""
    yield holder
    for node in holder.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def calls(holder: onnx.FunctionProto | onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of the domain in a graph or function."""
    return [node for graph in graphs(holder) for node in graph.node if node.domain == DOMAIN]


def node(name: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: float) -> onnx.NodeProto:
    """A node with every attribute written: a kernel need not share the defaults of anybody else.

    Optional ones are where they are not 0.

    Raises:
        ConfigError: an attribute is missing, unknown or out of range, or the inputs or outputs are too few or too many.
    """
    op = operator(name)
    written: Mapping[str, float] = {**{a.name: 0 for a in op.attributes if a.optional}, "spec": SPEC, **attributes}
    known = {attribute.name for attribute in op.attributes}
    if written.keys() != known:
        wrong = ", ".join(sorted(written.keys() ^ known))
        raise ConfigError(f"{name}: expected the attributes {', '.join(sorted(known))}, got others: {wrong}.")
    for attribute in op.attributes:
        value = written[attribute.name]
        if attribute.choices:
            check_choice(attribute.name, value, attribute.choices)
        elif attribute.type is int:
            check_int(attribute.name, value, attribute.low or 0, attribute.high)
        elif attribute.high is not None:
            check_share(attribute.name, value)
        elif not isinstance(value, Real) or not isfinite(value):
            raise ConfigError(f"{attribute.name}: expected a finite number, got {value!r}.")
    if "local_window" in written:
        check_local_window(written["local_window"], int(written["top_k"]))
    for kind, got, expected in (("inputs", inputs, op.inputs), ("outputs", outputs, op.outputs)):
        if len(got) != len(expected) or (kind == "inputs" and not all(got)):
            raise ConfigError(f"{name}: expected the {kind} {', '.join(t.name for t in expected)}, got {list(got)}.")
    typed = {a.name: a.type(written[a.name]) for a in op.attributes if written[a.name] or not a.optional}
    return onnx.helper.make_node(name, list(inputs), list(outputs), domain=DOMAIN, **typed)


def operator_model(
    name: str,
    *,
    dtype: str = "float32",
    weights: str = "float32",
    profile: Profile = DEFAULT,
    sizes: Mapping[str, int] | None = None,
    **attributes: float,
) -> onnx.ModelProto:
    """A checked model of one node that is all of ``name``, with the bodies a stock runtime needs.

    Args:
        name: the operator.
        dtype: float32, float16 or bfloat16, of queries, keys and values.
        weights: float32 or float16, of what else is stored in a type of its own.
        sizes: axis lengths to fix, such as ``{"D": 128}``; the others stay symbolic.
        attributes: all attributes but ``spec``.

    Raises:
        ConfigError: see `node`.
    """
    op = operator(name)
    check_choice("dtype", dtype, tuple(TYPES))
    check_choice("weights", weights, WEIGHT_TYPES)
    fixed = sizes or {}
    if "D" in fixed and "rank" in attributes:
        check_rank(attributes["rank"], fixed["D"])
    if "D" in fixed and fixed["D"] % int(attributes.get("kv_group_size", 1)):
        raise ConfigError(
            f"kv_group_size: expected a divisor of the head dim D={fixed['D']}, got {attributes['kv_group_size']}."
        )
    made = node(name, [t.name for t in op.inputs], [t.name for t in op.outputs], **attributes)
    if "C" in fixed and fixed["C"] % attributes.get("lanes", 1):
        raise ConfigError(f"lanes: expected a divisor of the capacity C={fixed['C']}, got {attributes['lanes']}.")

    def info(tensor: Tensor) -> onnx.ValueInfoProto:
        dims = [None if axis == "?" else fixed.get(str(axis), axis) for axis in tensor.dims]
        return onnx.helper.make_tensor_value_info(tensor.name, element(tensor.type, T=dtype, W=weights), dims)

    graph = onnx.helper.make_graph([made], name, [info(t) for t in op.inputs], [info(t) for t in op.outputs])
    model = onnx.helper.make_model(
        graph,
        producer_name=DOMAIN,
        ir_version=profile.ir,
        opset_imports=[onnx.helper.make_opsetid("", profile.opset), onnx.helper.make_opsetid(DOMAIN, VERSION)],
        functions=bodies([made], profile),
    )
    check(model)
    return model


def check(model: onnx.ModelProto) -> None:
    """The ONNX checker with shape inference, knowing our operators.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: what is wrong with the model.
    """
    with registered():
        onnx.checker.check_model(model, full_check=True)
