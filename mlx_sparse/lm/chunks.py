"""Multi-token calls of an enabled model: prefill chunks, ragged batches and verification steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.kv_cache import SparseBatchKVCache
from ..cache.sparse_cache import SparseCache
from ..methods import reasons, registry
from ..ops.packed_rows import PackedRows, Rows
from .dense import attend_alone, attend_packed

if TYPE_CHECKING:
    from .call import Call


def attend_chunk(
    call: Call, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, place: int
) -> tuple[mx.array, mx.array] | None:
    """Attend a prefill chunk by the prefill method.

    Args:
        place: of the layer, for the report.

    Returns:
        ``out (B, Hq, L, D)`` and float32 ``lse (B, Hq, L)``; None if the sample keeps too many blocks.
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
    call.figures.add(place, blocks, config.layout(L, S))
    if plan.mass:
        dense = registry.load("dense_lse", backend)(queries, keys, scale=scale, left_padding=None)
        call.figures.add_mass(place, mx.exp(lse - dense))
    return out, lse


def apart(call: Call, L: int, cache: SparseBatchKVCache) -> bool:
    """Return True if a call of ``L`` queries may be sparse for one sequence of a batch and dense for another.

    Without a method for prompts, chunks of a single token are: alone they are decode steps.
    """
    if L == 1:
        return False
    prefills = call.plan.prefill is not None
    ends = cache.prompt_ends or [cache.length]
    if not prefills and len(cache.first_rows(call.caches)) == 1 and min(ends) >= cache.length:
        return False  # what is kept beside the only sequence is kept
    before = cache.length - L
    return prefills or any(min(end - before, L) == 1 for end in ends)


def attend_each(
    call: Call, queries: mx.array, cache: SparseBatchKVCache, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """Attend the prompts of a batch, each as it would be alone; None if all are dense.

    mlx-lm cuts the prompts of a batch into the chunks that each would have alone. What is selected for a chunk, and
    whether it is dense, then follows from the sequence's own rows, so that no answer depends on others.
    """
    before = cache.length - queries.shape[2]
    extents = cache.extents(call.caches)
    if extents is None:
        call.counts.dense_calls[reasons.UNKNOWN_PADDING] += 1
        return None
    place = call.place(cache)
    pieces = []
    outs: list[Any] = []
    for sequence, (first, stop) in enumerate(extents):
        one = cache.alone(sequence, first, stop)
        start, end = max(first - before, 0), max(stop - before, 0)
        piece, out = queries[sequence : sequence + 1, :, start:end], None
        if start < end:
            keys, _, _ = one.rows("ops")
            lending: Any = contextlib.nullcontext()
            if end - start == 1 and call.hooks is not None:
                lending = call.hooks.lending(cache, sequence, one, first, queries, piece)
            with lending:
                out = call.attend_one(piece, keys, one, scale, mask, sinks, place)
            cache.keep(sequence, one)
        pieces.append((piece, one, start))
        outs.append(out)
    if all(out is None for out in outs):
        return None
    for sequence, (piece, one, start) in enumerate(pieces):
        n, out = piece.shape[2], outs[sequence]
        if out is None:
            out = attend_alone(piece, one, scale, sinks)
        outs[sequence] = mx.pad(out, [(0, 0), (0, 0), (start, queries.shape[2] - start - n), (0, 0)])
    return mx.concatenate(outs)


def dense(
    call: Call, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, sinks: mx.array | None
) -> mx.array | None:
    """Attend causally where MLX would read keys more than once or unpack all of them; None elsewhere."""
    plan = call.plan
    if plan.attend_check is not None and call.checks:
        return plan.attend_check(plan.backend, queries, keys, cache, scale, sinks)
    # In a lossless model MLX's own attention gives several queries the bits that its steps give them one by one.
    if plan.lossless is not None or sinks is not None or not isinstance(keys, PackedRows):
        return None
    return attend_packed(queries, cache, scale)
