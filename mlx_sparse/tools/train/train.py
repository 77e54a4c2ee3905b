"""Train the query networks of one layer with Adam; a killed process goes on from its last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...artefact import Layer
from ...artefact.tensors import read_tensors, write_tensors
from ...checks import ArtefactError
from . import network
from .network import Params, Spread
from .rows import Rows

Array = npt.NDArray[Any]
FEWEST_ROWS = 64  # a head with fewer long-range queries keeps the k-means router
BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's
CHECKPOINT_SECONDS = 20.0


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
    """Whether these are enough for a head to be trained."""
    return len(rows.queries) >= FEWEST_ROWS


def train_layer(
    rows: Sequence[Rows],
    centroids: Array,
    training: Training,
    *,
    scale: float,
    checkpoint: Path | None = None,
    progress: Any = None,
) -> Layer:
    """Centroids and networks of a layer, float32.

    Args:
        rows: what each KV head learns from.
        centroids: ``(Hkv, C, D)``.
        scale: of attention's scores, and of the k-means router.
        checkpoint: a file that this training, with exactly these arguments, goes on from and keeps up to date.
        progress: a bar; its ``update`` is told of steps.
    """
    every = network.router(mx.array(centroids), training.hidden, scale)
    heads = [head for head, found in enumerate(rows) if learns(found)]
    if heads:
        own = mx.array(heads)
        folded = _train([rows[head] for head in heads], mx.array(centroids)[own], training, scale, checkpoint, progress)
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
    checkpoint: Path | None,
    progress: Any,
) -> Params:
    spread = Spread.of([found.queries for found in rows])
    params = network.start(centroids, spread, training.hidden, scale, training.seed)
    state = Adam.of(params)
    if checkpoint is not None and checkpoint.exists():
        state = Adam.load(checkpoint, state)
        if progress is not None:
            progress.update(state.step)
    saved = time.monotonic()
    gradient = mx.grad(network.loss)
    while state.step < training.steps:
        batch = _batch(rows, training, state.step)
        state = state.after(gradient(state.params, *batch), training.rate_at(state.step))
        mx.eval(state.params, state.first, state.second)
        if progress is not None:
            progress.update(1)
        if checkpoint is not None and time.monotonic() - saved > CHECKPOINT_SECONDS:
            state.save(checkpoint)
            saved = time.monotonic()
    return network.fold(state.params, spread, mx.array(np.stack([found.share for found in rows])))


@dataclass(frozen=True)
class Adam:
    """Adam's state after some steps: the parameters, and running means of gradients and of their squares."""

    params: Params
    first: Params
    second: Params
    step: int = 0

    @classmethod
    def of(cls, params: Params) -> Adam:
        """The state before the first step."""
        zeros = {name: mx.zeros_like(array) for name, array in params.items()}
        return cls(params, zeros, dict(zeros))

    def after(self, gradient: Params, rate: float) -> Adam:
        """The state after one more step."""
        step, (b1, b2) = self.step + 1, BETAS
        first = {name: b1 * self.first[name] + (1 - b1) * g for name, g in gradient.items()}
        second = {name: b2 * self.second[name] + (1 - b2) * g * g for name, g in gradient.items()}
        params = {
            name: p - rate / (1 - b1**step) * first[name] / (mx.sqrt(second[name] / (1 - b2**step)) + EPS)
            for name, p in self.params.items()
        }
        return Adam(params, first, second, step)

    def save(self, path: Path) -> None:
        """Write a checkpoint.

        Raises:
            OSError: it cannot be written; the one before it is still there.
        """
        parts = {"params": self.params, "first": self.first, "second": self.second}
        arrays = {f"{part}.{name}": array for part, of in parts.items() for name, array in of.items()}
        write_tensors(path, arrays, {"step": str(self.step)})

    @classmethod
    def load(cls, path: Path, like: Adam) -> Adam:
        """Read a checkpoint of a training that began at ``like``.

        Raises:
            ArtefactError: the file is damaged or another training's.
        """
        parts = {"params": like.params, "first": like.first, "second": like.second}
        wanted = {f"{part}.{name}": array.shape for part, of in parts.items() for name, array in of.items()}
        arrays, metadata = read_tensors(path)
        step = metadata.get("step", "")
        if {name: array.shape for name, array in arrays.items()} != wanted or not step.isdecimal():
            raise ArtefactError(f"{path}: expected a checkpoint of this training, got another file. Delete it.")
        params, first, second = ({name: arrays[f"{part}.{name}"] for name in like.params} for part in parts)
        return cls(params, first, second, int(step))


def _batch(rows: Sequence[Rows], training: Training, step: int) -> tuple[mx.array, mx.array]:
    """Queries ``(heads, batch, D)`` and targets ``(heads, batch, C)``, the same ones for the same seed and step."""
    random = np.random.default_rng([training.seed, step])
    chosen = [random.integers(0, len(found.queries), training.batch) for found in rows]
    queries = np.stack([found.queries[rows] for found, rows in zip(rows, chosen, strict=True)])
    target = np.stack([found.target[rows] for found, rows in zip(rows, chosen, strict=True)])
    return mx.array(queries), mx.array(target).astype(mx.float32)
