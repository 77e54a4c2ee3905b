"""Export tiny models to ONNX, and generate reference tokens with the same models in mlx-lm."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
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
from mlx_sparse.onnx_export.runtime import native
from mlx_sparse.onnx_export.runtime.runner import Runner
from require import absent

import mlx_sparse
from mlx_sparse.methods.saap.artefact import Artefact, Layer
from mlx_sparse.model_info import identity, kv_shapes

# With few keys and few components, another selection would change the generated tokens.
SPARQ = "sparq:rank=4,top_k=16,local_window=4,dense_below=0,key_bits=16"  # component-major keys
CODED = SPARQ.replace("key_bits=16", "key_bits=4")  # int4 scoring keys, for native kernels only
# With small blocks and low alphas, attention is very sparse.
SAMPLE = "sample:alpha_column=0.4,alpha_slash=0.3,block_size=32,dense_below=0+" + SPARQ
# Tolerance of logits relative to the largest logit. A sum of n products has an error of about sqrt(n) / 2 ulp, and
# a model has 15 matrix products of up to 256 terms. The factor 8 is for weights twice as large as in trained models.
FLOAT32 = 8 * 2.0**-24 * (15 * 256) ** 0.5
PROMPT_LENGTH, STEPS = 24, 16  # used by `ExportedModel.check_tokens`
# As in an exported file, every key is indexed when it leaves the recent window. Half of the buckets contain keys.
SAAP = "probes=3,sink_tokens=1,recent_tokens=9,dense_layers=1,dense_below=0,merge_every=1"
SAAP_FILE = f"saap:artefact=FILE,{SAAP}"  # `ExportedModel` and `exported` write the file
SAMPLE_SAAP = f"{SAMPLE.partition('+')[0]}+{SAAP_FILE}"
by_method = pytest.mark.parametrize("method", ["dense", SPARQ], ids=["dense", "sparq"])
by_kernels = pytest.mark.parametrize("kernels", ["off", "auto"], ids=["bodies", "native"])


def need(kernels: str) -> None:
    """Skip the test if ``kernels`` is "auto" and there are no native kernels. If they are `required`, fail the test."""
    if kernels == "auto" and (reason := native.unavailable()):
        absent("ort", reason)


def needs_kernels(method: str) -> bool:
    """Return True if a model exported with ``method`` needs the native kernels."""
    return "key_bits=4" in method


def artefact(
    path: Path, model: Any, *, hidden: int = 12, buckets: int = 8, only: Sequence[int] | None = None, **changes: Any
) -> Path:
    """Write an artefact with random arrays for a tiny model. If ``only`` is set, write only the layers in ``only``."""
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
        # Scale the weights, so that the probability of every bucket is above 0 in float32.
        arrays[1:] = [array * array.shape[-2] ** -0.5 if array.ndim == 3 else array for array in arrays[1:]]
        layers[i] = Layer(*(array.astype(mx.float16) for array in arrays))
    made = Artefact(layers, buckets, hidden, 1, 9, identity(model))
    dataclasses.replace(made, **changes).save(path)
    return path


@functools.cache
def exported(method: str, max_length: int = 256, dtype: str = "float32", **changes: Any) -> Path:
    """Export a tiny llama model and return the output folder. Calls with the same arguments share one export."""
    home = Path(_scratch().name) / str(len(list(Path(_scratch().name).iterdir())))
    source = tiny_models.write(home / "source", **changes)
    if "FILE" in method:
        method = method.replace("FILE", str(artefact(home / "tiny.safetensors", tiny_models.build(**changes))))
    export(
        str(source), home / "exported", method=method, max_length=max_length, dtype=dtype, native=needs_kernels(method)
    )
    return home / "exported"


def copied(method: str, tmp_path: Path, change: Callable[[onnx.ModelProto], Any] | None = None) -> Path:
    """Copy the output folder of `exported` to ``tmp_path`` and apply ``change`` to the model. Return the new folder."""
    folder = Path(shutil.copytree(exported(method), tmp_path / "model"))
    if change is not None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        change(model)
        onnx.save(model, folder / "model.onnx")
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="exported-")


def tokens_of_mlx(method: str, prompt: list[int], count: int, **changes: Any) -> list[int]:
    """Generate ``count`` tokens greedily in mlx-lm, with the model that `exported` exports."""
    model = tiny_models.build(**changes)
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method):
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def tokens_of_mlx_after_dense_prefill(method: str, prompt: list[int], count: int, **changes: Any) -> list[int]:
    """Generate ``count`` tokens greedily in mlx-lm after a dense prefill. Return all tokens except the first.

    The prefill includes the last prompt token. In contrast, `tokens_of_mlx` processes this token in a decode step.
    """
    model = tiny_models.build(**changes)
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method):
        return tiny_models.greedy(model, prompt, count - 1)[0]


def tokens_in_steps(
    model: Runner, prompts: list[list[int]], count: int, left_padding: list[int] | None = None
) -> list[list[int]]:
    """Prefill all prompts in one call. Generate ``count`` tokens greedily for each prompt and return them."""
    picked = [model.step(prompts, left_padding).argmax(axis=1)]
    for _ in range(count - 1):
        picked.append(model.step(picked[-1][:, None]).argmax(axis=1))
    return np.stack(picked, axis=1).tolist()


class ExportedModel:
    """A tiny model as an mlx-lm folder, and its ONNX export.

    ``changes`` override entries of config.json, and ``options`` are passed to `export`. If ``method`` contains FILE,
    the class calls `artefact` with the keyword arguments ``about``, and replaces FILE by the artefact's path.
    """

    def __init__(
        self,
        tmp_path: Path,
        family: str,
        method: str,
        changes: dict[str, Any] | None = None,
        about: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        changes = changes or {}
        self.source = tiny_models.write(tmp_path / "source", family, **changes)
        if "FILE" in method:
            file = artefact(tmp_path / "tiny.safetensors", tiny_models.build(family, **changes), **(about or {}))
            method = method.replace("FILE", str(file))
        self.method, self.coded = method, needs_kernels(method)
        if self.coded:
            need("auto")
        self.folder = tmp_path / "exported"
        self.result = export(
            str(self.source), self.folder, **{"method": method, "max_length": 64, "native": self.coded, **options}
        )
        self.proto = onnx.load(self.folder / "model.onnx", load_external_data=False)

    @property
    def nodes(self) -> list[str]:
        """Operator types of the graph's nodes in the domain ``mlx_sparse``, in graph order."""
        return [node.op_type for node in self.proto.graph.node if node.domain == "mlx_sparse"]

    @property
    def metadata(self) -> dict[str, str]:
        return {entry.key.removeprefix("mlx_sparse."): entry.value for entry in self.proto.metadata_props}

    def runner(self, batch: int = 1, kernels: str = "off") -> Runner:
        return Runner(self.folder, native=kernels, threads=1, batch=batch)

    def mlx(self) -> contextlib.AbstractContextManager[Any]:
        """Load the model in mlx-lm as ``self.model``. The method is enabled inside the returned context."""
        self.model = load_model(self.source)[0]
        if self.method == "dense":
            return contextlib.nullcontext()
        return mlx_sparse.sparse(self.model, self.method, backend="ops")

    def check_tokens(self, length: int = PROMPT_LENGTH) -> None:
        """Assert that the exported model and mlx-lm generate the same tokens, and equal logits up to rounding."""
        prompt = tiny_models.prompt_of(length)
        with self.mlx():
            tokens, logits = tiny_models.greedy(self.model, prompt, STEPS)
        expected = np.array(logits)
        model = self.runner(kernels="auto" if self.coded else "off")
        got = [model.step([prompt])[0].copy()]
        for _ in range(STEPS):
            got.append(model.step([[int(got[-1].argmax())]])[0].copy())
        assert [int(step.argmax()) for step in got[1:]] == tokens
        assert np.abs(np.array(got[1:]) - expected).max() < FLOAT32 * np.abs(expected).max()
