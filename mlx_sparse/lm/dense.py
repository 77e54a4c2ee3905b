"""mlx-lm's attention for some sequences of a batch, where others are sparse."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..cache.sparse_cache import SparseCache
from ..kernels import attend_rows as metal
from ..methods import registry
from ..ops.blocks import after, most
from ..ops.packed_rows import Rows
from . import seam

FUSED_HEAD_DIMS = (64, 80, 128)  # for which MLX's kernel for prompts on a GPU holds no scores
# What MLX's kernel for a few queries takes on a GPU: of them, of rows of a KV head with its query heads, head dims.
QUERIES, ROWS, HEAD_DIMS = 8, 32, (64, 96, 128, 256)


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
        step = L if fused else most(B * Hq * S)
        outs: list[mx.array] = []
        for first in range(0, L, step):
            stop = min(first + step, L)
            end = S - L + stop
            part = after(outs, queries[:, :, first:stop])
            given = part, keys[:, :, :end], values[:, :, :end]
            outs.append(mx.fast.scaled_dot_product_attention(*given, scale=scale, mask="causal"))
        return (mx.concatenate(outs, axis=2),)

    (out,) = cache.by_heads(attend, queries, "ops")
    return out


def rows_at_once(backend: str, D: int, *, packed: bool) -> int:
    """Rows of a KV head, its query heads times the queries, that one kernel attends densely on a GPU."""
    ours = backend != "ops" and not packed and metal.takes(D, registry.METAL_ROWS) and not registry.unavailable("metal")
    return registry.METAL_ROWS if ours else ROWS


def many_rows(backend: str, queries: mx.array, keys: Rows) -> bool:
    """Whether a few queries are the Metal kernel's for many rows: for MLX's these are too many, or of another size."""
    _, heads, L, D = queries.shape
    G = heads // keys.shape[1]
    if L <= QUERIES and G * L <= ROWS and D in HEAD_DIMS:
        return False
    return isinstance(keys, mx.array) and ROWS < rows_at_once(backend, D, packed=False) >= G * L


def attend_many(queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None) -> mx.array:
    """Causal attention ``(1, Hq, L, D)`` of `many_rows`: keys and values are read once for all of them."""
    keys, values, _ = cache.rows("metal")
    out, lse = metal.attend_rows(queries, keys, values, scale=scale, length=cache.length)
    return out if sinks is None else with_sinks(out, lse, sinks)


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
