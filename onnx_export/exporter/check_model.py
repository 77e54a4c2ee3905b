"""Copies of a model that short prompts show the sparsity of."""

from __future__ import annotations

import dataclasses
import itertools

import onnx
from onnx import TensorProto

from mlx_sparse.methods import SAAP, Method, Sample, SparQ

from ..domain import DOMAIN
from .decoder import Target, output_of

PROMPT = 8  # tokens
SAMPLED_PROMPT, SAMPLED_BLOCK = 160, 32  # tokens of a prompt that SampleAttention leaves something out of
SIZES = {"top_k", "local_window", "sink_tokens", "recent_tokens", "dense_below"}  # attributes that say how many keys
KEYS = 4  # most keys attended to in the sparse step that is compared, so that a short prompt shows it


def shortened(target: Target) -> Method:
    """The method of a target with a sparse step that comes right after a short prompt."""
    method = target.method
    if isinstance(method, SAAP):
        sinks = min(method.sink_tokens, 1)
        recent = (PROMPT if target.rows else KEYS) - sinks
        # A file lists every key as soon as it leaves the window.
        return dataclasses.replace(method, sink_tokens=sinks, recent_tokens=recent, dense_below=0, fold_every=1)
    assert isinstance(method, SparQ)
    top_k = PROMPT if target.rows else min(method.top_k, KEYS)
    window = min(int(method.local_window or 0), top_k // 4)
    return dataclasses.replace(method, top_k=top_k, local_window=window, dense_below=0)


def shortened_prompts(method: Sample) -> Sample:
    """A method that leaves something out of a prompt of `SAMPLED_PROMPT` random tokens."""
    return dataclasses.replace(
        method,
        alpha_column=method.alpha_column / 2,
        alpha_slash=method.alpha_slash / 2,
        chunks=min(method.chunks, 2),
        block_size=SAMPLED_BLOCK,
        dense_below=0,
    )


def copy_for_check(model: onnx.ModelProto, target: Target) -> onnx.ModelProto:
    """The model with float32 caches, and with the attributes of `shortened` methods."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in (*made.graph.input, *made.graph.output):
        if tensor.type.tensor_type.elem_type not in (TensorProto.INT64, TensorProto.INT16):
            tensor.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in made.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Cast":  # up from the type of weights, or down to that of caches
            attributes["to"].i = TensorProto.FLOAT
        if "dense_below" in attributes and node.domain == DOMAIN:
            for name in SIZES.intersection(attributes):
                attributes[name].i = getattr(shortened(target), name)
        if "alpha_column" in attributes and target.prompts is not None:
            prompts = shortened_prompts(target.prompts)
            for name, value in prompts.parameters().items():
                setattr(attributes[name], "f" if isinstance(value, float) else "i", value)
            attributes["dense_prompt_below"].i = 0
    return made


def keep_layers(model: onnx.ModelProto, count: int) -> None:
    """Take out the layers after the first ``count``, their caches and their weights."""
    graph = model.graph
    made = {output for node in graph.node for output in node.output}
    last = next(i for i in itertools.count(count) if output_of(i) not in made) - 1
    needed, nodes = {"logits"}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            # Of what lies outside of layers, only the norm before the head reads the last one.
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
