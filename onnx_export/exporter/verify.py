"""Whether a finished file computes what MLX computes with the same weights.

MLX runs the model in float32, and once more with embeddings disturbed as much as rounding errors would disturb them:
what that does to the logits says how close the file must come. Caches of half precision round more than that, and may
swap the keys that a sparse step chooses. So a copy of the file with float32 caches, whose sparse step comes early, is
held to that, and the file itself must come as close as MLX does when it rounds what the caches hold. SampleAttention
is compared in a copy of the first layers, on a prompt of several small blocks: MLX would take minutes for all of them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as caches
import numpy as np
import numpy.typing as npt
import onnx
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache

from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.lm import seam, sparse
from mlx_sparse.methods import SAAP, Sample, SparQ

from .check_model import PROMPT, SAMPLED_PROMPT, copy_for_check, keep_layers, shortened, shortened_prompts
from .check_session import File
from .decoder import Target
from .families import window_of
from .weights import QUANTISED

Array = npt.NDArray[Any]
Lower = Callable[[onnx.ModelProto], onnx.ModelProto]

ROWS = 3  # prompts
SLACK = 2  # errors that are alike in size are not the same


@dataclass(frozen=True)
class Sampled:
    """What the first layers compute in MLX for a prompt by a `shortened_prompts` method.

    Attributes:
        layers: how many, before the norm and the head.
        tokens: (rows, at most SAMPLED_PROMPT).
        logits: (rows, vocabulary), and the same of dense attention.
        error: largest difference of the median row.
    """

    layers: int
    tokens: Array
    logits: Array
    dense: Array
    error: float


@dataclass(frozen=True)
class Expected:
    """Logits (rows, vocabulary) of MLX, and how far from them a file may be.

    Attributes:
        tokens: (rows, PROMPT + 1).
        logits: after the prompts, after one more token, and after that token if it is attended sparsely. The last is
            missing if the method is dense.
        rounded: largest difference of the file's dense logits.
        dense: the same with float32 caches.
        sparse: largest difference of the median row's sparse logits, with float32 caches.
        sampled: of a longer prompt; None if prompts attend densely.
    """

    tokens: Array
    logits: list[Array]
    rounded: float
    dense: float
    sparse: float
    sampled: Sampled | None = None


@dataclass(frozen=True)
class Agreement:
    """How far the logits of a file are from MLX's.

    Attributes:
        dense: largest difference where attention is dense.
        sparse: the same of the sparse step's median row, None if decoding is dense.
        largest: logit, for comparison.
        sampled: the same as ``sparse`` of a sampled prompt.
    """

    dense: float
    sparse: float | None
    largest: float
    sampled: float | None = None

    def __str__(self) -> str:
        sparse = {"sparse": self.sparse, "sampled": self.sampled}
        others = "".join(f", {error:.1e} {name}" for name, error in sparse.items() if error is not None)
        errors = f"{self.dense:.1e}" + (f" dense{others}" if others else "")
        return f"logits of up to {self.largest:.3g} are within {errors} of MLX's"


def reference(model: Any, target: Target) -> Expected:
    """What MLX computes on the CPU: Metal's products may round to less than float32.

    The model is of no other use afterwards: its parameters are those of the file.

    Raises:
        ArtefactError: logits that are not finite.
    """
    with mx.stream(mx.cpu), _layer_by_layer(model):
        return _reference(model, target)


def _reference(model: Any, target: Target) -> Expected:
    _as_stored(model, target.dtype)
    tokens = np.random.default_rng(0).integers(0, model.model.embed_tokens.weight.shape[0], (ROWS, PROMPT + 1))
    embedding = model.model.embed_tokens = _Widened(model.model.embed_tokens)
    if "lm_head" in model:
        model.lm_head = _OfLast(model.lm_head)
    # Sums of K products err by about sqrt(K) halves of an ulp, and the layers add their errors up.
    products = [_columns(module) for _, module in model.named_modules() if isinstance(module, (nn.Linear, *QUANTISED))]
    noise = 2.0**-24 * math.sqrt(max(products) * len(products))
    method = shortened(target) if isinstance(target.method, (SparQ, SAAP)) else None
    runs = []
    for embedding.noise in (0.0, noise):
        cache = make_prompt_cache(model)
        runs.append([_run(model, tokens[:, :-1], cache)])
        prompted = copy.deepcopy(cache)
        runs[-1].append(_run(model, tokens[:, -1:], cache))
        if method is not None:
            with sparse(model, method, backend="ops"):
                runs[-1].append(_run(model, tokens[:, -1:], prompted))
    exact, moved = runs
    if not all(np.isfinite(logits).all() for logits in exact):
        raise ArtefactError("--model: expected finite logits from MLX, got NaN or infinity. The model is damaged.")
    moves = [np.abs(a - b).max(axis=1) for a, b in zip(exact, moved, strict=True)]
    dense, lost = float(np.max(moves[:2])), 0.0
    if target.dtype != "float32":
        embedding.noise, cache = 0.0, make_prompt_cache(model)
        with _rounding(model, target.dtype):
            rounded = [_run(model, piece, cache) for piece in (tokens[:, :-1], tokens[:, -1:])]
        lost = _largest(exact[:2], rounded)
        if not math.isfinite(lost):
            raise ConfigError(f"--dtype: expected a type that holds keys and values, got {target.dtype}. Give another.")
    of_long = None if target.prompts is None else _sampled(model, target.prompts, target.max_length, noise)
    return Expected(tokens, exact, SLACK * (dense + lost), SLACK * dense, SLACK * float(np.median(moves[-1])), of_long)


def _sampled(model: Any, method: Sample, max_length: int, noise: float) -> Sampled:
    embedding = model.model.embed_tokens
    shape = ROWS, min(SAMPLED_PROMPT, max_length)
    tokens = np.random.default_rng(1).integers(0, embedding.inner.weight.shape[0], shape)
    # What a layer leaves out reaches the last row through the layers after it.
    unbounded = [i for i, layer in enumerate(model.layers) if not window_of(layer, model)]
    layers = min(len(model.layers), (unbounded[:2] or [0])[-1] + 2)
    runs = []
    caches = [make_prompt_cache(model) for _ in range(3)]  # of all layers: models look for the kinds of layers there
    with _first_layers(model, layers):
        with sparse(model, shortened_prompts(method), backend="ops"):
            for embedding.noise in (noise, 0.0):
                runs.append(_run(model, tokens, caches.pop()))
        moved, exact = runs
        dense = _run(model, tokens, caches.pop())
    error = SLACK * float(np.median(np.abs(exact - moved).max(axis=1)))
    return Sampled(layers, tokens, exact, dense, error)


@contextmanager
def _first_layers(model: Any, count: int) -> Iterator[None]:
    """Without the other layers."""
    layers = model.model.layers
    model.model.layers = layers[:count]
    try:
        yield
    finally:
        model.model.layers = layers


def _columns(module: Any) -> int:
    """How many products a linear layer sums."""
    if isinstance(module, QUANTISED):
        return int(module.scales.shape[1] * module.group_size)
    return int(module.weight.shape[1])


def _largest(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The largest difference; NaN if there is one."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)]))


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
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.noise = 0.0

    def __call__(self, ids: mx.array) -> mx.array:
        rows: mx.array = self.inner(ids).astype(mx.float32)
        return rows * (1 + self.noise * mx.random.normal(rows.shape, key=mx.random.key(0)))

    def as_linear(self, x: mx.array) -> mx.array:
        logits: mx.array = self.inner.as_linear(x[:, -1:])
        return logits


class _OfLast(nn.Module):
    """A head for the last token, which is all that is compared."""

    def __init__(self, inner: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self.inner(x[:, -1:])
        return logits


@contextmanager
def _layer_by_layer(model: Any) -> Iterator[None]:
    """Compute each layer before the next, so that not all weights are widened at the same time."""
    layer = type(model.layers[0])
    original = layer.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = original(self, *args, **kwargs)
        mx.eval(out)
        mx.clear_cache()
        return out

    layer.__call__ = call
    try:
        yield
    finally:
        layer.__call__ = original


@contextmanager
def _rounding(model: Any, dtype: str) -> Iterator[None]:
    """Round queries, keys, values and the output of every attention call to ``dtype``, and widen them again."""

    def rounded(array: mx.array) -> mx.array:
        return array.astype(getattr(mx, dtype)).astype(mx.float32)

    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), seam.NAME)]
    places: list[tuple[Any, str]] = [(module, seam.NAME) for module in modules]
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


def compare(model: onnx.ModelProto, folder: Path, expected: Expected, target: Target, lower: Lower) -> Agreement:
    """Run the finished file on stock ONNX Runtime, and a copy with float32 caches that shares its data.

    Args:
        model: the model before it was lowered.
        folder: where model.onnx and its data lie.
        expected: what MLX computes.
        target: what was made.
        lower: what was done to the model in the end.

    Raises:
        ArtefactError: the file computes something else.
    """
    logits = expected.logits
    got = _steps(folder / "model.onnx", expected.tokens, target.rows)
    if is_sparse := isinstance(target.method, (SparQ, SAAP)):
        shortest = int(target.method.dense_below)  # as settled: beyond the keys that are always attended
        got = got[: (PROMPT < shortest or not target.rows) + (PROMPT + 1 < shortest)]
    largest = _largest(got, logits[: len(got)]) if got else 0.0
    if not largest <= expected.rounded:
        raise _disagreement("dense attention", largest, expected.rounded)
    median = of_sampled = None
    check = folder / "check.onnx"
    if is_sparse or target.dtype != "float32":
        onnx.save(lower(copy_for_check(model, target)), check)
        got = _steps(check, expected.tokens, target.rows)
        exact = _largest(got[:1] if is_sparse else got, logits[:1] if is_sparse else logits)
        if not exact <= expected.dense:
            raise _disagreement("dense attention and float32 caches", exact, expected.dense)
        if is_sparse:
            median = _median_error(got[1], logits[2], logits[1], expected.sparse, where="sparse attention")
    if (sampled := expected.sampled) is not None:
        first = copy_for_check(model, target)
        keep_layers(first, sampled.layers)
        onnx.save(lower(first), check)
        file = File(check)
        file.start(len(sampled.tokens))
        errors = sampled.logits, sampled.dense, sampled.error
        of_sampled = _median_error(file(sampled.tokens), *errors, where="a sampled prompt")
    check.unlink(missing_ok=True)
    return Agreement(largest, median, float(np.abs(logits[0]).max()), of_sampled)


def _median_error(got: Array, wanted: Array, dense: Array, allowed: float, *, where: str) -> float:
    """The largest difference of the median row.

    Keys or blocks that tie but for rounding may be swapped. That is rare, and moves less than leaving keys out does.
    """
    error = np.abs(got - wanted).max(axis=1)
    median = float(np.median(error))
    if not median <= allowed or not (error <= allowed + np.abs(wanted - dense).max(axis=1)).all():
        raise _disagreement(where, float(error.max()), allowed)
    return median


def _disagreement(where: str, error: float, allowed: float) -> ArtefactError:
    return ArtefactError(
        f"model.onnx: expected logits within {allowed:.1e} of MLX's, got {error:.1e} with {where}. Nothing was kept; "
        "please report the model and the command."
    )


def _steps(path: Path, tokens: Array, batch: int | None) -> list[Array]:
    """Logits after the prompts, and after one more token, on stock ONNX Runtime.

    Args:
        batch: rows that the file is fixed to, one token at a time; None if it is not.
    """
    rows = batch or len(tokens)
    file = File(path)
    cuts = [*range(PROMPT + 2)] if batch else [0, PROMPT, PROMPT + 1]
    found: list[list[Array]] = [[], []]
    for start in range(0, len(tokens), rows):
        group = tokens[start : start + rows]
        full = np.resize(group, (rows, PROMPT + 1))  # repeats rows
        file.start(rows)
        steps = [file(full[:, begin:end])[: len(group)] for begin, end in itertools.pairwise(cuts)]
        for into, logits in zip(found, steps[-2:], strict=True):
            into.append(logits)
    return [np.concatenate(logits) for logits in found]
