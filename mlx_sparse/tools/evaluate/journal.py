"""Results as lines of JSON: records out of them, and a file that grows as results come.

A command that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from ...checks import ArtefactError
from ...files import naming, replace_file

T = TypeVar("T")
FORMAT = 1


def as_json(record: Any) -> dict[str, Any]:
    """Plain data of a dataclass for JSON, where what is not a number is null; `from_json` reads it."""
    data: dict[str, Any] = _without_nan(asdict(record))
    return data


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def from_json(kind: Any, value: Any) -> Any:
    """JSON data as a ``kind``: a dataclass, whose other keys are ignored, or a type that one of its fields has.

    Raises:
        ValueError, TypeError: the data is something else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_json(hint, value[name]) for name, hint in hints.items() if name in value})
    if origin is UnionType:
        return None if value is None else from_json(inner[0], value)
    if origin is list and isinstance(value, list):
        return [from_json(inner[0], one) for one in value]
    if origin is dict and isinstance(value, dict):
        return {key: from_json(inner[1], one) for key, one in value.items()}
    if kind is float:
        number = math.nan if value is None else value
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number in (math.inf, -math.inf):
            raise ValueError(value)
        return number
    if kind is Any or type(value) is kind:
        return value
    raise TypeError(value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def read_lines(content: bytes, read: Callable[[Any], T], path: Path, command: str, first: int = 1) -> list[T]:
    """What ``read`` makes of the JSON data of each line of ``path``, which ``command`` is to have written.

    Raises:
        ArtefactError: a line is something else; it says which, ``content`` begins with number ``first``.
    """
    found = []
    for number, line in enumerate(content.splitlines(), first):
        try:
            found.append(read(json.loads(line)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ArtefactError(
                f"{path}: expected what {command} of this version wrote, got something else in line {number}. Move the "
                "file away."
            ) from None
    return found


class Journal(Generic[T]):
    """Results by name, kept in a file of JSON lines where a path is given.

    A line that was cut off by the end of the process is dropped. What another command wrote is refused.
    """

    def __init__(self, path: Path | None, command: str, key: str, kind: type[T]) -> None:
        """``key`` stands for the command's inputs; results are dataclasses of this ``kind``.

        Raises:
            ArtefactError: the file is damaged, or another command's.
        """
        self.path = path
        self.results: dict[str, T] = {}
        if path is None:
            return
        header = json.dumps({"mlx_sparse": command, "format": FORMAT, "key": key}) + "\n"
        if path.exists():
            self._load(path, command, header.encode(), kind)
        else:
            replace_file(path, lambda new: new.write_text(header, encoding="utf-8"))

    def add(self, name: str, result: T) -> None:
        """Keep ``result`` under ``name``, and write it to the file at once."""
        self.results[name] = result
        if self.path is not None:
            line = json.dumps({"name": name, "result": as_json(result)}, allow_nan=False)
            with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _load(self, path: Path, command: str, header: bytes, kind: type[T]) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole.startswith(header):
            ours = whole.startswith(json.dumps({"mlx_sparse": command})[:-1].encode())
            found = "those of other inputs (model, text, options or version)" if ours else "another file"
            raise ArtefactError(
                f"{path}: expected the results of an interrupted run of this command, got {found}. Move it away, or "
                "choose another file."
            )

        def read(line: Any) -> tuple[str, T]:
            return line["name"], from_json(kind, line["result"])

        for name, result in read_lines(whole[len(header) :], read, path, f"mlx-sparse {command}", first=2):
            self.results.setdefault(name, result)
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
