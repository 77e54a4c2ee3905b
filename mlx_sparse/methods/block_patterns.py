"""Block patterns that depend only on sizes: docs/spec/sample.md, section "Baselines"."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .block_layout import Layout

Pattern = npt.NDArray[np.bool_]


def bigbird_pattern(layout: Layout, *, window: float, global_share: float, random_blocks: int) -> Pattern:
    """Return the window, the first blocks and some random blocks (sample.13): ``(R, Nk)`` bool, True = attend."""
    pattern = _window(layout, first=_blocks_of(global_share * layout.S, layout.block_size), window=window)
    for index in range(layout.row_blocks):
        # Random, but the same in every run and for every head: hashed from the row block (Knuth's multiplier).
        row_block = layout.first_block + index
        hashes = [(row_block * 8191 + n) * 2654435761 % 2**32 >> 8 for n in range(random_blocks)]
        pattern[index, [number % (row_block + 1) for number in hashes]] = True
    return pattern


def streaming_pattern(layout: Layout, *, sink_tokens: int, window: float) -> Pattern:
    """Return the first blocks and the window (sample.14): ``(R, Nk)`` bool, True = attend."""
    return _window(layout, first=_blocks_of(sink_tokens, layout.block_size), window=window)


def _window(layout: Layout, *, first: int, window: float) -> Pattern:
    """Return the first key blocks and the blocks less than a window away, up to the diagonal."""
    row_block = np.arange(layout.first_block, layout.key_blocks)[:, None]
    block: Any = np.arange(layout.key_blocks)
    near = row_block - block < _blocks_of(window * layout.S, layout.block_size)
    pattern: Pattern = (near | (block < first)) & (block <= row_block)
    return pattern


def _blocks_of(tokens: float, block_size: int) -> int:
    """Return the number of whole blocks that contain ``tokens``, at least 1."""
    return max(-(-int(tokens) // block_size), 1)
