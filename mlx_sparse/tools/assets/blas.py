"""Implement ``--fast-blas``: use a fast BLAS library for MLX on a Linux CPU. Neither root nor a compiler is needed.

MLX's Linux wheel contains the slow reference BLAS. SciPy's wheel contains OpenBLAS with the standard symbol names. In a
child process that preloads OpenBLAS, OpenBLAS replaces the reference BLAS. The wheel is read as data, never installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...checks import ArtefactError
from ...files import cache_directory
from .store import build_directory, fetch, file_hash, read_files

WHEEL = "scipy==1.13.1"
SIZE = "38.6 MB"  # size of the wheel
OFFER = f"MLX's BLAS is slow in float32 on this machine. --fast-blas fetches OpenBLAS once ({SIZE}) and uses it."


@dataclass(frozen=True)
class Build:
    """SHA-256 hashes of SciPy's wheel for one architecture and of the libraries in it. Dependencies come first."""

    sha256: str
    libraries: Mapping[str, str]


BUILDS = {
    "x86_64": Build(
        "a78b4b3345f1b6f68a763c6e25c0c9a23a9fd0f39f5f3d200efe8feda560a5fa",
        {
            "libquadmath-96973f99.so.0.0.0": "934c22ded0e7d169c4d4678876c96051adf3d94545da962f60b41659b075da3b",
            "libgfortran-040039e1.so.5.0.0": "14afb3129b1a8b50bc40a3b0820c7f1152ea9bc10121aab152943f7057472886",
            "libopenblasp-r0-01191904.3.27.so": "9b91f6ba8fdba9cf7682371fda53bb228763bd5073ff824edbc4b81e2ddc46bc",
        },
    ),
    "aarch64": Build(
        "e89369d27f9e7b0884ae559a3a956e77c02114cc60a6058b4e5011572eea9299",
        {
            "libgfortran-daac5196.so.5.0.0": "73b06dc7d12c5d4e37fe8ba67aa9ab440bb794e79adff58ae894b3d457e71bd7",
            "libopenblasp-r0-b958c995.3.27.so": "ff436c4ae08906f186840108e77c15a1edcfcfc37cb82ae7a28ddc5de98cda86",
        },
    ),
}


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--fast-blas`` to ``parser``."""
    parser.add_argument(
        "--fast-blas",
        action="store_true",
        help=f"on a Linux CPU, fetch OpenBLAS once ({SIZE}) and use it instead of MLX's BLAS, which is slow in "
        "float32; no effect elsewhere",
    )


def child_environment(requested: bool, cache: Path) -> dict[str, str]:
    """Return a dict of the environment variables for a child process.

    If ``requested`` is True, add variables that preload OpenBLAS. If ``requested`` is False but OpenBLAS would make MLX
    faster, print a hint.
    """
    if requested:
        return environment(cache)
    if wanted():
        print(OFFER, file=sys.stderr)
    return dict(os.environ)


def environment(cache: Path | None = None) -> dict[str, str]:
    """Return this process's environment variables. If OpenBLAS is faster, add variables that preload OpenBLAS."""
    inherited = dict(os.environ)
    if not wanted():
        return inherited
    try:
        libraries = fetch_libraries(cache or cache_directory())
    except (ArtefactError, OSError) as error:
        print(f"OpenBLAS is not available, so the run is slower: {error}", file=sys.stderr)
        return inherited
    # MLX runs all other operations of a step on one core. A second BLAS thread saves 10 % on an idle machine. If other
    # programs run, the threads wait for each other and a step takes several times as long.
    return {"OPENBLAS_NUM_THREADS": "1", **inherited, "LD_PRELOAD": ":".join([*map(str, libraries), *preloaded()])}


def wanted() -> bool:
    """Return True if MLX runs on a Linux CPU and neither OpenBLAS nor MKL is preloaded."""
    if sys.platform != "linux" or platform.machine() not in BUILDS or platform.libc_ver()[0] != "glibc":
        return False
    if any("blas" in library or "mkl" in library for library in preloaded()):
        return False
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.DeviceType.cpu, 0)


def preloaded() -> list[str]:
    """Return the paths of the libraries in this process's LD_PRELOAD variable."""
    return [library for library in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if library]


def fetch_libraries(cache: Path) -> list[Path]:
    """Return the paths of OpenBLAS and its dependencies. The first call fetches and unpacks the files."""
    machine = platform.machine()
    build, target = BUILDS[machine], cache / f"openblas-0.3.27-{machine}"
    if re.search("[: ]", str(target)):
        raise ArtefactError(f"{target}: expected a path without spaces or colons. Choose another --cache-dir.")
    if not target.exists():
        # SciPy 1.13.1 has no wheels for Python 3.13 and later. The libraries in this wheel do not depend on Python.
        options = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
        try:
            wheel = fetch(WHEEL, build.sha256, cache, [*options, "--platform", f"manylinux2014_{machine}"])
            build_directory(target, partial(_unpack, wheel, build))
            wheel.unlink(missing_ok=True)  # only the libraries are needed
        except (ArtefactError, OSError):
            if not target.exists():  # else another process has built the folder and removed the wheel
                raise
    # Compare with the pinned hashes, because the manifest in the same folder is not trusted.
    for name, sha256 in build.libraries.items():
        library = target / name
        if not library.is_file() or file_hash(library) != sha256:
            raise ArtefactError(f"{library}: expected the library of {WHEEL}, got another file. Delete its folder.")
    return [target / name for name in build.libraries]


def _unpack(wheel: Path, build: Build, folder: Path) -> None:
    for name in build.libraries:
        (folder / name).write_bytes(read_files(wheel, f"scipy.libs/{name}")[name])
