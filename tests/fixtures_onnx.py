"""Which kernels the native ONNX operators run, as a fixture, a plugin of pytest."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator

import pytest
from require import absent

SETS = ["scalar", "neon"] if platform.machine() in ("aarch64", "arm64") else ["scalar", "avx2", "avx512"]


@pytest.fixture
def limit() -> Iterator[Callable[[str | None, int], None]]:
    """Sets which instruction set runs, None for the fastest, and for how many threads work is cut, 0 for all here."""
    from mlx_sparse.onnx_export.runtime import native

    if reason := native.unavailable():
        absent("ort", reason)
    library = ctypes.CDLL(str(native.library_path()))
    library.mlx_sparse_ort_limit.restype = ctypes.c_char_p
    library.mlx_sparse_ort_limit.argtypes = [ctypes.c_char_p, ctypes.c_int]

    def set_limit(name: str | None, workers: int = 0) -> None:
        if library.mlx_sparse_ort_limit(name and name.encode(), workers) is None:
            pytest.skip(f"this machine has no {name}")

    yield set_limit
    library.mlx_sparse_ort_limit(None, 0)
