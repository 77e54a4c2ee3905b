"""Copy an exported model for verification. The settings of the copy make attention to short prompts sparse."""

from __future__ import annotations

import itertools

import onnx
from onnx import TensorProto

from ...domain import DOMAIN
from ..decoder import Target, output_of

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def copy_for_check(model: onnx.ModelProto, target: Target) -> onnx.ModelProto:
    """Return a copy of the model that has float32 caches and sparse attention even for short prompts."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in (*made.graph.input, *made.graph.output):
        if tensor.type.tensor_type.elem_type in HALVES:
            tensor.type.tensor_type.elem_type = TensorProto.FLOAT
    own, short = (each.attributes(each.decode, sampled=True) for each in (target, target.shortened()))
    for node in made.graph.node:
        for attribute in node.attribute:
            name = attribute.name
            if node.op_type == "Cast":  # casts from the type of the weights, or to the type of the caches
                attribute.i = TensorProto.FLOAT
            elif node.domain == DOMAIN and short.get(name) != own.get(name):
                setattr(attribute, "f" if isinstance(short[name], float) else "i", short[name])
    return made


def keep_layers(model: onnx.ModelProto, count: int) -> None:
    """Keep only the first ``count`` layers. Remove the caches and weights of all later layers."""
    graph = model.graph
    made = {output for node in graph.node for output in node.output}
    last = next(i for i in itertools.count(count) if output_of(i) not in made) - 1
    needed, nodes = {"logits"}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            # Outside the layers, only the norm before the head reads the output of the last layer.
            node.input[:] = [output_of(count - 1) if name == output_of(last) else name for name in node.input]
            needed.update(name for name in node.input if name)
            nodes.append(node)
    made = {output for node in nodes for output in node.output}
    for field, names in (("output", made), ("input", needed), ("initializer", needed)):
        kept = [tensor for tensor in getattr(graph, field) if tensor.name in names]
        graph.ClearField(field)
        getattr(graph, field).extend(kept)
    graph.ClearField("node")
    graph.node.extend(reversed(nodes))
