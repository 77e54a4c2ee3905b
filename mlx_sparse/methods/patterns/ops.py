"""Run the prefill baselines with MLX array operations (docs/spec/sample.md, "Baselines").

The functions return ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)`` and int32 lists of key blocks ``(B, Hq, R, N)``.
The baselines that hash queries and keys are for quality comparisons only. They compute the scores of all query-key
pairs and then mask the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.blocks.layout import MINFERENCE_ROWS, Layout
from ...core.blocks.ops import attend_blocks, batch_size, block_lists, merge_kept, select_largest, softmax, wait_for
from ..sample.ops import sample_scores
from .block_patterns import Pattern, bigbird_pattern, streaming_pattern
from .lsh_spans import Span, pieces, sampled, signs

Result = tuple[mx.array, mx.array, mx.array]


def minference_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    vertical_tokens: int,
    slash_tokens: int,
    block_size: int,
    scale: float,
) -> Result:
    """Run MInference on the key blocks and offset bins that the last 64 queries attend to most (sample.12)."""
    layout = Layout(queries.shape[2], keys.shape[2], 1, block_size, MINFERENCE_ROWS)
    scores = sample_scores(queries, keys, chunks=1, block_size=block_size, scale=scale, rows=MINFERENCE_ROWS)
    budgets = (-(-tokens // block_size) for tokens in (vertical_tokens, slash_tokens))
    column_kept, slash_kept = (select_largest(side, count) for side, count in zip(scores, budgets, strict=True))
    blocks = block_lists(merge_kept(column_kept, slash_kept, layout, sampled_in_full=False))
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def bigbird_attention(queries: mx.array, keys: mx.array, values: mx.array, **settings: Any) -> Result:
    """Run BigBird: attend to a window of recent keys, the first key blocks and random key blocks (sample.13)."""
    return _attend_pattern(bigbird_pattern, queries, keys, values, **settings)


def streaming_prefill_attention(queries: mx.array, keys: mx.array, values: mx.array, **settings: Any) -> Result:
    """Run StreamingLLM in prefill: attend to the first key blocks and to a window of recent keys (sample.14)."""
    return _attend_pattern(streaming_pattern, queries, keys, values, **settings)


def _attend_pattern(
    pattern: Callable[..., Pattern],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    block_size: int,
    scale: float,
    **settings: Any,
) -> Result:
    """Attend to the key blocks in a pattern ``(R, Nk)``, which is the same for all heads and sequences."""
    mask = pattern(Layout(queries.shape[2], keys.shape[2], 1, block_size, rows=0), **settings)
    blocks = block_lists(mx.array(np.broadcast_to(mask, (*queries.shape[:2], *mask.shape))))
    return *attend_blocks(queries, keys, values, blocks, block_size=block_size, scale=scale), blocks


def hash_codes(vectors: mx.array, buckets: int) -> mx.array:
    """Return the hash of each of ``vectors (..., D)`` (sample.15). See `methods.patterns.oracle.hash_codes`."""
    along = vectors.astype(mx.float32) @ mx.array(signs(vectors.shape[-1], buckets // 2))
    return mx.argmax(mx.concatenate([along, -along], axis=-1), axis=-1)


def hash_sparse_attention(queries: mx.array, keys: mx.array, values: mx.array, *, buckets: int, scale: float) -> Result:
    """Attend to the key at the query's position and to the earlier keys that have the query's hash (sample.15).

    Returns:
        ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)`` and int32 indices of the attended keys ``(B, Hq, L, N)``.
    """
    L, S = queries.shape[2], keys.shape[2]
    code_q, code_k = hash_codes(queries, buckets), _by_head(hash_codes(keys, buckets), queries, keys)
    lost = _nan_keys(queries, keys)

    def choose(start: int, stop: int) -> tuple[mx.array, None]:
        same = code_q[:, :, start - (S - L) : stop - (S - L), None] == code_k[:, :, None, :stop]
        itself = mx.arange(start, stop)[:, None] == mx.arange(stop)
        return same | itself | lost[..., :stop], None

    return _attend(queries, keys, values, _steps(queries, keys, S - L, S), choose, scale)


def sort_ranks(vectors: mx.array, hash_bits: int) -> mx.array:
    """Sort ``vectors (..., M, D)`` by a hash of length ``hash_bits``, and return ranks from 0 to M - 1 (sample.17)."""
    positive = vectors.astype(mx.float32) @ mx.array(signs(vectors.shape[-1], hash_bits)) > 0
    # Convert the Gray code to a number: each binary digit is the parity of the signs up to this digit.
    digits = mx.cumsum(positive.astype(mx.int32), axis=-1) % 2
    code = (digits * mx.array(1 << np.arange(hash_bits)[::-1])).sum(axis=-1)
    # MLX's sorts are not stable. Adding the row index makes all sort keys different.
    M = code.shape[-1]
    order = mx.argsort(code.astype(mx.int64) * M + mx.arange(M), axis=-1)
    return mx.argsort(order, axis=-1)


def hyperattention_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    bucket_size: int,
    sampled_keys: int,
    hash_bits: int,
    exact_rows: int,
    scale: float,
) -> Result:
    """Run HyperAttention. See `methods.patterns.oracle.hyperattention_attention`.

    Returns:
        ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)`` and int32 indices of the attended keys ``(B, Hq, L, N)``. The
        log-sum-exp excludes the sampling weights.
    """
    L, S = queries.shape[2], keys.shape[2]
    cut = list(pieces(L, S, exact_rows))
    spans = {span for _, _, before in cut for span in before}
    found = {span: _span_pairs(queries, keys, span, bucket_size, sampled_keys, hash_bits) for span in spans}
    lost = _nan_keys(queries, keys)
    before = {start: spans for start, _, spans in cut}
    starts = sorted(before)

    def choose(start: int, stop: int) -> tuple[mx.array, mx.array]:
        piece = max(first for first in starts if first <= start)
        shape = (*queries.shape[:2], stop - start)
        kept, weight = [], []
        for span in before[piece]:
            same, drawn = found[span](start - span.start, stop - span.start)
            M = span.last - span.first
            kept.append(mx.broadcast_to(same | drawn, (*shape, M)))
            weight.append(mx.broadcast_to(mx.where(drawn & ~same, np.log(M / sampled_keys), 0.0), (*shape, M)))
        kept.append(mx.ones((*shape, stop - piece), mx.bool_))
        weight.append(mx.zeros((*shape, stop - piece)))
        return mx.concatenate(kept, axis=-1) | lost[..., :stop], mx.concatenate(weight, axis=-1)

    steps = (step for start, stop, _ in cut for step in _steps(queries, keys, start, stop))
    return _attend(queries, keys, values, steps, choose, scale)


def _span_pairs(
    queries: mx.array, keys: mx.array, span: Span, bucket_size: int, sampled_keys: int, hash_bits: int
) -> Callable[[int, int], tuple[mx.array, mx.array]]:
    """Return a function that computes two masks over the keys of a span for a range of query rows (sample.18).

    The first mask is True for keys in the bucket of the query. The second mask is True for sampled keys.
    """
    P, M, offset = span.stop - span.start, span.last - span.first, keys.shape[2] - queries.shape[2]
    if bucket_size + sampled_keys >= M:
        return lambda start, stop: (mx.ones((1, 1, 1, M), mx.bool_), mx.zeros((M,), mx.bool_))
    query_bucket = (
        sort_ranks(queries[:, :, span.start - offset : span.stop - offset], hash_bits) * -(-M // bucket_size) // P
    )
    key_bucket = _by_head(sort_ranks(keys[:, :, span.first : span.last], hash_bits) // bucket_size, queries, keys)
    drawn = mx.array(np.isin(np.arange(span.first, span.last), sampled(span.first, span.last, sampled_keys)))
    return lambda start, stop: (query_bucket[:, :, start:stop, None] == key_bucket[:, :, None], drawn)


def _by_head(array: mx.array, queries: mx.array, keys: mx.array) -> mx.array:
    """Repeat ``array (B, Hkv, ...)`` for each query head, and return the result ``(B, Hq, ...)``."""
    return mx.repeat(array, queries.shape[1] // keys.shape[1], axis=1)


def _nan_keys(queries: mx.array, keys: mx.array) -> mx.array:
    """Return a mask ``(B, Hq, 1, S)``, True for NaN keys. NaN keys have no hash, so every query attends to them."""
    return _by_head(mx.isnan(keys.astype(mx.float32).sum(axis=-1)), queries, keys)[:, :, None]


def _steps(queries: mx.array, keys: mx.array, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split the query positions ``[start, stop)`` into ranges whose scores fit into one batch."""
    rows = batch_size(queries.shape[0] * queries.shape[1] * keys.shape[2])
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    steps: Iterator[tuple[int, int]],
    choose: Callable[[int, int], tuple[mx.array, mx.array | None]],
    scale: float,
) -> Result:
    """Compute attention over the causal keys that ``choose`` selects.

    Args:
        steps: ranges ``(start, stop)`` of query positions.
        choose: function that returns a mask of the selected keys for queries ``start`` to ``stop - 1``. It also returns
            an array that is added to the logits, or None.
    """
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    k, v = (array.astype(mx.float32)[:, :, None] for array in (keys, values))
    outs: list[mx.array] = []
    lses, lists = [], []
    for start, stop in steps:
        kept, weight = choose(start, stop)
        kept = kept & (mx.arange(stop) <= mx.arange(start, stop)[:, None])
        q = wait_for(outs, queries[:, :, start - (S - L) : stop - (S - L)]).astype(mx.float32) * scale
        grouped = q.reshape(B, Hkv, Hq // Hkv, stop - start, D)
        scores = (grouped @ k[..., :stop, :].swapaxes(-1, -2)).reshape(B, Hq, stop - start, stop)
        scores = mx.where(kept, scores, -mx.inf)
        lses.append(mx.logsumexp(scores, axis=-1))
        weights = softmax(scores if weight is None else scores + weight)
        out = weights.reshape(B, Hkv, Hq // Hkv, stop - start, stop) @ v[..., :stop, :]
        outs.append(out.reshape(B, Hq, stop - start, -1).astype(queries.dtype))
        lists.append(block_lists(kept))
    width = max(listed.shape[-1] for listed in lists)
    lists = [mx.pad(one, [(0, 0)] * 3 + [(0, width - one.shape[-1])], constant_values=-1) for one in lists]
    return mx.concatenate(outs, axis=2), mx.concatenate(lses, axis=2), mx.concatenate(lists, axis=2)
