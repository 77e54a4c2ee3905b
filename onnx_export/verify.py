"""Whether a finished file computes what MLX computes with the same weights.

MLX runs the model in float32, and once more with embeddings disturbed as much as rounding errors would disturb them:
what that does to the logits says how close the file must come. Caches of half precision round more than that, and may
swap the keys that a sparse step chooses. So the sparse step is compared in a copy of the file with float32 caches, and
the file itself must come as close as MLX does when it rounds what the caches hold.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx_lm.models.cache as caches
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from onnx import TensorProto

from mlx_sparse.checks import ArtefactError
from mlx_sparse.config import SparQ
from mlx_sparse.lm import seam, sparse

from .decoder import Target
from .memory import ort_value, zeros
from .weights import QUANTISED

Array = npt.NDArray[Any]
Lower = Callable[[onnx.ModelProto], onnx.ModelProto]

ROWS = 3  # prompts
PROMPT = 16  # tokens
KEYS = 8  # most keys attended to in the sparse step that is compared, so that a short prompt shows it
# Disturbed and true rounding errors are alike in size only.
SLACK = 2


@dataclass(frozen=True)
class Expected:
    """Logits (rows, vocabulary) of MLX, and how far from them a file may be.

    Attributes:
        tokens: (rows, PROMPT + 1).
        logits: after the prompts, after one more token, and after that token if it is attended sparsely. The last is
            missing if the method is dense.
        allowed: largest difference of the file's dense logits, and of the median row's sparse logits.
    """

    tokens: Array
    logits: list[Array]
    allowed: tuple[float, float]


@dataclass(frozen=True)
class Agreement:
    """How far the logits of a file are from MLX's.

    Attributes:
        dense: largest difference where attention is dense.
        sparse: the same of the sparse step's median row, None if the method is dense.
        allowed: for the two.
        largest: logit, for comparison.
    """

    dense: float
    sparse: float | None
    allowed: tuple[float, float]
    largest: float

    def __str__(self) -> str:
        both = f"{self.dense:.1e}" + ("" if self.sparse is None else f" dense, {self.sparse:.1e} sparse")
        return f"logits of up to {self.largest:.3g} are within {both} of MLX's"


def reference(model: Any, target: Target) -> Expected:
    """What MLX computes. The model is of no other use afterwards: its parameters are those of the file.

    Raises:
        ArtefactError: logits that are not finite.
    """
    _as_stored(model, target.dtype)
    tokens = np.random.default_rng(0).integers(0, model.model.embed_tokens.weight.shape[0], (ROWS, PROMPT + 1))
    embedding = model.model.embed_tokens = _Widened(model.model.embed_tokens)
    # Sums of K products err by about sqrt(K) halves of an ulp, and the layers add their errors up.
    shapes = [module.weight.shape for _, module in model.named_modules() if isinstance(module, (nn.Linear, *QUANTISED))]
    noise = 2.0**-24 * math.sqrt(max(max(shape) for shape in shapes) * len(shapes))
    method = shortened(target.method) if isinstance(target.method, SparQ) else None
    runs = []
    for embedding.noise in (0.0, noise):
        cache = make_prompt_cache(model)
        runs.append([_run(model, tokens[:, :-1], cache)])
        prompted = copy.deepcopy(cache)
        runs[-1].append(_run(model, tokens[:, -1:], cache))
        if method is not None:
            with sparse(model, method):
                runs[-1].append(_run(model, tokens[:, -1:], prompted))
    exact, moved = runs
    if not all(np.isfinite(logits).all() for logits in exact):
        raise ArtefactError("--model: expected finite logits from MLX, got NaN or infinity. The weights are damaged.")
    moves = [np.abs(a - b).max(axis=1) for a, b in zip(exact, moved, strict=True)]
    dense = float(np.max(moves[:2]))
    if target.dtype != "float32":
        embedding.noise, cache = 0.0, make_prompt_cache(model)
        with _rounding(model, target.dtype):
            rounded = [_run(model, piece, cache) for piece in (tokens[:, :-1], tokens[:, -1:])]
        dense += max(float(np.abs(a - b).max()) for a, b in zip(exact, rounded, strict=False))
    return Expected(tokens, exact, (SLACK * dense, SLACK * float(np.median(moves[-1]))))


def _as_stored(model: Any, dtype: str) -> None:
    """Round matrices to the type they are stored in; hold the rest, vectors and scales, in float32."""

    def stored(name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        matrix = array.ndim == 2 and name.endswith(".weight")
        if matrix and dtype == "float32":
            return array  # a product with float32 widens it anyway
        return array.astype(getattr(mx, dtype) if matrix else mx.float32)

    model.update(tree_map_with_path(stored, model.parameters()))


class _Widened(nn.Module):
    """An embedding in float32, from which everything after it is float32 too, with a relative ``noise``."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.noise = 0.0

    def __call__(self, ids: mx.array) -> mx.array:
        rows = self.inner(ids).astype(mx.float32)
        return rows * (1 + self.noise * mx.random.normal(rows.shape, key=mx.random.key(0)))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.inner.as_linear(x)


@contextmanager
def _rounding(model: Any, dtype: str) -> Iterator[None]:
    """Round queries, keys, values and the output of every attention call to ``dtype``, and widen them again."""

    def rounded(array: mx.array) -> mx.array:
        return array.astype(getattr(mx, dtype)).astype(mx.float32)

    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), seam.NAME)]
    places = [(module, seam.NAME) for module in modules]
    places += [(cls, "update_and_fetch") for cls in (caches.KVCache, caches.RotatingKVCache)]
    originals = [getattr(*place) for place in places]

    def attention(original: Callable[..., mx.array], queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return rounded(original(rounded(queries), *args, **kwargs))

    def append(original: Callable[..., Any], cache: Any, keys: mx.array, values: mx.array) -> Any:
        return original(cache, rounded(keys), rounded(values))

    for (place, name), original in zip(places, originals, strict=True):
        setattr(place, name, functools.partial(attention, original) if name == seam.NAME else _method(append, original))
    try:
        yield
    finally:
        for (place, name), original in zip(places, originals, strict=True):
            setattr(place, name, original)


def _method(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A partial object would not be bound to the instance."""

    def call(self: Any, *args: Any) -> Any:
        return function(original, self, *args)

    return call


def _run(model: Any, tokens: Array, cache: Any) -> Array:
    """Logits (rows, vocabulary) after these tokens."""
    return np.array(model(mx.array(tokens), cache=cache)[:, -1])


def shortened(method: SparQ) -> SparQ:
    """The method with a sparse step that a short prompt reaches."""
    top_k = min(method.top_k, KEYS)
    window = min(int(method.local_window or 0), top_k // 4)
    return dataclasses.replace(method, top_k=top_k, local_window=window, dense_below=0)


def compare(model: onnx.ModelProto, folder: Path, expected: Expected, lower: Lower) -> Agreement:
    """Run the finished file on stock ONNX Runtime, and its sparse step in a copy that shares its data.

    Args:
        model: the model before it was lowered.
        folder: where model.onnx and its data lie.
        expected: what MLX computes.
        lower: what was done to the model in the end.

    Raises:
        ArtefactError: the file computes something else.
    """
    tokens, logits = expected.tokens, expected.logits
    got = _steps(folder / "model.onnx", tokens)
    if any(PROMPT + 1 >= a.i for node in model.graph.node for a in node.attribute if a.name == "dense_below"):
        got.pop()  # sparse already
    dense = max(float(np.abs(a - b).max()) for a, b in zip(got, logits, strict=False))
    if not dense <= expected.allowed[0]:
        raise _disagreement("dense attention", dense, expected.allowed[0])
    median = None
    if len(logits) == 3:
        check = folder / "shortened.onnx"
        onnx.save(lower(_shortened_model(model)), check)
        error = np.abs(_steps(check, tokens)[1] - logits[2]).max(axis=1)
        check.unlink()
        median = float(np.median(error))
        # Two keys that tie but for rounding may be swapped. That is rare, and moves less than leaving keys out does.
        swapped = expected.allowed[1] + np.abs(logits[2] - logits[1]).max(axis=1)
        if not median <= expected.allowed[1] or not (error <= swapped).all():
            raise _disagreement("sparse attention", float(error.max()), expected.allowed[1])
    return Agreement(dense, median, expected.allowed, float(np.abs(logits[0]).max()))


def _disagreement(where: str, error: float, allowed: float) -> ArtefactError:
    return ArtefactError(
        f"model.onnx: expected logits within {allowed:.1e} of MLX's, got {error:.1e} with {where}. Nothing was kept; "
        "please report the model and the command."
    )


def _shortened_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with `shortened` attributes and float32 caches."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in (*made.graph.input, *made.graph.output):
        if tensor.type.tensor_type.elem_type != TensorProto.INT64:
            tensor.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in made.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Cast":  # up from the type of weights, or down to that of caches
            attributes["to"].i = TensorProto.FLOAT
        if node.op_type == "SparQAttention":
            method = shortened(SparQ(**{name: attributes[name].i for name in ("top_k", "local_window")}))
            for name in ("top_k", "local_window", "dense_below"):
                attributes[name].i = getattr(method, name)
    return made


def _steps(path: Path, tokens: Array) -> list[Array]:
    """Logits after the prompts, and after one more token, on stock ONNX Runtime."""
    steps = Steps(path, len(tokens))
    return [steps(piece) for piece in (tokens[:, :-1], tokens[:, -1:])]


class Steps:
    """A file on stock ONNX Runtime with caches of its own, appended in place."""

    def __init__(self, path: Path, rows: int) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._kept = []
        for tensor in self._session.get_inputs():
            if tensor.name.startswith("past_"):
                dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}.get(
                    tensor.type, ml_dtypes.bfloat16
                )
                array = zeros((rows, *tensor.shape[1:]), dtype)
                value = ort_value(array)
                self._kept += [array, value]
                self._binding.bind_ortvalue_input(tensor.name, value)
                present = tensor.name.replace("past_key_values", "present").replace("past_", "present_")
                self._binding.bind_ortvalue_output(present, value)
        self.mask = np.zeros((rows, 0))

    def __call__(self, tokens: Array, mask: Array | None = None) -> Array:
        """Logits (B, V) after new tokens (B, L), given a mask of all tokens."""
        tokens = np.asarray(tokens, np.int64)
        self.mask = np.concatenate([self.mask, np.ones(tokens.shape)], axis=1) if mask is None else np.asarray(mask)
        self._binding.bind_cpu_input("input_ids", tokens)
        self._binding.bind_cpu_input("attention_mask", self.mask.astype(np.int64))
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding)
        return self._binding.get_outputs()[-1].numpy()[:, 0]
