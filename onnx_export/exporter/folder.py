"""Create the output folder of an export atomically."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_sparse.checks import ConfigError


def check_free(folder: Path) -> None:
    """Raise `ConfigError` unless ``folder`` can be created, or is an empty folder that can be replaced."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(f"-o: expected a folder that is empty or does not exist, got {folder}. Nothing was written.")
    if folder.is_mount() or folder.samefile(Path.cwd()):
        raise ConfigError(
            f"-o: expected a folder that can be replaced, got a mount point or the current folder: {folder}. "
            "Name a new folder inside it."
        )


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``folder`` at the end or removed after an error."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        made = Path(tempfile.mkdtemp(".partial", f".{folder.name}.", folder.parent))
        with _opened(made) as handle:
            with suppress(OSError):  # not supported on some network drives, where leftovers stay
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield made
            made.chmod(0o777 & ~_umask())  # mkdtemp grants access to the user only
            made.rename(folder)  # replaces an empty folder, and raises for anything else
    except BaseException:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a file descriptor for ``folder``. Raise `OSError` if ``folder`` is a link.

    If you lock the descriptor, the lock ends when this process ends.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders that killed exports to ``folder`` left behind.

    A running export locks its temporary folder, so only unlocked folders of this user are removed.
    """
    start = f".{folder.name}."
    for left in folder.parent.iterdir():
        if left.name.startswith(start) and left.name.endswith(".partial"):
            with suppress(OSError), _opened(left) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid():
                    shutil.rmtree(left)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
