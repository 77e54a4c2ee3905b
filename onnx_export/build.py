"""Build nodes and one-node models with the operators of the domain ``mlx_sparse``, and register ONNX schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from numbers import Real

import onnx
from onnx.defs import OpSchema

from mlx_sparse.checks import ConfigError, check_choice, check_int, check_local_window, check_rank, check_share

from .compose import bodies, operator
from .domain import DEFAULT, DOMAIN, SPEC, VERSION, Operator, Profile, T, Tensor, W
from .operators import OPERATORS

TYPES = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
WEIGHT_TYPES = ("float32", "float16")


def element(kind: str, **own: str) -> int:
    """Return the ONNX data type of ``kind``, which is a type such as "tensor(int64)" or a type variable such as "T".

    ``own`` maps type variables to dtypes, such as ``T="float16"``.
    """
    if kind in own:
        return TYPES[own[kind]]
    return int(onnx.TensorProto.DataType.Value(kind.removeprefix("tensor(").removesuffix(")").upper()))


def node(name: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: float) -> onnx.NodeProto:
    """Create a node of the operator ``name``. Pass all attributes except ``spec``, because they have no defaults.

    Raises:
        ConfigError: an attribute is missing, unknown or out of range, or the number of inputs or outputs is wrong.
    """
    op = operator(name)
    written: Mapping[str, float] = {"spec": SPEC, **attributes}
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
    typed = {a.name: a.type(written[a.name]) for a in op.attributes}
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
    """Build and check a model with one node and function bodies, which run if there are no native kernels.

    Args:
        dtype: type of queries, keys and values: float32, float16 or bfloat16.
        weights: type W of centroids and query networks: float32 or float16.
        profile: opset version and IR version of the model.
        sizes: fixed axis lengths, such as ``{"D": 128}``; all other axes stay symbolic.

    Raises:
        ConfigError: an argument or an attribute is invalid (see `node`).
    """
    op = operator(name)
    check_choice("dtype", dtype, tuple(TYPES))
    check_choice("weights", weights, WEIGHT_TYPES)
    fixed = sizes or {}
    if "D" in fixed and "rank" in attributes:
        check_rank(attributes["rank"], fixed["D"])
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
    """Validate a model, which may contain our operators, with the ONNX checker and shape inference.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: the model is invalid.
    """
    with registered():
        onnx.checker.check_model(model, full_check=True)


def infer(op: Operator) -> Callable[[onnx.shape_inference.InferenceContext], None]:
    """Return a function that infers the types and shapes of an operator's outputs from its inputs.

    Axes with the same name must have the same length. If two lengths differ, the returned function raises
    `onnx.shape_inference.InferenceError`.
    """

    def run(context: onnx.shape_inference.InferenceContext) -> None:
        lengths: dict[str, onnx.TensorShapeProto.Dimension] = {}
        given_type = 0
        for i, tensor in enumerate(op.inputs):
            given = context.get_input_type(i).tensor_type if context.has_input(i) else None
            if given is None:
                continue
            if tensor.type == "T":
                given_type = given.elem_type
            if given.HasField("shape"):
                _bind(op, tensor, given.shape, lengths)
        for i, tensor in enumerate(op.outputs):
            kind = given_type if tensor.type == "T" else element(tensor.type)
            made = onnx.helper.make_tensor_type_proto(kind, [None] * len(tensor.dims))
            for axis, dim in zip(tensor.dims, made.tensor_type.shape.dim, strict=True):
                if isinstance(axis, int):
                    dim.dim_value = axis
                elif axis in lengths:
                    dim.CopyFrom(lengths[axis])
            context.set_output_type(i, made)

    return run


def _bind(
    op: Operator,
    tensor: Tensor,
    shape: onnx.TensorShapeProto,
    lengths: dict[str, onnx.TensorShapeProto.Dimension],
) -> None:
    """Record the length of each axis of ``tensor`` in ``lengths``. A fixed length replaces a symbolic length."""
    where = f"{op.name}: {tensor.name}"
    if len(shape.dim) != len(tensor.dims):
        raise onnx.shape_inference.InferenceError(f"{where}: expected axes ({tensor.axes}), got {len(shape.dim)} axes.")
    for axis, dim in zip(tensor.dims, shape.dim, strict=True):
        if isinstance(axis, int):
            known = onnx.TensorShapeProto.Dimension(dim_value=axis)
        else:
            known = lengths.setdefault(axis, dim)
            if dim.HasField("dim_value") and not known.HasField("dim_value"):
                lengths[axis] = dim
        fixed = known.HasField("dim_value") and dim.HasField("dim_value")
        if fixed and known.dim_value != dim.dim_value:
            raise onnx.shape_inference.InferenceError(
                f"{where}: expected {axis} = {known.dim_value} as elsewhere in the node, got {dim.dim_value}."
            )


def schema(op: Operator) -> OpSchema:
    """Return the `onnx.defs.OpSchema` of an op, including its shape inference function."""
    kinds = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT}

    def formal(tensor: Tensor) -> OpSchema.FormalParameter:
        return OpSchema.FormalParameter(tensor.name, tensor.type, f"({', '.join(tensor.axes.split())}). {tensor.doc}")

    constraints = [("T", list(T), "Type of queries, keys, values and caches.")]
    if op.weighted:
        constraints.append(("W", list(W), "Type of centroids and query networks."))
    made = OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        op.doc,
        inputs=[formal(tensor) for tensor in op.inputs],
        outputs=[formal(tensor) for tensor in op.outputs],
        type_constraints=constraints,
        attributes=[OpSchema.Attribute(a.name, kinds[a.type], a.doc, required=True) for a in op.attributes],
    )
    made.set_type_and_shape_inference_function(infer(op))
    return made


@contextmanager
def registered() -> Iterator[None]:
    """Register the schemas of all operators during a ``with`` block, so that the ONNX checker accepts the operators."""
    for op in OPERATORS.values():
        onnx.defs.register_schema(schema(op))
    try:
        yield
    finally:
        for name in OPERATORS:
            onnx.defs.deregister_schema(name, VERSION, DOMAIN)
