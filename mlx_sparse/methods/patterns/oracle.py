"""Run the prefill baselines that do not hash queries and keys (docs/spec/sample.md, "Baselines")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...checks import check_block_size, check_int, check_share
from ...core.attend.oracle import checked, float64
from ...core.blocks.layout import MINFERENCE_ROWS, Layout
from ...core.blocks.oracle import block_lists, prefill_result
from ..sample.oracle import merge, sample_scores
from .block_patterns import bigbird_pattern, streaming_pattern

Array = npt.NDArray[Any]


def minference_select(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    vertical_tokens: int = 1000,
    slash_tokens: int = 6096,
    block_size: int = 64,
    scale: float | None = None,
) -> Array:
    """Return int32 indices ``(B, Hq, R, N)`` of the key blocks that each row block attends to (sample.12).

    The softmax weights of the last 64 queries are summed by key block and by offset bin (see `SampleSelection`). Row
    blocks attend to the ``vertical_tokens / block_size`` key blocks with the largest sums. They also attend to the keys
    in the ``slash_tokens / block_size`` offset bins with the largest sums. Both quotients are rounded up.
    """
    q, k = float64(queries), float64(keys)
    layout = Layout(q.shape[2], k.shape[2], 1, block_size, MINFERENCE_ROWS)
    column, slash = sample_scores(q, k, chunks=1, block_size=block_size, scale=scale, rows=MINFERENCE_ROWS)
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
    vertical_tokens: int = 1000,
    slash_tokens: int = 6096,
    block_size: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run MInference: attend to the key blocks that `minference_select` selects (sample.12)."""
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("vertical_tokens", vertical_tokens, 1)
    check_int("slash_tokens", slash_tokens, 1)
    check_block_size(block_size)
    blocks = minference_select(
        q, k, vertical_tokens=vertical_tokens, slash_tokens=slash_tokens, block_size=block_size, scale=scale
    )
    layout = Layout(n.L, n.S, 1, block_size, MINFERENCE_ROWS)
    return prefill_result((q, k, v), blocks, layout, scale=scale, return_stats=return_stats)


def bigbird_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    window: float = 0.08,
    global_share: float = 0.08,
    random_blocks: int = 1,
    block_size: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run BigBird (sample.13).

    A query attends to ``window * S`` recent keys, to the first ``global_share * S`` keys and to random key blocks.
    """
    q, k, v, n = checked(queries, keys, values, backend)
    check_share("window", window)
    check_share("global_share", global_share)
    check_int("random_blocks", random_blocks, 0)
    check_block_size(block_size)
    layout = Layout(n.L, n.S, 1, block_size, rows=0)
    pattern = bigbird_pattern(layout, window=window, global_share=global_share, random_blocks=random_blocks)
    blocks = block_lists(np.broadcast_to(pattern, (n.B, n.Hq, *pattern.shape)))
    return prefill_result((q, k, v), blocks, layout, scale=scale, return_stats=return_stats)


def streaming_prefill_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    sink_tokens: int = 4,
    window: float = 0.08,
    block_size: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run StreamingLLM in prefill: attend to the first key blocks and to ``window * S`` recent keys (sample.14)."""
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("sink_tokens", sink_tokens, 0)
    check_share("window", window)
    check_block_size(block_size)
    layout = Layout(n.L, n.S, 1, block_size, rows=0)
    pattern = streaming_pattern(layout, sink_tokens=sink_tokens, window=window)
    blocks = block_lists(np.broadcast_to(pattern, (n.B, n.Hq, *pattern.shape)))
    return prefill_result((q, k, v), blocks, layout, scale=scale, return_stats=return_stats)
