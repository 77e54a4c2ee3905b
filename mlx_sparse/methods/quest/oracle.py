"""Implement Quest in NumPy (docs/spec/quest.md, quest.1 to quest.5)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import attend_indices, float64
from ...core.select.oracle import ranked, top_k_select

Array = np.ndarray


def page_bounds(
    keys: npt.ArrayLike, left_padding: npt.ArrayLike | None = None, *, page_size: int = 16
) -> tuple[Array, Array]:
    """Return the component-wise minimum and maximum of the keys in each page (quest.1), both ``(B, Hkv, P, D)``.

    If a page has no keys, its minimum is +inf and its maximum is -inf. If a component of a key is NaN, the minimum and
    maximum of this component are NaN.
    """
    k = float64(keys)
    B, Hkv, S, D = k.shape
    pages = -(-S // page_size)
    low, high = np.full((B, Hkv, pages, D), np.inf), np.full((B, Hkv, pages, D), -np.inf)
    for b, first in enumerate(first_keys(B, left_padding)):
        for page, start in enumerate(range(first, S, page_size)):
            own = k[b, :, start : start + page_size]
            low[b, :, page], high[b, :, page] = own.min(axis=1), own.max(axis=1)
    return low, high


def first_keys(B: int, left_padding: npt.ArrayLike | None) -> Array:
    """Return the index of the first valid key of each sequence, int ``(B,)``."""
    return np.zeros(B, int) if left_padding is None else np.asarray(left_padding).astype(int)


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
    low, high = page_bounds(k, left_padding, page_size=page_size)
    grouped = q.reshape(B, Hkv, -1, D)
    # (quest.2) with 0 * inf = NaN, then (quest.3)
    with np.errstate(invalid="ignore"):
        bounds = np.einsum("bhgd,bhpd->bhgp", np.maximum(grouped, 0.0), high)
        bounds = bounds + np.einsum("bhgd,bhpd->bhgp", np.minimum(grouped, 0.0), low)
    bounds = np.minimum(ranked(bounds), np.finfo(np.float64).max).max(axis=2)  # only the current page has +inf
    first = first_keys(B, left_padding)
    current = ((S - 1 - first) // page_size)[:, None, None]
    page = np.arange(bounds.shape[2])
    scores: Array = np.where(page < current, bounds, np.where(page == current, np.inf, -np.inf))
    # (quest.4)
    pages = top_k_select(scores, top_k=-(-top_k // page_size), local_window=0)
    # (quest.5)
    listed = (pages[..., None] * page_size + np.arange(page_size)).reshape(B, Hkv, -1) + first[:, None, None]
    there = np.repeat(pages >= 0, page_size, axis=-1) & (listed < S)
    return np.where(there, listed, -1).astype(np.int32), scores


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
