"""A decode step of SAAP: route, list and attend in every layer, and its share of listing keys anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from ....cache.kv_cache import SparseKVCache
from ....cache.saap_router import Router, kmeans_network
from ....cache.saap_state import BucketIndex, fold, index_of
from ....checks import check_int
from ....common.stats import saap_elements
from ....methods import SAAP, Step, registry
from ....oracle.saap import route_scores
from ..core import Shape
from .dense import cache_of, double
from .methods import DecodeStep, Known, WrongChoice, normal

BUCKETS = 1024
ROUTERS = {"2 D": 2, "1,024": 0}  # hidden units: so many times the head dim, or as many as the paper's
UNEVEN = 2  # times their share of the keys is in visited buckets
FOLDS = 3  # that are timed; their median counts
FAVOUR = 100.0  # the logit by which buckets are sure to be visited


@dataclass(frozen=True)
class Network:
    """The query network of a KV head; ``hidden`` is 0 for centroids that route."""

    buckets: int
    hidden: int

    def weights(self, D: int) -> int:
        """Numbers in it."""
        C, H = self.buckets, self.hidden
        return D * H + H + H * C + C if H else D * C + C


def network_of(shape: Shape, hidden: str) -> Network:
    """The query network of this name among `ROUTERS`."""
    return Network(BUCKETS, ROUTERS[hidden] * shape.D or 1024)


@dataclass(frozen=True)
class _Unrotated:
    """Random keys need no RoPE."""

    irreversible: None = None

    def before(self, recorder: Any, rows: mx.array, offset: int | mx.array) -> mx.array:
        return rows

    def turned_back(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        return rows


def saap_steps(config: SAAP, backend: str, shape: Shape) -> list[DecodeStep]:
    """One step for each of `ROUTERS`, or one without a network where centroids route."""
    if config.mode == "trained":
        return [SaapStep(config, backend, shape, network_of(shape, hidden)) for hidden in ROUTERS]
    return [SaapStep(config, backend, shape, Network(buckets_of(config), 0))]


def buckets_of(config: SAAP) -> int:
    """How many there are: an artefact is not read."""
    return config.fitted_buckets if config.mode == "online" else BUCKETS


def check_probes(config: SAAP) -> None:
    """Raise `ConfigError` unless there are buckets that are not visited."""
    check_int("probes", config.probes, 1, buckets_of(config) - 1)


class SaapStep(DecodeStep):
    """A decode step of SAAP with a router of random weights, whose biases send every query to the same buckets.

    These hold `UNEVEN` times their share of the keys.
    """

    config: SAAP

    def __init__(self, config: SAAP, backend: str, shape: Shape, network: Network) -> None:
        super().__init__(config, backend, shape)
        self.network = network

    @property
    def label(self) -> str:
        units = f" ({self.network.hidden:,} hidden units)" if self.network.hidden else ""
        return f"{self.config}{units}"

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        B, Hkv, S, D = keys.shape
        C, H, scale = self.network.buckets, self.network.hidden, D**-0.5
        chosen = np.stack([np.random.default_rng(h).permutation(C)[: self.config.probes] for h in range(Hkv)])
        bias = np.zeros((Hkv, C), np.float16)
        np.put_along_axis(bias, chosen, FAVOUR, axis=1)
        centroids = normal(1, Hkv, C, D, keys.dtype)[0]
        weights = kmeans_network(centroids, scale)
        if H:
            weights = {
                "hidden_weight": normal(1, Hkv, D, H, mx.float16)[0] * scale,
                "hidden_bias": normal(1, 1, Hkv, H, mx.float16)[0, 0],
                "out_weight": normal(1, Hkv, H, C, mx.float16)[0] * H**-0.5,
            }
        weights["out_bias"] = mx.array(bias)
        mx.eval(weights)
        cache = cache_of(keys, values)
        index = BucketIndex(Router(_Unrotated(), scale, C, centroids, weights))
        cache.hold(self.config.name, index)
        every = max(C // (UNEVEN * self.config.probes), 2)
        ids, key = np.empty((Hkv, S), np.int16), np.arange(S)
        for row, own in zip(ids, chosen, strict=True):
            others = np.setdiff1d(np.arange(C), own)
            row[:] = np.where(key % every == 1, own[key // every % len(own)], others[key % len(others)])
        index.ids = mx.array(np.broadcast_to(ids, (B, Hkv, S)))
        fold([cache], S, self.config)
        return cache

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        """Attend as an enabled model does between two folds."""
        index = index_of(cache)
        assert index is not None
        indices, counts = index.lists(queries, cache.length, self.config, None, self.backend)
        keys, values, length = cache.rows(self.backend)
        attend = registry.load("attend_indices", self.backend)
        scale = queries.shape[-1] ** -0.5
        out: mx.array = attend(queries, keys, values, indices, scale=scale, counts=counts, **length)[0]
        return out

    def upkeep(self, caches: Sequence[SparseKVCache]) -> float:
        """The share of listing keys anew."""

        def once() -> float:
            start = time.perf_counter()
            fold(list(caches), caches[0].length, self.config)
            return time.perf_counter() - start

        return median(once() for _ in range(FOLDS)) / self.config.fold_every

    def bytes(self, B: int, S: int, item: int) -> int:
        every = max(self.network.buckets // (UNEVEN * self.config.probes), 2)
        exact = self.config.attended
        visited = len(range(1, S, every)) * (S - exact) // S
        return B * self.shape.Hkv * (saap_elements(self.shape.D, exact + visited) * item + self._network(item))

    def sizes(self, B: int, item: int) -> Step:
        found = super().sizes(B, item)
        return Step(found.heads, found.G, found.D, item, found.gpu, self.network.buckets, self._network(item))

    def known(self, B: int, S: int, dtype: mx.Dtype) -> Known:
        """The buckets have to be among the best of the oracle; attended are theirs and keys that are not listed."""
        queries, cache = self._random(B, S, dtype)
        index = index_of(cache)
        assert index is not None
        assert index.ids is not None
        network = dict(index.network or {})
        route = registry.load("saap_route", self.backend)
        visited = np.array(route(queries, probes=self.config.probes, **network)).astype(np.int64)
        scores = route_scores(double(queries), **{name: double(array) for name, array in network.items()})
        missed = scores.copy()
        np.put_along_axis(missed, visited, -np.inf, axis=-1)
        chosen = np.take_along_axis(scores, visited, axis=-1)
        if (missed.max(axis=-1) - chosen.min(axis=-1) > 1e-4 * scores.max(axis=-1)).any():
            raise WrongChoice("other buckets")
        ids, position = np.array(index.ids), np.arange(S)
        exact = (position < self.config.sink_tokens) | (position >= index.covered[0])
        heads = range(self.shape.Hkv)
        rows = [[np.flatnonzero(exact | np.isin(ids[b, h], visited[b, h])) for h in heads] for b in range(B)]
        return queries, cache, rows

    def _network(self, item: int) -> int:
        """Bytes of the query network of a KV head, in float16, or of centroids in the type of the keys."""
        return self.network.weights(self.shape.D) * (2 if self.network.hidden else item)
