"""What was found as text: Markdown for people; JSON, JSON lines or CSV for programs."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checks import ConfigError
from ..files import replace_file

FORMS = ("md", "json", "jsonl", "csv")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options -o and --out."""
    parser.add_argument(
        "-o", "--output", metavar="FORM", default="md", help=f"what to print: {', '.join(FORMS)} (default: md)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write what is printed to FILE")


def check_options(args: argparse.Namespace) -> None:
    """Refuse before anything runs what `Printer` could not do.

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


class Printer:
    """Prints what a command finds in the form that its options ask for; JSON lines as soon as they are known.

    Args:
        args: of `add_options`.
        facts: of the run; its ``command`` stands above the Markdown. A line of JSON or CSV says alone where it is from.

    Attributes:
        lines: that were found.
    """

    def __init__(self, args: argparse.Namespace, facts: Mapping[str, Any]) -> None:
        self._form, self._target, self._facts = args.output, args.out, facts
        self.lines: list[Mapping[str, Any]] = []
        self._printed: list[str] = []

    @property
    def at_once(self) -> bool:
        """Whether a line is printed when it is known; otherwise all are at the end."""
        return bool(self._form == "jsonl")

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line that was found, and print it if lines are printed at once."""
        self.lines.append(line)
        if self.at_once:
            self._print(json.dumps({**line, "run": self._facts}, default=str))

    def end(self, text: str, right: bool) -> None:
        """All was found; ``text`` is Markdown of it."""
        if self.at_once:
            self.line({"kind": "end", "right": right, "text": text})
        elif self._form == "md":
            self._print(f"    {self._facts['command']}\n\n{text}")
        elif self._form == "json":
            self._print(json.dumps({**self._facts, "rows": self.lines}, indent=1, default=str))
        else:
            self._print(_csv([{**line, "run": self._facts} for line in self.lines]))
        if self._target:  # last: a disk that is full must not cost what was measured
            write(self._target, "\n".join(self._printed))

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self._printed.append(text)


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown of ``rows`` under a ``header``."""
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
