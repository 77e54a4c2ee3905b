"""Run the prefill baselines that do not hash queries and keys (docs/spec/sample.md, "Baselines").

The functions return ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)`` and int32 lists of key blocks ``(B, Hq, R, N)``.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...core.blocks import ops_select as block_select
from ...core.blocks.layout import MINFERENCE_ROWS, Layout
from ...core.blocks.ops import attend_blocks
from ..sample.ops import sample_scores
from .block_patterns import Pattern, bigbird_pattern, streaming_pattern


def minference_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    vertical_tokens: int,
    slash_tokens: int,
    block_size: int,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run MInference on the key blocks and offset bins that the last 64 queries attend to most (sample.12)."""
    layout = Layout(queries.shape[2], keys.shape[2], 1, block_size, MINFERENCE_ROWS)
    scores = sample_scores(queries, keys, chunks=1, block_size=block_size, scale=scale, rows=MINFERENCE_ROWS)
    budgets = (-(-tokens // block_size) for tokens in (vertical_tokens, slash_tokens))
    column_kept, slash_kept = (
        block_select.select_largest(side, count) for side, count in zip(scores, budgets, strict=True)
    )
    blocks = block_select.block_lists(block_select.merge(column_kept, slash_kept, layout, sampled_in_full=False))
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def bigbird_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    window: float,
    global_share: float,
    random_blocks: int,
    block_size: int,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run BigBird: attend to a window of recent keys, the first key blocks and random key blocks (sample.13)."""
    layout = Layout(queries.shape[2], keys.shape[2], 1, block_size, rows=0)
    pattern = bigbird_pattern(layout, window=window, global_share=global_share, random_blocks=random_blocks)
    return _static(queries, keys, values, pattern, block_size, scale)


def streaming_prefill_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    sink_tokens: int,
    window: float,
    block_size: int,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run StreamingLLM in prefill: attend to the first key blocks and to a window of recent keys (sample.14)."""
    layout = Layout(queries.shape[2], keys.shape[2], 1, block_size, rows=0)
    pattern = streaming_pattern(layout, sink_tokens=sink_tokens, window=window)
    return _static(queries, keys, values, pattern, block_size, scale)


def _static(
    queries: mx.array, keys: mx.array, values: mx.array, pattern: Pattern, block_size: int, scale: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Attend to the key blocks in ``pattern (R, Nk)``, which is the same for all heads and sequences."""
    mask = mx.array(np.broadcast_to(pattern, (*queries.shape[:2], *pattern.shape)))
    blocks = block_select.block_lists(mask)
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks
