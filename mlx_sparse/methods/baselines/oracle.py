"""Run the decode baselines of the SparQ paper (docs/spec/sparq.md, "Baselines")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...checks import check_decode_step, check_int, check_local_window, check_qkv, check_shape
from ...core.attend.oracle import (
    attend_indices,
    checked,
    dense_attention,
    float64,
    logits,
    softmax_lse,
    weighted_values,
    with_stats,
)
from ...core.select.oracle import top_k_select, valid_keys
from ...core.stats import Stats, dense_elements, flexgen_elements, h2o_elements, streaming_elements

Array = npt.NDArray[Any]


def streaming_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    sink_tokens: int = 16,
    recent_tokens: int = 112,
    scale: float | None = None,
    left_padding: npt.ArrayLike | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend to the first ``sink_tokens`` and the last ``recent_tokens`` valid keys. Keys keep their RoPE positions."""
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("sink_tokens", sink_tokens, 0)
    check_int("recent_tokens", recent_tokens, 1)
    top_k = sink_tokens + recent_tokens
    if n.L > 1:
        return dense_attention(q, k, v, scale=scale, left_padding=left_padding, return_stats=return_stats)
    scale = n.D**-0.5 if scale is None else scale

    valid = valid_keys(n.B, n.S, left_padding)
    first = np.argmax(valid, axis=1)[:, None]
    sinks = valid & (np.arange(n.S) < first + sink_tokens)
    scores = np.where(sinks, 1.0, -np.inf)[:, None, :].repeat(n.Hkv, axis=1)
    indices = top_k_select(scores, top_k=top_k, local_window=recent_tokens, left_padding=left_padding)
    out, lse = attend_indices(q, k, v, indices, scale=scale)
    moved = streaming_elements(n.S, n.D, top_k=top_k)
    return with_stats(out, lse, (q, k, v), scale, left_padding, moved, top_k, return_stats)


def oracle_top_k_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    top_k: int = 128,
    local_window: int | None = None,
    scale: float | None = None,
    left_padding: npt.ArrayLike | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run SparQ with ``rank=D`` and ``reallocate=False``, so that the ``top_k`` keys are selected by exact scores."""
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    if n.L > 1:
        return dense_attention(q, k, v, scale=scale, left_padding=left_padding, return_stats=return_stats)
    scale = n.D**-0.5 if scale is None else scale
    _, weights = _exact(q, k, scale, left_padding)
    indices = top_k_select(weights.sum(axis=2), top_k=top_k, local_window=window, left_padding=left_padding)
    out, lse = attend_indices(q, k, v, indices, scale=scale)
    moved = streaming_elements(n.S, n.D, top_k=top_k)
    return with_stats(out, lse, (q, k, v), scale, left_padding, moved, top_k, return_stats)


def flexgen_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    top_k: int = 128,
    scale: float | None = None,
    left_padding: npt.ArrayLike | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend to the ``top_k`` keys with the largest softmax weights.

    The selection uses the sum of the weights over the query heads of a group. The weights of the selected keys are not
    renormalized.
    """
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("top_k", top_k, 1)
    if n.L > 1:
        return dense_attention(q, k, v, scale=scale, left_padding=left_padding, return_stats=return_stats)
    scale = n.D**-0.5 if scale is None else scale
    _, weights = _exact(q, k, scale, left_padding)
    indices = top_k_select(weights.sum(axis=2), top_k=top_k, local_window=0, left_padding=left_padding)
    mask = listed(indices, n.S)[:, :, None, None, :]
    kept = np.where(mask, weights[:, :, :, None, :], 0.0)
    out = weighted_values(kept, v, mask).reshape(q.shape)
    if not return_stats:
        return out
    recall = None
    if return_stats == "recall":
        recall = np.where(mask.any(axis=-1), kept.sum(axis=-1), 1.0).reshape(q.shape[:3])
    moved = flexgen_elements(n.S, n.D, top_k=top_k)
    return out, Stats(moved, dense_elements(n.S, n.D), min(top_k, n.S) / n.S, recall)


def h2o_scores(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    scale: float | None = None,
    left_padding: npt.ArrayLike | None = None,
) -> Array:
    """Return the initial ``scores (B, Hkv, S)`` for `h2o_attention` after dense prefill.

    The score of a key is the sum of its causal softmax weights over the queries. Scores are averaged over the query
    heads of a group. Queries at padded positions are not counted. The score of an invalid key is -inf.
    """
    q, k = float64(queries), float64(keys)
    n = check_qkv(q, k, k)
    valid = valid_keys(n.B, n.S, left_padding)
    positions = np.arange(n.S - n.L, n.S)
    mask = valid[:, None, None, None, :] & (np.arange(n.S) <= positions[:, None])
    k = np.where(valid[:, None, :, None], k, 0.0)
    exact = logits(q, k, n.D**-0.5 if scale is None else scale)
    weights, _ = softmax_lse(exact, np.broadcast_to(mask, exact.shape))
    received = weights.mean(axis=2).sum(axis=2)
    return np.where(valid[:, None, :], received, -np.inf)


def h2o_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    scores: npt.ArrayLike,
    top_k: int = 128,
    local_window: int | None = None,
    scale: float | None = None,
    left_padding: npt.ArrayLike | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend to ``top_k`` keys, which are the last ``local_window`` keys and the keys with the best ``scores``.

    Args:
        scores: ``(B, Hkv, S)`` sum of the softmax weights of each key in earlier steps. The score of the current key is
            0, and the score of an evicted key is -inf.

    Returns:
        ``out``, the new ``scores``, and a `Stats` if ``return_stats`` is set. The step evicts all keys that it does not
        attend to. The new scores of the evicted keys are -inf.
    """
    q, k, v, n = checked(queries, keys, values, backend)
    check_decode_step(n, "h2o")
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    received = float64(scores)
    check_shape("scores", received, (n.B, n.Hkv, n.S))
    scale = n.D**-0.5 if scale is None else scale
    indices = top_k_select(received, top_k=top_k, local_window=window, left_padding=left_padding)
    out, lse = attend_indices(q, k, v, indices, scale=scale)
    kept = listed(indices, n.S)
    exact = _exact(q, k, scale, left_padding)[0]
    weights, _ = softmax_lse(exact, np.broadcast_to(kept[:, :, None, :], exact.shape))
    updated = np.where(kept, received + weights.mean(axis=2), -np.inf)
    moved = h2o_elements(n.S, n.D, top_k=top_k)
    result = with_stats(out, lse, (q, k, v), scale, left_padding, moved, top_k, return_stats)
    return (result[0], updated, result[1]) if return_stats else (result, updated)


def listed(indices: Array, S: int) -> Array:
    """Convert ``indices (B, Hkv, N)`` to a bool mask ``(B, Hkv, S)``, True for the listed keys."""
    mask = np.zeros((*indices.shape[:2], S), dtype=bool)
    for b, h in np.ndindex(indices.shape[:2]):
        mask[b, h, indices[b, h][indices[b, h] >= 0]] = True
    return mask


def _exact(q: Array, k: Array, scale: float, left_padding: npt.ArrayLike | None) -> tuple[Array, Array]:
    """Return the exact logits and softmax weights of one decode step, each ``(B, Hkv, G, S)``."""
    valid = valid_keys(k.shape[0], k.shape[2], left_padding)
    k = np.where(valid[:, None, :, None], k, 0.0)
    exact = logits(q, k, scale)[:, :, :, 0, :]
    weights, _ = softmax_lse(exact, np.broadcast_to(valid[:, None, None, :], exact.shape))
    return exact, weights
