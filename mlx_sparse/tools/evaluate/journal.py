"""Results on disk as they come, so that an interrupted command goes on where it stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...checks import ArtefactError
from ...common.files import naming, replace_file

T = TypeVar("T")
LIMIT = 64 << 20  # bytes; a result is a few hundred to a few thousand
FORMAT = 1
MOST = 1e30  # no figure is larger


class Journal(Generic[T]):
    """Results by name, kept in a file of JSON lines where a path is given.

    A line that was cut off by the end of the process is dropped. Anything else that this class did not write, or that
    belongs to another command, is refused.
    """

    def __init__(self, path: Path | None, command: str, key: str, read: Callable[[Any], T]) -> None:
        """``key`` stands for the command's inputs; ``read`` makes a result of JSON data or raises `ValueError`.

        Raises:
            ArtefactError: the file is damaged, or another command's.
        """
        self.path = path
        self.results: dict[str, T] = {}
        self._read = read
        self._header = {"mlx_sparse": command, "format": FORMAT, "key": key}
        if path is None:
            return
        if path.exists():
            self._load(path)
        else:
            replace_file(path, lambda new: new.write_text(json.dumps(self._header) + "\n", encoding="utf-8"))

    def add(self, name: str, result: T, data: Mapping[str, Any]) -> None:
        """Keep ``result``, whose JSON data is ``data``."""
        self.results[name] = result
        if self.path is not None:
            with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, "result": data}, allow_nan=False) + "\n")

    def _load(self, path: Path) -> None:
        def refuse(reason: str) -> ArtefactError:
            return ArtefactError(
                f"{path}: expected the results of an interrupted run of this command, got {reason}. Move it away, or "
                "choose another file."
            )

        if path.stat().st_size > LIMIT:
            raise refuse(f"more than {LIMIT >> 20} MiB")
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        try:
            header = parse(lines[0]) if lines else None
            if not isinstance(header, dict) or header.get("mlx_sparse") != self._header["mlx_sparse"]:
                raise refuse("another file")
            if header != self._header:
                raise refuse("those of other inputs (model, text, options or version)")
            for line in lines[1:]:
                name, result = fields(parse(line), "name", "result")
                self.results.setdefault(str(name), self._read(result))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, ArtefactError):
                raise
            raise refuse("a damaged one") from None
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))


def parse(line: bytes) -> Any:
    """The JSON data of a line; raise `ValueError` if it is none, or not a number where it has one."""

    def refuse(text: str) -> Any:
        raise ValueError(text)

    return json.loads(line.decode("utf-8"), parse_constant=refuse)


def number(value: Any, low: float, high: float = math.inf) -> float:
    """``value`` if it is a finite number in ``low..high``; raise `ValueError` otherwise."""
    low, high = max(low, -MOST), min(high, MOST)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(value)
    return value


def whole(value: Any, low: int) -> int:
    """``value`` if it is an integer of at least ``low``; raise `ValueError` otherwise."""
    if type(value) is not int or not low <= value <= MOST:
        raise ValueError(value)
    return value


def fields(value: Any, *names: str) -> list[Any]:
    """The values of a JSON object that has exactly these ``names``; raise `ValueError` otherwise."""
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(value)
    return [value[name] for name in names]
