"""Compute the bytes that a decode step reads, the memory of the caches, and the largest possible speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..calibrate.timing import Layer
from ..core.base import Method
from ..lm import seam
from ..lm.call import active
from ..model_info import leaves, new_caches, weights_read

FULL, WINDOW, LINEAR, LATENT = "full", "window", "linear", "latent"


@dataclass(frozen=True)
class LayerCache:
    """Kind and size of one layer's cache for one sequence.

    Attributes:
        kind: `FULL`, `WINDOW`, `LINEAR` (a state of fixed size) or `LATENT` (compressed keys and values).
        per_token: bytes that each token adds to the cache.
        fixed: bytes of the cache that do not depend on the number of tokens.
        window: maximum number of tokens in the cache; None if there is no limit.
        readers: number of layers that read the cache in a decode step.
    """

    kind: str
    per_token: int = 0
    fixed: int = 0
    window: int | None = None
    readers: int = 1

    def nbytes(self, S: int) -> int:
        return self.fixed + self.per_token * (S if self.window is None else min(S, self.window))

    def __str__(self) -> str:
        return self.kind + (f" of {self.window:,} tokens" if self.window else "")


@dataclass(frozen=True)
class Served:
    """A method with resolved settings, a layer shape, and the number of layers of this shape that use the method."""

    config: Method
    layer: Layer
    layers: int

    def dense_bytes(self, S: int) -> int:
        step = self.layer.step
        return self.layers * step.heads * step.itemsize * (S + 1) * (step.D + step.value_dim)

    def saved(self, S: int) -> int:
        """Return how many bytes fewer the method moves than dense attention in a decode step at ``S`` keys.

        If the method attends to all keys, return 0.
        """
        if S <= self.config.attended:
            return 0
        step = self.layer.step
        moved = self.config.elements(S, step.D, step.buckets) - self.config.value_rows(S) * (step.D - step.value_dim)
        return max(0, self.dense_bytes(S) - self.layers * step.heads * step.itemsize * moved)


@dataclass(frozen=True)
class Traffic:
    """Memory that a decode step reads for one sequence: weights and caches."""

    weights: int
    caches: tuple[LayerCache, ...]

    def kv(self, S: int) -> int:
        """Return the bytes that a decode step reads from the caches at ``S`` tokens."""
        return sum(cache.readers * cache.nbytes(S) for cache in self.caches)

    def nbytes(self, S: int) -> int:
        return sum(cache.nbytes(S) for cache in self.caches)

    def share(self, S: int) -> float:
        """Return the caches' share of all bytes that a decode step reads at ``S`` tokens."""
        return self.kv(S) / (self.weights + self.kv(S))

    def bound(self, S: int, served: Iterable[Served]) -> float:
        """Return an upper bound on a decode step's speed-up at ``S`` tokens if the layers in ``served`` are sparse."""
        total = self.weights + self.kv(S)
        return total / max(1, total - sum(one.saved(S) for one in served))


def traffic_of(model: nn.Module) -> Traffic:
    """Return the traffic of a loaded model on which `enable` was not called. No array is evaluated."""
    return Traffic(weights_read(model), layer_caches(model))


class _Readers:
    """Counter of the attention calls that read each cache. All calls stay dense.

    A layer can use the cache of a different layer. Such a layer may pass to `attend` only the keys and not the cache.
    The key array then identifies the cache.
    """

    def __init__(self, caches: list[object]) -> None:
        self.indices = {id(cache): index for index, cache in enumerate(caches)}
        self.keys: dict[int, tuple[object, int]] = {}  # keeps the keys alive, so that their ids stay unique
        self.calls: Counter[int] = Counter()

    def attend(
        self, queries: mx.array, keys: object, values: object, cache: object, scale: float, mask: object, sinks: object
    ) -> None:
        index = self.indices.get(id(cache), self.keys.get(id(keys), (None, -1))[1])
        self.keys.setdefault(id(keys), (keys, index))
        self.calls[index] += 1


def layer_caches(model: nn.Module) -> tuple[LayerCache, ...]:
    """Run ``model`` on one token, and return the kind and size of each layer's cache."""
    caches = new_caches(model)
    readers = _Readers(leaves(caches))
    places, token = seam.bind(model), active.set(readers)
    try:
        model(mx.zeros((1, 1), mx.int32), cache=caches)
    finally:
        active.reset(token)
        seam.unbind(places)
    return tuple(_layer_cache(leaf, max(1, readers.calls[index])) for index, leaf in enumerate(leaves(caches)))


def _layer_cache(leaf: Any, readers: int) -> LayerCache:
    """Return the kind and size of the cache ``leaf``. The cache contains one token, and ``readers`` layers read it."""
    keys, values = getattr(leaf, "keys", None), getattr(leaf, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array) or keys.ndim != 4:
        state: Any = tree_flatten(leaf.state)
        return LayerCache(LINEAR, fixed=sum(array.nbytes for _, array in state if isinstance(array, mx.array)))
    per_token = sum(rows.shape[1] * rows.shape[3] * rows.itemsize for rows in (keys, values))
    window = getattr(leaf, "max_size", None) or getattr(leaf, "chunk_size", None)
    latent = keys.shape[1] == 1 and keys.shape[3] != values.shape[3]
    return LayerCache(LATENT if latent else WINDOW if window else FULL, per_token, 0, window, readers)
