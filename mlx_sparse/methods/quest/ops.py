"""Run Quest with MLX array operations (docs/spec/quest.md, quest.1 to quest.5)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.ops import attend_indices, group_queries, top_k_select
from ...core.packed_rows import Rows

# Second largest float32. Scores of earlier pages are clipped to it, because `top_k_select` clips +inf to the largest.
SECOND_LARGEST = 3.4028232635611926e38


def page_bounds(keys: Rows, left_padding: mx.array | None, *, page_size: int) -> tuple[mx.array, mx.array]:
    """Return the component-wise minimum and maximum of the keys in each page (quest.1).

    Args:
        keys: ``(B, Hkv, S, D)``.
        left_padding: ``(B,)`` index of the first valid key of each sequence, where the first page begins.

    Returns:
        Minimum and maximum, both ``(B, Hkv, P, D)`` in the dtype of ``keys``. Empty pages have the bounds +inf and
        -inf.
    """
    keys = keys[:]
    B, Hkv, S, D = keys.shape
    bounds = []
    for nothing, reduce in ((mx.inf, mx.min), (-mx.inf, mx.max)):
        rows = keys
        if left_padding is not None:
            moved = (mx.arange(S) + left_padding[:, None])[:, None, :, None]
            rows = mx.take_along_axis(keys, mx.minimum(moved, S - 1), axis=2)
            rows = mx.where(moved < S, rows, mx.array(nothing, keys.dtype))
        if S % page_size:
            rows = mx.pad(rows, [(0, 0), (0, 0), (0, -S % page_size), (0, 0)], constant_values=nothing)
        bounds.append(reduce(rows.reshape(B, Hkv, -1, page_size, D), axis=3))
    return bounds[0], bounds[1]


def with_bounds(keys: Rows, selection: dict[str, Any]) -> dict[str, Any]:
    """Return ``selection``, and add the bounds ``page_min`` and ``page_max`` of the pages if they are absent."""
    if "page_min" in selection:
        return selection
    bounds = page_bounds(keys, selection["left_padding"], page_size=selection["page_size"])
    return {**selection, "page_min": bounds[0], "page_max": bounds[1]}


def page_scores(queries: mx.array, page_min: mx.array, page_max: mx.array) -> mx.array:
    """Return the score of each page, float32 ``(B, Hkv, P)`` (quest.2, quest.3).

    The score is an upper bound on q.k for all keys of the page and all query heads of the group. NaN becomes +inf.
    """
    q = group_queries(queries, page_min.shape[1])
    # (quest.2)
    bounds = mx.maximum(q, 0) @ page_max.swapaxes(-1, -2).astype(mx.float32)
    bounds = bounds + mx.minimum(q, 0) @ page_min.swapaxes(-1, -2).astype(mx.float32)
    return mx.where(mx.isnan(bounds), mx.inf, bounds).max(axis=2)


def page_keys(pages: mx.array, left_padding: mx.array | None, *, page_size: int, length: int) -> mx.array:
    """Return int32 indices ``(B, Hkv, K * page_size)`` of the keys in ``pages (B, Hkv, K)`` (quest.5).

    Empty slots contain -1.
    """
    listed = pages[..., None] * page_size + mx.arange(page_size)
    if left_padding is not None:
        listed = listed + left_padding[:, None, None, None]
    there = (pages[..., None] >= 0) & (listed < length)
    return mx.where(there, listed, -1).astype(mx.int32).reshape(*pages.shape[:2], -1)


def quest_select(
    queries: mx.array,
    keys: Rows,
    *,
    page_size: int,
    top_k: int,
    left_padding: mx.array | None,
    page_min: mx.array,
    page_max: mx.array,
) -> mx.array:
    """Select the best ``K = ceil(top_k / page_size)`` pages (quest.4). There must be more than K pages.

    Return int32 indices ``(B, Hkv, K * page_size)`` of the keys in the selected pages (quest.5).
    """
    S = keys.shape[2]
    before = (S - 1) // page_size
    scores = page_scores(queries, page_min[:, :, :before], page_max[:, :, :before])
    # Only the current page of each sequence has +inf, so it is always selected.
    scores = mx.pad(mx.minimum(scores, SECOND_LARGEST), [(0, 0), (0, 0), (0, 1)])
    first = 0 if left_padding is None else left_padding[:, None, None]
    current, page = (S - 1 - first) // page_size, mx.arange(before + 1)
    scores = mx.where(page < current, scores, mx.where(page == current, mx.inf, -mx.inf))
    pages = top_k_select(scores, top_k=-(-top_k // page_size), local_window=0, left_padding=None)
    return page_keys(pages, left_padding, page_size=page_size, length=S)


def quest_attention(
    queries: mx.array, keys: Rows, values: Rows, *, scale: float, **selection: Any
) -> tuple[mx.array, mx.array]:
    """Run one decode step of Quest and return ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``.

    Args:
        selection: the other parameters of `quest_select`. Page bounds are computed if they are absent.
    """
    selection = with_bounds(keys, selection)
    return attend_indices(queries, keys, values, quest_select(queries, keys, **selection), scale=scale)
