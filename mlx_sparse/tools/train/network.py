"""Train the query networks of a layer's KV heads. See docs/spec/saap.md, (saap.5) and (saap.6).

A network is ``D -> hidden -> batch norm, ReLU -> buckets, softmax``. All heads of a layer are trained at
once. The shift of batch norm is the bias of the hidden layer. After training, batch norm is folded into the weight
and bias of the hidden layer, with the statistics of all training rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx.optimizers import Adam

from ...methods.saap.artefact import Layer
from .rows import Rows

if TYPE_CHECKING:
    from ..progress import Bar

Params = dict[str, mx.array]
EPS = 1e-5  # epsilon of batch norm


@dataclass(frozen=True)
class Spread:
    """Mean ``(Hkv, 1, D)`` and covariance ``(Hkv, D, D)`` of the training queries of each head."""

    mean: mx.array
    covariance: mx.array

    @classmethod
    def of(cls, queries: Sequence[np.ndarray]) -> Spread:
        means = np.stack([rows.mean(axis=0, keepdims=True, dtype=np.float64) for rows in queries])
        spread = [(rows - mean).T @ (rows - mean) / len(rows) for rows, mean in zip(queries, means, strict=True)]
        return cls(mx.array(means.astype(np.float32)), mx.array(np.stack(spread).astype(np.float32)))

    def through(self, weight: mx.array) -> tuple[mx.array, mx.array]:
        """Return the mean and variance ``(Hkv, hidden)`` of the product of queries and ``weight (Hkv, D, hidden)``."""
        return (self.mean @ weight)[:, 0], ((self.covariance @ weight) * weight).sum(axis=1)


def start(centroids: mx.array, spread: Spread, hidden: int, scale: float, seed: int) -> Params:
    """Return initial networks that route like the k-means router.

    The first ``2 D`` hidden units have the weights ``[I, -I]``. The other hidden units have random weights, and their
    output weights are 0.

    Args:
        centroids: k-means centroids ``(Hkv, C, D)``.
        spread: mean and covariance of the queries. The initial gain and shift make batch norm the identity.
        scale: scale of the inner products of queries and centroids.
    """
    Hkv, _, D = centroids.shape
    folded = router(centroids, hidden, scale)
    spare = mx.random.normal((Hkv, D, hidden - 2 * D), key=mx.random.key(seed)) / D**0.5
    weight = mx.concatenate([folded["hidden_weight"][..., : 2 * D], spare], axis=-1)
    mean, variance = spread.through(weight)
    return {
        "hidden_weight": weight,
        "gain": mx.sqrt(variance + EPS),
        "shift": mean,
        "out_weight": folded["out_weight"],
        "out_bias": folded["out_bias"],
    }


def random_start(centroids: mx.array, hidden: int, seed: int) -> Params:
    """Return initial networks with random weights, for the k-means centroids ``(Hkv, C, D)``."""
    Hkv, C, D = centroids.shape
    first, last = mx.random.split(mx.random.key(seed))
    return {
        "hidden_weight": mx.random.normal((Hkv, D, hidden), key=first) / D**0.5,
        "gain": mx.ones((Hkv, hidden)),
        "shift": mx.zeros((Hkv, hidden)),
        "out_weight": mx.random.normal((Hkv, hidden, C), key=last) / hidden**0.5,
        "out_bias": mx.zeros((Hkv, C)),
    }


def router(centroids: mx.array, hidden: int, scale: float) -> Params:
    """Return folded networks whose logits are ``scale * <query, centroid>`` for the ``centroids (Hkv, C, D)``."""
    Hkv, C, D = centroids.shape
    assert hidden >= 2 * D
    identity = mx.broadcast_to(mx.eye(D), (Hkv, D, D))
    weight = mx.concatenate([identity, -identity, mx.zeros((Hkv, D, hidden - 2 * D))], axis=-1)
    directions = scale * centroids.swapaxes(-1, -2)
    out = mx.concatenate([directions, -directions, mx.zeros((Hkv, hidden - 2 * D, C))], axis=1)
    return {
        "hidden_weight": weight,
        "hidden_bias": mx.zeros((Hkv, hidden)),
        "out_weight": out,
        "out_bias": mx.zeros((Hkv, C)),
    }


def loss(params: Params, rows: mx.array, target: mx.array) -> mx.array:
    """Return the cross-entropy between ``target (Hkv, n, C)`` and the predictions for queries ``rows (Hkv, n, D)``.

    The result is averaged over rows and summed over heads. The cross-entropy is KL(target || predictions) plus the
    entropy of the target.
    """
    x = rows @ params["hidden_weight"]
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    x = (x - mean) * mx.rsqrt(variance + EPS) * params["gain"][:, None] + params["shift"][:, None]
    logits = mx.maximum(x, 0) @ params["out_weight"] + params["out_bias"][:, None]
    return cross_entropy(logits, target).sum()


def cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Return the cross-entropy ``(Hkv,)`` between targets and logits ``(Hkv, n, C)``, averaged over the ``n`` rows."""
    total = target.sum(axis=-1)
    return (mx.logsumexp(logits, axis=-1) * total - (logits * target).sum(axis=-1)).mean(axis=-1)


def fold(params: Params, spread: Spread, share: mx.array) -> Params:
    """Fold batch norm into the weights, with the mean and variance of all training queries (saap.6).

    Return the four arrays that the artefact stores.

    Args:
        share: ``(Hkv, C)`` share of the keys in each bucket. The networks learn the attention per bucket. Division by
            ``share`` gives the attention per key. The attention per key gives a higher recall for an equal number of
            keys.
    """
    mean, variance = spread.through(params["hidden_weight"])
    factor = params["gain"] * mx.rsqrt(variance + EPS)
    return {
        "hidden_weight": params["hidden_weight"] * factor[:, None],
        "hidden_bias": params["shift"] - mean * factor,
        "out_weight": params["out_weight"],
        "out_bias": params["out_bias"] - mx.log(share),
    }


def logits(network: Params, rows: mx.array) -> mx.array:
    """Return the logits ``(Hkv, n, C)`` of folded networks for the queries ``rows (Hkv, n, D)`` (saap.5)."""
    x = mx.maximum(rows @ network["hidden_weight"] + network["hidden_bias"][:, None], 0)
    return x @ network["out_weight"] + network["out_bias"][:, None]


Array = np.ndarray
STARTS = ("kmeans", "random")
MIN_ROWS = 64  # a head with fewer long-range queries keeps the k-means router


@dataclass(frozen=True)
class Training:
    """Hyperparameters of the query networks.

    Attributes:
        steps: number of steps. If it is 0, all heads keep the k-means router.
        batch: number of rows per step and head.
        rate: learning rate of the first step.
        start: one of `STARTS`, the router that the initial networks equal.
        one_text: draw the rows of a step and head from one random text.
    """

    hidden: int
    steps: int = 300
    batch: int = 512
    rate: float = 1e-3
    start: str = "kmeans"
    one_text: bool = False
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Return the learning rate of ``step``. The rate decays from ``rate`` to 0 along a cosine."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def has_enough_rows(rows: Rows) -> bool:
    """Return True if a head has at least `MIN_ROWS` training rows."""
    return len(rows.queries) >= MIN_ROWS


def train_layer(
    rows: Sequence[Rows], centroids: Array, training: Training, *, scale: float, progress: Bar | None = None
) -> Layer:
    """Train the query networks of a layer. Return the layer with its centroids and networks in float32.

    Args:
        rows: training rows of each KV head.
        centroids: k-means centroids ``(Hkv, C, D)``.
        scale: scale of the attention scores and of the k-means router.
    """
    every = router(mx.array(centroids), training.hidden, scale)
    heads = [head for head, found in enumerate(rows) if has_enough_rows(found)]
    if heads:
        own = mx.array(heads)
        folded = _train([rows[head] for head in heads], mx.array(centroids)[own], training, scale, progress)
        for name, array in folded.items():
            every[name][own] = array
    elif progress is not None:
        progress.update(training.steps)
    mx.eval(every)
    return Layer(mx.array(centroids), **every)


def _train(rows: Sequence[Rows], centroids: mx.array, training: Training, scale: float, progress: Bar | None) -> Params:
    spread = Spread.of([found.queries for found in rows])
    if training.start == "random":
        params = random_start(centroids, training.hidden, training.seed)
    else:
        params = start(centroids, spread, training.hidden, scale, training.seed)
    optimizer = Adam(training.rate, bias_correction=True)
    optimizer.init(params)
    gradient = mx.grad(loss)
    for step in range(training.steps):
        optimizer.learning_rate = training.rate_at(step)
        params = optimizer.apply_gradients(gradient(params, *_batch(rows, training, step)), params)
        mx.eval(params, optimizer.state)
        if progress is not None:
            progress.update(1)
    return fold(params, spread, mx.array(np.stack([found.share for found in rows])))


def _batch(rows: Sequence[Rows], training: Training, step: int) -> tuple[mx.array, mx.array]:
    """Draw random queries ``(heads, batch, D)`` and targets ``(heads, batch, C)``. The seed depends on ``step``."""
    random = np.random.default_rng([training.seed, step])
    chosen = [_draw(random, found, training) for found in rows]
    queries = np.stack([found.queries[rows] for found, rows in zip(rows, chosen, strict=True)])
    target = np.stack([found.target[rows] for found, rows in zip(rows, chosen, strict=True)])
    return mx.array(queries), mx.array(target).astype(mx.float32)


def _draw(random: np.random.Generator, rows: Rows, training: Training) -> Array:
    first, count = 0, len(rows.queries)
    if training.one_text:
        text = random.choice(np.flatnonzero(rows.counts))
        first, count = rows.counts[:text].sum(), rows.counts[text]
    return first + random.integers(0, count, training.batch)
