"""H2O in a model by the float64 oracle, and how the tests of it run models."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from tiny_models import prompt_of

from mlx_sparse import oracle
from mlx_sparse.lm import seam

LAYERS, STEPS, TOP_K = 2, 12, 8
H2O = f"h2o:top_k={TOP_K}"
PROMPT = prompt_of(24)
PROMPT_CALL = "of several queries at once (prompt)"
NEXT = prompt_of(STEPS, seed=5)


class Simulation:
    """In place of a plan: every attention call by the float64 oracle, prompts dense, steps by H2O."""

    def __init__(self, top_k: int = TOP_K, local_window: int | None = None) -> None:
        self.settings: dict[str, Any] = {"top_k": top_k, "local_window": local_window}
        self.scores: dict[int, Any] = {}  # by cache
        self.verifying = False  # then a single query too is attended densely

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        q, k, v = (np.array(array, np.float64) for array in (queries, keys, values))
        L, S = q.shape[2], k.shape[2]
        padding = np.array(cache.left_padding) if hasattr(cache, "left_padding") else None
        sizes: dict[str, Any] = {"scale": scale, "left_padding": padding}
        before = self.scores.get(id(cache), np.zeros((*k.shape[:2], 0)))
        before = np.pad(before, [(0, 0), (0, 0), (0, S - before.shape[2])])
        if L == 1 and not self.verifying:
            out, self.scores[id(cache)] = oracle.h2o_attention(q, k, v, scores=before, **self.settings, **sizes)
        else:
            out = oracle.dense_attention(q, k, v, **sizes)
            self.scores[id(cache)] = before + oracle.h2o_scores(q, k, **sizes)
        return mx.array(out.astype(np.float32))


@contextmanager
def simulated(model: Any, **settings: Any) -> Any:
    simulation = Simulation(**settings)
    names, token = seam.bind(model), seam.active.set(simulation)
    try:
        yield simulation
    finally:
        seam.active.reset(token)
        seam.unbind(names)


def run(model: Any, cache: Any, *tokens: list[int]) -> mx.array:
    """Logits at the last position of each call, for a cache of one sequence."""
    rows = [model(mx.array([call]), cache=cache)[:, -1] for call in tokens]
    mx.eval(rows)
    return mx.concatenate(rows)


def singles(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def close(a: mx.array, b: mx.array) -> bool:
    """Float32 through a few layers."""
    return bool((mx.abs(a - b).max() < 1e-4 * mx.abs(b).max()).item())
