"""Train one layer on its collected texts, and measure the recall of its routers on held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ...methods.saap.artefact import Layer
from ...methods.saap.kmeans import fit, saap_assign
from .. import terminal
from . import network
from .network import MIN_ROWS, Training, has_enough_rows, train_layer
from .rows import Distances, Rows, Texts, best_distance, bucket_mass, long_range_rows

if TYPE_CHECKING:
    from ..progress import Bar

Array = np.ndarray
ROUTERS = ("trained", "kmeans")
SELECTIVITIES = (0.05, 0.1, 0.2)
FEW = 16  # queries; the mean of fewer queries is too noisy


@dataclass(frozen=True)
class HeadReport:
    """Training and held-out statistics of one KV head.

    Attributes:
        rows: number of training rows. Each row is a long-range query. If there are fewer than `MIN_ROWS` rows, the head
            keeps the k-means router.
        long_range: share of the held-out queries that are long-range.
        loss: dict from each router to KL(target || router) in nats, averaged over the long-range held-out queries;
            empty if no held-out query is long-range.
        recall: dict from each router to its attention recall at each of `SELECTIVITIES`.
        imbalance: imbalance factor of the held-out keys (saap.13), which is 1 if all buckets have equal size.
    """

    layer: int
    head: int
    rows: int
    long_range: float
    loss: dict[str, float]
    recall: dict[str, list[float]]
    imbalance: float


def table(heads: Sequence[HeadReport]) -> str:
    """Return a table with one line per head, and a last line with the means over all heads."""
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
        f"rows: long-range queries used for training; a head with fewer than {MIN_ROWS} routes by its centroids.",
        "The other columns use held-out text. loss: KL divergence from the long-range attention per bucket.",
        "ROUTER N%: share of the long-range attention on the visited keys, if N% of the keys that are not always",
        "attended are visited. kmeans: baseline that routes by centroids. imbalance: 1 if all buckets have equal size.",
    ]
    return "\n".join([terminal.table(header, [*lines, [*cells, ""]], keys=2), "", terminal.fill(*notes)])


def summary(heads: Sequence[HeadReport]) -> dict[str, Any]:
    """Return a dict of the number of rows, the losses and the recall. Each value is averaged over all heads."""
    losses = {name for found in heads for name in found.loss}
    return {
        "rows": mean(found.rows for found in heads),
        "loss": {name: mean(found.loss[name] for found in heads if name in found.loss) for name in sorted(losses)},
        "recall": {
            name: [mean(found.recall[name][i] for found in heads) for i in range(len(SELECTIVITIES))]
            for name in heads[0].recall
        },
    }


def as_dict(heads: Sequence[HeadReport]) -> dict[str, object]:
    """Return the reports of all heads and the means over all heads as a dict for JSON."""
    return {"selectivities": list(SELECTIVITIES), "mean": summary(heads), "heads": [asdict(found) for found in heads]}


POINTS = 256  # keys per bucket for k-means, as in Faiss
MAX_HELD_OUT = 1024  # largest number of queries from one held-out text
MAX_REPORTED = 2048  # largest number of queries from all held-out texts, to limit memory


@dataclass(frozen=True)
class Recipe:
    """Training parameters for one layer.

    Attributes:
        distances: minimum distances in tokens at which keys are far and queries are long-range.
        max_rows: largest number of training rows per head. The targets take ``2 * max_rows * buckets`` bytes per head.
    """

    buckets: int
    distances: Distances
    training: Training
    max_rows: int
    seed: int


def make_layer(texts: Texts, recipe: Recipe, *, progress: Bar | None = None) -> tuple[Layer, list[Rows]]:
    """Train one layer. Return centroids and query networks in float16, and the training rows of each KV head."""
    centroids = make_centroids(texts, recipe)
    if not recipe.training.steps:
        recipe = replace(recipe, max_rows=0)  # a head without rows keeps the k-means router
    ids = bucket_ids(texts.pre_rope_keys, centroids)
    rows = [head_rows(texts, ids, head, recipe) for head in range(texts.heads)]
    layer = train_layer(rows, centroids, recipe.training, scale=texts.scale, progress=progress)
    return Layer(**{name: array.astype(mx.float16) for name, array in layer.arrays().items()}), rows


def make_centroids(texts: Texts, recipe: Recipe) -> Array:
    """Cluster the pre-RoPE keys of each KV head in all texts. Return centroids ``(Hkv, C, D)``. Sinks are excluded."""
    keys = texts.pre_rope_keys
    return np.stack([_head_centroids(keys[:, head], recipe) for head in range(texts.heads)])


def _head_centroids(keys: Array, recipe: Recipe) -> Array:
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
    """Cluster ``keys (n, D)`` and return ``buckets`` centroids ``(C, D)`` of length 1. No key may be a sink."""
    if len(keys) > POINTS * buckets:
        keys = keys[np.sort(np.random.default_rng(seed).choice(len(keys), POINTS * buckets, replace=False))]
    return np.array(fit(mx.array(keys), buckets, seed=seed))


def bucket_ids(keys: Array, centroids: Array) -> Array:
    """Return int32 bucket ids ``(W, Hkv, S)`` of ``keys (W, Hkv, S, D)``. Load one head of one text at a time."""
    ids = np.empty(keys.shape[:3], np.int32)
    for window, head in np.ndindex(*keys.shape[:2]):
        rows = mx.array(np.asarray(keys[window, head], np.float32))
        ids[window, head] = np.array(saap_assign(rows, mx.array(centroids[head])))
    return ids


def head_rows(texts: Texts, ids: Array, head: int, recipe: Recipe) -> Rows:
    """Return the long-range queries of one KV head and their targets, for training or for the report."""
    buckets, distances, most = recipe.buckets, recipe.distances, recipe.max_rows
    return long_range_rows(texts, ids, head, buckets=buckets, distances=distances, max_rows=most, seed=recipe.seed)


def report_layer(number: int, texts: Texts, layer: Layer, rows: Sequence[Rows], recipe: Recipe) -> list[HeadReport]:
    """Measure the losses and the recall of the trained router and the k-means router on held-out ``texts``.

    ``number`` is the index of the layer, and ``rows`` are the training rows of each KV head. Return one report per KV
    head.
    """
    texts = texts.thinned(min(MAX_HELD_OUT, max(MAX_REPORTED // len(texts.positions), 1)))
    ids = bucket_ids(texts.pre_rope_keys, np.array(layer.centroids.astype(mx.float32)))
    routers = routers_of(layer, texts.scale)
    found = []
    for head in range(texts.heads):
        before = index(texts, ids, head, buckets=recipe.buckets, distances=recipe.distances)
        queries = grouped_queries(texts, head)
        scores = {name: router_scores(queries, router, head) for name, router in routers.items()}
        curves = {name: curve(before, score, recipe.distances) for name, score in scores.items()}
        recall = {name: np.interp(SELECTIVITIES, *line).tolist() for name, line in curves.items()}
        held_out = head_rows(texts, ids, head, recipe)
        found.append(
            HeadReport(
                number,
                head,
                len(rows[head].queries),
                len(held_out.queries) / held_out.seen,
                losses(held_out, routers, head, rows[head]),
                recall,
                imbalance(ids[:, head], recipe),
            )
        )
    return found


def routers_of(layer: Layer, scale: float) -> dict[str, Layer]:
    """Return a dict from each of `ROUTERS` to its networks. ``scale`` is the scale of the k-means router."""
    centroids = layer.centroids.astype(mx.float32)
    kmeans = Layer(centroids, **network.router(centroids, 2 * centroids.shape[-1], scale))
    return dict(zip(ROUTERS, (layer, kmeans), strict=True))


# Recall (saap.12). A query of a held-out text attends to the keys before it, as in a decode step.


@dataclass(frozen=True)
class Indexed:
    """Softmax mass and number of keys in each bucket, for all queries of one KV head.

    Attributes:
        mass: ``(n, G, C)`` share of each query's softmax mass on the far keys of each bucket.
        keys: ``(n, C)`` number of far keys in each bucket at the query's position.
        distance: ``(n, G)`` distance in tokens from each query to its highest-scoring key, from `best_distance`.
    """

    mass: Array
    keys: Array
    distance: Array


def index(texts: Texts, ids: Array, head: int, *, buckets: int, distances: Distances) -> Indexed:
    """Compute the softmax mass and the number of far keys in each bucket for all queries of a KV head.

    ``ids (W, Hkv, S)`` is the bucket of each key.
    """
    G = texts.rope_queries.shape[1] // texts.heads
    mass, keys, distance = [], [], []
    for window, positions in enumerate(texts.positions):
        queries = texts.group(texts.rope_queries, window, head)
        rows, at = queries.reshape(-1, queries.shape[-1]), np.tile(positions, G)
        own = texts.rope_keys[window, head]
        ids_here = ids[window, head]
        found = bucket_mass(rows, own, ids_here, at, buckets=buckets, distances=distances, scale=texts.scale)
        mass.append(found.reshape(G, len(positions), buckets).swapaxes(0, 1))
        distance.append(best_distance(rows, own, at, distances=distances).reshape(G, len(positions)).T)
        keys.append(keys_per_bucket(ids_here, positions, buckets, distances))
    return Indexed(np.concatenate(mass), np.concatenate(keys), np.concatenate(distance))


def keys_per_bucket(ids: Array, positions: Array, buckets: int, distances: Distances) -> Array:
    """Count the far keys in each bucket for queries at the ascending ``positions (n,)``. Return counts ``(n, C)``."""
    counts = np.zeros((len(positions), buckets), np.int64)
    covered = distances.sink_tokens
    for row, position in enumerate(positions):
        end = max(int(position) - distances.recent_tokens + 1, covered)
        counts[row] = np.bincount(ids[covered:end], minlength=buckets)
        covered = end
    return counts.cumsum(axis=0)


def curve(indexed: Indexed, scores: Array, distances: Distances) -> tuple[Array, Array]:
    """Compute the recall at each selectivity. Buckets are visited in descending order of ``scores (n, C)``.

    Returns:
        Selectivity and recall, both ``(C + 1,)``. Selectivity is the share of the far keys in the visited buckets,
        averaged over positions. Recall is the softmax mass on the far keys in the visited buckets, divided by the
        softmax mass on all far keys. Recall is averaged over the long-range queries. If fewer than `FEW` queries are
        long-range, recall is averaged over all queries.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    keys = np.take_along_axis(indexed.keys, order, axis=1).cumsum(axis=1)
    mass = np.take_along_axis(indexed.mass.astype(np.float64), order[:, None], axis=2).cumsum(axis=2)
    share = mass / np.maximum(mass[..., -1:], 1e-30)
    is_long_range = indexed.distance > distances.farthest_top
    is_long_range = is_long_range if is_long_range.sum() >= FEW else np.ones_like(is_long_range)
    selectivity, recall = (keys / np.maximum(keys[:, -1:], 1)).mean(axis=0), share[is_long_range].mean(axis=0)
    return np.concatenate([[0.0], selectivity]), np.concatenate([[0.0], recall])


def router_scores(queries: Array, layer: Layer, head: int) -> Array:
    """Return the bucket probabilities ``(n, C)`` of ``queries (G, n, D)``, summed over the group (saap.8)."""
    logits = _logits(layer, head, mx.array(queries.reshape(1, -1, queries.shape[-1])))
    return np.array(mx.softmax(logits, axis=-1).reshape(*queries.shape[:2], -1).sum(axis=0))


def _logits(layer: Layer, head: int, queries: mx.array) -> mx.array:
    of = {name: array[head : head + 1].astype(mx.float32) for name, array in layer.arrays().items()}
    return network.logits(of, queries)


def grouped_queries(texts: Texts, head: int) -> Array:
    """Return the pre-RoPE queries ``(G, n, D)`` of all texts, in the same order as in `Indexed`."""
    source = texts.pre_rope_queries
    return np.concatenate([texts.group(source, window, head) for window in range(len(source))], axis=1)


def losses(rows: Rows, routers: Mapping[str, Layer], head: int, trained_on: Rows) -> dict[str, float]:
    """Return a dict from each of ``routers`` to KL(target || router) in nats, averaged over ``rows``.

    If there are no rows, return an empty dict.

    Args:
        rows: held-out rows.
        routers: dict from each of `ROUTERS` to its networks.
        trained_on: training rows of the trained network.
    """
    if not len(rows.queries):
        return {}
    queries, target = mx.array(rows.queries)[None], mx.array(rows.target).astype(mx.float32)[None]
    logits = {name: _logits(layer, head, queries) for name, layer in routers.items()}
    if has_enough_rows(trained_on):
        # `fold` divided the probabilities of a trained router by the share of keys. Undo this division.
        logits["trained"] += mx.log(mx.array(trained_on.share))
    entropy = -(target * mx.log(mx.maximum(target, 1e-30))).sum(axis=-1).mean()
    found = {name: network.cross_entropy(x, target)[0] - entropy for name, x in logits.items()}
    return {name: float(np.array(value)) for name, value in found.items()}


def imbalance(ids: Array, recipe: Recipe) -> float:
    """Return the imbalance factor (saap.13) of keys in the buckets ``ids (W, S)``. Sinks are excluded.

    If all buckets have equal size, the factor is 1.
    """
    sizes = np.bincount(ids[:, recipe.distances.sink_tokens :].ravel(), minlength=recipe.buckets).astype(np.float64)
    return float(recipe.buckets * (sizes**2).sum() / sizes.sum() ** 2)
