"""The reference page docs/spec/operators.md, made from the table of operators.

python tests/export/operators_page.py > docs/spec/operators.md
"""

from __future__ import annotations

from mlx_sparse.onnx_export.compose import COMPOSED, functions
from mlx_sparse.onnx_export.domain import COMPAT, DEFAULT, DOMAIN, SPEC, VERSION
from mlx_sparse.onnx_export.formal import Operator, T, Tensor, W
from mlx_sparse.onnx_export.operators import OPERATORS, PROMPTS

_HEAD = f"""# ONNX operators

The operators of domain `{DOMAIN}`, version {VERSION}. This page is made from `onnx_export/operators.py` by
`python tests/export/operators_page.py`; a test compares the two.

* A file carries every operator twice: as a node, and as a model-local function of standard operators, the *body*. A
  runtime without a kernel for the node runs the body.
* A runtime without local functions takes a file whose nodes were replaced by their bodies (`compose.inline`).
* `SparQCoded` and the operators over its caches have no body: only the native kernels run them.
* Bodies need opset {COMPAT.opset}. Files are written in opset {DEFAULT.opset} (IR {DEFAULT.ir}), or for old runtimes in
  opset {COMPAT.opset} (IR {COMPAT.ir}).
* Bodies read the keys a block at a time and never hold the logits of a whole prompt; how they cut is not part of the
  meaning.
* Everything after the reads is float32: logits, softmax, scores, choices, sums. The output is rounded once to T.
* **Every input is given and every attribute is written on every node.** A runtime passes a kernel its own defaults, not
  the body's, and a function cannot ask whether an input is there. Without padding, `left_padding` is zeros.
* `spec` is {SPEC}. A kernel refuses any other number. An incompatible change is a new operator, not a new version:
  runtimes give a kernel nodes of versions it does not know.
* Axis lengths of one name are equal; those of the outputs follow from the inputs, and `?` is left open.
* Axes: B rows, Hq query heads, Hkv KV heads, L tokens, D head dim, C capacity. Query head h reads KV head
  `h // (Hq // Hkv)`.
* Key j of row b is valid when `left_padding[b] <= j < length[b]`. What lies elsewhere in a buffer never reaches an
  output, be it NaN.

Equations are numbered by page: (sparq.4) is in [sparq.md](sparq.md), (saap.10) in [saap.md](saap.md), and so on.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(operator) for operator in OPERATORS.values())])


def _section(operator: Operator) -> str:
    if operator.base:
        return _pair(operator, OPERATORS[operator.base])
    return "\n".join(
        [
            *_title(operator),
            "#### Attributes",
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
            _body_of(operator),
            "",
        ]
    )


def _body_of(operator: Operator) -> str:
    if not operator.has_body:
        return "None: only the native kernels run it."
    *called, body = functions([operator.name])
    names = sorted(each.name for each in called)
    calls = f", and calls {' and '.join(f'`{name}`' for name in names)}" if called else ""
    return f"{_text(operator.name)}: {len(body.node)} nodes{calls}."


def _pair(operator: Operator, base: Operator) -> str:
    """Describe an operator that also samples prompts by what it has more than ``base``."""
    more = [attribute for attribute in operator.attributes if attribute not in base.attributes]
    less = [f"`{attribute.name}`" for attribute in base.attributes if attribute not in operator.attributes]
    without = f" but {' and '.join(less)}" if less else ""
    body = f"The body is that of `{base.name}`, with {_text(PROMPTS)} in place of `DenseAttention`."
    return "\n".join(
        [
            *_title(operator),
            f"Inputs, outputs and types are those of `{base.name}`; so are the attributes{without}, and besides",
            "",
            *(f"* **{a.name}** : {a.type.__name__} — {a.doc}" for a in more),
            "",
            body if operator.has_body else "It has no body: only the native kernels run it.",
            "",
        ]
    )


def _title(operator: Operator) -> list[str]:
    return [f'## <a name="{DOMAIN}.{operator.name}"></a>**{DOMAIN}.{operator.name}**', "", operator.doc, ""]


def _text(name: str) -> str:
    """Link the text of a body, or what composes it."""
    if name in COMPOSED:
        return "[onnx_export/compose.py](../../onnx_export/compose.py)"
    return f"[onnx_export/bodies/{name}.onnxtxt](../../onnx_export/bodies/{name}.onnxtxt)"


def _line(tensor: Tensor) -> str:
    return f"* **{tensor.name}** : {tensor.type} `({', '.join(tensor.axes.split())})` — {tensor.doc}"


if __name__ == "__main__":
    print(page(), end="")
