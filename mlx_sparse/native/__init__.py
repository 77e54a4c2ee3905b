"""Load the library of native kernels, which MLX (`core.native_call`) and ONNX Runtime (`onnx_export.runtime`) share.

The C++ files of this folder compute the methods on plain pointers, one file per method. kernels.cc and tiles.cc contain
the inner loops and are compiled once per instruction set. c_api.h is the interface for MLX.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from .. import __path__ as folders  # an editable install has two folders: the sources and the build
from ..extras import build_hint

LIBRARY = "libmlx_sparse_native.dylib" if sys.platform == "darwin" else "libmlx_sparse_native.so"
SPEC = 1  # version of the operators that the library implements (docs/spec/operators.md)
COMPILER = "macOS: xcode-select --install; Debian: apt install g++"


def unavailable() -> str | None:
    """Return the reason why the native kernels cannot run on this machine, or None."""
    found = path()
    if found is not None:
        return _mismatch(found)
    built = "the library of native kernels was not built: there was no C++ compiler"
    return f"{built}. Install one ({COMPILER}), then run {build_hint()}"


@cache
def path() -> Path | None:
    """Return the path of the library, or None if it was not built."""
    return next((path for folder in folders if (path := Path(folder) / LIBRARY).is_file()), None)


@cache
def library() -> ctypes.CDLL:
    """Load the library, which `unavailable` has accepted. Its functions release Python's global interpreter lock."""
    return ctypes.CDLL(str(path()))


@cache
def _mismatch(path: Path) -> str | None:
    try:
        version = ctypes.CDLL(str(path)).mlx_sparse_version
    except (OSError, AttributeError) as error:
        return f"{path} does not load ({error})"
    from .. import __version__

    version.restype, version.argtypes = ctypes.c_char_p, []
    built, wanted = (version() or b"").decode(), f"{__version__} spec {SPEC}"
    return None if built == wanted else f"{path} has version {built}, this package {wanted}. Run {build_hint()}"
