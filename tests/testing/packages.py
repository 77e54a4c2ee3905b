"""Download packages that are not installed in this environment, and store them in a cache folder."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from repository_paths import TESTS

from mlx_sparse.files import cache_directory

MINUTES = 5 * 60
WEB = TESTS / "backends" / "onnx" / "web"


@dataclass(frozen=True)
class Package:
    """A package. ``key`` is its name in the cache, and ``fetch`` returns the command that installs it into a folder."""

    key: str
    fetch: Callable[[Path], list[str]]


def wheel(requirement: str) -> Package:
    """Return a package that is installed from a wheel. Its dependencies are not installed."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Package(f"{requirement}-{version}", functools.partial(_pip, requirement))


def web() -> Package:
    """Return the package onnxruntime-web, which runs WebAssembly in Node."""

    def fetch(folder: Path) -> list[str]:
        folder.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WEB / name, folder)
        return ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]

    lock = hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()
    return Package(f"onnxruntime-web-{lock[:12]}", fetch)


def _pip(requirement: str, folder: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    return [*pip, "--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]


@functools.cache
def fetched(package: Package) -> Path | str:
    """Download ``package`` unless it is cached. Return the package's folder, or a message if the download failed."""
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
