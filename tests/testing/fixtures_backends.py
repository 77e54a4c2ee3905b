"""Provide the backends under test to all files of this folder."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from adapters import ADAPTERS, LIBRARIES
from require import absent

from mlx_sparse import native
from mlx_sparse.core import registry


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    """Return the adapter of a backend. Parametrize tests indirectly with names of `ADAPTERS` or `LIBRARIES`.

    Without a Metal GPU, Metal kernels run in the harness of tests/msl. All Triton launches are checked.
    """
    if request.param == "metal":
        request.getfixturevalue("metal")
    elif reason := registry.unavailable(request.param.partition("-")[0]):
        absent(request.param, reason)
    if request.param.startswith("cpu-"):
        request.getfixturevalue("limit")(request.param.removeprefix("cpu-"))
    if request.param == "triton":
        request.getfixturevalue("checked_memory")
    return {**ADAPTERS, **LIBRARIES}[request.param]


@pytest.fixture
def limit() -> Iterator[Callable[[str | None, int], None]]:
    """Return a function that sets the instruction set and the number of workers of the native kernels.

    None selects the fastest instruction set. 0 selects the default number of workers.
    """
    if reason := native.unavailable():
        absent("cpu", reason)
    library = native.library()
    library.mlx_sparse_limit.restype = ctypes.c_char_p
    library.mlx_sparse_limit.argtypes = [ctypes.c_char_p, ctypes.c_int]

    def set_limit(name: str | None, workers: int = 0) -> None:
        if library.mlx_sparse_limit(name and name.encode(), workers) is None:
            pytest.skip(f"this machine has no {name}")

    yield set_limit
    library.mlx_sparse_limit(None, 0)
