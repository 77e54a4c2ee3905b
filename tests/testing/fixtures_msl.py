"""Provide the fixture `metal`, which runs Metal kernels on a Mac's GPU or in the harness of tests/msl."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from msl import Metal, emulated
from require import absent, required

from mlx_sparse.core import launch


class Launched(NamedTuple):
    """Inputs and template arguments of a kernel launch."""

    inputs: dict[str, mx.array]
    template: dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On systems other than Linux, skip the tests of the Metal-on-CPU harness, because the harness reads ELF files."""
    if sys.platform != "linux":
        for item in items:
            if item.path.name.startswith("test_msl_"):
                item.add_marker(pytest.mark.skip(reason="the Metal-on-CPU harness runs on Linux"))


@contextmanager
def gpu_or_harness() -> Iterator[Metal]:
    """Run Metal kernels on the GPU inside the context. If there is no GPU, use the CPU harness of tests/msl."""
    if mx.metal.is_available():
        yield Metal(emulated=False)
    elif required("metal"):
        absent("metal", "MLX finds no Metal GPU on this machine")
    else:
        with emulated() as harness:
            yield harness


@pytest.fixture
def metal() -> Iterator[Metal]:
    """Run the Metal kernels of one test on the GPU or in the harness, as `gpu_or_harness` does."""
    with gpu_or_harness() as where:
        yield where


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Return a list to which all kernel launches of a test are appended."""
    seen: list[Launched] = []
    call = launch.Launch.__call__

    def record(self: launch.Launch, *arrays: mx.array) -> list[mx.array]:
        inputs = zip(self.kernel.inputs, (*arrays, *self.numbers), strict=True)
        seen.append(Launched(dict(inputs), dict(self.template)))
        return call(self, *arrays)

    monkeypatch.setattr(launch.Launch, "__call__", record)
    return seen
