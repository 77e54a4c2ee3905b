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
from mlx.optimizers import Adam
from mlx.utils import tree_flatten, tree_unflatten

from ...artefact import Layer
from ...artefact.tensors import read_tensors, write_tensors
from ...checks import ArtefactError
from . import network
from .network import Params, Spread
from .rows import Rows

Array = npt.NDArray[Any]
FEWEST_ROWS = 64  # a head with fewer long-range queries keeps the k-means router
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
    optimizer = Adam(training.rate, bias_correction=True)
    optimizer.init(params)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        params, done = _load(checkpoint, params, optimizer)
        if progress is not None:
            progress.update(done)
    saved = time.monotonic()
    gradient = mx.grad(network.loss)
    for step in range(done, training.steps):
        optimizer.learning_rate = training.rate_at(step)
        params = optimizer.apply_gradients(gradient(params, *_batch(rows, training, step)), params)
        mx.eval(params, optimizer.state)
        if progress is not None:
            progress.update(1)
        if checkpoint is not None and time.monotonic() - saved > CHECKPOINT_SECONDS:
            write_tensors(checkpoint, _state(params, optimizer), {"step": str(step + 1)})
            saved = time.monotonic()
    return network.fold(params, spread, mx.array(np.stack([found.share for found in rows])))


def _state(params: Params, optimizer: Adam) -> dict[str, mx.array]:
    """What a checkpoint holds: the parameters, and Adam's running means for each."""
    moments: Any = {name: optimizer.state[name] for name in params}
    return dict(tree_flatten({"params": params, "moments": moments}))


def _load(path: Path, params: Params, optimizer: Adam) -> tuple[Params, int]:
    """The parameters and the number of steps in a checkpoint of a training that began at ``params``.

    Raises:
        ArtefactError: the file is damaged or another training's.
    """
    wanted = {name: array.shape for name, array in _state(params, optimizer).items()}
    arrays, metadata = read_tensors(path)
    step = metadata.get("step", "")
    if {name: array.shape for name, array in arrays.items()} != wanted or not step.isdecimal():
        raise ArtefactError(f"{path}: expected a checkpoint of this training, got another file. Delete it.")
    found: Any = tree_unflatten(list(arrays.items()))
    optimizer.state |= found["moments"] | {"step": mx.array(int(step), mx.uint64)}
    return found["params"], int(step)


def _batch(rows: Sequence[Rows], training: Training, step: int) -> tuple[mx.array, mx.array]:
    """Queries ``(heads, batch, D)`` and targets ``(heads, batch, C)``, the same ones for the same seed and step."""
    random = np.random.default_rng([training.seed, step])
    chosen = [random.integers(0, len(found.queries), training.batch) for found in rows]
    queries = np.stack([found.queries[rows] for found, rows in zip(rows, chosen, strict=True)])
    target = np.stack([found.target[rows] for found, rows in zip(rows, chosen, strict=True)])
    return mx.array(queries), mx.array(target).astype(mx.float32)
