"""Run dense attention where mlx-lm's own attention would be slow, need much memory or see the wrong rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ..cache.sparse_cache import SparseCache
from ..core import registry
from ..core.blocks.ops import batch_size, wait_for
from ..core.packed_rows import Rows

# Limits of MLX's attention kernel for few queries: queries, query rows of a KV head (query heads x queries), head dim.
QUERIES, ROWS, HEAD_DIMS = 8, 32, (64, 96, 128, 256)


def rows_at_once(backend: str, D: int, *, packed: bool) -> int:
    """Return the largest number of query rows per KV head that one dense GPU kernel can process.

    Set ``packed`` to True for a quantized KV cache.
    """
    if (
        backend == "ops"
        or packed
        or registry.unsupported("metal", "attend_rows", D, 1)
        or registry.unavailable("metal")
    ):
        return ROWS
    return registry.METAL_ROWS


def drafts_per_kernel(G: int, rows: int = ROWS) -> int:
    """Return the number of draft tokens, at least 1, that one GPU kernel can check.

    If a check had more draft tokens, MLX would write the attention scores to memory.

    Args:
        G: number of query heads per KV head.
        rows: largest number of query rows per KV head that the kernel can process.
    """
    return max(min(QUERIES, rows // G) - 1, 1)


def large_group(backend: str, queries: mx.array, keys: Rows) -> bool:
    """Return True if only the Metal kernel for large query groups can process the queries, and MLX's kernel cannot."""
    _, heads, L, D = queries.shape
    G = heads // keys.shape[1]
    if L <= QUERIES and G * L <= ROWS and D in HEAD_DIMS:
        return False
    return isinstance(keys, mx.array) and ROWS < rows_at_once(backend, D, packed=False) >= G * L


def attend_check(
    backend: str, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, sinks: mx.array | None
) -> mx.array | None:
    """Use the kernel for large query groups to run the causal attention of a verification step.

    ``queries`` has the shape ``(1, Hq, L, D)``. Return None if MLX's kernel can process the queries. Also return None
    if the kernel for large query groups cannot process the queries.
    """
    if not large_group(backend, queries, keys):
        return None
    rows, values, _ = cache.rows("metal")
    out, lse = registry.load("attend_rows", "metal")(queries, rows, values, scale=scale, length=cache.length)
    return out if sinks is None else with_sinks(out, lse, sinks)


FUSED_HEAD_DIMS = (64, 80, 128)  # head dims for which MLX's GPU kernel for prefill writes no scores to memory


def attend_sequence(queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None) -> mx.array:
    """Run mlx-lm's dense attention for ``queries (1, Hq, L, D)``, which belong to the last L rows of ``cache``."""
    keys, values, _ = cache.rows("ops")
    mask: Any = "causal" if queries.shape[2] > 1 else None
    return scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def attend_packed(queries: mx.array, cache: SparseCache, scale: float) -> mx.array:
    """Run dense causal attention for a prefill chunk ``(B, Hq, L, D)`` over a quantized KV cache.

    mlx-lm would store the scores of all queries and keys. To save memory, dequantize the rows of a few heads at a
    time and call MLX's fused kernel. If MLX has no fused kernel for the head dim, process a few queries at a time.
    """
    fused = mx.default_device().type == mx.gpu and queries.shape[3] in FUSED_HEAD_DIMS

    def attend(heads: slice, queries: mx.array, keys: Rows, values: Rows, length: object) -> tuple[mx.array]:
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
    """Rescale ``out (B, Hq, L, D)`` as if the softmax denominator included the logits ``sinks (Hq,)``."""
    share = mx.sigmoid(lse - sinks.astype(mx.float32)[None, :, None])
    return (out.astype(mx.float32) * share[..., None]).astype(out.dtype)


def replace_with_dense(
    out: mx.array, sequences: list[int], queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None
) -> mx.array:
    """Overwrite ``out (B, Hq, 1, D)`` with the dense results for the given ``sequences``, and return ``out``."""
    first_rows, batch = cache.first_rows(), mx.array(sequences)
    start = min(first_rows[sequence] for sequence in sequences)
    keys, values = (rows[:, :, start:][batch] for rows in cache.rows("ops")[:2])
    own = mx.array([first_rows[sequence] - start for sequence in sequences])[:, None, None, None]
    mask = mx.arange(cache.length - start) >= own
    given = queries[batch], keys, values
    out[batch] = scaled_dot_product_attention(*given, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out
