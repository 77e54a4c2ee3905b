"""Print results as Markdown for people, or as JSON or JSON lines for programs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..checks import ConfigError
from ..files import replace_file
from ..methods import load_toml

FORMS = ("md", "json", "jsonl")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add to ``parser`` the options -o and --out."""
    parser.add_argument(
        "-o", "--output", metavar="FORM", default="md", help=f"output format: {', '.join(FORMS)} (default: md)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the output to FILE")


def check_options(args: argparse.Namespace) -> None:
    """Check the options -o and --out before anything runs."""
    if args.output not in FORMS:
        raise ConfigError(f"-o: expected one of {', '.join(FORMS)}, got {args.output!r}. --out names a file.")
    check_folder("--out", args.out)


def check_folder(option: str, path: Path | None) -> None:
    """Raise `ConfigError` unless ``path`` is None or a file path in a writable folder."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{option}: expected a file in a folder that exists, got {path}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: expected a writable folder, got {path.parent}.")


def check_own(option: str, path: Path | None, first_line: str) -> None:
    """Check that ``path`` is a new TOML file or an earlier output of the command, which begins with ``first_line``."""
    if path is None:
        return
    check_folder(option, path)
    if path.suffix != ".toml":
        raise ConfigError(f"{option}: expected a name ending in .toml, got {path}.")
    if path.exists() and path.read_bytes()[: len(first_line)] != first_line.encode():
        raise ConfigError(f"{option}: expected a new file or a file of this command, got {path}. Choose another name.")


def write_toml(path: Path, text: str) -> None:
    """Check that ``text`` is valid for ``--attn-config``, and write the TOML file atomically."""

    def write(new: Path) -> None:
        new.write_text(text, encoding="utf-8")
        load_toml(new)

    replace_file(path, write)


class Printer:
    """Printer of a command's results in the requested format. JSON lines are printed immediately.

    Args:
        facts: command, date and machine of the run. Markdown starts with the command. Each JSON line repeats all facts.
    """

    def __init__(self, args: argparse.Namespace, facts: Mapping[str, object]) -> None:
        self._form, self._target, self._facts = args.output, args.out, facts
        self.lines: list[Mapping[str, object]] = []
        self._printed: list[str] = []

    @property
    def at_once(self) -> bool:
        return bool(self._form == "jsonl")

    def line(self, line: Mapping[str, object]) -> None:
        self.lines.append(line)
        if self.at_once:
            self._print(json.dumps({**line, "run": self._facts}, default=str))

    def end(self, text: str, right: bool) -> None:
        """Print the remaining output. ``text`` is the Markdown output; ``right`` is True if all results are correct."""
        if self.at_once:
            self.line({"kind": "end", "right": right, "text": text})
        elif self._form == "md":
            self._print(f"    {self._facts['command']}\n\n{text}")
        else:
            self._print(json.dumps({**self._facts, "rows": self.lines}, indent=1, default=str))
        if self._target:  # last, so that a full disk does not lose the measurements
            write(self._target, "\n".join(self._printed))

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self._printed.append(text)


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table with a ``header`` and ``rows``."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write(path: Path, text: str) -> None:
    """Write ``text`` and a final line break to the file ``path`` atomically."""
    replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))
