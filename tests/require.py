"""What a test does without the backend it needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = "MLX_SPARSE_REQUIRE"  # backends that must be there, with commas between: what CI is to run


def absent(backend: str, reason: str) -> NoReturn:
    """Skip this test, or fail it where the environment says that ``backend`` must be there."""
    if backend in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(f"{REQUIRED} names {backend}, which is absent: {reason}")
    pytest.skip(f"{backend} is absent: {reason}", allow_module_level=True)
