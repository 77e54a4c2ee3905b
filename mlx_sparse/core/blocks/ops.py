"""Select key blocks, and attend to lists of key blocks (docs/spec/sample.md, sample.6 to sample.8).

Row blocks whose lists have the same length are processed in one batch. Thus the lists need no padding, and only the
diagonal block needs a mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from .layout import Layout

Array = np.ndarray

# Maximum number of scores per batch. On a CPU the scores of a batch fit into the cache; on a GPU they occupy all cores.
# If a single row block has more scores, the batch has one row block.
MAX_SCORES = {mx.cpu: 1 << 20, mx.gpu: 1 << 24}


def attend_blocks(
    queries: mx.array, keys: mx.array, values: mx.array, blocks: mx.array, *, block_size: int, scale: float
) -> tuple[mx.array, mx.array]:
    """Compute exact causal attention of each query over the key blocks that are listed for its row block.

    ``blocks`` is evaluated, so this function does not work inside `mx.compile`.

    Args:
        queries: ``(B, Hq, L, D)``.
        keys, values: ``(B, Hkv, S, D)``.
        blocks: ``(B, Hq, R, N)`` int32 block indices. A number that is not a block index, such as -1, is an empty slot.

    Returns:
        ``out (B, Hq, L, D)`` in the dtype of ``queries`` and float32 ``lse (B, Hq, L)``. If a query attends to no key,
        its out is 0 and its lse is -inf.
    """
    B, Hq, L, D = queries.shape
    S = keys.shape[2]
    layout = Layout(L, S, 1, block_size)
    R = layout.row_blocks
    lead, tail = (S - L) % block_size, -S % block_size
    rows = _in_blocks(queries, lead, tail, block_size).reshape(B * Hq * R, block_size, D)
    keys, values = (_in_blocks(array, 0, tail, block_size) for array in (keys, values))
    # MLX has a fused attention kernel only for GPUs.
    attend = _plain if mx.default_device().type == mx.cpu else _fused

    order, outs, lses = [], [], []
    for items, listed, diagonal in _batches(np.array(blocks), layout):
        order.append(items)
        if listed.shape[1] == 0:
            outs.append(mx.zeros((len(items), block_size, values.shape[-1]), queries.dtype))
            lses.append(mx.full((len(items), block_size), -mx.inf))
            continue
        b, h = (mx.array(axis[:, None]) for axis in np.divmod(items // R, Hq))
        at = (b, h // (Hq // keys.shape[1]), mx.array(listed))
        q, gathered = rows[mx.array(items)], (array[at] for array in (keys, values))
        k, v = (array.reshape(len(items), -1, array.shape[-1]) for array in gathered)
        outs.append(attend(wait_for(outs, q), k, v, scale, diagonal).astype(queries.dtype))
        lses.append(_lse(wait_for(lses, q), k, scale, diagonal))
    back = mx.array(np.argsort(np.concatenate(order)))

    def gather(parts: list[mx.array], *tail_shape: int) -> mx.array:
        whole = mx.concatenate(parts)[back].reshape(B, Hq, R * block_size, *tail_shape)
        return whole[:, :, lead : lead + L]

    return gather(outs, values.shape[-1]), gather(lses)


def wait_for(done: list[mx.array], array: mx.array) -> mx.array:
    """Make ``array`` depend on the last array in ``done``, to keep only one batch at a time in memory."""
    return mx.depends(array, done[-1]) if done else array


def batch_size(scores: int) -> int:
    """Return the number of items that fit into one batch, at least 1. ``scores`` is the number of scores per item."""
    return max(1, MAX_SCORES[mx.default_device().type] // scores)


def causal_scores(queries: mx.array, keys: mx.array) -> mx.array:
    """Return ``queries @ keys^T (..., n, N)`` for queries at the last n of N positions. Later keys score -inf."""
    n, N = queries.shape[-2], keys.shape[-2]
    causal = mx.arange(n) <= mx.arange(n)[:, None]
    edge = mx.where(causal, queries @ keys[..., N - n :, :].swapaxes(-1, -2), -mx.inf)
    if n == N:
        return edge
    return mx.concatenate([queries @ keys[..., : N - n, :].swapaxes(-1, -2), edge], axis=-1)


def softmax(scores: mx.array) -> mx.array:
    """Return the softmax over the last axis. If all scores of a query are -inf, its weights are 0."""
    return mx.where(mx.max(scores, axis=-1, keepdims=True) == -mx.inf, 0.0, mx.softmax(scores, axis=-1))


def zero_sinks(heads: int, dtype: mx.Dtype) -> mx.array:
    """Return sinks for MLX's attention kernel. If all scores of a query are -inf, the sink makes its output 0.

    MLX masks scores with the lowest number, so the sink is larger. In any other softmax its weight is 0.
    """
    return mx.full(heads, mx.finfo(dtype).min / 2, dtype)


def _in_blocks(array: mx.array, lead: int, tail: int, block_size: int) -> mx.array:
    """Add ``lead`` zero rows before and ``tail`` after ``array (B, H, length, D)``, and split the rows into blocks."""
    B, H, _, D = array.shape
    if lead or tail:
        array = mx.pad(array, [(0, 0), (0, 0), (lead, tail), (0, 0)])
    return array.reshape(B, H, -1, block_size, D)


def _batches(blocks: Array, layout: Layout) -> Iterator[tuple[Array, Array, bool]]:
    """Group the row blocks by the length of their lists, and by whether their lists contain the diagonal block.

    Yields:
        A tuple of three results. The first is the indices ``(M,)`` of M row blocks, numbered across all sequences and
        query heads. The second is the ascending indices ``(M, n)`` of the key blocks in their lists. The third is True
        if the last key block of each list is the diagonal block.
    """
    row_block = np.tile(np.arange(layout.first_block, layout.key_blocks), blocks.shape[0] * blocks.shape[1])
    lists = blocks.reshape(len(row_block), -1)
    # A mask accepts lists in any order and with duplicates. Numbers that are not a causal block go to the last column.
    mask = np.zeros((len(row_block), layout.key_blocks + 1), dtype=bool)
    causal = (lists >= 0) & (lists <= row_block[:, None])
    mask[np.arange(len(lists))[:, None], np.where(causal, lists, layout.key_blocks)] = True
    mask = mask[:, : layout.key_blocks]
    count, diagonal = mask.sum(axis=1), mask[np.arange(len(mask)), row_block]
    for n, with_diagonal in sorted(set(zip(count.tolist(), diagonal.tolist(), strict=True))):
        items = np.flatnonzero((count == n) & (diagonal == with_diagonal))
        listed = np.nonzero(mask[items])[1].reshape(len(items), n).astype(np.int32)
        step = batch_size(max(n, 1) * layout.block_size**2)
        for start in range(0, len(items), step):
            yield items[start : start + step], listed[start : start + step], with_diagonal


def _fused(queries: mx.array, keys: mx.array, values: mx.array, scale: float, diagonal: bool) -> mx.array:
    """Compute attention for one batch with MLX's kernel, whose causal mask aligns the last query with the last key."""
    q, k, v = (array[:, None] for array in (queries, keys, values))
    mask = "causal" if diagonal else None
    sinks = zero_sinks(1, queries.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)[:, 0]


def _plain(queries: mx.array, keys: mx.array, values: mx.array, scale: float, diagonal: bool) -> mx.array:
    """Compute attention for one batch with float32 matrix products. On a CPU, 16-bit products are slower."""
    return softmax(_scores(queries, keys, scale, diagonal)) @ values.astype(mx.float32)


def _lse(queries: mx.array, keys: mx.array, scale: float, diagonal: bool) -> mx.array:
    """Return the log-sum-exp for one batch. The scores are recomputed only if MLX evaluates the result."""
    return mx.logsumexp(_scores(queries, keys, scale, diagonal), axis=-1)


def _scores(queries: mx.array, keys: mx.array, scale: float, diagonal: bool) -> mx.array:
    q, k = queries.astype(mx.float32) * scale, keys.astype(mx.float32)
    return causal_scores(q, k) if diagonal else q @ k.swapaxes(-1, -2)


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


def merge_kept(column_kept: mx.array, slash_kept: mx.array, layout: Layout, *, sampled_in_full: bool) -> mx.array:
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


def select_blocks(
    column: mx.array, slash: mx.array, layout: Layout, *, alpha_column: float, alpha_slash: float
) -> mx.array:
    """Select the key blocks of each row block from ``column`` and ``slash``, the results of `sample_scores`.

    Return ascending int32 lists ``(B, Hq, R, Nk)``, padded with -1.
    """
    kept = select_share(column, alpha_column), select_share(slash, alpha_slash)
    # Row blocks with sampled rows attend to every causal block, so the longest list usually has Nk blocks.
    return block_lists(merge_kept(*kept, layout, sampled_in_full=True), layout.key_blocks)
