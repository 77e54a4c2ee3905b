"""What was measured on this machine: a small JSON file for each question, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .checks import ArtefactError
from .files import cache_directory, replace_file

FORMAT = 1
MAX_BYTES = 1 << 16

Question = Mapping[str, str | int]


def question(backend: str, device: str, packages: tuple[str, ...], **what: str | int) -> Question:
    """What a measurement is an answer to: it holds for this machine, this system and these versions alone.

    Args:
        backend: that was timed.
        device: the chip.
        packages: distributions that the times depend on, besides ours.
        what: sizes of the layer, and the method and its settings.
    """
    versions = {name: _version(name) for name in ("mlx-sparse-attention", *packages)}
    where: dict[str, str | int] = {"backend": backend, "device": device, "processors": os.cpu_count() or 1}
    where["preloaded"] = os.environ.get("LD_PRELOAD", "")  # a fast BLAS (--fast-blas): dense attention gains most
    return where | {"system": platform.platform(), "python": sys.version.split()[0]} | versions | what


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def folder() -> Path:
    """Where the files are."""
    return cache_directory() / "calibration"


def path_of(asked: Question) -> Path:
    """The file with the answer."""
    text = json.dumps(dict(asked), sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read(asked: Question) -> dict[str, Any] | None:
    """The answer; None if there is none.

    Raises:
        ArtefactError: the file is damaged, or holds something else. It can be replaced.
    """
    path = path_of(asked)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        found = json.loads(data) if len(data) <= MAX_BYTES else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("question") != dict(asked):
        raise _damaged(path, "something else")
    answer = found.get("answer")
    if not isinstance(answer, dict):
        raise _damaged(path, "no answer")
    return answer


def _damaged(path: Path, got: str) -> ArtefactError:
    return ArtefactError(f"{path}: expected a measurement of this version, got {got[:80]}.")


@contextlib.contextmanager
def alone() -> Iterator[bool]:
    """Whether no other process is measuring; then none begins meanwhile. Two at once would disturb each other."""
    try:
        import fcntl

        folder().mkdir(parents=True, exist_ok=True)
        lock = (folder() / "lock").open("w")
    except (ImportError, OSError):  # Windows; and where nothing can be kept, nobody can be asked either
        yield True
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True


def write(asked: Question, answer: Mapping[str, Any]) -> None:
    """Keep an answer; a file that is there is replaced at once.

    Raises:
        OSError: it cannot be written.
    """
    path = path_of(asked)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "question": dict(asked), "answer": answer}, indent=1)
    replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))
