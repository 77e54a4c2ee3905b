"""Compute attention over lists of key blocks, for all prefill methods (docs/spec/sample.md, sample.8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...checks import ShapeError, check_block_size, check_qkv
from ..attend.oracle import attention_recall, dense_with_lse, float64, logits, softmax_lse, weighted_values
from ..stats import Stats, prefill_elements
from .layout import Layout

Array = npt.NDArray[Any]


def attend_blocks(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    blocks: npt.ArrayLike,
    *,
    block_size: int,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Compute exact causal attention of each query over the key blocks that are listed for its row block.

    Args:
        queries: ``(B, Hq, L, D)``; query i is at position ``S - L + i``, in row block ``(S - L + i) // block_size``.
        keys, values: ``(B, Hkv, S, D)``.
        blocks: ``(B, Hq, R, N)`` int32 block indices for R row blocks. Numbers that are not an index are empty slots.

    Returns:
        ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``. If a query attends to no key, its out is 0 and its lse is -inf.

    Raises:
        ShapeError: ``blocks`` does not fit the queries.
    """
    q, k, v = float64(queries), float64(keys), float64(values)
    n = check_qkv(q, k, v)
    check_block_size(block_size)
    layout = Layout(n.L, n.S, 1, block_size)
    listed = np.asarray(blocks)
    if listed.ndim != 4 or listed.shape[:3] != (n.B, n.Hq, layout.row_blocks):
        raise ShapeError(f"blocks: expected shape {(n.B, n.Hq, layout.row_blocks)} + (N,), got {listed.shape}.")
    kept = block_mask(listed, layout.key_blocks)
    position, key = np.arange(n.S - n.L, n.S), np.arange(n.S)
    by_row = np.take(kept, position // block_size - layout.first_block, axis=2)
    mask = np.take(by_row, key // block_size, axis=3) & (key <= position[:, None])
    mask = mask.reshape(n.B, n.Hkv, n.G, n.L, n.S)
    attended = np.logical_or.reduce(mask, axis=(2, 3))[..., None]
    weights, lse = softmax_lse(logits(q, np.where(attended, k, 0.0), n.D**-0.5 if scale is None else scale), mask)
    return weighted_values(weights, v, mask).reshape(q.shape), lse.reshape(q.shape[:3])


def block_mask(blocks: Array, key_blocks: int) -> Array:
    """Convert block lists ``(B, Hq, R, N)`` to a bool mask ``(B, Hq, R, key_blocks)``, True for listed blocks."""
    mask: Array = (blocks[..., None] == np.arange(key_blocks)).any(axis=-2)
    return mask


def block_lists(mask: Array) -> Array:
    """Convert a mask ``(B, Hq, R, key_blocks)`` to ascending int32 block lists, padded with -1 to equal lengths."""
    key_blocks = mask.shape[-1]
    listed = np.sort(np.where(mask, np.arange(key_blocks), key_blocks), axis=-1)[..., : mask.sum(axis=-1).max()]
    return np.where(listed < key_blocks, listed, -1).astype(np.int32)


def prefill_result(
    qkv: tuple[Array, Array, Array], blocks: Array, layout: Layout, *, scale: float | None, return_stats: bool | str
) -> Any:
    """Run `attend_blocks`. Return ``out``, and a `Stats` if ``return_stats`` is set."""
    out, lse = attend_blocks(*qkv, blocks, block_size=layout.block_size, scale=scale)
    return prefill_stats(qkv, out, lse, blocks, layout, scale=scale, return_stats=return_stats)


def prefill_stats(
    qkv: tuple[Array, Array, Array],
    out: Array,
    lse: Array,
    blocks: Array,
    layout: Layout,
    *,
    scale: float | None,
    return_stats: bool | str,
) -> Any:
    """Return ``out``. If ``return_stats`` is set, also return the `Stats` of a call that attended to ``blocks``."""
    if not return_stats:
        return out
    q, k, v = qkv
    recall = None
    if return_stats == "recall":
        recall = attention_recall(lse, dense_with_lse(q, k, v, scale=scale, left_padding=None)[1])
    # (sample.9)
    density = (blocks >= 0).sum(axis=(2, 3)) / layout.causal_pairs
    share, D = float(density.mean()), q.shape[-1]
    moved, dense = prefill_elements(layout, D, share), prefill_elements(layout, D)
    return out, Stats(moved, dense, share, recall, density, layout.sampled_share)
