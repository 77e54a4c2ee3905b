"""Bodies of operators whose several queries choose keys once, docs/spec/several.md: made from those of one query."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
import onnx.parser

from .table import VERIFY_QUERIES

TEXTS = Path(__file__).parent / "bodies" / "several"


def choose_once(body: onnx.FunctionProto) -> None:
    """Make the body one that takes up to ``verify_queries`` queries through its sparse branch.

    bodies/several has what is read then: IsChosen of the call; in the branch, in place of NAME, the prefix_NAME of
    Prefix and of the text that is called as the body is; and Output, which adds what queries attend to besides.
    """
    body.attribute.append(VERIFY_QUERIES.name)
    if "past_sums" in body.input:
        _rename(body.node, {"past_sums": "kept_past_sums"})
        for i, node in enumerate(_nodes("Kept", {})):
            body.node.insert(i, node)
    [enough] = [node for node in body.node if "enough" in node.output]
    [is_sparse] = [node for node in body.node if "is_sparse" in node.output]
    [output] = [node for node in body.node if "output" in node.output]
    longest = enough.input[0]  # in some bodies it has an axis elsewhere
    is_chosen = _nodes("IsChosen", {"longest": longest})
    enough.input[0] = "several_prefix"
    is_sparse.input[0] = "several_few"
    at = list(body.node).index(enough)
    for i, node in enumerate(is_chosen):
        body.node.insert(at + i, node)
    branch = next(attribute.g for attribute in output.attribute if attribute.name == "then_branch")
    made = _nodes("Prefix", {})
    if (TEXTS / f"{body.name}.onnxtxt").is_file():
        made += _nodes(body.name, {"past_sums": "kept_past_sums"})
    given = {name for node in made for name in node.output if name.startswith("prefix_")}
    _rename(branch.node, {name.removeprefix("prefix_"): name for name in given})
    for node in branch.node:
        node.output[:] = ["several_chosen" if name == "y_sparse" else name for name in node.output]
    listed = "i2" if any("i2" in node.output for node in branch.node) else "listed"
    rest = [*branch.node, *_nodes("Output", {"listed": listed})]
    made = _used(made, {name for node in _with_inner(rest) for name in node.input})
    del branch.node[:]
    branch.node.extend([*made, *rest])


def _nodes(text: str, inputs: Mapping[str, str]) -> list[onnx.NodeProto]:
    """The nodes of a text, some of whose inputs have other names; what is not for others gets a name of its own."""
    made = onnx.parser.parse_function((TEXTS / f"{text}.onnxtxt").read_text(encoding="utf-8"))
    own = {name for node in made.node for name in node.output} - set(made.output)
    names = {**{name: f"several_{name}" for name in own}, **inputs}
    _rename(made.node, names)
    for node in made.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    return list(made.node)


def _used(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """Those of the nodes that give what is wanted, or what such a node reads."""
    used: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            used.insert(0, node)
            wanted |= set(node.input)
    return used


def _rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    for node in _with_inner(nodes):
        node.input[:] = [names.get(name, name) for name in node.input]


def _with_inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _with_inner(attribute.g.node)
