"""Tiny models exported to ONNX, and what mlx-lm says with the same models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import pytest
import tiny_models
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from mlx_sparse.onnx_export import export
from mlx_sparse.onnx_export.runtime.runner import Runner

import mlx_sparse
from mlx_sparse.artefact import Artefact, Layer, identity, kv_shapes

# Few keys out of few components, so that choosing others would change the text.
SPARQ = "sparq:rank=4,top_k=16,local_window=4,dense_below=0"
# Small blocks and little mass, so that much is left out.
SAMPLE = "sample:alpha_column=0.4,alpha_slash=0.3,block_size=32,dense_below=0+" + SPARQ
# Largest error of logits, relative to the largest logit: 15 products of up to 256 terms, each sum off by about the root
# of that many halves of an ulp, and eight times that for weights that are twice as large as those of trained models.
FLOAT32 = 8 * 2.0**-24 * (15 * 256) ** 0.5
PROMPT_LENGTH, STEPS = 24, 16  # of `Made.check_tokens`
# Every key is listed as soon as it leaves the window, as in a file; half of the buckets hold some of the keys.
SAAP = "probes=3,sink_tokens=1,recent_tokens=9,dense_layers=1,dense_below=0,fold_every=1"
by_method = pytest.mark.parametrize("method", ["dense", SPARQ], ids=["dense", "sparq"])


def artefact(
    path: Path, model: Any, *, hidden: int = 12, buckets: int = 8, only: Sequence[int] | None = None, **changes: Any
) -> Path:
    """An artefact for a tiny model, or ``only`` for some layers, with centroids and networks that were made up."""
    layers = {}
    for i, shape in enumerate(kv_shapes(model)):
        if only is not None and i not in only:
            continue
        assert shape is not None
        heads, D = shape
        sizes = [(buckets, D), *([(D, hidden), (hidden,), (hidden, buckets), (buckets,)] if hidden else [])]
        keys = mx.random.split(mx.random.key(i), len(sizes))
        arrays = [mx.random.normal((heads, *size), key=key) for size, key in zip(sizes, keys, strict=True)]
        arrays[0] = arrays[0] / mx.linalg.norm(arrays[0], axis=-1, keepdims=True)
        # Weights that leave every bucket a probability that float32 can tell from 0.
        arrays[1:] = [array * array.shape[-2] ** -0.5 if array.ndim == 3 else array for array in arrays[1:]]
        layers[i] = Layer(*(array.astype(mx.float16) for array in arrays))
    made = Artefact(layers, buckets, hidden, "before_rope", 1, 9, identity(model))
    dataclasses.replace(made, **changes).save(path)
    return path


@functools.cache
def exported(method: str, max_length: int = 256, dtype: str = "float32", **changes: Any) -> Path:
    """The folder of an exported tiny llama, made once in a session."""
    home = Path(_scratch().name) / str(len(list(Path(_scratch().name).iterdir())))
    source = tiny_models.write(home / "source", **changes)
    export(str(source), home / "exported", method=method, max_length=max_length, dtype=dtype)
    return home / "exported"


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="exported-")


def said_by_mlx(method: str, prompt: list[int], count: int, **changes: Any) -> list[int]:
    """mlx-lm's ``count`` greedy tokens after a prompt, with the model of `exported`."""
    model = tiny_models.build(**changes)
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method):
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def said_after_a_dense_prompt(method: str, prompt: list[int], count: int, **changes: Any) -> list[int]:
    """The same, but for the first, where the last token of the prompt attends densely too."""
    model = tiny_models.build(**changes)
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method):
        return tiny_models.greedy(model, prompt, count - 1)[0]


def said_in_steps(
    model: Runner, prompts: list[list[int]], count: int, left_padding: list[int] | None = None
) -> list[list[int]]:
    """Each row's ``count`` greedy tokens after prompts that go in at once."""
    picked = [model.step(prompts, left_padding).argmax(axis=1)]
    for _ in range(count - 1):
        picked.append(model.step(picked[-1][:, None]).argmax(axis=1))
    return np.stack(picked, axis=1).tolist()


class Made:
    """A tiny model, written for mlx-lm and exported."""

    def __init__(self, tmp_path: Path, family: str, method: str, changes: dict[str, Any], **options: Any) -> None:
        self.source = tiny_models.write(tmp_path / "source", family, **changes)
        self.method = method
        self.folder = tmp_path / "exported"
        self.result = export(str(self.source), self.folder, **{"method": method, "max_length": 64, **options})
        self.proto = onnx.load(self.folder / "model.onnx", load_external_data=False)

    def runner(self, batch: int = 1) -> Runner:
        return Runner(self.folder, native="off", threads=1, batch=batch)

    def mlx(self) -> contextlib.AbstractContextManager[Any]:
        """mlx-lm's model, attending by the method."""
        self.model = load_model(self.source)[0]
        if self.method == "dense":
            return contextlib.nullcontext()
        return mlx_sparse.sparse(self.model, self.method, backend="ops")

    def check_tokens(self, length: int = PROMPT_LENGTH) -> None:
        """Greedy tokens after a prompt are those of mlx-lm, and so are the logits but for rounding."""
        prompt = tiny_models.prompt_of(length)
        with self.mlx():
            tokens, logits = tiny_models.greedy(self.model, prompt, STEPS)
        expected = np.array(logits)
        model = self.runner()
        got = [model.step([prompt])[0].copy()]
        for _ in range(STEPS):
            got.append(model.step([[int(got[-1].argmax())]])[0].copy())
        assert [int(step.argmax()) for step in got[1:]] == tokens
        assert np.abs(np.array(got[1:]) - expected).max() < FLOAT32 * np.abs(expected).max()
