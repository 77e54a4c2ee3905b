"""Compute attention over lists of key blocks, for all prefill methods (docs/spec/sample.md, sample.8)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..attend.oracle import float64, logits, softmax_lse, weighted_values
from .layout import Layout

Array = np.ndarray


def attend_blocks(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    blocks: npt.ArrayLike,
    *,
    block_size: int,
    scale: float,
) -> tuple[Array, Array]:
    """Compute exact causal attention of each query over the key blocks that are listed for its row block.

    Args:
        queries: ``(B, Hq, L, D)``; query i is at position ``S - L + i``, in row block ``(S - L + i) // block_size``.
        keys, values: ``(B, Hkv, S, D)``.
        blocks: ``(B, Hq, R, N)`` int32 block indices for R row blocks. Numbers that are not an index are empty slots.

    Returns:
        ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``. If a query attends to no key, its out is 0 and its lse is -inf.
    """
    q, k, v = float64(queries), float64(keys), float64(values)
    (B, Hq, L, _), (_, Hkv, S, _) = q.shape, k.shape
    layout = Layout(L, S, 1, block_size)
    kept = block_mask(np.asarray(blocks), layout.key_blocks)
    position, key = np.arange(S - L, S), np.arange(S)
    by_row = np.take(kept, position // block_size - layout.first_block, axis=2)
    mask = np.take(by_row, key // block_size, axis=3) & (key <= position[:, None])
    mask = mask.reshape(B, Hkv, Hq // Hkv, L, S)
    attended = np.logical_or.reduce(mask, axis=(2, 3))[..., None]
    weights, lse = softmax_lse(logits(q, np.where(attended, k, 0.0), scale), mask)
    return weighted_values(weights, v, mask).reshape(B, Hq, L, -1), lse.reshape(q.shape[:3])


def block_mask(blocks: Array, key_blocks: int) -> Array:
    """Convert block lists ``(B, Hq, R, N)`` to a bool mask ``(B, Hq, R, key_blocks)``, True for listed blocks."""
    mask: Array = (blocks[..., None] == np.arange(key_blocks)).any(axis=-2)
    return mask


def block_lists(mask: Array) -> Array:
    """Convert a mask ``(B, Hq, R, key_blocks)`` to ascending int32 block lists, padded with -1 to equal lengths."""
    key_blocks = mask.shape[-1]
    listed = np.sort(np.where(mask, np.arange(key_blocks), key_blocks), axis=-1)[..., : mask.sum(axis=-1).max()]
    return np.where(listed < key_blocks, listed, -1).astype(np.int32)
