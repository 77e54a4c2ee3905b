"""Implement gathered prefill in NumPy (docs/spec/gather.md, gather.1 to gather.10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import float64, logits, softmax_lse, weighted_values
from .config import GatherLayout

Array = np.ndarray


def gather_rows(queries: Array, samples: int) -> Array:
    """Return a mask ``(B, Hq, m)`` of the sampled queries (gather.3), (gather.4)."""
    B, Hq, m, _ = queries.shape
    rows = np.zeros((B, Hq, m), bool)
    if m <= samples:
        rows[:] = True
        return rows
    mean = queries.mean(axis=2, keepdims=True)
    norms = np.linalg.norm(queries, axis=-1) * np.linalg.norm(mean, axis=-1)
    cosines = (queries * mean).sum(axis=-1) / np.maximum(norms, 1e-12)
    least = np.argsort(cosines, axis=-1, kind="stable")[..., : samples // 2]
    np.put_along_axis(rows, least, True, axis=-1)
    even = samples - samples // 2
    rows[..., [(t + 1) * m // even - 1 for t in range(even)]] = True
    return rows


def gather_scores(
    queries: npt.ArrayLike, keys: npt.ArrayLike, *, samples: int, scale: float, sinks: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Sum the softmax weights of the sampled queries by earlier key (gather.5), (gather.6).

    Args:
        queries: ``(B, Hq, m, D)`` queries of one chunk, at the last m positions.
        keys: ``(B, Hkv, M + m, D)``.

    Returns:
        The sums ``(B, Hkv, M)``, NaN if a query or key is NaN, and the number of sampled queries ``(B, Hkv)``.
    """
    q, k = float64(queries), float64(keys)
    B, _, m, _ = q.shape
    Hkv, M = k.shape[1], k.shape[2] - m
    scores = logits(q, k, scale)
    _, lse = softmax_lse(scores, np.broadcast_to(np.tri(m, M + m, M, dtype=bool), scores.shape))
    if sinks is not None:
        lse = np.logaddexp(lse, float64(sinks).reshape(1, Hkv, -1, 1))
    rows = gather_rows(q, samples).reshape(B, Hkv, -1, m)
    weights = np.exp(scores[..., :M] - lse[..., None])
    found = np.where(rows[..., None], weights, 0.0).sum(axis=(2, 3))
    found[np.isnan(q).any(axis=(1, 2, 3))] = np.nan
    return found, rows.sum(axis=(2, 3))


def gather_select(scores: Array, kept: int, neighbors: int = 0) -> Array:
    """Return the ascending int32 indices ``(B, Hkv, kept)`` of the best keys by ``scores (B, Hkv, M)`` (gather.7)."""
    padded = np.pad(scores, [(0, 0), (0, 0), (neighbors, neighbors)])
    best = np.lib.stride_tricks.sliding_window_view(padded, 2 * neighbors + 1, axis=-1).max(axis=-1)
    return np.sort(np.argsort(-best, axis=-1, kind="stable")[..., :kept], axis=-1).astype(np.int32)


def gather_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    scale: float,
    sinks: npt.ArrayLike | None = None,
    **settings: Any,
) -> tuple[Array, Array, Array, Array]:
    """Run gathered prefill.

    Args:
        sinks: ``(Hq,)`` logits that enter the denominator of (gather.5). The output is not rescaled; None for no sinks.
        settings: parameters of `Gather`.

    Returns:
        ``out (B, Hq, L, D)``, ``lse (B, Hq, L)``, the number of attended pairs ``(B, Hq)`` and the estimated attention
        recall ``(B, Hkv)``, averaged over the queries (gather.10).
    """
    q, k, v = float64(queries), float64(keys), float64(values)
    B, Hq, L, _ = q.shape
    Hkv, S = k.shape[1:3]
    layout = GatherLayout(L, S, 1, 1, 0, **settings)
    mask = np.broadcast_to(np.tri(L, S, S - L, dtype=bool), (B, Hkv, L, S)).copy()
    pairs, recall = np.full((B, Hq), layout.causal_pairs), np.ones((B, Hkv))
    for piece in layout.pieces:
        M, end = piece.earlier, S - L + piece.stop
        if piece.sparse:
            chunk = q[:, :, piece.start : piece.stop]
            scores, rows = gather_scores(chunk, k[:, :, :end], samples=layout.samples, scale=scale, sinks=sinks)
            skipped = np.ones(scores.shape, bool)
            np.put_along_axis(skipped, gather_select(scores, piece.kept, layout.neighbors), False, axis=-1)
            skipped[np.isnan(scores).any(axis=(1, 2))] = False  # a NaN makes the chunk of a sequence dense
            mask[:, :, piece.start : piece.exact, :M] &= ~skipped[:, :, None]
            recall -= np.where(skipped, scores, 0.0).sum(axis=-1) / rows * piece.sparse / L
            pairs -= piece.sparse * skipped.sum(axis=-1).repeat(Hq // Hkv, axis=1)
    weights, lse = softmax_lse(logits(q, k, scale), np.broadcast_to(mask[:, :, None], (B, Hkv, Hq // Hkv, L, S)))
    out = weighted_values(weights, v, mask[:, :, None])
    return out.reshape(B, Hq, L, -1), lse.reshape(B, Hq, L), pairs, recall
