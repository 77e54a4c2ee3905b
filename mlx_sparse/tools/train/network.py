"""Query networks of a layer's KV heads while they are trained: docs/spec/saap.md, (saap.5), (saap.6).

``D -> hidden -> batch norm, ReLU -> buckets, softmax``. All heads are one batched product. Batch norm takes the place
of the first bias, and is folded into weight and bias at the end, with the mean and variance over all training rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Params = dict[str, mx.array]
EPS = 1e-5  # of batch norm


@dataclass(frozen=True)
class Spread:
    """Mean ``(Hkv, 1, D)`` and covariance ``(Hkv, D, D)`` of the queries that each head learns from."""

    mean: mx.array
    covariance: mx.array

    @classmethod
    def of(cls, queries: Sequence[npt.NDArray[Any]]) -> Spread:
        """The spread of the ``(N, D)`` queries of each head."""
        means = np.stack([rows.mean(axis=0, keepdims=True, dtype=np.float64) for rows in queries])
        spread = [(rows - mean).T @ (rows - mean) / len(rows) for rows, mean in zip(queries, means, strict=True)]
        return cls(mx.array(means.astype(np.float32)), mx.array(np.stack(spread).astype(np.float32)))

    def through(self, weight: mx.array) -> tuple[mx.array, mx.array]:
        """Mean and variance ``(Hkv, hidden)`` of the queries times ``weight (Hkv, D, hidden)``."""
        return (self.mean @ weight)[:, 0], ((self.covariance @ weight) * weight).sum(axis=1)


def start(centroids: mx.array, spread: Spread, hidden: int, scale: float, seed: int) -> Params:
    """Networks that route like k-means: ``[I, -I]`` and what is left of the hidden units at random, unheard at first.

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
    """The k-means router ``scale * <query, centroid>`` as a folded network, of ``centroids (Hkv, C, D)``."""
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
    """Cross-entropy of ``target (Hkv, n, C)`` for a batch of queries ``(Hkv, n, D)``: mean over rows, sum over heads.

    It differs from KL(target || f) by what no weight can change.
    """
    x = rows @ params["hidden_weight"]
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    x = (x - mean) * mx.rsqrt(variance + EPS) * params["gain"][:, None] + params["shift"][:, None]
    logits = mx.maximum(x, 0) @ params["out_weight"] + params["out_bias"][:, None]
    return cross_entropy(logits, target).sum()


def cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """``(Hkv,)``: mean over the rows of ``-sum(target * log softmax(logits))``, both ``(Hkv, n, C)``."""
    total = target.sum(axis=-1)
    return (mx.logsumexp(logits, axis=-1) * total - (logits * target).sum(axis=-1)).mean(axis=-1)


def fold(params: Params, spread: Spread, share: mx.array) -> Params:
    """(saap.6) the four arrays that the artefact holds, with batch norm's mean and variance over all queries.

    Args:
        share: ``(Hkv, C)`` of the keys in each bucket. The networks learn how much attention a bucket has; divided by
            this, it is what a key in it has, and for the same keys read more attention is found.
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
    """(saap.5) ``(Hkv, n, C)`` of folded networks for queries ``(Hkv, n, D)``, before the softmax."""
    x = mx.maximum(rows @ network["hidden_weight"] + network["hidden_bias"][:, None], 0)
    return x @ network["out_weight"] + network["out_bias"][:, None]
