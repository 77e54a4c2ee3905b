"""``--fast-blas`` of the demo: a fast BLAS library for MLX on a Linux CPU, without root and without a compiler.

MLX's Linux wheel brings the reference BLAS. SciPy's wheel brings OpenBLAS under the plain names, so
preloading it in a child process replaces the slow one. The wheel is read as data, never installed.
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
SIZE = "38.6 MB"  # of the wheel
OFFER = f"MLX's own BLAS is slow in float32 here: --fast-blas fetches OpenBLAS once ({SIZE}) and runs with it."


@dataclass(frozen=True)
class Build:
    """SHA-256 of one architecture's wheel, and of its libraries by name, in the order in which they need each other."""

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
    """Add ``--fast-blas``."""
    parser.add_argument(
        "--fast-blas",
        action="store_true",
        help=f"on a Linux CPU, where MLX's own BLAS is slow in float32: fetch OpenBLAS once ({SIZE}) and run with it; "
        "elsewhere nothing changes",
    )


def chosen(asked: bool, cache: Path) -> dict[str, str]:
    """Return `environment` if that was ``asked`` for; otherwise this process's, saying where it would help."""
    if asked:
        return environment(cache)
    if wanted():
        print(OFFER, file=sys.stderr)
    return dict(os.environ)


def environment(cache: Path | None = None) -> dict[str, str]:
    """Return the environment for a child process that runs MLX: this one's, with OpenBLAS where it helps."""
    inherited = dict(os.environ)
    if not wanted():
        return inherited
    try:
        libraries = fetch_libraries(cache or cache_directory())
    except (ArtefactError, OSError) as error:
        print(f"No fast BLAS, going on slower: {error}", file=sys.stderr)
        return inherited
    # MLX does the rest of a step on one core, so a second BLAS thread gains a tenth of the time on an idle machine;
    # where other programs run, the threads wait for each other and it costs several times as much.
    return {
        "OPENBLAS_NUM_THREADS": "1",
        **inherited,
        "LD_PRELOAD": ":".join([*map(str, libraries), *preloaded()]),
    }


def wanted() -> bool:
    """Return True if MLX computes on a Linux CPU here and no other OpenBLAS or MKL is preloaded."""
    if sys.platform != "linux" or platform.machine() not in BUILDS or platform.libc_ver()[0] != "glibc":
        return False
    if any("blas" in library or "mkl" in library for library in preloaded()):
        return False
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.DeviceType.cpu, 0)


def preloaded() -> list[str]:
    """Return the libraries that the user preloads already."""
    return [library for library in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if library]


def fetch_libraries(cache: Path) -> list[Path]:
    """Return OpenBLAS and what it needs, unpacked into the cache the first time."""
    machine = platform.machine()
    build, target = BUILDS[machine], cache / f"openblas-0.3.27-{machine}"
    if re.search("[: ]", str(target)):
        raise ArtefactError(f"{target}: expected a path without blanks or colons. Choose another --cache-dir.")
    if not target.exists():
        # This SciPy stops at Python 3.12; as data its wheel serves every Python.
        options = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
        try:
            wheel = fetch(WHEEL, build.sha256, cache, [*options, "--platform", f"manylinux2014_{machine}"])
            build_directory(target, partial(_unpack, wheel, build))
            wheel.unlink(missing_ok=True)  # the libraries are all that is needed of it
        except (ArtefactError, OSError):
            if not target.exists():  # or another process was faster, and has removed the wheel
                raise
    # Not by the directory's own manifest: what lies beside a library cannot vouch for it.
    for name, sha256 in build.libraries.items():
        library = target / name
        if not library.is_file() or file_hash(library) != sha256:
            raise ArtefactError(f"{library}: expected that of {WHEEL}, got another. Delete its folder and run again.")
    return [target / name for name in build.libraries]


def _unpack(wheel: Path, build: Build, folder: Path) -> None:
    for name in build.libraries:
        (folder / name).write_bytes(read_files(wheel, f"scipy.libs/{name}")[name])
