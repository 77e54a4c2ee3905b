"""Store results in a file of JSON lines, and check their types when a resumed run reads the file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from ...checks import ArtefactError
from ...files import naming, replace_file

T = TypeVar("T")
FORMAT = 2
LARGEST = 1 << 63  # limit for numbers; Python cannot convert much larger integers to floats
# Errors that a damaged line can raise.
DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def as_json(record: Any) -> dict[str, object]:
    """Convert a dataclass to plain data for JSON. NaN becomes None. `from_json` is the inverse."""
    data: dict[str, object] = _without_nan(asdict(record))
    return data


def _without_nan(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def from_json(kind: Any, value: Any) -> Any:
    """Convert JSON data to the type ``kind``, which is a dataclass or the type of a dataclass field.

    Keys in the data that are not fields of the dataclass are ignored.

    Raises:
        ValueError, TypeError, LookupError, OverflowError: the data does not have this type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(value)
        return kind(**{name: from_json(hint, value[name]) for name, hint in _hints(kind).items() if name in value})
    if origin is UnionType:
        kinds = [one for one in inner if type(value) is (get_origin(one) or one)]
        return from_json(kinds[0] if kinds else inner[0], value)
    if origin is list and isinstance(value, list):
        return [from_json(inner[0], one) for one in value]
    if origin is dict and isinstance(value, dict):
        return {key: from_json(inner[1], one) for key, one in value.items()}
    if kind is float and type(value) in (int, NoneType):
        value = math.nan if value is None else float(value)
    if type(value) is not kind or (kind in (int, float) and abs(value) >= LARGEST):
        raise TypeError(value)
    return value


@cache
def _hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind)


class Journal(Generic[T]):
    """Store of named results in memory and optionally in a file of JSON lines.

    An incomplete last line of the file is removed. If a different command or a run with different inputs wrote the
    file, an error is raised.
    """

    def __init__(self, path: Path | None, command: str, key: str, kind: type[T]) -> None:
        """Create the file, or read the results from an existing file.

        Args:
            path: the file; None to keep results in memory only.
            key: hash of the command's inputs.
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
            found = "results of other inputs (model, text, options or version)" if ours else "another file"
            raise ArtefactError(
                f"{path}: expected the results of an interrupted run of this command, got {found}. Move it away, or "
                "choose another file."
            )
        for number, line in enumerate(whole[len(header) :].splitlines(), 2):
            try:
                record = json.loads(line)
                self.results.setdefault(from_json(str, record["name"]), from_json(kind, record["result"]))
            except DAMAGED:
                raise ArtefactError(
                    f"{path}: expected the output of mlx-sparse {command} of this version, got something else in line "
                    f"{number}. Move the file away."
                ) from None
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
