"""Register the operators as ONNX schemas with shape inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnx
from onnx.defs import OpSchema

from .domain import DOMAIN, VERSION, Operator, T, Tensor, W
from .operators import OPERATORS


def infer(operator: Operator) -> Callable[[onnx.shape_inference.InferenceContext], None]:
    """Return a function that infers the types and shapes of an operator's outputs from its inputs.

    Axes with the same name must have the same length. If two lengths differ, the returned function raises
    `onnx.shape_inference.InferenceError`.
    """

    def run(context: onnx.shape_inference.InferenceContext) -> None:
        lengths: dict[str, onnx.TensorShapeProto.Dimension] = {}
        element = 0
        for i, tensor in enumerate(operator.inputs):
            given = context.get_input_type(i).tensor_type if context.has_input(i) else None
            if given is None:
                continue
            if tensor.type == "T":
                element = given.elem_type
            if given.HasField("shape"):
                _bind(operator, tensor, given.shape, lengths)
        for i, tensor in enumerate(operator.outputs):
            name = tensor.type.removeprefix("tensor(").removesuffix(")")
            kind = element if tensor.type == "T" else onnx.TensorProto.DataType.Value(name.upper())
            made = onnx.helper.make_tensor_type_proto(kind, [None] * len(tensor.dims))
            for axis, dim in zip(tensor.dims, made.tensor_type.shape.dim, strict=True):
                if isinstance(axis, int):
                    dim.dim_value = axis
                elif axis in lengths:
                    dim.CopyFrom(lengths[axis])
            context.set_output_type(i, made)

    return run


def _bind(
    operator: Operator,
    tensor: Tensor,
    shape: onnx.TensorShapeProto,
    lengths: dict[str, onnx.TensorShapeProto.Dimension],
) -> None:
    """Record the length of each axis of ``tensor`` in ``lengths``. A fixed length replaces a symbolic length."""
    where = f"{operator.name}: {tensor.name}"
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


def schema(operator: Operator) -> OpSchema:
    """Return the `onnx.defs.OpSchema` of an operator, including its shape inference function."""
    kinds = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT}

    def formal(tensor: Tensor) -> OpSchema.FormalParameter:
        return OpSchema.FormalParameter(tensor.name, tensor.type, f"({', '.join(tensor.axes.split())}). {tensor.doc}")

    constraints = [("T", list(T), "Type of queries, keys, values and caches.")]
    if operator.weighted:
        constraints.append(("W", list(W), "Type of centroids and query networks."))
    made = OpSchema(
        operator.name,
        DOMAIN,
        VERSION,
        operator.doc,
        inputs=[formal(tensor) for tensor in operator.inputs],
        outputs=[formal(tensor) for tensor in operator.outputs],
        type_constraints=constraints,
        attributes=[OpSchema.Attribute(a.name, kinds[a.type], a.doc, required=True) for a in operator.attributes],
    )
    made.set_type_and_shape_inference_function(infer(operator))
    return made


@contextmanager
def registered() -> Iterator[None]:
    """Register the schemas of all operators during a ``with`` block, so that the ONNX checker accepts the operators."""
    for operator in OPERATORS.values():
        onnx.defs.register_schema(schema(operator))
    try:
        yield
    finally:
        for name in OPERATORS:
            onnx.defs.deregister_schema(name, VERSION, DOMAIN)
