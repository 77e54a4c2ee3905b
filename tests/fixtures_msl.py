"""The `metal` fixture: custom kernels run on the GPU of a Mac, and in the harness of tests/msl elsewhere."""

import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest
from msl import Metal, emulated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The harness's own tests need Linux: it reads ELF files and reserves memory as Linux does."""
    if sys.platform != "linux":
        for item in items:
            if item.path.name.startswith("test_msl_"):
                item.add_marker(pytest.mark.skip(reason="the Metal-on-CPU harness runs on Linux"))


@pytest.fixture
def metal() -> Iterator[Metal]:
    """Where `mx.fast.metal_kernel` runs; `metal.emulated` says whether faults and traffic are seen."""
    if mx.metal.is_available():
        yield Metal(emulated=False)
    else:
        with emulated() as harness:
            yield harness
