"""What a test does without the backend it needs."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest

REQUIRED = "MLX_SPARSE_REQUIRE"  # backends that must be there, with commas between: what CI is to run


def absent(backend: str, reason: str) -> NoReturn:
    """Skip this test, or fail it where the environment says that ``backend`` must be there."""
    if backend in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(f"{REQUIRED} names {backend}, which is absent: {reason}")
    pytest.skip(f"{backend} is absent: {reason}", allow_module_level=True)


def needs_triton() -> None:
    """`absent` where torch or triton is not installed, whether their kernels can run or not."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        absent("triton", f"{' and '.join(missing)} not installed")
