"""Tiny models exported to ONNX, and what mlx-lm says with the same models."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from mlx_sparse.onnx_export import exporter

import mlx_sparse

# Few keys out of few components, so that choosing others would change the text.
SPARQ = "sparq:rank=4,top_k=16,local_window=4,dense_below=0"
by_method = pytest.mark.parametrize("method", ["dense", SPARQ], ids=["dense", "sparq"])


@functools.cache
def exported(method: str, max_length: int = 256, dtype: str = "float32", **changes: Any) -> Path:
    """The folder of an exported tiny llama, made once in a session."""
    home = Path(_scratch().name) / str(len(list(Path(_scratch().name).iterdir())))
    source = tiny_models.write(home / "source", **changes)
    exporter.export(str(source), home / "exported", method=method, max_length=max_length, dtype=dtype)
    return home / "exported"


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="exported-")


def said_by_mlx(method: str, prompt: list[int], count: int, **changes: Any) -> list[int]:
    """mlx-lm's ``count`` greedy tokens after a prompt, but for the first, with the model of `exported`."""
    model = tiny_models.build(**changes)
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method):
        return tiny_models.greedy(model, prompt, count - 1)[0]
