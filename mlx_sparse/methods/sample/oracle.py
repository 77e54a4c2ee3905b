"""Implement SampleAttention in NumPy (docs/spec/sample.md, sample.1 to sample.9)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import float64, logits, softmax_lse
from ...core.blocks.layout import Layout
from ...core.blocks.oracle import attend_blocks, block_lists

Array = np.ndarray


class SampleSelection(NamedTuple):
    """Selected key blocks and sample scores of SampleAttention, for C regions, R row blocks and Nk key blocks.

    Key j is in offset bin ``(i - j) // block_size`` of the query at position i.

    Attributes:
        blocks: ``(B, Hq, R, N)`` int32 key blocks that each row block attends to.
        column: ``(B, Hq, C, Nk)`` softmax weights of the sampled queries, summed by key block.
        slash: ``(B, Hq, C, Nk)`` softmax weights of the sampled queries, summed by offset bin.
        column_kept: bool ``(B, Hq, C, Nk)``, True for the selected key blocks.
        slash_kept: bool ``(B, Hq, C, Nk)``, True for the selected offset bins.
    """

    blocks: Array
    column: Array
    slash: Array
    column_kept: Array
    slash_kept: Array


def sample_selection(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    alpha_column: float,
    alpha_slash: float,
    **sampling: Any,
) -> SampleSelection:
    """Select the key blocks of each row block. The selection uses the attention of sampled queries in each region.

    The arguments ``sampling`` are those of `sample_scores`.
    """
    layout = Layout(np.shape(queries)[2], np.shape(keys)[2], sampling["chunks"], sampling["block_size"])
    column, slash = sample_scores(queries, keys, **sampling)
    column_kept, slash_kept = select_share(column, alpha_column), select_share(slash, alpha_slash)
    mask = merge_kept(column_kept, slash_kept, layout)
    # (sample.7) sampled rows attend to every causal block
    for block in layout.sampled_blocks:
        mask[:, :, block - layout.first_block, : block + 1] = True
    return SampleSelection(block_lists(mask), column, slash, column_kept, slash_kept)


def sample_select(queries: npt.ArrayLike, keys: npt.ArrayLike, **settings: Any) -> Array:
    """Return the key blocks ``(B, Hq, R, N)`` of `sample_selection`."""
    return sample_selection(queries, keys, **settings).blocks


def sample_scores(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    chunks: int,
    block_size: int,
    scale: float,
    rows: int | None = None,
) -> tuple[Array, Array]:
    """Sum the softmax weights of the sampled queries in each region by key block and by offset bin.

    Return the two sums, each ``(B, Hq, C, Nk)``. See `SampleSelection` for the axes and the offset bins.

    Args:
        rows: number of query rows that are sampled per region. If None, it is ``block_size``.
    """
    q, k = float64(queries), float64(keys)
    B, Hq, L, _ = q.shape
    S = k.shape[2]
    layout = Layout(L, S, chunks, block_size, rows)
    column = np.zeros((B, Hq, len(layout.regions), layout.key_blocks))
    slash = np.zeros_like(column)
    key = np.arange(S)
    for c, region in enumerate(layout.regions):
        start, stop = region.sample
        offset = np.arange(S - L + start, S - L + stop)[:, None] - key
        # (sample.3) the sample's attention
        exact = logits(q[:, :, start:stop], k, scale)
        weights = softmax_lse(exact, np.broadcast_to(offset >= 0, exact.shape))[0].reshape(B, Hq, stop - start, S)
        # (sample.4) by key block, (sample.5) by offset
        for block in range(layout.key_blocks):
            column[:, :, c, block] = weights[..., key // block_size == block].sum(axis=(2, 3))
            slash[:, :, c, block] = (weights * (offset // block_size == block)).sum(axis=(2, 3))
    return column, slash


def select_share(scores: Array, alpha: float) -> Array:
    """Select the fewest ``scores (..., Nk)`` whose share of the total is at least ``alpha - 1e-6`` (sample.6).

    Return a mask that is True for the selected scores. If a score is NaN, all scores are selected.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    share = np.cumsum(np.take_along_axis(scores, order, axis=-1), axis=-1) / scores.sum(axis=-1, keepdims=True)
    # The largest score is always needed, any other score if the larger ones do not reach alpha.
    reached = np.concatenate([np.zeros_like(share[..., :1]), share[..., :-1] >= alpha - 1e-6], axis=-1).astype(bool)
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order, ~reached, axis=-1)
    return kept


def merge_kept(column_kept: Array, slash_kept: Array, layout: Layout) -> Array:
    """Convert the selected key blocks and offset bins of each region to a mask ``(B, Hq, R, Nk)`` (sample.7)."""
    B, Hq, _, key_blocks = column_kept.shape
    mask = np.zeros((B, Hq, layout.row_blocks, key_blocks), dtype=bool)
    for index, c in enumerate(layout.region_of):
        row_block = layout.first_block + index
        for block in range(row_block + 1):
            away = row_block - block
            kept = column_kept[:, :, c, block] | slash_kept[:, :, c, away]
            if away > 0:
                kept |= slash_kept[:, :, c, away - 1]
            mask[:, :, index, block] = True if block in (0, row_block) else kept
    return mask


def sample_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    block_size: int,
    scale: float,
    **selection: Any,
) -> tuple[Array, Array, Array]:
    """Run SampleAttention in prefill. The arguments ``selection`` are the other arguments of `sample_select`.

    Returns:
        ``out (B, Hq, L, D)``, ``lse (B, Hq, L)`` and the attended key blocks ``(B, Hq, R, N)``.
    """
    blocks = sample_select(queries, keys, block_size=block_size, scale=scale, **selection)
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks
