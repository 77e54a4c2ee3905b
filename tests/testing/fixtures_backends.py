"""Provide the backends under test to all files of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from adapters import ADAPTERS, LIBRARIES
from require import absent

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
    if request.param == "triton":
        request.getfixturevalue("checked_memory")
    return {**ADAPTERS, **LIBRARIES}[request.param]
