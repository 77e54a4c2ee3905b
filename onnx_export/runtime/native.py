"""Find the library of native kernels and create session options that use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlx_sparse import native as library
from mlx_sparse.checks import BackendUnavailable, check_choice
from mlx_sparse.native import unavailable as unavailable

if TYPE_CHECKING:
    import onnxruntime


def library_path() -> Path:
    """Return the path of the native library, for ONNX Runtime's ``SessionOptions.register_custom_ops_library``.

    Raises:
        BackendUnavailable: the library was not built, does not load, or has a different version than this package.
    """
    found, reason = library.path(), unavailable()
    if found is None or reason:
        raise BackendUnavailable(f"native: expected a usable {library.LIBRARY}, got none: {reason}.")
    return found


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
    if native == "auto" and library.path() is not None:
        options.register_custom_ops_library(str(library_path()))
    return options
