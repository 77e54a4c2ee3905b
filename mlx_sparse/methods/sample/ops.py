"""Run SampleAttention with MLX array operations (docs/spec/sample.md, sample.1 to sample.9)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.blocks.layout import Layout
from ...core.blocks.ops import attend_blocks, batch_size, causal_scores, select_blocks, softmax, wait_for


def sample_scores(
    queries: mx.array, keys: mx.array, *, chunks: int, block_size: int, scale: float, rows: int | None = None
) -> tuple[mx.array, mx.array]:
    """Sum the softmax weights of the sampled queries in float32 (sample.4), (sample.5).

    `methods.sample.oracle.sample_scores` describes the arguments and the results.
    """
    B, Hq, L, _ = queries.shape
    Hkv, S = keys.shape[1:3]
    layout = Layout(L, S, chunks, block_size, rows)
    done: list[mx.array] = []
    for start, stop in (region.sample for region in layout.regions):
        end = S - L + stop
        step = batch_size(B * (stop - start) * end)
        for first in range(0, Hq, step):
            heads = range(first, min(first + step, Hq))
            q = queries[:, first : first + step, start:stop]
            k = mx.take(keys[:, :, :end], mx.array([head // (Hq // Hkv) for head in heads]), axis=1)
            done.append(_masses(wait_for(done, q), k, layout, scale))
    masses = mx.concatenate(done, axis=1).reshape(B, -1, Hq, 2, layout.key_blocks)
    return masses[:, :, :, 0].swapaxes(1, 2), masses[:, :, :, 1].swapaxes(1, 2)


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
    """Select key blocks for each row block. Return ascending int32 lists ``(B, Hq, R, Nk)``, padded with -1."""
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    column, slash = sample_scores(queries, keys, chunks=chunks, block_size=block_size, scale=scale)
    return select_blocks(column, slash, layout, alpha_column=alpha_column, alpha_slash=alpha_slash)


def sample_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    block_size: int,
    scale: float,
    **selection: Any,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run SampleAttention on a prefill chunk.

    Args:
        selection: the other parameters of `sample_select`.

    Returns:
        ``out (B, Hq, L, D)`` in the dtype of ``queries``, float32 ``lse (B, Hq, L)`` and the selected key blocks.
    """
    blocks = sample_select(queries, keys, block_size=block_size, scale=scale, **selection)
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def _masses(queries: mx.array, keys: mx.array, layout: Layout, scale: float) -> mx.array:
    """Compute the softmax weights of ``queries (B, H, n, D)`` at the last n positions. Sum them with `masses_of`."""
    # (sample.3)
    scores = causal_scores(queries.astype(mx.float32) * scale, keys.astype(mx.float32))
    return masses_of(softmax(scores), layout)


def masses_of(weights: mx.array, layout: Layout) -> mx.array:
    """Sum the softmax weights ``(B, H, n, N)`` by key block and by offset bin.

    The n queries are at the last n of the N positions.

    Returns:
        float32 ``(B, H, 2, Nk)``. The third axis contains the sums by key block and the sums by offset bin.
    """
    B, H, n, end = weights.shape
    first = end - n
    column = mx.zeros((B, H, layout.key_blocks))
    slash = mx.zeros((B, H, layout.key_blocks))
    size = layout.block_size
    for row_block in range(first // size, (end - 1) // size + 1):
        low, high = max(first, row_block * size), min(end, (row_block + 1) * size)
        near, far = _by_block(weights[:, :, low - first : high - first, :high], low, size)
        behind = layout.key_blocks - row_block - 1
        # (sample.4) by key block
        column = column + _pad(near + far, behind)
        # (sample.5) by offset: of the key block m blocks before, the near keys are in bin m, the far keys in bin m - 1
        slash = slash + _pad(near[..., ::-1], behind) + _pad(far[..., ::-1], behind + 1)[..., 1:]
    return mx.stack([column, slash], axis=2)


def _by_block(weights: mx.array, first: int, size: int) -> tuple[mx.array, mx.array]:
    """Sum ``weights (B, H, n, N)`` of one row block by key block, separately for near and far keys.

    A key is near if its offset in the key block is at most the offset of the row in the row block. All other keys are
    far.

    Args:
        first: position of the first row; the last row is at position N - 1.
    """
    B, H, n, N = weights.shape
    blocks = _pad(weights, -N % size).reshape(B, H, n, -1, size)
    place = mx.arange(first, first + n)[:, None, None] % size
    near = (mx.arange(size) <= place).astype(mx.float32)
    near, far = ((blocks * part).sum(axis=2).sum(axis=-1) for part in (near, 1.0 - near))
    return near, far


def _pad(array: mx.array, behind: int) -> mx.array:
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, behind)]) if behind else array
