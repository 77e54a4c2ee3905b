"""Implement ``--fast-blas``: fetch OpenBLAS for MLX on a Linux CPU. Neither root nor a compiler is needed.

SciPy's wheel contains OpenBLAS with the standard symbol names. The wheel is read as data, never installed.
"""

from __future__ import annotations

import argparse
import platform
import sys
from functools import partial
from pathlib import Path

from ... import blas
from ...checks import ArtefactError
from .store import build_directory, fetch, read_files

WHEEL = "scipy==1.13.1"
WHEELS = {  # SHA-256 hashes
    "x86_64": "a78b4b3345f1b6f68a763c6e25c0c9a23a9fd0f39f5f3d200efe8feda560a5fa",
    "aarch64": "e89369d27f9e7b0884ae559a3a956e77c02114cc60a6058b4e5011572eea9299",
}


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--fast-blas`` to ``parser``."""
    parser.add_argument(
        "--fast-blas",
        action="store_true",
        help="fetch OpenBLAS once (38.6 MB), which MLX then uses on a Linux CPU, also with --attn. MLX's own BLAS is "
        "slow in float32",
    )


def fetch_libraries(cache: Path) -> None:
    """Fetch and unpack OpenBLAS and its dependencies if they are missing in ``cache``. On an error, print a line."""
    if not blas.LIBRARIES or blas.fetched(cache):
        return
    machine = platform.machine()
    # SciPy 1.13.1 has no wheels for Python 3.13 and later. The libraries in this wheel do not depend on Python.
    options = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    try:
        wheel = fetch(WHEEL, WHEELS[machine], cache, [*options, "--platform", f"manylinux2014_{machine}"])
        build_directory(cache / blas.DIRECTORY, partial(_unpack, wheel))
        wheel.unlink(missing_ok=True)  # only the libraries are needed
    except (ArtefactError, OSError) as error:
        if not blas.fetched(cache):  # else another process has built the folder and removed the wheel
            print(f"OpenBLAS is not available, so the run is slower: {error}", file=sys.stderr)


def _unpack(wheel: Path, folder: Path) -> None:
    for name in blas.LIBRARIES:
        (folder / name).write_bytes(read_files(wheel, f"scipy.libs/{name}")[name])
