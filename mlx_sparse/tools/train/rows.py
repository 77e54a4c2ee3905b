"""Build training rows for a layer's query networks: long-range queries and their attention per bucket.

See docs/spec/saap.md, (saap.3) and (saap.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...checks import check_int

Array = np.ndarray
SCORES_AT_ONCE = 1 << 23  # scores in memory at a time; 32 MiB for each temporary array


@dataclass(frozen=True)
class Distances:
    """Distances in tokens that define far keys and long-range queries.

    Attributes:
        sink_tokens: number of keys at the start of the text that every query attends to.
        recent_tokens: number of most recent keys that every query attends to. A key is far from a query if the key is
            not a sink and is at least ``recent_tokens`` positions away.
        farthest_top: if the highest-scoring key of a query is more than ``farthest_top`` positions away, the query is
            long-range. Sinks are excluded.
    """

    sink_tokens: int = 1
    recent_tokens: int = 2047
    farthest_top: int = 1024

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 1)
        check_int("farthest_top", self.farthest_top, 0)

    @property
    def exact(self) -> int:
        return self.sink_tokens + self.recent_tokens


@dataclass(frozen=True)
class Texts:
    """Queries and keys of one layer in ``W`` texts. Arrays are in memory or mapped from disk.

    Attributes:
        pre_rope_keys, rope_keys: keys ``(W, Hkv, S, D)`` before and after RoPE.
        pre_rope_queries, rope_queries: sampled queries ``(W, Hq, n, D)`` before and after RoPE.
        positions: ascending positions ``(W, n)`` of the sampled queries in their texts.
    """

    pre_rope_keys: Array
    rope_keys: Array
    pre_rope_queries: Array
    rope_queries: Array
    positions: Array
    scale: float

    @property
    def heads(self) -> int:
        return int(self.pre_rope_keys.shape[1])

    def thinned(self, max_rows: int) -> Texts:
        """Return a copy with at most ``max_rows`` evenly spaced queries per text."""
        every = slice(None, None, -(-self.positions.shape[1] // max_rows))
        before, after = (array[:, :, every] for array in (self.pre_rope_queries, self.rope_queries))
        return replace(self, pre_rope_queries=before, rope_queries=after, positions=self.positions[:, every])

    def group(self, array: Array, window: int, head: int) -> Array:
        """Return the queries of one text and KV head from ``array (W, Hq, n, D)``, in float32 ``(G, n, D)``."""
        G = array.shape[1] // self.heads
        return np.asarray(array[window, head * G : (head + 1) * G], np.float32)


def best_distance(queries: Array, keys: Array, positions: Array, *, distances: Distances) -> Array:
    """Return the int32 distance ``(n,)`` in tokens from each query to its highest-scoring key that is not a sink.

    If a query attends only to sinks, the distance is -1.

    Args:
        queries: ``(n, D)`` after RoPE, at ``positions (n,)``. Each query attends to the keys up to its position.
        keys: ``(S, D)`` of a whole text, after RoPE.
        positions: ``(n,)`` positions of the queries in the text.
    """

    def distance(at: mx.array, behind: mx.array, logits: mx.array) -> mx.array:
        own = (behind >= 0) & (mx.arange(logits.shape[1]) >= distances.sink_tokens)
        best = mx.argmax(mx.where(own, logits, -mx.inf), axis=1).astype(mx.int32)
        return mx.where(mx.any(own, axis=1), at - best, -1)

    return _by_chunks(queries, keys, positions, distance)


def bucket_mass(
    queries: Array, keys: Array, ids: Array, positions: Array, *, buckets: int, distances: Distances, scale: float
) -> Array:
    """Return the float32 share ``(n, C)`` of each query's softmax mass that falls on the far keys of each bucket.

    Args:
        queries, keys, positions: as in `best_distance`.
        ids: ``(S,)`` bucket of each key.
    """
    bucket = mx.array(np.asarray(ids, np.int32))

    def mass(_: mx.array, behind: mx.array, logits: mx.array) -> mx.array:
        logits = mx.where(behind >= 0, scale * logits, -mx.inf)
        attention = mx.softmax(logits, axis=1)
        far = (behind >= distances.recent_tokens) & (mx.arange(logits.shape[1]) >= distances.sink_tokens)
        attention = mx.where(far, attention, 0.0)
        # The sum has one row per bucket, so that each key adds a contiguous row.
        total = mx.zeros((buckets, len(logits))).at[bucket[: logits.shape[1]]].add(mx.contiguous(attention.T))
        return total.T

    return _by_chunks(queries, keys, positions, mass)


def _by_chunks(
    queries: Array, keys: Array, positions: Array, of_chunk: Callable[[mx.array, mx.array, mx.array], mx.array]
) -> Array:
    """Call ``of_chunk(positions, distances to the keys, inner products)`` for one chunk of queries at a time.

    Queries are sorted by position, so that each chunk is multiplied only with the keys up to the chunk's last position.
    The results are returned in the original order of ``queries``.
    """
    every = mx.array(np.asarray(keys, np.float32))
    order = np.argsort(positions, kind="stable")
    size = max(SCORES_AT_ONCE // len(keys), 1)
    found = []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        at = mx.array(np.asarray(positions[rows], np.int32))
        some = every[: int(positions[rows[-1]]) + 1]
        chunk = mx.array(np.asarray(queries[rows], np.float32))
        found.append(np.array(of_chunk(at, at[:, None] - mx.arange(len(some)), chunk @ some.T)))
    result = np.concatenate(found)
    result[order] = result.copy()
    return result


@dataclass(frozen=True)
class Rows:
    """Training rows of one query network.

    Attributes:
        queries: float32 queries ``(N, D)`` before RoPE.
        target: float16 ``(N, C)`` softmax mass of each query on the far keys of each bucket. Each row is divided by its
            sum, so that it sums to 1.
        seen: number of queries from which the rows were selected.
        share: float32 ``(C,)`` share of the texts' keys in each bucket. An empty bucket counts as if it had one key.
        counts: ``(W,)`` number of rows from each text, in the order of the rows.
    """

    queries: Array
    target: Array
    seen: int
    share: Array
    counts: Array


def long_range_rows(
    texts: Texts, ids: Array, head: int, *, buckets: int, distances: Distances, max_rows: int, seed: int = 0
) -> Rows:
    """Return at most ``max_rows`` training rows from all texts and all query heads of one KV head.

    Unlike in the paper, queries attend only to earlier keys, because a decode step has no later keys.

    Args:
        ids: ``(W, Hkv, S)`` bucket of each key.
    """
    windows, G = len(texts.rope_keys), texts.rope_queries.shape[1] // texts.heads
    share = -(-max_rows // windows)
    queries, targets, counts, seen = [], [], np.zeros(windows, int), 0
    for window in range(windows if max_rows else 0):
        before, after = (texts.group(a, window, head) for a in (texts.pre_rope_queries, texts.rope_queries))
        before, after = (array.reshape(-1, array.shape[-1]) for array in (before, after))
        keys, positions = texts.rope_keys[window, head], np.tile(texts.positions[window], G)
        distance = best_distance(after, keys, positions, distances=distances)
        rows = np.flatnonzero((distance > distances.farthest_top) & (positions >= distances.exact))
        seen += len(distance)
        if len(rows) > share:
            rows = np.sort(np.random.default_rng([seed, window]).choice(rows, share, replace=False))
        if not len(rows):
            continue
        own = after[rows], keys, ids[window, head], positions[rows]
        mass = bucket_mass(*own, buckets=buckets, distances=distances, scale=texts.scale)
        far = mass.sum(axis=1)
        queries.append(before[rows][far > 0])
        counts[window] = len(queries[-1])
        targets.append((mass[far > 0] / far[far > 0, None]).astype(np.float16))
    D = texts.pre_rope_keys.shape[-1]
    queries, targets = queries or [np.empty((0, D), np.float32)], targets or [np.empty((0, buckets), np.float16)]
    sizes = np.bincount(ids[:, head, distances.sink_tokens :].ravel(), minlength=buckets)
    share = (np.maximum(sizes, 1) / sizes.sum()).astype(np.float32)
    return Rows(np.concatenate(queries), np.concatenate(targets), seen, share, counts)
