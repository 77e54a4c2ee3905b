"""Files that are written at once or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an `OSError` that names no file, as that of a full disk, which comes from writing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a new file beside ``path``, which takes the name only when it is complete."""
    new = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        with naming(path):
            write(new)
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)
