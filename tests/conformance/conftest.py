"""The backends under test, for every file of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from adapters import ADAPTERS
from require import absent

from mlx_sparse.methods import registry


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    """The adapter of a backend that is here, by name: parametrise indirectly with `adapters.having`.

    Metal runs in the harness of tests/msl where there is no Metal GPU; Triton's launches are checked.
    """
    if request.param == "metal":
        request.getfixturevalue("metal")
    elif reason := registry.unavailable(request.param.partition("-")[0]):
        absent(request.param, reason)
    if request.param == "triton":
        request.getfixturevalue("checked_memory")
    return ADAPTERS[request.param]
