"""The backends under test, for every file of this folder."""

from __future__ import annotations

from typing import Any

import pytest
from adapters import ADAPTERS
from require import absent

from mlx_sparse.methods import registry


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    """Return the adapter of an available backend by name; parametrize indirectly with `adapters.backends_with`.

    Without a Metal GPU, Metal runs in the harness of tests/msl. Launches of Triton are checked.
    """
    if request.param == "metal":
        request.getfixturevalue("metal")
    elif reason := registry.unavailable(request.param.partition("-")[0]):
        absent(request.param, reason)
    if request.param == "triton":
        request.getfixturevalue("checked_memory")
    return ADAPTERS[request.param]
