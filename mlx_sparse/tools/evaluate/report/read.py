"""Results back from their files, which anyone may have written: each field is checked before it is used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....checks import ArtefactError
from ..journal import fields, number, parse, whole
from ..metadata import read_facts, read_text
from ..results import Row
from ..selection import SCORES, SelectionRow
from ..tasks import PASSAGES, TASKS

RESULTS = "results.jsonl"
LARGEST, MOST_LINES = 64 << 20, 5000  # bytes and lines of a file
SHORTEST = 1e-9  # microseconds
BOTH = ("method", "backend", "dtype", "shape", "batch", "S", "ratio", "bytes_formula", "bytes_plain", "note", "failed")
SIDES = [f"{side}_us{end}" for side in ("dense", "sparse", "plain_read") for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class Found:
    """What ``mlx-sparse eval`` found: rows of its tasks, SparQ's choices of keys, and the facts of the run."""

    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    selection: list[SelectionRow] = field(default_factory=list)


def read_results(folder: Path) -> Found:
    """What ``mlx-sparse eval --out folder`` wrote.

    Raises:
        ArtefactError: there is none, or it is damaged, or of several runs.
    """
    path = folder / RESULTS
    found: list[Found] = []

    def take(line: Any) -> None:
        row = dict(line)
        facts = row.pop("run")
        if not found:
            found.append(Found(read_facts(facts)))
        if facts != found[0].facts:
            raise ArtefactError(f"{path}: expected the results of one run, got several. Report each on its own.")
        if "component_score" in row:
            found[0].selection.append(_selection(row))
        else:
            found[0].rows.append(_row(row))

    _lines(path, "mlx-sparse eval --out", take)
    return found[0]


def read_speed(path: Path) -> list[dict[str, Any]]:
    """Rows that ``mlx-sparse bench -o jsonl`` printed, as far as a report shows them.

    Raises:
        ArtefactError: the file is not there, damaged or another.
    """
    rows: list[dict[str, Any]] = []

    def take(line: dict[str, Any]) -> None:
        if line.get("kind", "row") == "row":  # bars and the end are no rows
            rows.append(_speed(line))

    _lines(path, "mlx-sparse bench -o jsonl", take)
    return rows


def _lines(path: Path, command: str, take: Callable[[Any], None]) -> None:
    """Hand every line of a file to ``take``; what it refuses is refused here in one line."""

    def refuse(reason: str) -> ArtefactError:
        return ArtefactError(f"{path}: expected what {command} wrote, got {reason}.")

    if not path.is_file():
        raise refuse("no such file")
    if path.stat().st_size > LARGEST:
        raise refuse(f"more than {LARGEST >> 20} MiB")
    lines = path.read_bytes().splitlines()
    if not 0 < len(lines) <= MOST_LINES:
        raise refuse(f"{len(lines):,} lines")
    for i, line in enumerate(lines):
        try:
            take(parse(line))
        except ArtefactError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            raise refuse(f"something else in line {i + 1}") from None


def _row(data: dict[str, Any]) -> Row:
    row = Row.read(data)
    if row.task not in (*TASKS, *PASSAGES):
        raise ValueError(row.task)
    return row


def _selection(data: dict[str, Any]) -> SelectionRow:
    found = dict(zip(SelectionRow.__annotations__, fields(data, *SelectionRow.__annotations__), strict=True))
    if found["component_score"] not in SCORES:
        raise ValueError(data)
    for name in ("rank", "head_dim", "top_k", "context", "layers", "examples"):
        whole(found[name], 1)
    whole(found["worst_layer"], 0)
    for name in ("agreement", "worst", "mass", "exact_mass", "alpha_gap"):
        number(found[name], 0, 1 + 1e-3)
    for name in ("agreement_error", "mass_error", "alpha_gap_error"):
        found[name] = math.nan if found[name] is None else number(found[name], 0)
    return SelectionRow(**found)


def _speed(line: dict[str, Any]) -> dict[str, Any]:
    row = {name: line[name] for name in BOTH} | {name: line.get(name) for name in (*SIDES, "step")}
    for name in ("method", "backend", "dtype", "shape"):
        read_text(row[name])
    if not re.fullmatch(r"\d{1,6}x\d{1,6}x\d{1,6}", row["shape"], re.ASCII) or type(row["failed"]) is not bool:
        raise ValueError(row)
    whole(row["batch"], 1)
    whole(row["S"], 1)
    for name in ("bytes_formula", "bytes_plain", "step"):
        if row[name] is not None:
            whole(row[name], 0)
    for name in (*SIDES, "ratio"):
        if row[name] is not None:
            number(row[name], SHORTEST)
    if row["failed"] and any(row[name] is not None for name in (*SIDES, "ratio")):
        raise ValueError(row)  # a speed beside a wrong result
    if row["note"] is not None:
        read_text(row["note"])
    run = line["run"]
    return row | {"run": {name: read_text(run[name]) for name in ("command", "date")} | {"chip": _chip(run["machine"])}}


def _chip(machine: dict[str, Any]) -> str:
    chip = machine.get("chip")
    return "" if chip is None else read_text(chip)
