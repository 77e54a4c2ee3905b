"""From the scores of SampleAttention to block lists, in array operations: docs/spec/sample.md, (sample.6), (sample.7).

A leaf that the `ops` and `metal` backends share; all arrays here are small beside the keys.
"""

from __future__ import annotations

import mlx.core as mx

from ..methods.block_layout import Layout


def keep(scores: mx.array, alpha: float) -> mx.array:
    """(sample.6) the fewest of the largest ``scores (..., Nk)`` whose share of their sum reaches ``alpha - 1e-6``.

    Returns:
        Bool; scores are float32, ties go to the lower index. Shares that are NaN reach nothing: everything is kept.
    """
    ordered = -mx.sort(-scores, axis=-1)
    reached = mx.cumsum(ordered, axis=-1)
    # Each one is needed if those before it do not reach it.
    enough = reached >= (alpha - 1e-6) * reached[..., -1:]
    count = 1 + enough.shape[-1] - mx.sum(enough, axis=-1, keepdims=True)
    return _first(scores, ordered, mx.minimum(count, scores.shape[-1]))


def best(scores: mx.array, count: int) -> mx.array:
    """The ``count`` largest of ``scores (..., Nk)``: bool; ties go to the lower index. Scores with a NaN keep all."""
    ordered = -mx.sort(-scores, axis=-1)
    return _first(scores, ordered, mx.full((*scores.shape[:-1], 1), min(count, scores.shape[-1]), mx.int32))


def _first(scores: mx.array, ordered: mx.array, count: mx.array) -> mx.array:
    """The ``count (..., 1)`` largest; without relying on an order that a sort gives to equal scores."""
    last = mx.take_along_axis(ordered, count - 1, axis=-1)
    above, level = scores > last, scores == last
    room = count - mx.sum(above, axis=-1, keepdims=True)
    first = above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room))
    return first | mx.isnan(scores).any(axis=-1, keepdims=True)


def merge(column_kept: mx.array, slash_kept: mx.array, layout: Layout, *, sampled_in_full: bool) -> mx.array:
    """(sample.7) kept columns and bins ``(B, Hq, C, Nk)`` over each region's row blocks: bool ``(B, Hq, R, Nk)``.

    Args:
        sampled_in_full: row blocks that hold a sampled row attend everything, as SampleAttention's do.
    """
    # A bin reaches two diagonals: offsets m * block_size .. cross a block border in most rows.
    slash_kept = slash_kept | mx.pad(slash_kept, [*[(0, 0)] * 3, (1, 0)])[..., :-1]
    region = mx.array(layout.region_of)
    row = mx.arange(layout.first_block, layout.key_blocks)[:, None]
    block = mx.arange(layout.key_blocks)
    away = mx.broadcast_to(mx.maximum(row - block, 0), (*slash_kept.shape[:2], layout.row_blocks, layout.key_blocks))
    diagonals = mx.take_along_axis(mx.take(slash_kept, region, axis=2), away, axis=3)
    always = (block == 0) | (block == row)
    if sampled_in_full:
        sampled = [row in layout.sampled_blocks for row in range(layout.first_block, layout.key_blocks)]
        always = always | mx.array(sampled)[:, None]
    return (mx.take(column_kept, region, axis=2) | diagonals | always) & (block <= row)


def block_lists(mask: mx.array, width: int | None = None) -> mx.array:
    """Bool ``(B, Hq, R, Nk)`` as ascending int32 lists ``(B, Hq, R, width)``, then -1.

    Args:
        width: at least the longest list; None finds that out, which waits for the GPU.
    """
    if width is None:
        longest = mx.max(mx.sum(mask, axis=-1)).item()
        assert isinstance(longest, int)
        width = longest
    lists = mx.full((*mask.shape[:3], width + 1), -1, mx.int32)
    # What is not kept lands in the last slot, which is cut off.
    slot = mx.where(mask, mx.cumsum(mask.astype(mx.int32), axis=-1) - 1, width)
    block = mx.broadcast_to(mx.arange(mask.shape[-1], dtype=mx.int32), mask.shape)
    return mx.put_along_axis(lists, slot, block, axis=-1)[..., :width]


def select(
    column: mx.array,
    slash: mx.array,
    layout: Layout,
    *,
    alpha_column: float,
    alpha_slash: float,
    width: int | None = None,
) -> mx.array:
    """Block lists ``(B, Hq, R, width)`` of SampleAttention from its scores ``(B, Hq, C, Nk)``."""
    kept = keep(column, alpha_column), keep(slash, alpha_slash)
    return block_lists(merge(*kept, layout, sampled_in_full=True), width)
