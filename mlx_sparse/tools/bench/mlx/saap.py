"""A decode step of SAAP: route, list and attend in every layer, and its share of listing keys anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from ....cache.kv_cache import SparseKVCache
from ....cache.saap_lists import attended_keys, fold
from ....cache.saap_router import Router, kmeans_network
from ....cache.saap_state import BucketIndex, index_of
from ....checks import check_int
from ....methods import Step, registry
from ....methods.stats import saap_elements
from ....oracle.saap import route_scores
from ..core import Case, Shape
from ..inputs import bucket_ids, network_weights
from .dense import cache_of, double, normal
from .steps import DecodeStep, Known, Layers, WrongChoice

BUCKETS = 1024
ROUTERS = {"2 D": 2, "1,024": 0}  # hidden units: so many times the head dim, or as many as the paper's
UNEVEN = 2  # times their share of the keys is in visited buckets
FOLDS = 3  # that are timed; their median counts
FAVOUR = 100.0  # the logit by which buckets are sure to be visited


def hidden_of(D: int, name: str) -> int:
    """Hidden units of the query network of this name among `ROUTERS`."""
    return ROUTERS[name] * D or 1024


@dataclass(frozen=True)
class _Unrotated:
    """Random keys need no RoPE."""

    irreversible: None = None

    def before(self, recorder: Any, rows: mx.array, offset: int | mx.array) -> mx.array:
        return rows

    def turned_back(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        return rows


def saap_steps(case: Case, config: Any, backend: str, layers: Layers | None) -> list[DecodeStep]:
    """One step for each of `ROUTERS`, or one without a network where centroids route."""
    units = [hidden_of(case.D, name) for name in ROUTERS] if config.mode == "trained" else [0]
    return [SaapStep(case, config, backend, layers, hidden) for hidden in units]


def buckets_of(config: Any) -> int:
    """How many there are: an artefact is not read."""
    return config.fitted_buckets if config.mode == "online" else BUCKETS


class SaapStep(DecodeStep):
    """A decode step of SAAP with a router of random weights, whose biases send every query to the same buckets.

    These hold `UNEVEN` times their share of the keys.

    Args:
        hidden: units of the query network of a KV head; 0 for centroids that route.
    """

    def __init__(self, case: Case, config: Any, backend: str, layers: Layers | None = None, hidden: int = 0) -> None:
        self.buckets, self.hidden = buckets_of(config), hidden
        self.every = max(self.buckets // (UNEVEN * config.probes), 2)
        super().__init__(case, config, backend, layers)

    @classmethod
    def check_config(cls, config: Any, shape: Shape) -> None:
        """Raise `ConfigError` unless there are buckets that are not visited."""
        check_int("probes", config.probes, 1, buckets_of(config) - 1)

    @property
    def label(self) -> str:
        return f"{self.config} ({self.hidden:,} hidden units)" if self.hidden else str(self.config)

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        B, Hkv, S, D = keys.shape
        C, H, scale = self.buckets, self.hidden, D**-0.5
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
        index.ids = mx.array(np.broadcast_to(bucket_ids(chosen, C, S, self.every), (B, Hkv, S)))
        fold([cache], S, self.config)
        return cache

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        """Attend as an enabled model does between two folds."""
        index = index_of(cache)
        assert index is not None
        indices, counts = attended_keys(index, queries, cache.length, self.config, None, self.backend)
        keys, values, length = cache.rows(self.backend)
        attend = registry.load("attend_indices", self.backend)
        out: mx.array = attend(queries, keys, values, indices, scale=self.case.scale, counts=counts, **length)[0]
        return out

    def once_in_a_while(self, caches: Sequence[SparseKVCache]) -> float:
        """The share of listing keys anew."""

        def once() -> float:
            start = time.perf_counter()
            fold(list(caches), caches[0].length, self.config)
            return time.perf_counter() - start

        return float(median(once() for _ in range(FOLDS)) / self.config.fold_every)

    def bytes(self) -> int:
        S, exact = self.case.S, self.config.attended
        visited = len(range(1, S, self.every)) * (S - exact) // S
        return self.case.rows * (saap_elements(self.case.D, exact + visited) * self.case.item + self.network)

    def sizes(self) -> Step:
        return replace(super().sizes(), buckets=self.buckets, network=self.network)

    @property
    def network(self) -> int:
        """Bytes of the query network of a KV head, in float16, or of centroids in the type of the keys."""
        return network_weights(self.case.D, self.hidden, self.buckets) * (2 if self.hidden else self.case.item)

    def known(self) -> Known:
        """The buckets have to be among the best of the oracle; attended are theirs and keys that are not listed."""
        queries, cache = self.random()
        index = index_of(cache)
        assert index is not None and index.lists is not None
        network = dict(index.network or {})
        route = registry.load("saap_route", self.backend)
        visited = np.array(route(queries, probes=self.config.probes, **network)).astype(np.int64)
        scores = route_scores(double(queries), **{name: double(array) for name, array in network.items()})
        missed = scores.copy()
        np.put_along_axis(missed, visited, -np.inf, axis=-1)
        chosen = np.take_along_axis(scores, visited, axis=-1)
        if (missed.max(axis=-1) - chosen.min(axis=-1) > 1e-4 * scores.max(axis=-1)).any():
            raise WrongChoice("other buckets")
        ids, position = np.array(index.ids), np.arange(self.case.S)
        exact = (position < self.config.sink_tokens) | (position >= index.lists.covered[0])
        rows = [
            [np.flatnonzero(exact | np.isin(own, seen)) for own, seen in zip(*one, strict=True)]
            for one in zip(ids, visited, strict=True)
        ]
        return queries, cache, rows
