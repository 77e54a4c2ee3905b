"""Query networks of a layer's KV heads while they are trained: docs/spec/saap.md, (saap.5), (saap.6).

``D -> hidden -> batch norm, ReLU -> buckets, softmax``. All heads are one batched product. Batch norm takes the place
of the first bias, and is folded into weight and bias at the end, with the mean and variance over all training rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.optimizers import Adam

from ...artefact import Layer
from .rows import Rows

Params = dict[str, mx.array]
EPS = 1e-5  # of batch norm


@dataclass(frozen=True)
class Spread:
    """Mean ``(Hkv, 1, D)`` and covariance ``(Hkv, D, D)`` of the queries that each head learns from."""

    mean: mx.array
    covariance: mx.array

    @classmethod
    def of(cls, queries: Sequence[npt.NDArray[Any]]) -> Spread:
        """Return the spread of the ``(N, D)`` queries of each head."""
        means = np.stack([rows.mean(axis=0, keepdims=True, dtype=np.float64) for rows in queries])
        spread = [(rows - mean).T @ (rows - mean) / len(rows) for rows, mean in zip(queries, means, strict=True)]
        return cls(mx.array(means.astype(np.float32)), mx.array(np.stack(spread).astype(np.float32)))

    def through(self, weight: mx.array) -> tuple[mx.array, mx.array]:
        """Return the mean and variance ``(Hkv, hidden)`` of the queries times ``weight (Hkv, D, hidden)``."""
        return (self.mean @ weight)[:, 0], ((self.covariance @ weight) * weight).sum(axis=1)


def start(centroids: mx.array, spread: Spread, hidden: int, scale: float, seed: int) -> Params:
    """Return networks that route like k-means: ``[I, -I]``, and random other hidden units whose output weights are 0.

    Args:
        centroids: ``(Hkv, C, D)``.
        spread: of the queries, by which batch norm is made to change nothing.
        scale: of the inner products.
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


def router(centroids: mx.array, hidden: int, scale: float) -> Params:
    """Return the k-means router ``scale * <query, centroid>`` as a folded network, of ``centroids (Hkv, C, D)``."""
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
    """Return the cross-entropy of ``target (Hkv, n, C)`` for queries ``(Hkv, n, D)``: mean over rows, sum over heads.

    It differs from KL(target || f) by a constant, the entropy of the target.
    """
    x = rows @ params["hidden_weight"]
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    x = (x - mean) * mx.rsqrt(variance + EPS) * params["gain"][:, None] + params["shift"][:, None]
    logits = mx.maximum(x, 0) @ params["out_weight"] + params["out_bias"][:, None]
    return cross_entropy(logits, target).sum()


def cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Return ``(Hkv,)``, the mean over the rows of ``-sum(target * log softmax(logits))``, both ``(Hkv, n, C)``."""
    total = target.sum(axis=-1)
    return (mx.logsumexp(logits, axis=-1) * total - (logits * target).sum(axis=-1)).mean(axis=-1)


def fold(params: Params, spread: Spread, share: mx.array) -> Params:
    """(saap.6) Return the four arrays that the artefact holds, with batch norm's mean and variance over all queries.

    Args:
        share: ``(Hkv, C)`` of the keys in each bucket. The networks learn the attention of a bucket. Divided by the
            share it is the attention per key, which finds more attention for the same number of keys.
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
    """(saap.5) Return the logits ``(Hkv, n, C)`` of folded networks for queries ``(Hkv, n, D)``, before the softmax."""
    x = mx.maximum(rows @ network["hidden_weight"] + network["hidden_bias"][:, None], 0)
    return x @ network["out_weight"] + network["out_bias"][:, None]


Array = npt.NDArray[Any]
FEWEST_ROWS = 64  # a head with fewer long-range queries keeps the k-means router


@dataclass(frozen=True)
class Training:
    """Parameters of the training: ``steps`` of Adam, each on ``batch`` rows, at a ``rate`` that falls to 0."""

    hidden: int
    steps: int = 300
    batch: int = 512
    rate: float = 1e-3
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Return half a cosine, from ``rate`` at step 0 to 0 when all steps are done."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def learns(rows: Rows) -> bool:
    """Return True if a head has enough rows to be trained."""
    return len(rows.queries) >= FEWEST_ROWS


def train_layer(
    rows: Sequence[Rows],
    centroids: Array,
    training: Training,
    *,
    scale: float,
    progress: Any = None,
) -> Layer:
    """Return the centroids and networks of a layer, float32.

    Args:
        rows: training rows of each KV head.
        centroids: ``(Hkv, C, D)``.
        scale: of attention's scores, and of the k-means router.
        progress: a bar that counts steps.
    """
    every = router(mx.array(centroids), training.hidden, scale)
    heads = [head for head, found in enumerate(rows) if learns(found)]
    if heads:
        own = mx.array(heads)
        folded = _train([rows[head] for head in heads], mx.array(centroids)[own], training, scale, progress)
        for name, array in folded.items():
            every[name][own] = array
    elif progress is not None:
        progress.update(training.steps)
    mx.eval(every)
    return Layer(mx.array(centroids), **every)


def _train(
    rows: Sequence[Rows],
    centroids: mx.array,
    training: Training,
    scale: float,
    progress: Any,
) -> Params:
    spread = Spread.of([found.queries for found in rows])
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
    """Draw queries ``(heads, batch, D)`` and targets ``(heads, batch, C)``, the same for the same seed and step."""
    random = np.random.default_rng([training.seed, step])
    chosen = [random.integers(0, len(found.queries), training.batch) for found in rows]
    queries = np.stack([found.queries[rows] for found, rows in zip(rows, chosen, strict=True)])
    target = np.stack([found.target[rows] for found, rows in zip(rows, chosen, strict=True)])
    return mx.array(queries), mx.array(target).astype(mx.float32)
