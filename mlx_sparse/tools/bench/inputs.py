"""What contenders attend to, and what is right for it, in NumPy: for the engines whose sizes allow that."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .core import Case

Array = npt.NDArray[Any]

PEAK = 14.0  # logits by which keys of a prompt stand out


def prompt(case: Case) -> tuple[Array, Array, Array]:
    """A prompt whose heads look at the first keys, at a few others, nearby, or at a distance of their own.

    Half of the components are waves of the position, turned back by each head's distance: the product peaks there.
    Along one direction of the other half the first keys and a few more stand out.

    Returns:
        float32 queries ``(B, Hq, S, D)``, keys and values ``(B, Hkv, S, D)``.
    """
    B, S, D = case.B, case.S, case.D
    rng = np.random.default_rng(0)
    waves = max(D // 4, 1)
    frequency = np.geomspace(1.0, 0.01, waves)
    distance = np.where(np.arange(case.Hq) % 2, rng.integers(0, max(S // 2, 1), case.Hq), 0)[:, None]
    share = rng.uniform(0.3, 1.0, (2, case.Hq, 1, 1)).astype(np.float32)
    queries = rng.standard_normal((B, case.Hq, S, D), np.float32)
    keys, values = rng.standard_normal((2, B, case.Hkv, S, D), np.float32)

    def wave(position: Array) -> Array:
        angle = position[..., None] * frequency
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)

    keys[..., : 2 * waves] = wave(np.arange(S))
    queries[..., : 2 * waves] = share[0] * wave(np.arange(S) - distance) * (PEAK * D**0.5 / waves)
    direction = rng.standard_normal((case.Hkv, 1, D - 2 * waves), np.float32)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    found = (rng.random((case.Hkv, S, 1)) < 4 / S) | (np.arange(S) < 4)[:, None]
    strength = PEAK**0.5 * D**0.25
    keys[..., 2 * waves :] += found * direction * strength
    queries[..., 2 * waves :] += share[1] * np.repeat(direction, case.G, axis=0) * strength
    return queries, keys, values


def bucket_ids(visited: Array, buckets: int, S: int, every: int) -> Array:
    """int16 ``(Hkv, S)``: one key in ``every`` is in a bucket of ``visited (Hkv, probes)``, all of them as large."""
    ids, key = np.empty((len(visited), S), np.int16), np.arange(S)
    for row, own in zip(ids, visited, strict=True):
        others = np.setdiff1d(np.arange(buckets), own)
        row[:] = np.where(key % every == 1, own[key // every % len(own)], others[key % len(others)])
    return ids


def network_weights(D: int, hidden: int, buckets: int) -> int:
    """Numbers in the query network of a KV head; without ``hidden`` units centroids route."""
    return D * hidden + hidden + hidden * buckets + buckets if hidden else D * buckets + buckets


def attention(queries: Array, keys: Array, values: Array, mask: Array | None = None) -> Array:
    """Attention of ``queries (..., n, D)`` over ``keys (..., N, D)``, where ``mask (..., n, N)``, in their type."""
    scores = queries @ keys.swapaxes(-1, -2) * keys.shape[-1] ** -0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mean: Array = weights @ values / weights.sum(axis=-1, keepdims=True)
    return mean
