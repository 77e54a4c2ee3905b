"""Implement the prefill baselines in NumPy (docs/spec/sample.md, "Baselines")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import float64, logits, softmax_lse, weighted_values
from ...core.blocks.layout import MINFERENCE_ROWS, Layout
from ...core.blocks.oracle import attend_blocks, block_lists
from ..sample.oracle import merge_kept, sample_scores
from .block_patterns import Pattern, bigbird_pattern, streaming_pattern
from .lsh_spans import Span, pieces, sampled, signs

Array = np.ndarray
Result = tuple[Array, Array, Array]  # out, lse, and key blocks of each row block or indices of the attended keys


def minference_select(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    vertical_tokens: int,
    slash_tokens: int,
    block_size: int,
    scale: float,
) -> Array:
    """Return int32 indices ``(B, Hq, R, N)`` of the key blocks that each row block attends to (sample.12).

    The softmax weights of the last 64 queries are summed by key block and by offset bin (see `SampleSelection`). Row
    blocks attend to the ``vertical_tokens / block_size`` key blocks with the largest sums. They also attend to the keys
    in the ``slash_tokens / block_size`` offset bins with the largest sums. Both quotients are rounded up.
    """
    layout = Layout(np.shape(queries)[2], np.shape(keys)[2], 1, block_size, MINFERENCE_ROWS)
    column, slash = sample_scores(queries, keys, chunks=1, block_size=block_size, scale=scale, rows=MINFERENCE_ROWS)
    budgets = (-(-tokens // block_size) for tokens in (vertical_tokens, slash_tokens))
    column_kept, slash_kept = (select_largest(scores, n) for scores, n in zip((column, slash), budgets, strict=True))
    return block_lists(merge_kept(column_kept, slash_kept, layout))


def select_largest(scores: Array, count: int) -> Array:
    """Return a mask of the ``count`` largest ``scores (..., Nk)``. Ties go to the lower index.

    If a score is NaN, all scores are selected.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order, True, axis=-1)
    selected: Array = kept | np.isnan(scores).any(axis=-1, keepdims=True)
    return selected


def minference_attention(
    queries: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike, *, block_size: int, scale: float, **budgets: int
) -> Result:
    """Run MInference: attend to the key blocks that `minference_select` selects (sample.12)."""
    blocks = minference_select(queries, keys, **budgets, block_size=block_size, scale=scale)
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def bigbird_attention(queries: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike, **settings: Any) -> Result:
    """Run BigBird: attend to the key blocks in a `bigbird_pattern` (sample.13)."""
    return _attend_pattern(bigbird_pattern, queries, keys, values, **settings)


def streaming_prefill_attention(
    queries: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike, **settings: Any
) -> Result:
    """Run StreamingLLM in prefill: attend to the first key blocks and to ``window * S`` recent keys (sample.14)."""
    return _attend_pattern(streaming_pattern, queries, keys, values, **settings)


def _attend_pattern(
    pattern: Callable[..., Pattern],
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    block_size: int,
    scale: float,
    **settings: Any,
) -> Result:
    """Attend to the key blocks in a pattern ``(R, Nk)``, which is the same for every head."""
    mask = pattern(Layout(np.shape(queries)[2], np.shape(keys)[2], 1, block_size, rows=0), **settings)
    blocks = block_lists(np.broadcast_to(mask, (*np.shape(queries)[:2], *mask.shape)))
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def hash_codes(vectors: Array, buckets: int) -> Array:
    """Return a hash from 0 to ``buckets - 1`` for each of ``vectors (..., D)`` (sample.15).

    The hash is the index of the direction that has the largest dot product with the vector. There are ``buckets // 2``
    random directions and their negatives.
    """
    along = vectors @ signs(vectors.shape[-1], buckets // 2)
    codes: Array = np.argmax(np.concatenate([along, -along], axis=-1), axis=-1)
    return codes


def hash_sparse_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    buckets: int,
    scale: float,
) -> Result:
    """Attend to the key at the query's position and to the earlier keys that have the query's hash (sample.15)."""
    q, k, v = float64(queries), float64(keys), float64(values)
    L, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    code_q, code_k = hash_codes(q, buckets), np.repeat(hash_codes(k, buckets), G, axis=1)
    same = code_q[..., :, None] == code_k[..., None, :]
    position, key = np.arange(S - L, S)[:, None], np.arange(S)
    mask = (same | (key == position) | _nan_keys(k, G)) & (key <= position)
    return _attend_keys((q, k, v), mask, np.zeros(S), scale)


def sort_ranks(vectors: Array, hash_bits: int) -> Array:
    """Sort ``vectors (..., M, D)`` by a hash of length ``hash_bits``, and return ranks from 0 to M - 1 (sample.17).

    The signs of a vector's dot products with random directions are decoded as a Gray code. Vectors with
    adjacent hashes therefore differ in one sign.
    """
    positive = vectors @ signs(vectors.shape[-1], hash_bits) > 0
    bits = np.logical_xor.accumulate(positive, axis=-1)
    code = bits @ (1 << np.arange(hash_bits)[::-1])
    return np.argsort(np.argsort(code, axis=-1, kind="stable"), axis=-1)


def hyperattention_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    bucket_size: int,
    sampled_keys: int,
    hash_bits: int,
    exact_rows: int,
    scale: float,
) -> Result:
    """Run HyperAttention (sample.16 to sample.18).

    The queries are divided into ranges of at most ``exact_rows`` queries. A query attends to all keys of its range up
    to its own position. Of the keys before the range, the query attends to the keys in its bucket and to a weighted
    sample.
    """
    q, k, v = float64(queries), float64(keys), float64(values)
    L, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    offset = S - L
    mask, weight = np.zeros((*q.shape[:3], S), dtype=bool), np.zeros((*q.shape[:3], S))
    for start, stop, spans in pieces(L, S, exact_rows):
        rows = slice(start - offset, stop - offset)
        mask[:, :, rows, start:stop] = np.tri(stop - start, dtype=bool)
        for span in spans:
            columns = slice(span.first, span.last)
            kept, extra = _span_pairs(q, k, span, offset, bucket_size, sampled_keys, hash_bits)
            inside = slice(start - span.start, stop - span.start)
            mask[:, :, rows, columns], weight[:, :, rows, columns] = kept[:, :, inside], extra[:, :, inside]
    position, key = np.arange(offset, S)[:, None], np.arange(S)
    lost = _nan_keys(k, G) & (key <= position)
    return _attend_keys((q, k, v), mask | lost, weight, scale)


def _span_pairs(
    q: Array, k: Array, span: Span, offset: int, bucket_size: int, sampled_keys: int, hash_bits: int
) -> tuple[Array, Array]:
    """Select query-key pairs in a span of P queries and M keys (sample.17, sample.18).

    Return a mask that is True for the selected pairs, and the logarithms of the pairs' weights. Both arrays are
    ``(B, Hq, P, M)``.
    """
    P, M, G = span.stop - span.start, span.last - span.first, q.shape[1] // k.shape[1]
    if bucket_size + sampled_keys >= M:
        return np.ones((*q.shape[:2], P, M), dtype=bool), np.zeros((*q.shape[:2], P, M))
    buckets = -(-M // bucket_size)
    rank_q = sort_ranks(q[:, :, span.start - offset : span.stop - offset], hash_bits)
    rank_k = np.repeat(sort_ranks(k[:, :, span.first : span.last], hash_bits), G, axis=1)
    same = (rank_q * buckets // P)[..., :, None] == (rank_k // bucket_size)[..., None, :]
    drawn = np.isin(np.arange(span.first, span.last), sampled(span.first, span.last, sampled_keys))
    return same | drawn, np.where(drawn & ~same, np.log(M / sampled_keys), 0.0)


def _nan_keys(k: Array, G: int) -> Array:
    """Return a mask ``(B, Hq, 1, S)``, True for NaN keys. NaN keys have no hash, so every query attends to them."""
    return np.repeat(np.isnan(k.sum(axis=-1)), G, axis=1)[:, :, None]


def _attend_keys(qkv: tuple[Array, Array, Array], mask: Array, weight: Array, scale: float) -> Result:
    """Compute attention over the query-key pairs in ``mask (B, Hq, L, S)``, and add ``weight`` to their logits."""
    q, k, v = qkv
    scores = logits(q, k, scale)
    by_group = mask.reshape(scores.shape)
    lse = softmax_lse(scores, by_group)[1].reshape(q.shape[:3])
    weights, _ = softmax_lse(scores + np.broadcast_to(weight, mask.shape).reshape(scores.shape), by_group)
    return weighted_values(weights, v, by_group).reshape(*q.shape[:3], -1), lse, block_lists(mask)
