"""Train the query networks of one layer with Adam."""

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
from . import network
from .network import Params, Spread
from .rows import Rows

Array = npt.NDArray[Any]
FEWEST_ROWS = 64  # a head with fewer long-range queries keeps the k-means router


@dataclass(frozen=True)
class Training:
    """How query networks are trained: ``steps`` of Adam, each on ``batch`` rows, at a ``rate`` that falls to 0."""

    hidden: int
    steps: int = 300
    batch: int = 512
    rate: float = 1e-3
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Half a cosine, from ``rate`` at step 0 to 0 when all steps are done."""
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
    every = network.router(mx.array(centroids), training.hidden, scale)
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
    params = network.start(centroids, spread, training.hidden, scale, training.seed)
    optimizer = Adam(training.rate, bias_correction=True)
    optimizer.init(params)
    gradient = mx.grad(network.loss)
    for step in range(training.steps):
        optimizer.learning_rate = training.rate_at(step)
        params = optimizer.apply_gradients(gradient(params, *_batch(rows, training, step)), params)
        mx.eval(params, optimizer.state)
        if progress is not None:
            progress.update(1)
    return network.fold(params, spread, mx.array(np.stack([found.share for found in rows])))


def _batch(rows: Sequence[Rows], training: Training, step: int) -> tuple[mx.array, mx.array]:
    """Draw queries ``(heads, batch, D)`` and targets ``(heads, batch, C)``, the same for the same seed and step."""
    random = np.random.default_rng([training.seed, step])
    chosen = [random.integers(0, len(found.queries), training.batch) for found in rows]
    queries = np.stack([found.queries[rows] for found, rows in zip(rows, chosen, strict=True)])
    target = np.stack([found.target[rows] for found, rows in zip(rows, chosen, strict=True)])
    return mx.array(queries), mx.array(target).astype(mx.float32)
