"""Implement the prefill baselines in NumPy (docs/spec/sample.md, "Baselines")."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...checks import check_block_size, check_int, check_qkv, check_share
from ...core.attend.oracle import checked, float64, logits, softmax_lse, weighted_values
from ...core.blocks.layout import MINFERENCE_ROWS, Layout
from ...core.blocks.oracle import block_lists, prefill_result, prefill_stats
from ..sample.oracle import merge, sample_scores
from .block_patterns import bigbird_pattern, streaming_pattern
from .lsh_spans import Span, pieces, sampled, signs

Array = npt.NDArray[Any]


def minference_select(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    vertical_tokens: int = 1000,
    slash_tokens: int = 6096,
    block_size: int = 64,
    scale: float | None = None,
) -> Array:
    """Return int32 indices ``(B, Hq, R, N)`` of the key blocks that each row block attends to (sample.12).

    The softmax weights of the last 64 queries are summed by key block and by offset bin (see `SampleSelection`). Row
    blocks attend to the ``vertical_tokens / block_size`` key blocks with the largest sums. They also attend to the keys
    in the ``slash_tokens / block_size`` offset bins with the largest sums. Both quotients are rounded up.
    """
    q, k = float64(queries), float64(keys)
    layout = Layout(q.shape[2], k.shape[2], 1, block_size, MINFERENCE_ROWS)
    column, slash = sample_scores(q, k, chunks=1, block_size=block_size, scale=scale, rows=MINFERENCE_ROWS)
    budgets = (-(-tokens // block_size) for tokens in (vertical_tokens, slash_tokens))
    column_kept, slash_kept = (select_largest(scores, n) for scores, n in zip((column, slash), budgets, strict=True))
    return block_lists(merge(column_kept, slash_kept, layout))


def select_largest(scores: Array, count: int) -> Array:
    """Return a mask of the ``count`` largest ``scores (..., Nk)``. Ties go to the lower index.

    If a score is NaN, all scores are selected.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, order, True, axis=-1)
    return kept | np.isnan(scores).any(axis=-1, keepdims=True)


def minference_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    vertical_tokens: int = 1000,
    slash_tokens: int = 6096,
    block_size: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run MInference: attend to the key blocks that `minference_select` selects (sample.12)."""
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("vertical_tokens", vertical_tokens, 1)
    check_int("slash_tokens", slash_tokens, 1)
    check_block_size(block_size)
    blocks = minference_select(
        q, k, vertical_tokens=vertical_tokens, slash_tokens=slash_tokens, block_size=block_size, scale=scale
    )
    layout = Layout(n.L, n.S, 1, block_size, MINFERENCE_ROWS)
    return prefill_result((q, k, v), blocks, layout, scale=scale, return_stats=return_stats)


def bigbird_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    window: float = 0.08,
    global_share: float = 0.08,
    random_blocks: int = 1,
    block_size: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run BigBird (sample.13).

    A query attends to ``window * S`` recent keys, to the first ``global_share * S`` keys and to random key blocks.
    """
    q, k, v, n = checked(queries, keys, values, backend)
    check_share("window", window)
    check_share("global_share", global_share)
    check_int("random_blocks", random_blocks, 0)
    check_block_size(block_size)
    layout = Layout(n.L, n.S, 1, block_size, rows=0)
    pattern = bigbird_pattern(layout, window=window, global_share=global_share, random_blocks=random_blocks)
    blocks = block_lists(np.broadcast_to(pattern, (n.B, n.Hq, *pattern.shape)))
    return prefill_result((q, k, v), blocks, layout, scale=scale, return_stats=return_stats)


def streaming_prefill_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    sink_tokens: int = 4,
    window: float = 0.08,
    block_size: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run StreamingLLM in prefill: attend to the first key blocks and to ``window * S`` recent keys (sample.14)."""
    q, k, v, n = checked(queries, keys, values, backend)
    check_int("sink_tokens", sink_tokens, 0)
    check_share("window", window)
    check_block_size(block_size)
    layout = Layout(n.L, n.S, 1, block_size, rows=0)
    pattern = streaming_pattern(layout, sink_tokens=sink_tokens, window=window)
    blocks = block_lists(np.broadcast_to(pattern, (n.B, n.Hq, *pattern.shape)))
    return prefill_result((q, k, v), blocks, layout, scale=scale, return_stats=return_stats)


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
    buckets: int = 16,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend to the key at the query's position and to the earlier keys that have the query's hash (sample.15)."""
    q, k, v, n = checked(queries, keys, values, backend)
    code_q, code_k = hash_codes(q, buckets), np.repeat(hash_codes(k, buckets), n.G, axis=1)
    same = code_q[..., :, None] == code_k[..., None, :]
    position, key = np.arange(n.S - n.L, n.S)[:, None], np.arange(n.S)
    mask = (same | (key == position) | _nan_keys(k, n.G)) & (key <= position)
    return _attend((q, k, v), mask, np.zeros(n.S), scale=scale, return_stats=return_stats)


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
    bucket_size: int = 256,
    sampled_keys: int = 256,
    hash_bits: int = 7,
    exact_rows: int = 4096,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Run HyperAttention (sample.16 to sample.18).

    The queries are divided into ranges of at most ``exact_rows`` queries. A query attends to all keys of its range up
    to its own position. Of the keys before the range, the query attends to the keys in its bucket and to a weighted
    sample.
    """
    q, k, v, n = checked(queries, keys, values, backend)
    offset = n.S - n.L
    mask, weight = np.zeros((n.B, n.Hq, n.L, n.S), dtype=bool), np.zeros((n.B, n.Hq, n.L, n.S))
    for start, stop, spans in pieces(n.L, n.S, exact_rows):
        rows = slice(start - offset, stop - offset)
        mask[:, :, rows, start:stop] = np.tri(stop - start, dtype=bool)
        for span in spans:
            columns = slice(span.first, span.last)
            kept, extra = _span_pairs(q, k, span, offset, bucket_size, sampled_keys, hash_bits)
            inside = slice(start - span.start, stop - span.start)
            mask[:, :, rows, columns], weight[:, :, rows, columns] = kept[:, :, inside], extra[:, :, inside]
    position, key = np.arange(offset, n.S)[:, None], np.arange(n.S)
    lost = _nan_keys(k, n.G) & (key <= position)
    return _attend((q, k, v), mask | lost, weight, scale=scale, return_stats=return_stats)


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


def _attend(
    qkv: tuple[Array, Array, Array], mask: Array, weight: Array, *, scale: float | None, return_stats: bool | str
) -> Any:
    """Compute attention over the query-key pairs in ``mask (B, Hq, L, S)``, and add ``weight`` to their logits."""
    q, k, v = qkv
    n = check_qkv(q, k, v)
    grouped = (n.B, n.Hkv, n.G, n.L, n.S)
    by_group = mask.reshape(grouped)
    scores = logits(q, k, n.D**-0.5 if scale is None else scale)
    lse = softmax_lse(scores, by_group)[1].reshape(q.shape[:3])
    weights, _ = softmax_lse(scores + np.broadcast_to(weight, mask.shape).reshape(grouped), by_group)
    out = weighted_values(weights, v, by_group).reshape(q.shape)
    layout = Layout(n.L, n.S, 1, 1, rows=0)
    return prefill_stats(qkv, out, lse, block_lists(mask), layout, scale=scale, return_stats=return_stats)
