"""Compute the logits of a model in MLX, and the tolerances for an exported file."""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_sparse.checks import ArtefactError, ConfigError

from .decoder import Target
from .families import window_of
from .methods import sample
from .methods.base import PROMPT, Step
from .weights import QUANTIZED

Array = np.ndarray
Attention = Callable[..., mx.array]

ATTENTION = "scaled_dot_product_attention"  # name of mlx-lm's attention function in model modules
ROWS = 3  # number of prompts
SLACK = 2  # ratio of tolerance to measured difference, because rounding errors can exceed the noise


@dataclass(frozen=True)
class FirstLayers:
    """Logits that MLX computes with only the first layers of a model. The prompt is longer than `Expected.tokens`.

    Attributes:
        layers: number of first layers that ran before the final norm and the head.
        chunks: token ids for successive calls, each of shape (rows, number of tokens).
        logits: logits (rows, vocabulary) with the sparse method.
        dense: logits (rows, vocabulary) with dense attention.
        error: tolerance for the median over rows of each row's largest logit difference.
    """

    layers: int
    chunks: list[Array]
    logits: Array
    dense: Array
    error: float


@dataclass(frozen=True)
class Expected:
    """Logits of MLX and the tolerances for an exported file.

    Attributes:
        tokens: token ids (rows, PROMPT + 1).
        logits: arrays (rows, vocabulary): after prefill, after a dense step with one more token, and after a sparse
            step with the same token. The last array is missing if the method is dense.
        rounded: tolerance for dense logits with the cache type of the file.
        dense: tolerance for dense logits with float32 caches.
        sparse: tolerance for sparse logits with float32 caches. It applies to the median over rows of each row's
            largest difference.
        sampled: results of the first layers for a prompt of several blocks; None if prefill is dense.
        coded: results of the first layers for a prompt and a step, each of which fills a group of int4 keys; None if no
            keys are int4.
    """

    tokens: Array
    logits: list[Array]
    rounded: float
    dense: float
    sparse: float
    sampled: FirstLayers | None = None
    coded: FirstLayers | None = None


def reference(model: nn.Module, target: Target) -> Expected:
    """Compute logits and tolerances on the CPU, because Metal's matrix products may be less exact than float32.

    This function rounds the parameters of ``model`` in place, as the exporter does for the file.
    """
    with mx.stream(mx.cpu), _layer_by_layer(model):
        return _reference(model, target)


def _reference(model: nn.Module, target: Target) -> Expected:
    _as_stored(model, target.dtype)
    tokens = np.random.default_rng(0).integers(0, model.model.embed_tokens.weight.shape[0], (ROWS, PROMPT + 1))
    embedding = model.model.embed_tokens = _Float32Embedding(model.model.embed_tokens)
    if "lm_head" in model:
        model.lm_head = _LastTokenHead(model.lm_head)
    # The rounding error of a sum of K products is about sqrt(K) / 2 ulp, and the errors of the layers add up.
    products = [_columns(module) for _, module in model.named_modules() if isinstance(module, (nn.Linear, *QUANTIZED))]
    noise = 2.0**-24 * math.sqrt(max(products) * len(products))
    short = target.shortened()
    runs = []
    for embedding.noise in (0.0, noise):
        cache = make_prompt_cache(model)
        with _sparse(model, short):
            prompted = _run(model, tokens[:, :-1], cache)
            steps = [_run(model, tokens[:, -1:], copy.deepcopy(cache))] if short.decode.sparse_from is not None else []
        runs.append([prompted, _run(model, tokens[:, -1:], cache), *steps])
    exact, moved = runs
    if not all(np.isfinite(logits).all() for logits in exact):
        raise ArtefactError("--model: expected finite logits from MLX, got NaN or infinity. The model is damaged.")
    moves = [np.abs(a - b).max(axis=1) for a, b in zip(exact, moved, strict=True)]
    dense, lost = float(np.max(moves[:2])), 0.0
    embedding.noise = 0.0
    if target.dtype != "float32":
        cache = make_prompt_cache(model)
        with _rounding(model, target.dtype):
            held = [_run(model, chunk, cache) for chunk in (tokens[:, :-1], tokens[:, -1:])]
        lost = largest(exact[:2], held)
        if not math.isfinite(lost):
            raise ConfigError(f"--dtype: expected a type with the range of keys and values, got {target.dtype}.")
    sampled = coded = None
    if short.prompts is not None:
        sampled = _run_first_layers(model, short, min(sample.SHORT_PROMPT, target.max_length), 0, noise)
    group = target.decode.group
    if group and target.capacity >= group:
        coded = _run_first_layers(model, short, min(2, target.capacity // group) * group, 1, noise)
    bounds = SLACK * (dense + lost), SLACK * dense, SLACK * float(np.median(moves[-1]))
    return Expected(tokens, exact, *bounds, sampled, coded)


def _run_first_layers(model: nn.Module, short: Target, count: int, last: int, noise: float) -> FirstLayers:
    """Run the first layers on ``count`` random tokens. The final ``last`` tokens run in a separate call.

    The tolerance comes from a second run, which adds relative ``noise`` to the embeddings.
    """
    embedding = model.model.embed_tokens
    tokens = np.random.default_rng(1).integers(0, embedding.inner.weight.shape[0], (ROWS, count))
    chunks = np.split(tokens, [count - last], axis=1) if last else [tokens]
    # An error in a sparse layer changes the last row only through later layers.
    unbounded = [i for i, layer in enumerate(model.layers) if not window_of(layer, model)]
    layers = min(len(model.layers), (unbounded[:2] or [0])[-1] + 2)
    runs = []
    caches = [make_prompt_cache(model) for _ in range(3)]  # for all layers, because models read layer types here
    with _replaced((model.model, "layers", model.model.layers[:layers])):  # skip the other layers
        with _sparse(model, short):
            for embedding.noise in (noise, 0.0):
                runs.append(_run_chunks(model, chunks, caches.pop()))
        moved, exact = runs
        dense = _run_chunks(model, chunks, caches.pop())
    error = SLACK * float(np.median(np.abs(exact - moved).max(axis=1)))
    return FirstLayers(layers, chunks, exact, dense, error)


@contextmanager
def _replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Set attributes ``(object, name, value)`` during a ``with`` block, and then restore their old values."""
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for original in before:
            setattr(*original)


def _columns(module: nn.Module) -> int:
    if isinstance(module, QUANTIZED):
        return int(module.scales.shape[1] * module.group_size)
    return int(module.weight.shape[1])


def largest(found: Sequence[Array], wanted: Sequence[Array]) -> float:
    """Return the largest absolute difference between two lists of arrays, or NaN if any difference is NaN."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)]))


def _as_stored(model: nn.Module, dtype: str) -> None:
    """Round the matrices of a model to the type of the exported file, and convert vectors and scales to float32."""

    def stored(name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        matrix = array.ndim == 2 and name.endswith(".weight")
        if matrix and dtype == "float32":
            return array  # MLX computes products with float32 activations in float32
        return array.astype(getattr(mx, dtype) if matrix else mx.float32)

    model.update(tree_map_with_path(stored, model.parameters()))


class _Float32Embedding(nn.Module):
    """Embedding that returns float32, so that all later activations are float32. Relative ``noise`` is added."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.noise = 0.0

    def __call__(self, ids: mx.array) -> mx.array:
        rows: mx.array = self.inner(ids).astype(mx.float32)
        return rows * (1 + self.noise * mx.random.normal(rows.shape, key=mx.random.key(0)))

    def as_linear(self, x: mx.array) -> mx.array:
        logits: mx.array = self.inner.as_linear(x[:, -1:])
        return logits


class _LastTokenHead(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self.inner(x[:, -1:])
        return logits


def _layer_by_layer(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that evaluates layers one by one, so that only one layer has float32 weights in memory."""
    layer = type(model.layers[0])
    original = layer.__call__

    def call(self: nn.Module, *args: object, **kwargs: object) -> mx.array:
        out: mx.array = original(self, *args, **kwargs)
        mx.eval(out)
        mx.clear_cache()
        return out

    return _replaced((layer, "__call__", call))


class _RecordedRope:
    """RoPE module that appends its layer number and each input to ``seen``."""

    def __init__(self, inner: nn.Module, layer: int, seen: deque[tuple[int, mx.array]]) -> None:
        self._inner, self._layer, self._seen = inner, layer, seen

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> object:
        self._seen.append((self._layer, x))
        return self._inner(x, *args, **kwargs)


def _sparse(model: nn.Module, short: Target) -> AbstractContextManager[None]:
    """Return a context in which the layers that are sparse in the file call `mlx_sparse` instead of mlx-lm's attention.

    The prompt before a decode step must run in a single call.
    """
    seen: deque[tuple[int, mx.array]] = deque(maxlen=2)  # the last two inputs of RoPE: a query, then keys
    windows = [window_of(layer, model) for layer in model.layers]
    prompt_keys: dict[int, mx.array] = {}
    prompts, decode = short.prompts, short.decode

    def attention(original: Attention) -> Attention:
        def attend(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, **others: object) -> mx.array:
            (layer, query), (_, new) = seen
            L = queries.shape[2]
            if L > 1:
                prompt_keys[layer] = new
            if L == 1 and decode.sparse_from is not None and decode.supports(layer) and not windows[layer]:
                before = query, mx.concatenate([prompt_keys[layer], new], axis=2)
                return decode.attend(Step(layer, queries, keys, values, before, scale))
            if prompts is not None and L > prompts.block_size and not windows[layer]:
                return sample.attend(prompts, queries, keys, values, scale)
            return original(queries, keys, values, scale=scale, **others)

        return attend

    attentions = [layer.self_attn for layer in model.layers]
    ropes = [(module, "rope", _RecordedRope(module.rope, i, seen)) for i, module in enumerate(attentions)]
    return _replaced(*ropes, *_attention_of(model, attention))


def _rounding(model: nn.Module, dtype: str) -> AbstractContextManager[None]:
    """Return a context in which mlx-lm's attention rounds its inputs and outputs to ``dtype``."""
    kind = getattr(mx, dtype)

    def rounded(array: mx.array) -> mx.array:
        return array.astype(kind).astype(mx.float32)

    def attention(original: Attention) -> Attention:
        return lambda queries, *args, **kwargs: rounded(original(rounded(queries), *args, **kwargs))

    def append(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, keys, values: original(self, rounded(keys), rounded(values))

    caches = [(kind, "update_and_fetch", append(kind.update_and_fetch)) for kind in (KVCache, RotatingKVCache)]
    return _replaced(*caches, *_attention_of(model, attention))


def _attention_of(model: nn.Module, wrap: Callable[[Attention], Attention]) -> list[tuple[object, str, Attention]]:
    """Return the changes for `_replaced` that wrap mlx-lm's attention function in all modules of a model."""
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), ATTENTION)]
    return [(module, ATTENTION, wrap(getattr(module, ATTENTION))) for module in modules]


def _run_chunks(model: nn.Module, chunks: Sequence[Array], cache: list[object]) -> Array:
    return [_run(model, chunk, cache) for chunk in chunks][-1]


def _run(model: nn.Module, tokens: Array, cache: list[object]) -> Array:
    return np.array(model(mx.array(tokens), cache=cache)[:, -1])
