"""Build block masks that do not depend on the queries and keys (docs/spec/sample.md, "Baselines")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.blocks.layout import Layout

Pattern = npt.NDArray[np.bool_]


def bigbird_pattern(layout: Layout, *, window: float, global_share: float, random_blocks: int) -> Pattern:
    """Return a bool mask ``(R, Nk)`` of the window, the first key blocks and random key blocks (sample.13)."""
    pattern = _window(layout, first=_blocks_of(global_share * layout.S, layout.block_size), window=window)
    for index in range(layout.row_blocks):
        # Hash the row block with Knuth's multiplier, to get the same random blocks in every run and for every head.
        row_block = layout.first_block + index
        hashes = [(row_block * 8191 + n) * 2654435761 % 2**32 >> 8 for n in range(random_blocks)]
        pattern[index, [number % (row_block + 1) for number in hashes]] = True
    return pattern


def streaming_pattern(layout: Layout, *, sink_tokens: int, window: float) -> Pattern:
    """Return a bool mask ``(R, Nk)`` of the first key blocks and the window (sample.14)."""
    return _window(layout, first=_blocks_of(sink_tokens, layout.block_size), window=window)


def _window(layout: Layout, *, first: int, window: float) -> Pattern:
    """Return a bool mask ``(R, Nk)`` of the causal key blocks that are among the first ``first`` or in the window."""
    row_block = np.arange(layout.first_block, layout.key_blocks)[:, None]
    block: Any = np.arange(layout.key_blocks)
    near = row_block - block < _blocks_of(window * layout.S, layout.block_size)
    pattern: Pattern = (near | (block < first)) & (block <= row_block)
    return pattern


def _blocks_of(tokens: float, block_size: int) -> int:
    return max(-(-int(tokens) // block_size), 1)
