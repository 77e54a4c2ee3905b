"""Find the library of native kernels and create session options that use it."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_sparse import __version__
from mlx_sparse.checks import BackendUnavailable, check_choice
from mlx_sparse.extras import build_hint

from ..domain import SPEC

if TYPE_CHECKING:
    import onnxruntime

LIBRARY = "libmlx_sparse_ort.dylib" if sys.platform == "darwin" else "libmlx_sparse_ort.so"
NOT_BUILT = "the library of native ONNX Runtime kernels was not built: there was no C++ compiler"


def library_path() -> Path:
    """Return the path of the native library, for ONNX Runtime's ``SessionOptions.register_custom_ops_library``.

    Raises:
        BackendUnavailable: the library was not built, does not load, or has a different version than this package.
    """
    found = _found()
    reason = unavailable()
    if found is None or reason:
        raise BackendUnavailable(f"native: expected a usable {LIBRARY}, got none: {reason}.")
    return found


def unavailable() -> str | None:
    """Return the reason why the native kernels cannot run on this machine, or None."""
    found = _found()
    if found is not None:
        return _mismatch(found)
    compiler = "macOS: xcode-select --install; Debian: apt install g++"
    return f"{NOT_BUILT}. Install one ({compiler}), then run {build_hint()}"


def session_options(native: str = "auto") -> onnxruntime.SessionOptions:
    """Create session options for ONNX Runtime. If the native kernels are used, register them in the options.

    Args:
        native: "auto" to use the native kernels if they were built, "off" to use the function bodies.

    Raises:
        ConfigError: ``native`` is neither "auto" nor "off".
        BackendUnavailable: the library does not load, or has a different version than this package.
    """
    check_choice("native", native, ("auto", "off"))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if native == "auto" and _found() is not None:
        options.register_custom_ops_library(str(library_path()))
    return options


def _found() -> Path | None:
    from mlx_sparse import __path__ as folders  # an editable install has two folders: the sources and the build

    return next((path for folder in folders if (path := Path(folder) / LIBRARY).is_file()), None)


@cache
def _mismatch(path: Path) -> str | None:
    try:
        version = ctypes.CDLL(str(path)).mlx_sparse_ort_version
    except (OSError, AttributeError) as error:
        return f"{path} does not load ({error})"
    version.restype, version.argtypes = ctypes.c_char_p, []
    built, wanted = (version() or b"").decode(), f"{__version__} spec {SPEC}"
    return None if built == wanted else f"{path} has version {built}, this package {wanted}. Run {build_hint()}"
