"""Files that are written at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a new file beside ``path``, which takes the name only when it is complete."""
    new = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
