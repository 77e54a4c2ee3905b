"""Models for runtimes that know less than ONNX: without local functions, or without open sizes, loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir
from onnx.defs import OpSchema
from onnx.inliner import inline_local_functions
from onnx.shape_inference import InferenceContext
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants

from mlx_sparse.checks import ConfigError, check_int

from .build import calls, graphs
from .domain import DOMAIN
from .formal import T
from .operators import OPERATORS

LARGEST = 1 << 22  # elements of a constant that folding may make: positions of a whole cache


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the body of every operator in its place; inputs, outputs and weights keep their names.

    External data stays where it is.

    Raises:
        ConfigError: an operator of the domain has no body in the model.
    """
    made = inline_local_functions(model)
    left = {node.op_type for node in calls(made.graph)}
    if left:
        raise ConfigError(f"model: expected a body for {' and '.join(sorted(left))}, got none. Export it again.")
    kept = [opset for opset in made.opset_import if opset.domain != DOMAIN]  # runtimes refuse domains they do not know
    del made.opset_import[:]
    made.opset_import.extend(kept)
    return made


def static(model: onnx.ModelProto, batch: int, capacity: int) -> onnx.ModelProto:
    """The model inlined for ``batch`` rows, one token a run and caches of ``capacity``, every size a number.

    Loops, branches and whatever is constant are gone; every step reads the whole capacity. An attention mask is
    ``(batch, capacity)``, with zeros on its right.

    Raises:
        ConfigError: a size that does not fit the model, or one that the model leaves open.
    """
    check_int("batch", batch, 1)
    check_int("capacity", capacity, 1)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    _fix_sizes(made, {"B": batch, "batch": batch, "L": 1, "length": 1, "C": capacity, "total": capacity})
    _check_capacity(made, capacity)
    for function in made.functions:
        if function.domain == DOMAIN:
            _read_everything(function, capacity)
    made = inline(made)

    # External weights are inputs for a while, so that nobody reads them.
    inputs = list(made.graph.input)
    external = [t for t in made.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    own = [t for t in made.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    del made.graph.initializer[:]
    made.graph.initializer.extend(own)
    made.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in external)
    made = _fold(made)
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    used = {name for node in made.graph.node for name in node.input}
    kept = [tensor for tensor in (*made.graph.initializer, *external) if tensor.name in used]  # runtimes warn of others
    del made.graph.initializer[:]
    made.graph.initializer.extend(kept)
    return made


def _fix_sizes(model: onnx.ModelProto, sizes: dict[str, int]) -> None:
    """Replace the symbols among the axis lengths of the inputs; those of the outputs follow by inference."""
    for info in (*model.graph.input, *model.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    for info in model.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                name = dim.dim_param or "?"
                raise ConfigError(f"model: expected a number for axis {name} of {info.name}, got none. Give it a size.")


def _check_capacity(model: onnx.ModelProto, capacity: int) -> None:
    """The caches must be as long as the bodies are told."""
    shapes = {info.name: info.type.tensor_type.shape.dim for info in model.graph.input}
    for node in model.graph.node:
        inputs = OPERATORS[node.op_type].inputs if node.domain == DOMAIN else ()
        for tensor, name in zip(inputs, node.input, strict=False):
            for axis, dim in zip(tensor.dims, shapes.get(name, ()), strict=False):
                if axis == "C" and dim.dim_value != capacity:
                    raise ConfigError(f"capacity: expected {dim.dim_value} as in {name}, got {capacity}.")


def _read_everything(function: onnx.FunctionProto, capacity: int) -> None:
    """Make constants of what a body computes from data in order to read less. The names are those of bodies/."""
    made: dict[str, Any]
    for graph in graphs(function):
        for node in graph.node:
            match node.output[0]:
                case "longest" if "keys" in function.input:  # which are whole caches, or lists
                    everything = onnx.helper.make_node("Shape", ["keys"], ["longest"], start=2, end=3)
                    node.CopyFrom(everything)
                    continue
                case "longest" | "most_attended":  # row, or list of keys
                    scalar = any(attribute.name == "keepdims" and not attribute.i for attribute in node.attribute)
                    made = {"value_int": capacity} if scalar else {"value_ints": [capacity]}
                case "not_negative":  # number of the first key
                    made = {"value_ints": [0]}
                case "block_elements":  # one block of everything
                    made = {"value_ints": [1 << 40]}
                case "whole" | "sound" | "nothing_new" | "all_coded" | "in_place":  # nothing is spared
                    made = {"value": onnx.helper.make_tensor("", onnx.TensorProto.BOOL, [], [False])}
                case _:
                    continue
            node.CopyFrom(onnx.helper.make_node("Constant", [], list(node.output), **made))


def _fold(model: onnx.ModelProto) -> onnx.ModelProto:
    """Compute what is constant and put the bodies of loops of one trip in their place, until neither is left."""
    made = ir.from_proto(model)
    with _contrib_schemas():
        fold_constants(made, onnx_shape_inference=True, input_size_limit=LARGEST, output_size_limit=LARGEST)
        while _unroll(made.graph):
            fold_constants(made, onnx_shape_inference=True, input_size_limit=LARGEST, output_size_limit=LARGEST)
    passes.IdentityEliminationPass()(made)
    passes.RemoveUnusedNodesPass()(made)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(made)
    passes.NameFixPass()(made)
    return ir.to_proto(made)


def _unroll(graph: ir.Graph) -> bool:
    """Replace the Loops of one trip by their bodies; True when there were any."""
    found = False
    for node in list(graph):
        trips = node.inputs[0].const_value if node.op_type == "Loop" and node.inputs[0] is not None else None
        if trips is None or trips.numpy() != 1:
            continue
        found = True
        body = node.attributes["body"].as_graph()
        trip = ir.node("Constant", [], {"value_int": 0})
        carried = node.inputs[2:]
        for formal, actual in zip(body.inputs, [trip.outputs[0], *node.inputs[1:]], strict=True):
            assert actual is not None  # our bodies give a condition
            formal.replace_all_uses_with(actual, replace_graph_outputs=True)
        results = list(body.outputs)[1:]
        nodes = list(body)
        for name, constant in list(body.initializers.items()):  # what was folded inside
            del body.initializers[name]
            graph.register_initializer(constant)
        body.outputs.clear()
        body.remove(nodes)
        stacks = []
        for i in range(len(carried), len(results)):  # what comes from each trip is stacked along a new axis
            axis = ir.node("Constant", [], {"value_ints": [0]})
            stack = ir.node("Unsqueeze", [results[i], axis.outputs[0]])
            stacks += [axis, stack]
            results[i] = stack.outputs[0]
        made = [trip, *nodes, *stacks]
        ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, results)
    return found


@contextmanager
def _contrib_schemas() -> Iterator[None]:
    """Tell shape inference what the quantised operators of ONNX Runtime return."""

    def matmul(context: InferenceContext) -> None:
        made = onnx.TypeProto()
        made.CopyFrom(context.get_input_type(0))
        made.tensor_type.shape.dim[-1].dim_value = context.get_attribute("N").i
        context.set_output_type(0, made)

    def gather(context: InferenceContext) -> None:
        data, ids, scales = (context.get_input_type(i).tensor_type for i in range(3))
        blocks = data.shape.dim[1].dim_value
        size = data.shape.dim[2].dim_value * 8 // context.get_attribute("bits").i
        dims = [dim.dim_value for dim in ids.shape.dim]
        context.set_output_type(0, onnx.helper.make_tensor_type_proto(scales.elem_type, [*dims, blocks, size]))

    def schema(name: str, inputs: str, infer: Callable[[InferenceContext], None], attributes: str) -> OpSchema:
        integers = [OpSchema.Attribute(a, OpSchema.AttrType.INT, required=False) for a in attributes.split()]
        types = [("T", list(T), ""), ("Q", ["tensor(uint8)"], ""), ("I", ["tensor(int64)"], "")]
        formal = [OpSchema.FormalParameter(f"input_{i}", kind) for i, kind in enumerate(inputs)]
        output = OpSchema.FormalParameter("output", "T")
        made = OpSchema(
            name, "com.microsoft", 1, inputs=formal, outputs=[output], type_constraints=types, attributes=integers
        )
        made.set_type_and_shape_inference_function(infer)
        return made

    schemas = [
        schema("MatMulNBits", "TQTQ", matmul, "K N bits block_size accuracy_level"),
        schema("GatherBlockQuantized", "QITQ", gather, "gather_axis quantize_axis bits block_size"),
    ]
    for each in schemas:
        onnx.defs.register_schema(each)
    try:
        yield
    finally:
        for each in schemas:
            onnx.defs.deregister_schema(each.name, 1, "com.microsoft")
