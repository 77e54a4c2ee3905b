"""The reference page docs/spec/operators.md, made from the table of operators.

``python -m mlx_sparse.onnx_export.reference > docs/spec/operators.md``
"""

from __future__ import annotations

from .build import function, functions
from .domain import COMPAT, DEFAULT, DOMAIN, SPEC, VERSION
from .formal import Operator, T, Tensor, W
from .operators import OPERATORS, OWN_KEYS, PACKED, PROMPTS
from .table import VERIFY_QUERIES

_HEAD = f"""# ONNX operators

The operators of domain `{DOMAIN}`, version {VERSION}. This page is made from `onnx_export/operators.py` by
`python -m mlx_sparse.onnx_export.reference`; a test holds it to that.

* A file carries every operator twice: as a node, and as a model-local function of standard operators, the *body*. A
  runtime without a kernel for the node runs the body.
* A runtime without local functions takes a file whose nodes were replaced by their bodies (`lower.inline`); one without
  open sizes, loops or branches takes a file for fixed sizes (`lower.static`).
* Bodies need opset {COMPAT.opset}. Files are written in opset {DEFAULT.opset} (IR {DEFAULT.ir}), or for old runtimes in
  opset {COMPAT.opset} (IR {COMPAT.ir}).
* Bodies read the keys a block at a time and never hold the logits of a whole prompt; how they cut is not part of the
  meaning.
* Everything after the reads is float32: logits, softmax, scores, choices, sums. The output is rounded once to T.
* **Every input is given and every attribute is written on every node.** A runtime passes a kernel its own defaults, not
  the body's, and a function cannot ask whether an input is there. Without padding, `left_padding` is zeros. Only
  `{VERIFY_QUERIES.name}` is not written where it is 0; nodes of one operator in a file all have it or none, as their
  body does.
* `spec` is {SPEC}. A kernel refuses any other number. An incompatible change is a new operator, not a new version:
  runtimes give a kernel nodes of versions it does not know.
* Axis lengths of one name are equal; those of the outputs follow from the inputs, and `?` is left open.
* Axes: B rows, Hq query heads, Hkv KV heads, L tokens, D head dim, C capacity. Query head h reads KV head
  `h // (Hq // Hkv)`. The operators whose names begin with `Packed` keep keys and values in few bits; `row` is the bytes
  of one ([quantised.md](quantised.md#4-exported-files)).
* Key j of row b is valid when `left_padding[b] <= j < length[b]`. What lies elsewhere in a buffer never reaches an
  output, be it NaN.

Equations are numbered by page: (sparq.4) is in [sparq.md](sparq.md), (saap.10) in [saap.md](saap.md), and so on.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(operator) for operator in OPERATORS.values())])


def _section(operator: Operator) -> str:
    body = functions([operator.name])[-1]
    called = sorted({f"`{node.name}`" for node in functions([operator.name])[:-1]})
    calls = f", and calls {' and '.join(called)}" if called else ""
    if operator.base:
        return _pair(operator, OPERATORS[operator.base], f"{len(body.node)} nodes{calls}")
    return "\n".join(
        [
            *_title(operator),
            f"#### Attributes ({_required(operator)})",
            "",
            *(f"* **{a.name}** : {a.type.__name__} — {a.doc}" for a in operator.attributes),
            "",
            "#### Inputs",
            "",
            *map(_line, operator.inputs),
            "",
            "#### Outputs",
            "",
            *map(_line, operator.outputs),
            "",
            "#### Type constraints",
            "",
            f"* **T** : {', '.join(T)}",
            *([f"* **W** : {', '.join(W)}"] if operator.weighted else []),
            "",
            "#### Body",
            "",
            f"{_body(operator.name)}: {len(body.node)} nodes{calls}.{_of_several(operator)}",
            "",
        ]
    )


def _required(operator: Operator) -> str:
    return f"required, but for `{VERIFY_QUERIES.name}`" if VERIFY_QUERIES in operator.attributes else "all required"


def _of_several(operator: Operator) -> str:
    """Of the body of nodes whose several queries choose keys once."""
    if VERIFY_QUERIES not in operator.attributes:
        return ""
    nodes = len(function(operator.name, several=True).node)
    texts = "[onnx_export/bodies/several](../../onnx_export/bodies/several)"
    return f" With `{VERIFY_QUERIES.name}` it is changed by {texts}: {nodes} nodes, and it calls `{OWN_KEYS}` besides."


def _pair(operator: Operator, base: Operator, nodes: str) -> str:
    """Of an operator that also samples prompts or keeps packed rows: what it has more."""
    more = [attribute for attribute in operator.attributes if attribute not in base.attributes]
    less = [f"`{attribute.name}`" for attribute in base.attributes if attribute not in operator.attributes]
    without = f" but {' and '.join(less)}" if less else ""
    body = f"{_body(base.name)}, with {_body(PROMPTS)} in place of `DenseAttention`"
    rows = ""
    if operator.name.startswith(PACKED):
        body = f"that of `{base.name}`, with {_body('Pack')} of new rows and {_body('Unpack')} of those it reads"
        rows = ", but for keys and values, past and present, which are tensor(uint8) `(B, Hkv, C, row)`"
    return "\n".join(
        [
            *_title(operator),
            f"Inputs, outputs and types are those of `{base.name}`{rows}; so are the attributes{without}, and besides",
            "",
            *(f"* **{a.name}** : {a.type.__name__} — {a.doc}" for a in more),
            "",
            f"The body is {body}: {nodes}.",
            "",
        ]
    )


def _title(operator: Operator) -> list[str]:
    return [f'## <a name="{DOMAIN}.{operator.name}"></a>**{DOMAIN}.{operator.name}**', "", operator.doc, ""]


def _body(name: str) -> str:
    return f"[onnx_export/bodies/{name}.onnxtxt](../../onnx_export/bodies/{name}.onnxtxt)"


def _line(tensor: Tensor) -> str:
    return f"* **{tensor.name}** : {tensor.type} `({', '.join(tensor.axes.split())})` — {tensor.doc}"


if __name__ == "__main__":
    print(page(), end="")
