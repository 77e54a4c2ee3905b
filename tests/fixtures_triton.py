"""The guard of every test that runs Triton's kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def guarded() -> Iterator[list[Any]]:
    """Watch every launch (see triton_bytes.py), its programs in a mixed order; the launches so far.

    On a GPU kernels run as they are, and there is nothing to see.
    """
    from mlx_sparse.cuda_ref.availability import interpreted

    if not interpreted():
        yield []
        return
    from triton_bytes import shuffled, watched

    with watched(shuffled) as launches:
        yield launches
