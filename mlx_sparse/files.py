"""Write files and folders atomically, and read files without following links."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_directory(chosen: str | os.PathLike[str] | None = None) -> Path:
    """Return ``chosen`` as an absolute path, or the default cache folder of this platform if ``chosen`` is None."""
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    # By the XDG specification a relative path is ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "mlx-sparse"
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "mlx-sparse"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set the file name of an `OSError` in the ``with`` block to ``path`` if the error has none, as on a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with the path of a new file in the folder of ``path``, then rename the complete file to ``path``.

    The new file has a random name and is opened with O_EXCL, because other users may put links into the folder.
    """
    new = path.with_name(f".{path.stem}-{os.urandom(8).hex()}{path.suffix}")
    with naming(path):
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        with naming(path):
            write(new)
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path``, and rename it to ``path`` at the end. After an error, nothing is left.

    The rename replaces an empty folder, and raises `OSError` for anything else.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            work = Path(scratch) / "work"  # only the user may read `scratch`, so rename a folder inside it
            work.mkdir()
            yield work
            work.rename(path)
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def file_hash(path: Path) -> str:
    """Return the SHA-256 hash of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file. Links are not followed, and a pipe does not block.

    Raises:
        OSError: the file is absent, a link, or not a regular file.
        ValueError: the file has more than ``most`` bytes.
    """
    with naming(path), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data
