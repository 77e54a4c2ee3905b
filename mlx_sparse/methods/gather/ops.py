"""Run gathered prefill with MLX array operations (docs/spec/gather.md, gather.1 to gather.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from ...core.attend.ops import dense_attention, dense_lse, exact_logits, take_rows
from ...core.blocks.ops import batch_size, wait_for
from ...core.packed_rows import PackedRows, Rows
from .config import GatherLayout

Result = tuple[mx.array, mx.array, mx.array, mx.array]
# Function that attends causally: (queries, keys, values, scale=, length=) -> (out, lse). The first `length` keys count.
Attend = Callable[..., tuple[mx.array, mx.array]]


def gather_rows(queries: mx.array, samples: int) -> tuple[mx.array, mx.array]:
    """Select the sampled queries of a chunk ``(B, Hq, m, D)`` (gather.3), (gather.4).

    Return their indices ``(B, Hq, N)``, and float32 weights: 1, or 0 for a duplicate. If a cosine is NaN, so is a
    weight.
    """
    B, Hq, m, _ = queries.shape
    if m <= samples:
        return mx.broadcast_to(mx.arange(m), (B, Hq, m)), mx.ones((B, Hq, m))
    q = queries.astype(mx.float32)
    mean = q.mean(axis=2, keepdims=True)
    norms = mx.linalg.norm(q, axis=-1) * mx.linalg.norm(mean, axis=-1)
    cosines = (q * mean).sum(axis=-1) / mx.maximum(norms, 1e-12)
    half = samples // 2
    even = mx.array([(t + 1) * m // (samples - half) - 1 for t in range(samples - half)])
    least = mx.argpartition(cosines, kth=max(half - 1, 0), axis=-1)[..., :half]
    once = (least[..., None] != even).all(axis=-1)
    rows = mx.concatenate([least.astype(mx.int32), mx.broadcast_to(even, (B, Hq, even.size))], axis=-1)
    weight = mx.concatenate([once.astype(mx.float32), mx.ones((B, Hq, even.size))], axis=-1)
    return rows, weight + 0.0 * cosines.sum(axis=-1, keepdims=True)


def gather_scores(
    queries: mx.array, keys: Rows, *, samples: int, scale: float, sinks: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Sum the softmax weights of the sampled queries by earlier key. See `methods.gather.oracle.gather_scores`.

    Quantized keys are not dequantized.
    """
    B, Hq, m, D = queries.shape
    Hkv, M = keys.shape[1], keys.shape[2] - m
    rows, weight = gather_rows(queries, samples)
    N = rows.shape[2]
    q = (take_rows(queries, rows).astype(mx.float32) * scale).reshape(B, Hkv, -1, D)
    hidden = (mx.arange(m) > rows[..., None]).reshape(B, Hkv, -1, m)
    weight = weight.reshape(B, Hkv, -1)
    extra = None if sinks is None else mx.repeat(sinks.astype(mx.float32), N).reshape(1, Hkv, -1)
    step = batch_size(B * (Hq // Hkv) * N * (M + m))
    found: list[mx.array] = []
    for first in range(0, Hkv, step):
        heads = slice(first, first + step)
        scores = exact_logits(wait_for(found, q[:, heads]), _first(keys, M + m, heads))
        own = mx.where(hidden[:, heads], -mx.inf, scores[..., M:])
        top = mx.maximum(mx.max(scores[..., :M], axis=-1), mx.max(own, axis=-1))
        exps, total = mx.exp(scores[..., :M] - top[..., None]), mx.exp(own - top[..., None]).sum(axis=-1)
        if extra is not None:
            total = total + mx.exp(extra[:, heads] - top)
        shares = weight[:, heads] / (total + exps.sum(axis=-1))
        found.append((shares[:, :, None] @ exps)[:, :, 0])
    return mx.concatenate(found, axis=1), weight.sum(axis=-1)


def gather_select(scores: mx.array, kept: int, neighbors: int = 0) -> mx.array:
    """Return the ascending int32 indices ``(B, Hkv, kept)`` of the best keys by ``scores (B, Hkv, M)`` (gather.7)."""
    M = scores.shape[2]
    best = mx.pad(scores, [(0, 0), (0, 0), (neighbors, neighbors)])  # no score is negative
    for step in _doublings(2 * neighbors + 1):
        best = mx.maximum(best[..., :-step], best[..., step:])
    # Neighbors of a key often have equal scores. MLX's sorts are not stable, so count the ties.
    least = mx.sort(best, axis=-1)[..., M - kept, None]
    above, equal = best > least, best == least
    room = kept - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    return mx.sort(mx.where(chosen, mx.arange(M), M), axis=-1)[..., :kept]


def _doublings(width: int) -> Iterator[int]:
    """Yield the shifts with which a running maximum of 1 element becomes one of ``width`` elements."""
    size = 1
    while size < width:
        step = min(size, width - size)
        yield step
        size += step


def gather_attention(
    queries: mx.array, keys: Rows, values: Rows, *, scale: float, sinks: mx.array | None = None, **settings: Any
) -> Result:
    """Run gathered prefill. See `methods.gather.oracle.gather_attention` for the arguments and results.

    The scores are evaluated, so this function does not work inside `mx.compile`. ``lse`` costs nothing if it is not
    used. Only the selected rows of quantized keys and values are dequantized, and all rows for dense queries.
    """
    return gather_with(_attend, queries, keys, values, scale=scale, sinks=sinks, length=keys.shape[2], **settings)


def gather_with(
    attend: Attend,
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    scale: float,
    sinks: mx.array | None,
    length: int,
    **settings: Any,
) -> Result:
    """Run gathered prefill with the dense kernel ``attend``. The first ``length`` keys are in use."""
    B, Hq, L, _ = queries.shape
    Hkv = keys.shape[1]
    layout = GatherLayout(L, length, 1, 1, 0, **settings)
    pairs, recall = mx.full((B, Hq), layout.causal_pairs, mx.int64), mx.ones((B, Hkv))
    parts: list[tuple[mx.array, mx.array]] = []
    for piece in layout.pieces:
        M, end = piece.earlier, piece.earlier + piece.stop - piece.start
        if piece.sparse:
            chunk, seen = queries[:, :, piece.start : piece.stop], _first(keys, end)
            scores, rows = gather_scores(chunk, seen, samples=layout.samples, scale=scale, sinks=sinks)
            lists = gather_select(scores, piece.kept, layout.neighbors)
            lost = mx.isnan(scores).any(axis=(1, 2))
            own = slice(M, M + piece.sparse)
            given = (mx.concatenate([take_rows(each, lists), each[:, :, own]], axis=2) for each in (keys, values))
            found = attend(chunk[:, :, : piece.sparse], *given, scale=scale, length=piece.kept + piece.sparse)
            if bool(lost.any()):  # (gather.8)
                dense = attend(chunk[:, :, : piece.sparse], keys, values, scale=scale, length=own.stop)
                at = lost[:, None, None]
                found = mx.where(at[..., None], dense[0], found[0]), mx.where(at, dense[1], found[1])
            parts.append(found)
            missed = scores.sum(axis=-1) - mx.take_along_axis(scores, lists, axis=-1).sum(axis=-1)
            recall = recall - mx.where(lost[:, None], 0.0, missed / rows) * (piece.sparse / L)
            pairs = pairs - mx.where(lost[:, None], 0, piece.sparse * (M - piece.kept))
        if piece.exact < piece.stop:
            parts.append(attend(queries[:, :, piece.exact : piece.stop], keys, values, scale=scale, length=end))
    out, lse = (mx.concatenate(list(each), axis=2) for each in zip(*parts, strict=True))
    return out, lse, pairs, recall


def _first(rows: Rows, length: int, heads: slice = slice(None)) -> Rows:
    return rows.first(length, heads) if isinstance(rows, PackedRows) else rows[:, heads, :length]


def _attend(queries: mx.array, keys: Rows, values: Rows, *, scale: float, length: int) -> tuple[mx.array, mx.array]:
    keys, values = keys[:, :, :length], values[:, :, :length]
    out = dense_attention(queries, keys, values, scale=scale, left_padding=None)
    return out, dense_lse(queries, keys, scale=scale, left_padding=None)
