"""What a benchmark found as text: Markdown for people; JSON, JSON lines or CSV for programs."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import ConfigError
from .files import replace_file

FORMS = ("md", "json", "jsonl", "csv")


@dataclass(frozen=True)
class Result:
    """What a benchmark found: rows for programs, Markdown for people, and whether all that ran was right."""

    rows: Sequence[Mapping[str, Any]]
    text: str
    right: bool = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options -o and --out."""
    parser.add_argument(
        "-o", "--output", metavar="FORM", default="md", help=f"what to print: {', '.join(FORMS)} (default: md)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write what is printed to FILE")


def check_options(args: argparse.Namespace) -> None:
    """Refuse before anything runs what `put` could not do.

    Raises:
        ConfigError: an unknown form, or a folder that is not there.
    """
    if args.output not in FORMS:
        raise ConfigError(f"-o: expected one of {', '.join(FORMS)}, got {args.output!r}. --out names a file.")
    check_folder("--out", args.out)


def check_folder(option: str, path: Path | None) -> None:
    """Raise `ConfigError` unless ``path`` is None or a file that may be written in a folder that exists."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{option}: expected a file in a folder that exists, got {path}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: expected a folder that can be written, got {path.parent}.")


def put(args: argparse.Namespace, facts: Mapping[str, Any], result: Result) -> None:
    """Print ``result`` as ``args`` say, and write it to the file they name.

    Args:
        facts: of the run; its ``command`` stands above the Markdown.
    """
    text = render(args.output, facts, result)
    print(text)  # first: a disk that is full must not cost what was measured
    if args.out:
        write(args.out, text)


def render(form: str, facts: Mapping[str, Any], result: Result) -> str:
    """``result`` as one of `FORMS`; a line of JSON or CSV says alone where it comes from."""
    if form == "md":
        return f"    {facts['command']}\n\n{result.text}"
    if form == "json":
        return json.dumps({**facts, "rows": result.rows}, indent=1, default=str)
    lines = [{**row, "run": facts} for row in result.rows]
    return "\n".join(json.dumps(line, default=str) for line in lines) if form == "jsonl" else _csv(lines)


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write(path: Path, text: str) -> None:
    """Replace a file at once or not at all."""
    replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    flat = [_flat(line) for line in lines]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(key for line in flat for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue().rstrip("\n")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A key within a key is joined to it by a dot."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            cells |= {f"{key}.{inner}": cell for inner, cell in _flat(value).items()}
        else:
            cells[str(key)] = json.dumps(value, default=str) if isinstance(value, (list, tuple)) else value
    return cells
