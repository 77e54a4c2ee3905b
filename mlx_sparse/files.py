"""Files that are written at once or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return the chosen cache folder, or this platform's usual place for one."""
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    # The XDG rules say that a relative path there is to be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "mlx-sparse"
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "mlx-sparse"


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
