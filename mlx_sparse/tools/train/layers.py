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
from .recall import SELECTIVITIES, Indexed, centroid_scores, curve, grouped_queries, index, router_scores
from .rows import Distances, Rows, Texts, long_range_rows

ROUTERS = ("trained", "kmeans")


@dataclass(frozen=True)
class HeadReport:
    """One KV head.

    Attributes:
        rows: long-range queries that it was trained on; with too few it keeps the k-means router.
        long_range: share of the collected queries that are long-range.
        loss: KL divergence of each router from the targets of held-out queries, nats; empty without such queries.
        recall: of each router, at `recall.SELECTIVITIES`.
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


Array = npt.NDArray[Any]
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
    return half(layer), rows


def half(layer: Layer) -> Layer:
    """Return the layer in float16, the type that the artefact holds."""
    return Layer(**{name: array.astype(mx.float16) for name, array in layer.arrays().items()})


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
        recall = {name: _recall(before, score, recipe) for name, score in scores.items()}
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


def _recall(indexed: Indexed, scores: Array, recipe: Recipe) -> list[float]:
    found = curve(indexed, scores, recipe.distances)
    return [found.at(selectivity) for selectivity in SELECTIVITIES]


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
