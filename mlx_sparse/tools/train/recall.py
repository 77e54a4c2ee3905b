"""Measure the share of far attention that a router finds, and the keys that it reads: docs/spec/saap.md, (saap.12).

A query of a held-out text sees the keys before it, as in a decode step. Sinks and recent keys are always attended; the
other keys are found if the router visits their buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...artefact import Layer
from . import network
from .rows import Distances, Texts, best_distance, bucket_mass

Array = npt.NDArray[Any]
SELECTIVITIES = (0.05, 0.1, 0.2)
FEW = 16  # queries: a mean of fewer is too noisy


@dataclass(frozen=True)
class Indexed:
    """One KV head's queries in texts whose keys are in buckets.

    Attributes:
        mass: ``(n, G, C)`` share of each query's whole attention in each bucket of far keys.
        keys: ``(n, C)`` number of far keys in each bucket at the query's position.
        distance: ``(n, G)`` from the query to its best key.
    """

    mass: Array
    keys: Array
    distance: Array


@dataclass(frozen=True)
class Curve:
    """Recall against selectivity, from no bucket to all of them.

    Attributes:
        selectivity: ``(C + 1,)`` share of the far keys in the visited buckets, mean over positions.
        recall: ``(C + 1,)`` share of a query's far attention that is on them, mean over the queries that look far
            away; over all queries where fewer than `FEW` do.
    """

    selectivity: Array
    recall: Array

    def at(self, selectivity: float) -> float:
        """Return the recall at a selectivity between those that whole buckets give."""
        return float(np.interp(selectivity, self.selectivity, self.recall))


def index(texts: Texts, ids: Array, head: int, *, buckets: int, distances: Distances) -> Indexed:
    """Index the held-out texts of one KV head, whose keys are in the buckets ``ids (W, Hkv, S)``."""
    G = texts.queries_after.shape[1] // texts.heads
    mass, keys, distance = [], [], []
    for window, positions in enumerate(texts.positions):
        queries = texts.group(texts.queries_after, window, head)
        rows, at = queries.reshape(-1, queries.shape[-1]), np.tile(positions, G)
        own = texts.keys_after[window, head]
        options: dict[str, Any] = {"buckets": buckets, "distances": distances, "scale": texts.scale}
        found = bucket_mass(rows, own, ids[window, head], at, **options)
        mass.append(found.reshape(G, len(positions), buckets).swapaxes(0, 1))
        distance.append(best_distance(rows, own, at, distances=distances).reshape(G, len(positions)).T)
        keys.append(keys_per_bucket(ids[window, head], positions, buckets, distances))
    return Indexed(np.concatenate(mass), np.concatenate(keys), np.concatenate(distance))


def keys_per_bucket(ids: Array, positions: Array, buckets: int, distances: Distances) -> Array:
    """Count the far keys of each bucket before each of the ascending ``positions``, ``(n, C)``."""
    counts = np.zeros((len(positions), buckets), np.int64)
    covered = distances.sink_tokens
    for row, position in enumerate(positions):
        end = max(int(position) - distances.recent_tokens + 1, covered)
        counts[row] = np.bincount(ids[covered:end], minlength=buckets)
        covered = end
    return counts.cumsum(axis=0)


def curve(indexed: Indexed, scores: Array, distances: Distances) -> Curve:
    """Return the recall of visiting the buckets with the largest ``scores (n, C)`` first, at each position."""
    order = np.argsort(-scores, axis=1, kind="stable")
    keys = np.take_along_axis(indexed.keys, order, axis=1).cumsum(axis=1)
    mass = np.take_along_axis(indexed.mass.astype(np.float64), order[:, None], axis=2).cumsum(axis=2)
    share = mass / np.maximum(mass[..., -1:], 1e-30)
    looks_far = indexed.distance > distances.farthest_top
    looks_far = looks_far if looks_far.sum() >= FEW else np.ones_like(looks_far)
    values = (
        (keys / np.maximum(keys[:, -1:], 1)).mean(axis=0),
        share[looks_far].mean(axis=0),
    )
    return Curve(*(np.concatenate([[0.0], value]) for value in values))


def router_scores(queries: Array, layer: Layer, head: int) -> Array:
    """(saap.8) Return ``(n, C)``, the probability of each bucket for ``queries (G, n, D)``, summed over the group."""
    of = {name: array[head : head + 1].astype(mx.float32) for name, array in layer.arrays().items()}
    return _summed(network.logits(of, mx.array(queries.reshape(1, -1, queries.shape[-1]))), queries)


def centroid_scores(queries: Array, layer: Layer, head: int, *, scale: float) -> Array:
    """Return the `router_scores` of the centroids, the baseline: logits are ``scale`` times the inner products."""
    rows = mx.array(queries.reshape(1, -1, queries.shape[-1]))
    return _summed(scale * rows @ layer.centroids[head].astype(mx.float32).T, queries)


def _summed(logits: mx.array, queries: Array) -> Array:
    probabilities = mx.softmax(logits, axis=-1).reshape(queries.shape[0], queries.shape[1], -1)
    return np.array(probabilities.sum(axis=0))


def grouped_queries(texts: Texts, head: int) -> Array:
    """Return ``(G, n, D)``, the pre-RoPE queries of all texts in the order of `Indexed`."""
    source = texts.queries_before
    return np.concatenate([texts.group(source, window, head) for window in range(len(source))], axis=1)
