"""Run the prefill baselines that do not hash queries and keys (docs/spec/sample.md, "Baselines")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.blocks.layout import MINFERENCE_ROWS, Layout
from ...core.blocks.oracle import attend_blocks, block_lists
from ..sample.oracle import merge, sample_scores
from .block_patterns import Pattern, bigbird_pattern, streaming_pattern

Array = npt.NDArray[Any]
Result = tuple[Array, Array, Array]  # out, lse, key blocks of each row block


def minference_select(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    vertical_tokens: int,
    slash_tokens: int,
    block_size: int,
    scale: float,
) -> Array:
    """Return int32 indices ``(B, Hq, R, N)`` of the key blocks that each row block attends to (sample.12).

    The softmax weights of the last 64 queries are summed by key block and by offset bin (see `SampleSelection`). Row
    blocks attend to the ``vertical_tokens / block_size`` key blocks with the largest sums. They also attend to the keys
    in the ``slash_tokens / block_size`` offset bins with the largest sums. Both quotients are rounded up.
    """
    layout = Layout(np.shape(queries)[2], np.shape(keys)[2], 1, block_size, MINFERENCE_ROWS)
    column, slash = sample_scores(queries, keys, chunks=1, block_size=block_size, scale=scale, rows=MINFERENCE_ROWS)
    budgets = (-(-tokens // block_size) for tokens in (vertical_tokens, slash_tokens))
    column_kept, slash_kept = (select_largest(scores, n) for scores, n in zip((column, slash), budgets, strict=True))
    return block_lists(merge(column_kept, slash_kept, layout))


def select_largest(scores: Array, count: int) -> Array:
    """Return a mask of the ``count`` largest ``scores (..., Nk)``. Ties go to the lower index.

    If a score is NaN, all scores are selected.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order, True, axis=-1)
    return kept | np.isnan(scores).any(axis=-1, keepdims=True)


def minference_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    vertical_tokens: int,
    slash_tokens: int,
    block_size: int,
    scale: float,
) -> Result:
    """Run MInference: attend to the key blocks that `minference_select` selects (sample.12)."""
    budgets = {"vertical_tokens": vertical_tokens, "slash_tokens": slash_tokens}
    blocks = minference_select(queries, keys, **budgets, block_size=block_size, scale=scale)
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def bigbird_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    block_size: int,
    scale: float,
    **pattern: Any,
) -> Result:
    """Run BigBird (sample.13). The arguments ``pattern`` are the shares and the random blocks of `bigbird_pattern`."""
    mask = bigbird_pattern(_layout(queries, keys, block_size), **pattern)
    return _attend(queries, keys, values, mask, block_size, scale)


def streaming_prefill_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    sink_tokens: int,
    window: float,
    block_size: int,
    scale: float,
) -> Result:
    """Run StreamingLLM in prefill: attend to the first key blocks and to ``window * S`` recent keys (sample.14)."""
    mask = streaming_pattern(_layout(queries, keys, block_size), sink_tokens=sink_tokens, window=window)
    return _attend(queries, keys, values, mask, block_size, scale)


def _layout(queries: npt.ArrayLike, keys: npt.ArrayLike, block_size: int) -> Layout:
    return Layout(np.shape(queries)[2], np.shape(keys)[2], 1, block_size, rows=0)


def _attend(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    pattern: Pattern,
    block_size: int,
    scale: float,
) -> Result:
    """Attend to the key blocks in ``pattern (R, Nk)``, which is the same for every head."""
    blocks = block_lists(np.broadcast_to(pattern, (*np.shape(queries)[:2], *pattern.shape)))
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks
