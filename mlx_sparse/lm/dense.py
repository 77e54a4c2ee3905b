"""mlx-lm's attention for some sequences of a batch, where others are sparse."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..cache.kv_cache import SparseCache
from . import seam


def attend_alone(queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None) -> mx.array:
    """The last queries of a cache of one sequence: ``(1, Hq, L, D)``, as ``queries``."""
    keys, values, _ = cache.rows("ops")
    mask: Any = "causal" if queries.shape[2] > 1 else None
    return seam.original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def replace(
    out: mx.array, sequences: list[int], queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None
) -> mx.array:
    """``out (B, Hq, 1, D)`` of a decode step, with that of these sequences by dense attention."""
    first_rows, batch = cache.first_rows(), mx.array(sequences)
    start = min(first_rows[sequence] for sequence in sequences)
    keys, values = (rows[:, :, start:][batch] for rows in cache.rows("ops")[:2])  # no longer than the longest of them
    own = mx.array([first_rows[sequence] - start for sequence in sequences])[:, None, None, None]
    mask = mx.arange(cache.length - start) >= own
    out[batch] = seam.original(queries[batch], keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out
