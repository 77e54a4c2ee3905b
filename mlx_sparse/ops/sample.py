"""SampleAttention: docs/spec/sample.md, equations (sample.1) to (sample.9)."""

from __future__ import annotations

import mlx.core as mx

from .. import kept
from ..layout import Layout
from .blocks import attend_blocks, causal_scores


def sample_scores(
    queries: mx.array, keys: mx.array, *, chunks: int, block_size: int, scale: float, rows: int | None = None
) -> tuple[mx.array, mx.array]:
    """Attention mass of each region's sample by key block and by offset bin: two float32 ``(B, Hq, C, Nk)``.

    Args:
        rows: query rows sampled per region; None means ``block_size``.
    """
    L, S = queries.shape[2], keys.shape[2]
    layout = Layout(L, S, chunks, block_size, rows)
    regions = [_masses(queries, keys, region.sample, layout, scale) for region in layout.regions]
    column, slash = (mx.stack(list(masses), axis=2) for masses in zip(*regions, strict=True))
    return column, slash


def sample_select(
    queries: mx.array,
    keys: mx.array,
    *,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> mx.array:
    """The key blocks that each row block attends: ``(B, Hq, R, Nk)`` int32, ascending, then -1."""
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    column, slash = sample_scores(queries, keys, chunks=chunks, block_size=block_size, scale=scale)
    # Rows that were sampled attend everything, so the longest list nearly always is as long as this.
    return kept.select(
        column, slash, layout, alpha_column=alpha_column, alpha_slash=alpha_slash, width=layout.key_blocks
    )


def sample_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """``out (B, Hq, L, D)`` in the type of ``queries``, float32 ``lse (B, Hq, L)``, and what `sample_select` chose."""
    blocks = sample_select(
        queries,
        keys,
        alpha_column=alpha_column,
        alpha_slash=alpha_slash,
        chunks=chunks,
        block_size=block_size,
        scale=scale,
    )
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def _masses(
    queries: mx.array, keys: mx.array, sample: tuple[int, int], layout: Layout, scale: float
) -> tuple[mx.array, mx.array]:
    """The two masses ``(B, Hq, Nk)`` of the query rows ``sample``."""
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    start, stop = sample
    first, end = S - L + start, S - L + stop
    # (sample.3) the sample's attention
    grouped = queries[:, :, start:stop].reshape(B, Hkv, Hq // Hkv, stop - start, D).astype(mx.float32) * scale
    scores = causal_scores(grouped, keys[:, :, None, :end].astype(mx.float32))
    weights = mx.softmax(scores, axis=-1).reshape(B, Hq, stop - start, end)

    column = mx.zeros((B, Hq, layout.key_blocks))
    slash = mx.zeros((B, Hq, layout.key_blocks))
    size = layout.block_size
    for row_block in range(first // size, (end - 1) // size + 1):
        low, high = max(first, row_block * size), min(end, (row_block + 1) * size)
        near, far = _by_block(weights[:, :, low - first : high - first, :high], low, size)
        behind = layout.key_blocks - row_block - 1
        # (sample.4) by key block
        column = column + _pad(near + far, behind)
        # (sample.5) by offset: of the key block m away these rows see a part at offsets of bin m, the rest of bin m - 1
        slash = slash + _pad(near[..., ::-1], behind) + _pad(far[..., ::-1], behind + 1)[..., 1:]
    return column, slash


def _by_block(weights: mx.array, first: int, size: int) -> tuple[mx.array, mx.array]:
    """Sums of ``weights (B, Hq, n, N)`` by key block: of the keys up to each row's own place in a block, of the others.

    Args:
        first: position of the first row; all are in one row block, and the last is that of key N - 1.
    """
    B, Hq, n, N = weights.shape
    blocks = _pad(weights, -N % size).reshape(B, Hq, n, -1, size)
    place = mx.arange(first, first + n)[:, None, None] % size
    near = mx.arange(size) <= place
    return mx.where(near, blocks, 0.0).sum(axis=2).sum(axis=-1), mx.where(near, 0.0, blocks).sum(axis=2).sum(axis=-1)


def _pad(array: mx.array, behind: int) -> mx.array:
    """``array`` with that many zeros behind the last of its last axis."""
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, behind)]) if behind else array
