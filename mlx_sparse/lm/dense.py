"""Run dense attention where mlx-lm's own attention would be slow, need much memory or see the wrong rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ..api.call_report import Counts
from ..cache.kv_cache import Mask, is_padding_mask
from ..cache.sparse_cache import SparseCache
from ..core import native_call, registry
from ..core.blocks.ops import batch_size, wait_for
from ..core.packed_rows import PackedRows, Rows
from .plan import Plan

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
    if the kernel for large query groups cannot process the queries, or values of their head dim.
    """
    rows, values, _ = cache.rows("metal")
    if not large_group(backend, queries, keys) or rows.shape[3] != values.shape[3]:
        return None
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


class DenseAttention:
    """Dense attention of one forward pass of an enabled model, where it saves time or memory.

    Args:
        plan: `Plan` of the enabled model.
        caches: the caches of all layers.
        counts: tally of the forward pass.
        checks: True if the model is lossless and this forward pass checks draft tokens or is a dense decode step.
    """

    def __init__(self, plan: Plan, caches: list[object], counts: Counts, *, checks: bool) -> None:
        self._plan, self._caches, self._counts, self._checks = plan, caches, counts, checks
        self._window: tuple[mx.array, int | None] | None = None  # mask of the last layer with a window, and its size

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: SparseCache,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend to the rows of ``cache``, or return None to use mlx-lm's attention."""
        plan, causal = self._plan, isinstance(mask, str)
        if self._checks:
            return attend_check(plan.backend, queries, keys, cache, scale, sinks) if causal else None
        if isinstance(keys, PackedRows):
            own = causal and sinks is None and plan.lossless is None
            return attend_packed(queries, cache, scale) if own else None
        return self.attend_natively(queries, keys, values, cache, scale, mask, sinks)

    def attend_natively(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: SparseCache | None,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attend with native kernels, or return None to use mlx-lm's attention.

        Args:
            cache: the cache with the rows ``keys`` and ``values``; None if it is not a sparse cache.
        """
        if not isinstance(keys, mx.array) or keys.shape[:3] != values.shape[:3]:
            return None
        if not self._plan.attends_natively(queries, keys) or native_call.unsupported(queries, keys) is not None:
            return None
        L, length, padding, window = queries.shape[2], keys.shape[2], None, 0
        if L == 1 if mask is None else is_padding_mask(mask, self._caches):
            if cache is not None:
                keys, values, length, padding = cache.key_rows, cache.value_rows, cache.length, cache.padding
            elif isinstance(mask, mx.array):
                return None
        elif isinstance(mask, mx.array) and (found := self._window_of(mask, L, length)) is not None:
            window = found
        else:
            return None
        self._counts.native_calls += 1
        how: dict[str, Any] = {"length": length, "left_padding": padding, "window": window}
        out, lse = registry.load("attend_all", "cpu")(queries, keys, values, scale=scale, **how)
        return out if sinks is None else with_sinks(out, lse, sinks)

    def _window_of(self, mask: mx.array, L: int, S: int) -> int | None:
        if self._window is None or self._window[0] is not mask:  # layers share a mask
            self._window = mask, window_of(mask, L, S)
        return self._window[1]


def window_of(mask: mx.array, L: int, S: int) -> int | None:
    """Return the number of keys in the sliding window that ``mask`` describes, or None for any other mask.

    The L queries are at the last of the S positions. A query attends to the last keys up to its own position.
    """
    if mask.dtype != mx.bool_ or mask.size != L * S:
        return None
    mask = mask.reshape(L, S)
    size = int(mask[-1].sum())
    distance = mx.arange(S - L, S)[:, None] - mx.arange(S)
    same = mx.array_equal(mask, (distance >= 0) & (distance < size))
    return size if size and bool(same) else None


def with_sinks(out: mx.array, lse: mx.array, sinks: mx.array) -> mx.array:
    """Rescale ``out (B, Hq, L, D)`` as if the softmax denominator included the logits ``sinks (Hq,)``."""
    share = mx.sigmoid(lse - sinks.astype(mx.float32)[None, :, None])
    return (out.astype(mx.float32) * share[..., None]).astype(out.dtype)


def replace_with_dense(
    out: mx.array,
    sequences: list[int],
    queries: mx.array,
    cache: SparseCache,
    scale: float,
    sinks: mx.array | None,
    bias: mx.array | None,
) -> mx.array:
    """Overwrite ``out (B, Hq, 1, D)`` with the dense results for the given ``sequences``, and return ``out``."""
    first_rows, batch = cache.first_rows(), mx.array(sequences)
    start = min(first_rows[sequence] for sequence in sequences)
    keys, values = (rows[:, :, start:][batch] for rows in cache.rows("ops")[:2])
    own = mx.array([first_rows[sequence] - start for sequence in sequences])[:, None, None, None]
    mask = mx.arange(cache.length - start) >= own
    if bias is not None:
        mask = mx.where(mask, bias[batch][..., start:], mx.array(-mx.inf, bias.dtype))
    given = queries[batch], keys, values
    out[batch] = scaled_dot_product_attention(*given, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out
