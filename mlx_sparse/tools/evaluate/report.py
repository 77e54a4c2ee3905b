"""Implement ``mlx-sparse report``: write an HTML page with the results of ``mlx-sparse eval --out``."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...checks import ArtefactError, Parser
from ...extras import require
from ...files import replace_file
from .journal import from_json, read_lines
from .picture import draw, svg
from .results import Facts, Row
from .table import REPLACEMENT, tables
from .tasks import PASSAGES, TASKS

RESULTS, PAGE = "results.jsonl", "report.html"


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse report`` with the arguments ``argv``, and return the exit code."""
    parser = Parser(
        prog="mlx-sparse report",
        description=f"Write {PAGE} again from the results of mlx-sparse eval --out DIR, without running the model.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help=f"folder with {RESULTS}")
    folder = parser.parse_args(argv).folder
    check()
    write(folder, *read(folder / RESULTS))
    print(folder / PAGE)
    return 0


def check() -> None:
    """Raise `BackendUnavailable` unless matplotlib is installed."""
    require("matplotlib")


def read(path: Path) -> tuple[list[Row], Facts]:
    """Read the rows and the facts of the run from a file that ``mlx-sparse eval --out`` wrote."""

    def read_line(line: dict[str, object]) -> tuple[Facts, Row]:
        row = from_json(Row, line)
        if row.task not in (*TASKS, *PASSAGES):
            raise ValueError(row.task)
        return from_json(Facts, line["run"]), row

    command = "mlx-sparse eval --out"
    content = path.read_bytes() if path.is_file() else b""
    if not content:
        raise ArtefactError(f"{path}: expected the output of {command}, got no file or an empty file.")
    lines = read_lines(content, read_line, path, command)
    facts = lines[0][0]
    if any(of_row != facts for of_row, _ in lines):
        raise ArtefactError(f"{path}: expected the results of one run, got several runs. Report each run separately.")
    return [row for _, row in lines], facts


def write(folder: Path, rows: Sequence[Row], facts: Facts) -> None:
    """Write the HTML report into ``folder``. Equal arguments always give the same bytes."""
    sections = []
    for task in dict.fromkeys(row.task for row in rows):
        figure = draw([row for row in rows if row.task == task])
        picture = figure and base64.b64encode(svg(figure).encode()).decode()
        sections.append({"heading": task, "picture": picture, "tables": tables(rows, task)})
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    text = environment.get_template("report.html.jinja").render(facts=facts, sections=sections)
    replace_file(folder / PAGE, lambda new: new.write_text(text, encoding="utf-8"))


def _printable(value: object) -> object:
    """Replace the control characters in a string, because HTML forbids these characters."""
    if type(value) is not str:  # markup of the template
        return value
    return "".join(letter if letter.isprintable() or letter == "\n" else REPLACEMENT for letter in value)
