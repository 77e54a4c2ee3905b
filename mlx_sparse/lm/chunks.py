"""Run attention for prefill chunks, verification steps, and batches whose prompts have different lengths."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.kv_cache import SparseBatch
from ..cache.sparse_cache import SparseCache
from ..core import reasons, registry
from ..core.attend import metal_rows as metal
from ..core.blocks.ops import batch_size, wait_for
from ..core.packed_rows import PackedRows, Rows
from . import seam

if TYPE_CHECKING:
    from .call import Call

# Limits of MLX's attention kernel for few queries: queries, query rows of a KV head (query heads x queries), head dim.
QUERIES, ROWS, HEAD_DIMS = 8, 32, (64, 96, 128, 256)


def rows_at_once(backend: str, D: int, *, packed: bool) -> int:
    """Return the largest number of query rows per KV head that one dense GPU kernel can process.

    Set ``packed`` to True for a quantized KV cache.
    """
    ours = (
        backend != "ops" and not packed and metal.supports(D, registry.METAL_ROWS) and not registry.unavailable("metal")
    )
    return registry.METAL_ROWS if ours else ROWS


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
    out, lse = metal.attend_rows(queries, rows, values, scale=scale, length=cache.length)
    return out if sinks is None else with_sinks(out, lse, sinks)


FUSED_HEAD_DIMS = (64, 80, 128)  # head dims for which MLX's GPU kernel for prefill writes no scores to memory


def attend_sequence(queries: mx.array, cache: SparseCache, scale: float, sinks: mx.array | None) -> mx.array:
    """Run mlx-lm's dense attention for ``queries (1, Hq, L, D)``, which belong to the last L rows of ``cache``."""
    keys, values, _ = cache.rows("ops")
    mask: Any = "causal" if queries.shape[2] > 1 else None
    return seam.original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def attend_packed(queries: mx.array, cache: SparseCache, scale: float) -> mx.array:
    """Run dense causal attention for a prefill chunk ``(B, Hq, L, D)`` over a quantized KV cache.

    mlx-lm would store the scores of all queries and keys. To save memory, dequantize the rows of a few heads at a
    time and call MLX's fused kernel. If MLX has no fused kernel for the head dim, process a few queries at a time.
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
    out[batch] = seam.original(queries[batch], keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out


def attend_chunk(
    call: Call, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, layer_index: int
) -> tuple[mx.array, mx.array] | None:
    """Run the prefill method on a prefill chunk.

    Args:
        layer_index: index of the layer's cache. The report uses it to identify the layer.

    Returns:
        ``out (B, Hq, L, D)`` and float32 ``lse (B, Hq, L)``; None if the selected blocks exceed the density limit.
    """
    plan = call.plan
    assert plan.prefill is not None
    L, S = queries.shape[2], keys.shape[2]
    config, backend = plan.prefill.at(S), plan.resolve(plan.prefill, queries, keys)
    sizes = plan.sizes(config, queries, keys, cache, backend, call.hooks)
    blocks, max_density = None, plan.calibration.threshold(config, sizes, S).value
    if max_density <= 0:
        return None
    if max_density < 1:
        blocks = cache.select_prefill(queries, config, scale=scale, backend=backend, max_density=max_density)
        if blocks is None:
            return None
    out, lse, blocks = cache.attend_prefill(queries, config, scale=scale, backend=backend, blocks=blocks)
    call.prefill_counts.add(layer_index, blocks, config.layout(L, S))
    if plan.recall:
        dense = registry.load("dense_lse", backend)(queries, keys, scale=scale, left_padding=None)
        call.prefill_counts.add_recall(layer_index, mx.exp(lse - dense))
    return out, lse


def differs_by_sequence(call: Call, L: int, cache: SparseBatch) -> bool:
    """Return True if a call with ``L`` queries per sequence must process each sequence of a batch separately.

    One sequence may be long enough for sparse attention while another sequence is too short. A sequence
    that has only one token in the chunk needs a decode step, as it would outside of a batch.
    """
    if L == 1:
        return False
    prefills = call.plan.prefill is not None
    ends = cache.prompt_ends or [cache.length]
    if not prefills and len(cache.first_rows(call.caches)) == 1 and min(ends) >= cache.length:
        return False  # a single sequence without padding needs no separate cache
    before = cache.length - L
    return prefills or any(min(end - before, L) == 1 for end in ends)


def attend_each(
    call: Call, queries: mx.array, cache: SparseBatch, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """Run the prefill chunk of each sequence in a padded batch separately.

    mlx-lm splits each prompt of a batch into the same chunks as a single prompt. The selection for a chunk depends only
    on the rows of the chunk's sequence. So the output for a prompt does not depend on the other prompts.

    Return None if all sequences need dense attention.
    """
    before = cache.length - queries.shape[2]
    extents = cache.extents(call.caches)
    if extents is None:
        call.counts.dense_calls[reasons.UNKNOWN_PADDING] += 1
        return None
    layer_index = call.layer_index(cache)
    parts = []
    outs: list[Any] = []
    for sequence, (first, stop) in enumerate(extents):
        one = cache.select_rows(sequence, first, stop)
        start, end = max(first - before, 0), max(stop - before, 0)
        part, out = queries[sequence : sequence + 1, :, start:end], None
        if start < end:
            keys, _, _ = one.rows("ops")
            step: Any = contextlib.nullcontext()
            if end - start == 1 and call.hooks is not None:
                step = call.hooks.single_sequence(cache, sequence, one, first, queries, part)
            with step:
                out = call.attend_one(part, keys, one, scale, mask, sinks, layer_index)
            cache.store_full_sample(sequence, one)
        parts.append((part, one, start))
        outs.append(out)
    if all(out is None for out in outs):
        return None
    for sequence, (part, one, start) in enumerate(parts):
        n, out = part.shape[2], outs[sequence]
        if out is None:
            out = attend_sequence(part, one, scale, sinks)
        outs[sequence] = mx.pad(out, [(0, 0), (0, 0), (start, queries.shape[2] - start - n), (0, 0)])
    return mx.concatenate(outs)


def attend_dense(
    call: Call, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, sinks: mx.array | None
) -> mx.array | None:
    """Run this package's dense attention if it saves time or memory. Return None to use mlx-lm's dense attention."""
    plan = call.plan
    if call.checks:
        return attend_check(plan.backend, queries, keys, cache, scale, sinks)
    # A lossless model needs mlx-lm's attention, which returns the same bits for one query and for several queries.
    if plan.lossless is not None or sinks is not None or not isinstance(keys, PackedRows):
        return None
    return attend_packed(queries, cache, scale)
