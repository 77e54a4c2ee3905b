"""mlx-lm's attention for some sequences of a batch, where others are sparse."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..cache.sparse_cache import SparseCache
from ..ops.blocks import batch_size, wait_for
from . import seam

FUSED_HEAD_DIMS = (64, 80, 128)  # for which MLX's kernel for prompts on a GPU holds no scores


def attend_alone(queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None) -> mx.array:
    """The last queries of a cache of one sequence: ``(1, Hq, L, D)``, as ``queries``."""
    keys, values, _ = cache.rows("ops")
    mask: Any = "causal" if queries.shape[2] > 1 else None
    return seam.original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def attend_packed(queries: mx.array, cache: SparseCache, scale: float) -> mx.array:
    """Causal attention ``(B, Hq, L, D)`` of a prompt over packed rows, in pieces.

    mlx-lm would hold the scores of all queries and keys. These are MLX's own kernels on unpacked rows, and where it has
    none for the head dim, on as many queries as their scores are few.
    """
    fused = mx.default_device().type == mx.gpu and queries.shape[3] in FUSED_HEAD_DIMS

    def attend(heads: slice, queries: mx.array, keys: mx.array, values: mx.array, length: Any) -> tuple[mx.array]:
        (B, Hq, L, _), S = queries.shape, keys.shape[2]
        step = L if fused else batch_size(B * Hq * S)
        outs: list[mx.array] = []
        for first in range(0, L, step):
            stop = min(first + step, L)
            end = S - L + stop
            part = wait_for(outs, queries[:, :, first:stop])
            given = part, keys[:, :, :end], values[:, :, :end]
            outs.append(mx.fast.scaled_dot_product_attention(*given, scale=scale, mask="causal"))
        return (mx.concatenate(outs, axis=2),)

    (out,) = cache.by_heads(attend, queries, "ops")
    return out


def with_sinks(out: mx.array, lse: mx.array, sinks: mx.array) -> mx.array:
    """``out (B, Hq, L, D)`` where a head's softmax has one more logit, of ``sinks (Hq,)``, with nothing behind it."""
    kept = mx.sigmoid(lse - sinks.astype(mx.float32)[None, :, None])
    return (out.astype(mx.float32) * kept[..., None]).astype(out.dtype)


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
