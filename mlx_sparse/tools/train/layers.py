"""Train one layer on its collected texts, and report what its centroids and networks find in held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...artefact import Layer
from ...ops.kmeans import assign, fit
from .. import formats
from . import network
from .network import FEWEST_ROWS, Training, learns, train_layer
from .rows import Distances, Rows, Texts, best_distance, bucket_mass, long_range_rows

Array = npt.NDArray[Any]
ROUTERS = ("trained", "kmeans")
SELECTIVITIES = (0.05, 0.1, 0.2)
FEW = 16  # queries: a mean of fewer is too noisy


@dataclass(frozen=True)
class HeadReport:
    """One KV head.

    Attributes:
        rows: long-range queries that it was trained on; with too few it keeps the k-means router.
        long_range: share of the collected queries that are long-range.
        loss: KL divergence of each router from the targets of held-out queries, nats; empty without such queries.
        recall: of each router, at `SELECTIVITIES`.
        imbalance: (saap.13) of the held-out keys.
    """

    layer: int
    head: int
    rows: int
    long_range: float
    loss: dict[str, float]
    recall: dict[str, list[float]]
    imbalance: float


def table(heads: Sequence[HeadReport]) -> str:
    """Return Markdown: a line per head, and their mean."""
    at = [f"{share:.0%}" for share in SELECTIVITIES]
    header = ["layer", "head", "rows", *(f"loss {name}" for name in ROUTERS)]
    header += [f"{name} {share}" for name in ROUTERS for share in at] + ["imbalance"]
    lines = []
    for found in heads:
        cells = [str(found.layer), str(found.head), f"{found.rows:,}"]
        cells += [f"{found.loss[name]:.3f}" if name in found.loss else "" for name in ROUTERS]
        cells += [f"{value:.3f}" for name in ROUTERS for value in found.recall[name]]
        lines.append([*cells, f"{found.imbalance:.2f}"])
    means = summary(heads)
    cells = ["mean", "", f"{means['rows']:,.0f}", *(f"{means['loss'].get(name, 0):.3f}" for name in ROUTERS)]
    cells += [f"{value:.3f}" for name in ROUTERS for value in means["recall"][name]]
    notes = [
        f"rows: queries trained on, which look far away; a head with fewer than {FEWEST_ROWS} routes by its centroids.",
        "The rest is of text that was not trained on. loss: KL divergence from where long-range attention goes.",
        "ROUTER N%: what share of that attention is found by visiting N% of the keys that are not attended anyway;",
        "kmeans routes by the centroids, the baseline. imbalance: 1 if all buckets are equal.",
    ]
    return "\n".join([formats.table(header, [*lines, [*cells, ""]]), "", *notes])


def summary(heads: Sequence[HeadReport]) -> dict[str, Any]:
    """Return the means of rows, losses and recall over the heads."""
    losses = {name for found in heads for name in found.loss}
    return {
        "rows": mean(found.rows for found in heads),
        "loss": {name: mean(found.loss[name] for found in heads if name in found.loss) for name in sorted(losses)},
        "recall": {
            name: [mean(found.recall[name][i] for found in heads) for i in range(len(SELECTIVITIES))]
            for name in heads[0].recall
        },
    }


def as_dict(heads: Sequence[HeadReport]) -> dict[str, Any]:
    """Return the heads and their means as plain data for JSON."""
    return {"selectivities": list(SELECTIVITIES), "mean": summary(heads), "heads": [asdict(found) for found in heads]}


POINTS = 256  # keys per bucket that k-means looks at, as in Faiss
MOST_HELD_OUT = 1024  # queries of a held-out text that are looked at
MOST_REPORTED = 2048  # of all held-out texts, to bound memory


@dataclass(frozen=True)
class Recipe:
    """Parameters of one layer's training.

    Attributes:
        training: of the query networks.
        most_rows: per head; ``2 * most_rows * buckets`` bytes of targets per head are held in memory.
    """

    buckets: int
    distances: Distances
    training: Training
    most_rows: int
    seed: int


def make_layer(texts: Texts, recipe: Recipe, *, progress: Any = None) -> tuple[Layer, list[Rows]]:
    """Return pre-RoPE centroids and query networks in float16, and the training rows of each head."""
    centroids = make_centroids(texts, recipe)
    ids = bucket_ids(texts.keys_before, centroids)
    rows = [head_rows(texts, ids, head, recipe) for head in range(texts.heads)]
    layer = train_layer(rows, centroids, recipe.training, scale=texts.scale, progress=progress)
    return Layer(**{name: array.astype(mx.float16) for name, array in layer.arrays().items()}), rows


def make_centroids(texts: Texts, recipe: Recipe) -> Array:
    """Cluster the pre-RoPE keys of all texts but sinks: ``(Hkv, C, D)``."""
    keys = texts.keys_before
    return np.stack([_head_centroids(keys[:, head], recipe) for head in range(texts.heads)])


def _head_centroids(keys: Array, recipe: Recipe) -> Array:
    """Return centroids ``(C, D)`` of one head's ``keys (W, S, D)``. Only the keys that k-means looks at are read."""
    windows, S, D = keys.shape
    random, sinks = np.random.default_rng(recipe.seed), recipe.distances.sink_tokens
    share = min(-(-POINTS * recipe.buckets // windows), S - sinks)
    found = np.empty((windows, share, D), np.float32)
    for window in range(windows):
        rows = np.arange(sinks, S)
        if len(rows) > share:
            rows = np.sort(random.choice(rows, share, replace=False))
        found[window] = keys[window][rows]
    return fit_centroids(found.reshape(-1, D), recipe.buckets, seed=recipe.seed)


def fit_centroids(keys: Array, buckets: int, *, seed: int = 0) -> Array:
    """Return unit centroids ``(C, D)`` of ``keys (n, D)`` without sinks.

    Raises:
        ConfigError: more buckets than keys.
    """
    if len(keys) > POINTS * buckets:
        keys = keys[np.sort(np.random.default_rng(seed).choice(len(keys), POINTS * buckets, replace=False))]
    return np.array(fit(mx.array(keys), buckets, seed=seed))


def bucket_ids(keys: Array, centroids: Array) -> Array:
    """Return ``(W, Hkv, S)`` int32, the buckets of ``keys (W, Hkv, S, D)``, one text and head in memory at a time."""
    ids = np.empty(keys.shape[:3], np.int32)
    for window, head in np.ndindex(*keys.shape[:2]):
        rows = mx.array(np.asarray(keys[window, head], np.float32))
        ids[window, head] = np.array(assign(rows, mx.array(centroids[head])))
    return ids


def head_rows(texts: Texts, ids: Array, head: int, recipe: Recipe) -> Rows:
    """Return the training rows of one head."""
    options: dict[str, Any] = {"buckets": recipe.buckets, "distances": recipe.distances, "seed": recipe.seed}
    return long_range_rows(texts, ids, head, most=recipe.most_rows, **options)


def report_layer(number: int, texts: Texts, layer: Layer, rows: Sequence[Rows], recipe: Recipe) -> list[HeadReport]:
    """Report what the networks and the centroids find in held-out ``texts``."""
    texts = texts.thinned(min(MOST_HELD_OUT, max(MOST_REPORTED // len(texts.positions), 1)))
    centroids = np.array(layer.centroids.astype(mx.float32))
    ids = bucket_ids(texts.keys_before, centroids)
    found = []
    for head in range(texts.heads):
        before = index(texts, ids, head, buckets=recipe.buckets, distances=recipe.distances)
        queries = grouped_queries(texts, head)
        scores = {
            "trained": router_scores(queries, layer, head),
            "kmeans": centroid_scores(queries, layer, head, scale=texts.scale),
        }
        curves = {name: curve(before, score, recipe.distances) for name, score in scores.items()}
        recall = {name: np.interp(SELECTIVITIES, *line).tolist() for name, line in curves.items()}
        held_out = head_rows(texts, ids, head, recipe)
        found.append(
            HeadReport(
                number,
                head,
                len(rows[head].queries),
                len(held_out.queries) / held_out.seen,
                losses(held_out, layer, head, texts.scale, rows[head]),
                recall,
                imbalance(ids[:, head], recipe),
            )
        )
    return found


# Recall (saap.12): a query of a held-out text sees the keys before it, as in a decode step.


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


def curve(indexed: Indexed, scores: Array, distances: Distances) -> tuple[Array, Array]:
    """Visit the buckets with the largest ``scores (n, C)`` first, from no bucket to all of them.

    Returns:
        Selectivity ``(C + 1,)``, the share of the far keys in the visited buckets, mean over positions. Recall
        ``(C + 1,)``, the share of a query's far attention on these keys, mean over the queries that look far away, or
        over all queries if fewer than `FEW` do.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    keys = np.take_along_axis(indexed.keys, order, axis=1).cumsum(axis=1)
    mass = np.take_along_axis(indexed.mass.astype(np.float64), order[:, None], axis=2).cumsum(axis=2)
    share = mass / np.maximum(mass[..., -1:], 1e-30)
    looks_far = indexed.distance > distances.farthest_top
    looks_far = looks_far if looks_far.sum() >= FEW else np.ones_like(looks_far)
    selectivity, recall = (keys / np.maximum(keys[:, -1:], 1)).mean(axis=0), share[looks_far].mean(axis=0)
    return np.concatenate([[0.0], selectivity]), np.concatenate([[0.0], recall])


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


def losses(rows: Rows, layer: Layer, head: int, scale: float, trained_on: Rows) -> dict[str, float]:
    """Return KL(target || router) in nats, mean over ``rows``, of both routers; empty without rows.

    Args:
        trained_on: training rows of the network.
    """
    if not len(rows.queries):
        return {}
    queries, target = mx.array(rows.queries)[None], mx.array(rows.target).astype(mx.float32)[None]
    of = {name: array[head : head + 1].astype(mx.float32) for name, array in layer.arrays().items()}
    # The network before it was divided by the sizes of the buckets; the k-means router was not divided.
    share = trained_on.share if learns(trained_on) else np.ones_like(trained_on.share)
    logits = {
        "trained": network.logits(of, queries) + mx.log(mx.array(share)),
        "kmeans": scale * queries @ of["centroids"].swapaxes(-1, -2),
    }
    entropy = -(target * mx.log(mx.maximum(target, 1e-30))).sum(axis=-1).mean()
    found = {name: network.cross_entropy(x, target)[0] - entropy for name, x in logits.items()}
    return {name: float(np.array(value)) for name, value in found.items()}


def imbalance(ids: Array, recipe: Recipe) -> float:
    """(saap.13) Return the imbalance of the keys behind the sinks, ``ids (W, S)``."""
    sizes = np.bincount(ids[:, recipe.distances.sink_tokens :].ravel(), minlength=recipe.buckets).astype(np.float64)
    return float(recipe.buckets * (sizes**2).sum() / sizes.sum() ** 2)
