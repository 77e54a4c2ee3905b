"""Build the function body of each operator: a model-local ONNX function that consists of standard operators.

The functions for appending and for decode steps are ONNX text in bodies/, in one file per method. shared.onnxtxt
begins with constants, which every function can use. If an operator appends to caches and then computes attention, its
body calls these functions. A called function receives its inputs and attributes from the operator by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import onnx
import onnx.parser
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, helper
from onnx.inliner import inline_local_functions

from mlx_sparse.checks import ConfigError, did_you_mean

from .domain import DEFAULT, DOMAIN, VERSION, Operator, Profile
from .operators import FUNCTIONS, OPERATORS, PROMPTS

BODIES = Path(__file__).parent / "bodies"
CONSTANTS = "constants"
# For each operator with caches: the functions that append, and the functions of its sparse decode step, if any.
COMPOSED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CachedAttention": (("Append",), ()),
    "SparQAttention": (("Append", "SparQStates"), ("SparQMeans", "KeyChunks", "SparQ")),
    "SaapAttention": (("SaapAppend",), ("Saap",)),
}
# Inputs of called functions that have another name in the calling operator.
CACHES = {"keys": "present_key", "values": "present_value", "bucket_ids": "present_bucket_ids"}
_KINDS = {int: AttributeProto.INT, float: AttributeProto.FLOAT}
_TYPES = {a.name: _KINDS[a.type] for operator in OPERATORS.values() for a in operator.attributes}


def operator(name: str) -> Operator:
    """Return the operator with the given name."""
    if name not in OPERATORS:
        raise ConfigError(
            f"operator: expected one of {', '.join(OPERATORS)}, got {name!r}.{did_you_mean(name, OPERATORS)}"
        )
    return OPERATORS[name]


def function(name: str, profile: Profile = DEFAULT) -> FunctionProto:
    """Return the function body of ``name``, an operator or one of `FUNCTIONS`. The body may call other functions."""
    if name not in FUNCTIONS and (operator(name).base or name) in COMPOSED:
        return _attention(operator(name), profile)
    made = FunctionProto()
    made.CopyFrom(_parsed(name))
    for opset in made.opset_import:
        if opset.domain == "":
            opset.version = profile.opset  # a function and its model must have the same opset
    return made


@cache
def _parsed(name: str) -> FunctionProto:
    head, brace, body = _texts()[name].partition("{\n")
    used = set(re.findall(r"\w+", body))
    constants = [line for line in _texts()[CONSTANTS].splitlines() if line.partition(" ")[0] in used]
    return onnx.parser.parse_function("\n".join([head, brace, *constants, body]))


@cache
def _texts() -> dict[str, str]:
    """Read the files in bodies/ and remove the comments. Return a dict from function name to ONNX text.

    The entry `CONSTANTS` is the text of all constants.
    """
    found = {}
    for file in sorted(BODIES.glob("*.onnxtxt")):
        constants, *functions = re.split(r"(?m)^(?=<opset_import)", re.sub(r"#.*", "", file.read_text("utf-8")))
        if constants.strip():
            found[CONSTANTS] = constants
        for text in functions:
            name = re.search(r"^\w+", text, re.MULTILINE)
            assert name, file
            found[name[0]] = text
    return found


def _attention(made: Operator, profile: Profile) -> FunctionProto:
    """Compose the body of operator ``made``, which appends to the caches and then runs a decode step or prefill."""
    appends, step = COMPOSED[made.base or made.name]
    prompt = _call(PROMPTS if made.base else "DenseAttention", made)
    nodes = [
        helper.make_node("Shape", ["key"], ["L"], start=2, end=3),
        helper.make_node("Add", ["past_length", "L"], ["length"]),
        *(_call(name, made) for name in appends),
    ]
    if step:
        calls = [_call(name, made) for name in step]
        branches = {"then_branch": _branch("sparse", calls), "else_branch": _branch("dense", [prompt])}
        nodes += [_call("IsStep", made), helper.make_node("If", ["is_step"], ["output"], **branches)]
    else:
        nodes.append(prompt)
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (made.inputs, made.outputs))
    opsets = [helper.make_opsetid("", profile.opset), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_function(DOMAIN, made.name, inputs, outputs, nodes, opsets, made.attribute_names)


def _call(name: str, caller: Operator) -> NodeProto:
    """Build a node that calls the function ``name`` with the attributes of the operator ``caller``.

    If the function needs ``window`` and ``caller`` has no such attribute, the node sets ``window=0``.
    """
    called = _parsed(name)
    node = helper.make_node(name, [CACHES.get(value, value) for value in called.input], called.output, domain=DOMAIN)
    for attribute in called.attribute:
        if attribute in caller.attribute_names:
            node.attribute.add(name=attribute, ref_attr_name=attribute, type=_TYPES[attribute])
        else:
            assert attribute == "window", attribute
            node.attribute.append(helper.make_attribute(attribute, 0))
    return node


def _branch(name: str, calls: list[NodeProto]) -> GraphProto:
    """Build a branch of an If node from ``calls``. The output of the last call is the output of the branch."""
    given = f"output_{name}"
    calls[-1].output[0] = given
    return helper.make_graph(calls, name, [], [onnx.ValueInfoProto(name=given)])


def functions(names: Iterable[str], profile: Profile = DEFAULT) -> list[FunctionProto]:
    """Return the function bodies of the operators ``names``. Every function comes after the functions that it calls.

    Operators that have no function body are skipped, because only the native kernels run these operators.
    """
    found: dict[str, FunctionProto] = {}
    for name in names:
        if name in OPERATORS and not OPERATORS[name].has_body:
            continue
        body = function(name, profile)
        called = functions([node.op_type for node in calls(body)], profile)
        found |= {each.name: each for each in (*called, body) if each.name not in found}
    return list(found.values())


def bodies(nodes: Iterable[NodeProto], profile: Profile = DEFAULT) -> list[FunctionProto]:
    """Return the function bodies that ``nodes`` need. Every function comes after the functions that it calls."""
    return functions(dict.fromkeys(node.op_type for node in nodes if node.domain == DOMAIN), profile)


def calls(holder: FunctionProto | GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes of our domain in a graph or function, including nodes in subgraphs of If and Loop."""
    for node in holder.node:
        if node.domain == DOMAIN:
            yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from calls(attribute.g)


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace every operator of our domain with its function body, for runtimes that do not support local functions.

    Inputs, outputs and weights keep their names. External data is not moved.

    Raises:
        ConfigError: an operator of the domain has no function body in the model.
    """
    made = inline_local_functions(model)
    left = {node.op_type for node in calls(made.graph)}
    if left:
        raise ConfigError(f"model: expected a function body for {' and '.join(sorted(left))}, got none. Export again.")
    kept = [opset for opset in made.opset_import if opset.domain != DOMAIN]  # runtimes refuse unknown domains
    del made.opset_import[:]
    made.opset_import.extend(kept)
    return made
