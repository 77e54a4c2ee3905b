"""Results back from the files of ``mlx-sparse eval --out`` and ``mlx-sparse bench -o jsonl``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ....checks import ArtefactError
from ..journal import from_json, read_lines
from ..metadata import Facts
from ..results import Row
from ..selection import SelectionRow
from ..tasks import PASSAGES, TASKS
from .speed import Speed

T = TypeVar("T")
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Found:
    """What ``mlx-sparse eval`` found: the facts of the run, rows of its tasks, and SparQ's choices of keys."""

    facts: Facts
    rows: list[Row]
    selection: list[SelectionRow]


def read_results(folder: Path) -> Found:
    """What ``mlx-sparse eval --out folder`` wrote.

    Raises:
        ArtefactError: there is none, or it is damaged, of another version, or of several runs.
    """
    path = folder / RESULTS

    def read(line: dict[str, Any]) -> tuple[Facts, Row | SelectionRow]:
        row = from_json(SelectionRow if "component_score" in line else Row, line)
        if isinstance(row, Row) and row.task not in (*TASKS, *PASSAGES):  # a picture is named after it
            raise ValueError(row.task)
        return from_json(Facts, line["run"]), row

    lines = _read(path, "mlx-sparse eval --out", read)
    facts = lines[0][0]
    if any(of_row != facts for of_row, _ in lines):
        raise ArtefactError(f"{path}: expected the results of one run, got several. Report each on its own.")
    rows = [row for _, row in lines]
    choices = [row for row in rows if isinstance(row, SelectionRow)]
    return Found(facts, [row for row in rows if isinstance(row, Row)], choices)


def read_speed(path: Path) -> list[Speed]:
    """Rows that ``mlx-sparse bench -o jsonl`` printed, as far as a report shows them.

    Raises:
        ArtefactError: the file is not there, damaged or of another version.
    """

    def read(line: dict[str, Any]) -> Speed | None:
        return from_json(Speed, line) if line.get("kind", "row") == "row" else None  # bars and the end are no rows

    return [row for row in _read(path, "mlx-sparse bench -o jsonl", read) if row is not None]


def _read(path: Path, command: str, read: Callable[[Any], T]) -> list[T]:
    content = path.read_bytes() if path.is_file() else b""
    if not content:
        raise ArtefactError(f"{path}: expected what {command} wrote, got no such file or an empty one.")
    return read_lines(content, read, path, command)
