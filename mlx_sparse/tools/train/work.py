"""The folder that the command works in."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...checks import ConfigError


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make ``folder`` and be the only run in it; however a process ends, the next one can have it.

    Raises:
        ConfigError: another run is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--work: expected a folder that no other run is working in, got {folder}. Wait for that run, or "
                "choose another folder."
            ) from None
        yield


def clear(work: Path) -> None:
    """Remove what runs have left in ``work``, and the folder itself if it held nothing else."""
    for folder in [*work.glob("collected-*"), *work.glob("trained-*")]:
        shutil.rmtree(folder)
    with suppress(OSError):
        work.rmdir()
