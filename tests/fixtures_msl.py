"""The `metal` fixture: custom kernels run on the GPU of a Mac, and in the harness of tests/msl elsewhere."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from msl import Metal, emulated


@pytest.fixture
def metal() -> Iterator[Metal]:
    """Where `mx.fast.metal_kernel` runs; `metal.emulated` says whether faults and traffic are seen."""
    if mx.metal.is_available():
        yield Metal(emulated=False)
    else:
        with emulated() as harness:
            yield harness
