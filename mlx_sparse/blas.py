"""Make MLX on a Linux CPU call OpenBLAS instead of its own slow BLAS, in this process.

MLX's Linux wheel contains the reference BLAS. `load` loads OpenBLAS and replaces the addresses of the BLAS functions in
the table through which MLX's library calls them. Other libraries do not see OpenBLAS: in the global scope of the
process it would replace functions of torch and NumPy too, with other calling conventions.
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
LIBRARIES = BUILDS.get(platform.machine(), {}) if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else {}


STRTAB, SYMTAB, JMPREL, PLTRELSZ, FLAGS_1 = 5, 6, 23, 2, 0x6FFFFFFB  # tags of an ELF file's dynamic section
NOW = 1  # flag: the table is read-only after the library is loaded
_loaded: list[ctypes.CDLL] = []  # OpenBLAS, once MLX calls it


def fetched(cache: Path) -> bool:
    """Return True if the libraries are in ``cache``. Return False too if the user may not read ``cache``."""
    return os.path.isdir(cache / DIRECTORY)  # noqa: PTH112 - Path.is_dir raises a PermissionError


def load(cache: Path) -> None:
    """Make MLX call OpenBLAS if it is in ``cache`` and MLX uses its own BLAS. If a library is damaged, print a line."""
    if not fetched(cache) or note() != SLOW:
        return
    # MLX runs all other operations of a step on one core. A second BLAS thread saves 10 % on an idle machine. If other
    # programs run, the threads wait for each other and a step takes several times as long.
    chosen = os.environ.get(THREADS)
    os.environ[THREADS] = chosen or "1"
    try:
        for path in checked(cache / DIRECTORY):
            library = ctypes.CDLL(str(path))
        _bind(library)
        _loaded.append(library)
    except (OSError, ValueError, AttributeError) as error:
        sys.stderr.write(f"[mlx-sparse] OpenBLAS is not used: {error}\n")
    if chosen is None:
        del os.environ[THREADS]  # other libraries read it too


def _bind(library: ctypes.CDLL) -> None:
    """Write the addresses of the BLAS functions in ``library`` to the procedure linkage table of libmlx.so."""
    import mlx.core as mx

    mlx = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"), mode=os.RTLD_NOLOAD)
    # In glibc, a handle is the address of a struct link_map: base address, name, dynamic section, ...
    base, _, section = (ctypes.c_size_t * 3).from_address(mlx._handle)
    dynamic: dict[int, int] = {}
    while (entry := (ctypes.c_size_t * 2).from_address(section))[0]:
        dynamic[entry[0]] = entry[1]
        section += ctypes.sizeof(entry)
    if JMPREL not in dynamic or dynamic.get(FLAGS_1, 0) & NOW:
        raise OSError(f"{mlx._name}: expected a procedure linkage table that can be changed, got none.")
    for at in range(dynamic[JMPREL], dynamic[JMPREL] + dynamic[PLTRELSZ], 24):  # Elf64_Rela
        offset, info = (ctypes.c_size_t * 2).from_address(at)
        symbol = ctypes.c_uint32.from_address(dynamic[SYMTAB] + 24 * (info >> 32)).value  # Elf64_Sym
        name = ctypes.string_at(dynamic[STRTAB] + symbol).decode()
        if name.startswith("cblas_"):
            ctypes.c_void_p.from_address(base + offset).value = ctypes.cast(library[name], ctypes.c_void_p).value


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
    for library in _loaded:
        library.openblas_get_config.restype = ctypes.c_char_p
        version = b" ".join(library.openblas_get_config().split()[:2]).decode()
        return f"{version}, threads: {library.openblas_get_num_threads()}"
    return "preloaded" if LIBRARIES and hasattr(ctypes.CDLL(None), "cblas_sgemm") else None


def note() -> str | None:
    """Return a line about the BLAS of MLX on a Linux CPU. Return None on other devices."""
    import mlx.core as mx

    if not LIBRARIES or mx.default_device() != mx.Device(mx.DeviceType.cpu, 0):
        return None
    return f"BLAS: {name}" if (name := in_use()) else SLOW
