"""Select key blocks from the sample scores of SampleAttention (docs/spec/sample.md, sample.6, sample.7).

The `ops` and `metal` backends share this module.
"""

from __future__ import annotations

import mlx.core as mx

from .layout import Layout


def select_share(scores: mx.array, alpha: float) -> mx.array:
    """Select the largest ``scores (..., Nk)`` until their share of the sum reaches ``alpha - 1e-6`` (sample.6).

    Returns:
        Bool mask in the shape of ``scores``. Ties go to the lower index. If a score is NaN, all scores are selected.
    """
    ordered = -mx.sort(-scores, axis=-1)
    reached = mx.cumsum(ordered, axis=-1)
    # A score is needed if the larger scores do not reach alpha.
    enough = reached >= (alpha - 1e-6) * reached[..., -1:]
    count = 1 + enough.shape[-1] - mx.sum(enough, axis=-1, keepdims=True)
    return _largest(scores, ordered, mx.minimum(count, scores.shape[-1]))


def select_largest(scores: mx.array, count: int) -> mx.array:
    """Return a mask of the ``count`` largest ``scores (..., Nk)``. Ties go to the lower index.

    If a score is NaN, all scores are selected.
    """
    ordered = -mx.sort(-scores, axis=-1)
    return _largest(scores, ordered, mx.full((*scores.shape[:-1], 1), min(count, scores.shape[-1]), mx.int32))


def _largest(scores: mx.array, ordered: mx.array, count: mx.array) -> mx.array:
    """Return a mask of the largest ``scores (..., Nk)``. ``count (..., 1)`` is the number of scores to select.

    ``ordered`` contains the scores in descending order.
    """
    last = mx.take_along_axis(ordered, count - 1, axis=-1)
    above, level = scores > last, scores == last
    room = count - mx.sum(above, axis=-1, keepdims=True)
    first = above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room))
    return first | mx.isnan(scores).any(axis=-1, keepdims=True)


def merge(column_kept: mx.array, slash_kept: mx.array, layout: Layout, *, sampled_in_full: bool) -> mx.array:
    """Convert the selected key blocks and offset bins of each region to a mask of key blocks per row block (sample.7).

    Args:
        column_kept: bool ``(B, Hq, C, Nk)``, True for the selected key blocks of each region.
        slash_kept: bool ``(B, Hq, C, Nk)``, True for the selected offset bins of each region.
        sampled_in_full: if True, row blocks that contain a sampled row attend to every causal block, as in
            SampleAttention.

    Returns:
        Bool mask ``(B, Hq, R, Nk)``, True where a row block attends to a key block.
    """
    # A bin covers two block diagonals, because for most rows the offsets of a bin belong to two key blocks.
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
    """Convert a mask ``(B, Hq, R, Nk)`` to ascending int32 lists ``(B, Hq, R, width)``, padded with -1.

    Args:
        width: number of slots per list, at least the length of the longest list. If None, the function evaluates
            ``mask`` and uses the length of the longest list.
    """
    if width is None:
        longest = mx.max(mx.sum(mask, axis=-1)).item()
        assert isinstance(longest, int)
        width = longest
    lists = mx.full((*mask.shape[:3], width + 1), -1, mx.int32)
    # Blocks that are not selected are written to an additional last slot, which is removed.
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
    """Select the key blocks of each row block from ``column`` and ``slash``, the results of `sample_scores`.

    Return int32 lists ``(B, Hq, R, width)`` from `block_lists`.
    """
    kept = select_share(column, alpha_column), select_share(slash, alpha_slash)
    return block_lists(merge(*kept, layout, sampled_in_full=True), width)
