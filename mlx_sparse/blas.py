"""Load OpenBLAS into this process, so that MLX on a Linux CPU calls it instead of its own slow BLAS.

MLX's Linux wheel contains the reference BLAS. If OpenBLAS is in the global scope of the process before `mlx.core` is
imported, the dynamic linker binds MLX's calls to OpenBLAS. The start-up hook runs this file without the package, so the
file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import sys
from pathlib import Path

DIRECTORY = f"openblas-0.3.27-{platform.machine()}"  # in the cache folder
THREADS = "OPENBLAS_NUM_THREADS"
SLOW = "BLAS: MLX's own, which is slow in float32. Run `mlx-sparse doctor --fast-blas` once (38.6 MB to download)."

# SHA-256 hashes of the libraries for each architecture. Dependencies come first.
BUILDS = {
    "x86_64": {
        "libquadmath-96973f99.so.0.0.0": "934c22ded0e7d169c4d4678876c96051adf3d94545da962f60b41659b075da3b",
        "libgfortran-040039e1.so.5.0.0": "14afb3129b1a8b50bc40a3b0820c7f1152ea9bc10121aab152943f7057472886",
        "libopenblasp-r0-01191904.3.27.so": "9b91f6ba8fdba9cf7682371fda53bb228763bd5073ff824edbc4b81e2ddc46bc",
    },
    "aarch64": {
        "libgfortran-daac5196.so.5.0.0": "73b06dc7d12c5d4e37fe8ba67aa9ab440bb794e79adff58ae894b3d457e71bd7",
        "libopenblasp-r0-b958c995.3.27.so": "ff436c4ae08906f186840108e77c15a1edcfcfc37cb82ae7a28ddc5de98cda86",
    },
}
# Libraries for this system. The dict is empty if they cannot run here.
LIBRARIES = BUILDS.get(platform.machine(), {}) if platform.libc_ver()[0] == "glibc" else {}


def fetched(cache: Path) -> bool:
    """Return True if the libraries are in ``cache``. Return False too if the user may not read ``cache``."""
    return os.path.isdir(cache / DIRECTORY)  # noqa: PTH112 - Path.is_dir raises a PermissionError


def load(cache: Path) -> None:
    """Load OpenBLAS from ``cache`` if MLX would call its own BLAS. If a library is damaged, print a line instead."""
    if "mlx.core" in sys.modules or not fetched(cache) or in_use():
        return
    # MLX runs all other operations of a step on one core. A second BLAS thread saves 10 % on an idle machine. If other
    # programs run, the threads wait for each other and a step takes several times as long.
    chosen = os.environ.get(THREADS)
    os.environ[THREADS] = chosen or "1"
    try:
        for path in checked(cache / DIRECTORY):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"[mlx-sparse] OpenBLAS is not used: {error}\n")
    if chosen is None:
        del os.environ[THREADS]  # other libraries read it too


def checked(folder: Path) -> list[Path]:
    """Return the paths of the libraries in ``folder``. Raise `ValueError` if one is missing or changed."""
    paths = [folder / name for name in LIBRARIES]
    for path in paths:
        # Hashes of mapped files take 24 ms in total, hashes of files that are read 42 ms.
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hashlib.sha256(data).hexdigest() == LIBRARIES[path.name]:
                continue
        raise ValueError(f"{path}: expected a library of OpenBLAS, got another file. Delete its folder.")
    return paths


def in_use() -> str | None:
    """Return the name of the fast BLAS that MLX calls in this process. If there is none, return None."""
    if not LIBRARIES:
        return None
    scope = ctypes.CDLL(None)
    if hasattr(scope, "openblas_get_config"):
        scope.openblas_get_config.restype = ctypes.c_char_p
        version = b" ".join(scope.openblas_get_config().split()[:2]).decode()
        return f"{version}, threads: {scope.openblas_get_num_threads()}"
    return "preloaded" if hasattr(scope, "cblas_sgemm") else None


def note() -> str | None:
    """Return a line about the BLAS of MLX on a Linux CPU. Return None on other devices."""
    import mlx.core as mx

    if not LIBRARIES or mx.default_device() != mx.Device(mx.DeviceType.cpu, 0):
        return None
    return f"BLAS: {name}" if (name := in_use()) else SLOW
