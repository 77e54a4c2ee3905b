"""Run the decode baselines of the SparQ paper and Quest (docs/spec/sparq.md, "Baselines", and docs/spec/quest.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import add_bias, attend_indices, float64, logits, softmax_lse, visible_keys, weighted_values
from ...core.select.oracle import ranked, top_k_select, valid_keys

Array = np.ndarray


def streaming_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    sink_tokens: int,
    recent_tokens: int,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    """Attend to the first ``sink_tokens`` and the last ``recent_tokens`` valid keys. Keys keep their RoPE positions."""
    B, Hkv, S, _ = np.shape(keys)
    valid = valid_keys(B, S, left_padding)
    first = np.argmax(valid, axis=1)[:, None]
    sinks = valid & (np.arange(S) < first + sink_tokens)
    scores = np.where(sinks, 1.0, -np.inf)[:, None, :].repeat(Hkv, axis=1)
    top_k = sink_tokens + recent_tokens
    indices = top_k_select(scores, top_k=top_k, local_window=recent_tokens, left_padding=left_padding)
    return attend_indices(queries, keys, values, indices, scale=scale)


def oracle_top_k_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    top_k: int,
    local_window: int,
    scale: float,
    left_padding: npt.ArrayLike | None,
    bias: npt.ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Run SparQ with ``rank=D`` and ``reallocate=False``, so that the ``top_k`` keys are selected by exact scores."""
    _, weights = _exact(float64(queries), float64(keys), scale, left_padding, bias)
    how: dict[str, Any] = {"top_k": top_k, "local_window": local_window, "left_padding": left_padding}
    visible = None if bias is None else visible_keys(bias, np.shape(keys)[1])
    indices = top_k_select(weights.sum(axis=2), **how, visible=visible)
    return attend_indices(queries, keys, values, indices, scale=scale, bias=bias)


def flexgen_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    top_k: int,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    """Attend to the ``top_k`` keys with the largest softmax weights.

    The selection uses the sum of the weights over the query heads of a group. The weights of the selected keys are not
    renormalized.
    """
    q, v = float64(queries), float64(values)
    exact, weights = _exact(q, float64(keys), scale, left_padding)
    indices = top_k_select(weights.sum(axis=2), top_k=top_k, local_window=0, left_padding=left_padding)
    mask = listed(indices, v.shape[2])[:, :, None, None, :]
    kept = np.where(mask, weights[:, :, :, None, :], 0.0)
    lse = softmax_lse(exact[:, :, :, None, :], np.broadcast_to(mask, kept.shape))[1]
    return weighted_values(kept, v, mask).reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def h2o_scores(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> Array:
    """Return the initial ``scores (B, Hkv, S)`` for `h2o_attention` after dense prefill.

    The score of a key is the sum of its causal softmax weights over the queries. Scores are averaged over the query
    heads of a group. Queries at padded positions are not counted. The score of an invalid key is -inf.
    """
    q, k = float64(queries), float64(keys)
    L, S = q.shape[2], k.shape[2]
    valid = valid_keys(len(k), S, left_padding)
    mask = valid[:, None, None, None, :] & (np.arange(S) <= np.arange(S - L, S)[:, None])
    k = np.where(valid[:, None, :, None], k, 0.0)
    exact = logits(q, k, scale)
    weights, _ = softmax_lse(exact, np.broadcast_to(mask, exact.shape))
    received = weights.mean(axis=2).sum(axis=2)
    return np.where(valid[:, None, :], received, -np.inf)


def h2o_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    scores: npt.ArrayLike,
    top_k: int,
    local_window: int,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> tuple[Array, Array, Array]:
    """Attend to ``top_k`` keys, which are the last ``local_window`` keys and the keys with the best ``scores``.

    Args:
        scores: ``(B, Hkv, S)`` sum of the softmax weights of each key in earlier steps. The score of the current key is
            0, and the score of an evicted key is -inf.

    Returns:
        ``out``, ``lse`` and the new ``scores``. The step evicts all keys that it does not attend to. The new scores of
        the evicted keys are -inf.
    """
    received = float64(scores)
    indices = top_k_select(received, top_k=top_k, local_window=local_window, left_padding=left_padding)
    out, lse = attend_indices(queries, keys, values, indices, scale=scale)
    kept = listed(indices, received.shape[2])
    exact = _exact(float64(queries), float64(keys), scale, left_padding)[0]
    weights, _ = softmax_lse(exact, np.broadcast_to(kept[:, :, None, :], exact.shape))
    return out, lse, np.where(kept, received + weights.mean(axis=2), -np.inf)


def quest_select(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    page_size: int = 16,
    top_k: int = 1024,
    left_padding: npt.ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Select the pages of one decode step for ``queries (B, Hq, 1, D)`` and ``keys (B, Hkv, S, D)``.

    Returns:
        int32 indices ``(B, Hkv, K * page_size)`` of the keys in K selected pages (quest.5), and page scores
        ``(B, Hkv, P)`` (quest.3). Empty slots contain -1. The score of the current page is +inf, and the scores of
        later pages are -inf.
    """
    q, k = float64(queries), float64(keys)
    B, Hkv, S, D = k.shape
    first = np.zeros(B, int) if left_padding is None else np.asarray(left_padding).astype(int)
    # (quest.1)
    shape = (B, Hkv, -(-S // page_size), D)
    low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
    for b in range(B):
        for number, start in enumerate(range(first[b], S, page_size)):
            own = k[b, :, start : start + page_size]
            low[b, :, number], high[b, :, number] = own.min(axis=1), own.max(axis=1)
    grouped = q.reshape(B, Hkv, -1, D)
    # (quest.2) with 0 * inf = NaN, then (quest.3)
    with np.errstate(invalid="ignore"):
        bounds = np.einsum("bhgd,bhpd->bhgp", np.maximum(grouped, 0.0), high)
        bounds = bounds + np.einsum("bhgd,bhpd->bhgp", np.minimum(grouped, 0.0), low)
    bounds = np.minimum(ranked(bounds), np.finfo(np.float64).max).max(axis=2)  # only the current page has +inf
    current = ((S - 1 - first) // page_size)[:, None, None]
    page = np.arange(bounds.shape[2])
    scores: Array = np.where(page < current, bounds, np.where(page == current, np.inf, -np.inf))
    # (quest.4)
    pages = top_k_select(scores, top_k=-(-top_k // page_size), local_window=0)
    # (quest.5)
    slots = (pages[..., None] * page_size + np.arange(page_size)).reshape(B, Hkv, -1) + first[:, None, None]
    there = np.repeat(pages >= 0, page_size, axis=-1) & (slots < S)
    return np.where(there, slots, -1).astype(np.int32), scores


def quest_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    page_size: int,
    top_k: int,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    """Run one decode step of Quest."""
    indices, _ = quest_select(queries, keys, page_size=page_size, top_k=top_k, left_padding=left_padding)
    return attend_indices(queries, keys, values, indices, scale=scale)


def listed(indices: Array, S: int) -> Array:
    """Convert ``indices (B, Hkv, N)`` to a bool mask ``(B, Hkv, S)``, True for the listed keys."""
    mask = np.zeros((*indices.shape[:2], S), dtype=bool)
    for b, h in np.ndindex(indices.shape[:2]):
        mask[b, h, indices[b, h][indices[b, h] >= 0]] = True
    return mask


def _exact(
    q: Array, k: Array, scale: float, left_padding: npt.ArrayLike | None, bias: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Return the exact logits and softmax weights of one decode step, each ``(B, Hkv, G, S)``."""
    valid = valid_keys(k.shape[0], k.shape[2], left_padding)
    k = np.where(valid[:, None, :, None], k, 0.0)
    exact = logits(q, k, scale)[:, :, :, 0, :]
    mask = np.broadcast_to(valid[:, None, None, :], exact.shape)
    if bias is not None:
        exact, mask = add_bias(exact, np.reshape(bias, exact.shape), mask)
    weights, _ = softmax_lse(exact, mask)
    return exact, weights
