"""Generate the tables of docs/methods.md and README.md from the dataclasses of the methods and the registry.

Usage: python tests/testing/methods_page.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from mlx_sparse.core.base import Method
from mlx_sparse.core.registry import BACKENDS, backends_of
from mlx_sparse.methods import METHODS
from mlx_sparse.methods.baselines.config import BASELINES
from mlx_sparse.methods.patterns.config import PATTERNS

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "methods.md"
SECTION = re.compile(r"(?<=<!-- parameters of )(\w+)( -->\n).*?(?=<!-- /parameters -->)", re.DOTALL)


def page(text: str) -> str:
    """Return the page ``text`` with newly generated tables."""
    return SECTION.sub(lambda found: found[1] + found[2] + _table(found[1]), text)


def readme(text: str) -> str:
    """Return README.md's ``text`` with a new table of the methods that have more than two backends."""
    lines = [f"| method | {' | '.join(BACKENDS)} |", f"|---|{'---|' * len(BACKENDS)}"]
    for name in METHODS:
        if len(backends_of(name)) > 2:
            cells = ["yes" if backend in backends_of(name) else "no" for backend in BACKENDS]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    table = "\n".join(lines)
    return re.sub(r"(?<=<!-- matrix -->\n).*?(?=\n<!-- /matrix -->)", table, text, flags=re.DOTALL)


def _table(name: str) -> str:
    if name == "baselines":
        rows = [("baseline", "parameters (defaults)")]
        for one in (*BASELINES, *PATTERNS):
            rows.append((f"`{one.name}`", ", ".join(map(_parameter, dataclasses.fields(one)))))
    else:
        meanings = _meanings(METHODS[name])
        rows = [("parameter (default)", "meaning")]
        rows += [(_parameter(field), meanings[field.name]) for field in dataclasses.fields(METHODS[name])]
    lines = [f"| {first} | {second} |\n" for first, second in rows]
    return "".join([_introduction(name), lines[0], "|---|---|\n", *lines[1:]])


def _introduction(name: str) -> str:
    """Return the start of a method's docstring, up to the attributes, without the name of its specification."""
    if name == "baselines":
        return ""
    paragraph = " ".join((inspect.getdoc(METHODS[name]) or "").partition("Attributes:")[0].split())
    return re.sub(r" \(docs/spec/\w+\.md\)", "", paragraph).replace("``", "`") + "\n\n"


def _parameter(field: dataclasses.Field[object]) -> str:
    default = "none" if field.default in (None, ()) else field.default
    return f"`{field.name}` ({default})"


def _meanings(method: type[Method]) -> dict[str, str]:
    """Return a dict from parameter names to the first sentence about the parameter in the method's docstring."""
    entries = (inspect.getdoc(method) or "").partition("Attributes:\n")[2]
    found = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + entries)[1:]:
        name, _, text = entry.strip().partition(": ")
        sentence = re.split(r"(?<=\.)\s+(?=[A-Z\"])", " ".join(text.split()))[0]
        found[name] = sentence.rstrip(".").replace("``", "`").replace("|", r"\|")
    return found


if __name__ == "__main__":
    for path, renew in ((PAGE, page), (README, readme)):
        path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
