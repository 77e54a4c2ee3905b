"""Make the training rows of a layer's query networks: long-range queries, and their attention by bucket.

docs/spec/saap.md, (saap.3), (saap.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...checks import check_int

Array = npt.NDArray[Any]
CHUNK = 1 << 23  # scores at a time: 32 MiB, held a few times over


@dataclass(frozen=True)
class Distances:
    """Distances from which keys and queries are long-range.

    Attributes:
        sink_tokens, recent_tokens: the part that is always attended: a key counts for a query if it is at least
            ``recent_tokens`` positions away and no sink.
        farthest_top: a query is a training row if its best key, sinks aside, is more than this many positions away.
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
        """Number of tokens that are always attended."""
        return self.sink_tokens + self.recent_tokens


@dataclass(frozen=True)
class Texts:
    """Queries and keys of one layer in some texts ("windows"), each array in memory or mapped from disk.

    Attributes:
        keys_before, keys_after: ``(W, Hkv, S, D)`` before and after RoPE.
        queries_before, queries_after: ``(W, Hq, n, D)``, a sample of each text's.
        positions: ``(W, n)`` where in the text they stand, ascending.
        scale: of the scores.
    """

    keys_before: Array
    keys_after: Array
    queries_before: Array
    queries_after: Array
    positions: Array
    scale: float

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return int(self.keys_before.shape[1])

    def thinned(self, most: int) -> Texts:
        """Return the same texts with at most ``most`` queries of each, evenly from all of them."""
        every = slice(None, None, -(-self.positions.shape[1] // most))
        before, after = (array[:, :, every] for array in (self.queries_before, self.queries_after))
        return replace(self, queries_before=before, queries_after=after, positions=self.positions[:, every])

    def group(self, array: Array, window: int, head: int) -> Array:
        """Return float32 ``(G, n, D)``, the queries that share a KV head."""
        G = array.shape[1] // self.heads
        return np.asarray(array[window, head * G : (head + 1) * G], np.float32)


def best_distance(queries: Array, keys: Array, positions: Array, *, distances: Distances) -> Array:
    """Return ``(n,)`` int32, the distance of each query to its best key, sinks aside; -1 where there is none.

    Args:
        queries: ``(n, D)`` at ``positions (n,)``; each sees the keys before it.
        keys: ``(S, D)`` of a whole text, after RoPE as the queries are.
    """

    def distance(at: mx.array, behind: mx.array, logits: mx.array) -> mx.array:
        own = (behind >= 0) & (mx.arange(logits.shape[1]) >= distances.sink_tokens)
        best = mx.argmax(mx.where(own, logits, -mx.inf), axis=1).astype(mx.int32)
        return mx.where(mx.any(own, axis=1), at - best, -1)

    return _by_chunks(queries, keys, positions, distance)


def bucket_mass(
    queries: Array, keys: Array, ids: Array, positions: Array, *, buckets: int, distances: Distances, scale: float
) -> Array:
    """Return ``(n, C)`` float32, the share of each query's whole attention that is on the far keys of each bucket.

    Args:
        queries, keys, positions: as of `best_distance`.
        ids: ``(S,)`` bucket of each key.
    """
    bucket = mx.array(np.asarray(ids, np.int32))

    def mass(_: mx.array, behind: mx.array, logits: mx.array) -> mx.array:
        logits = mx.where(behind >= 0, scale * logits, -mx.inf)
        attention = mx.softmax(logits, axis=1)
        far = (behind >= distances.recent_tokens) & (mx.arange(logits.shape[1]) >= distances.sink_tokens)
        attention = mx.where(far, attention, 0.0)
        # One row of the sum per bucket, so that each key adds a whole row of it.
        total = mx.zeros((buckets, len(logits))).at[bucket[: logits.shape[1]]].add(mx.contiguous(attention.T))
        return total.T

    return _by_chunks(queries, keys, positions, mass)


def _by_chunks(
    queries: Array,
    keys: Array,
    positions: Array,
    of_chunk: Callable[[mx.array, mx.array, mx.array], mx.array],
) -> Array:
    """Apply ``of_chunk`` to positions, distances to the keys and inner products, a few rows at a time.

    Rows are taken by position, so that a chunk is multiplied with no keys behind its last one.
    """
    every = mx.array(np.asarray(keys, np.float32))
    order = np.argsort(positions, kind="stable")
    size = max(CHUNK // len(keys), 1)
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
        queries: ``(N, D)`` float32 before RoPE.
        target: ``(N, C)`` float16 share of the far attention in each bucket; rows add up to 1.
        seen: number of queries from which the rows were selected.
        share: ``(C,)`` float32 share of the texts' keys in each bucket; an empty one counts as if it had one key.
    """

    queries: Array
    target: Array
    seen: int
    share: Array


def long_range_rows(
    texts: Texts,
    ids: Array,
    head: int,
    *,
    buckets: int,
    distances: Distances,
    most: int,
    seed: int = 0,
) -> Rows:
    """Return the rows of one KV head, from all its query heads and texts, at most ``most`` of them.

    Unlike the paper's, queries see no later keys: a model that was trained to look back attends to them at random, and
    what is learnt from that is worse (docs/results/saap.md).

    Args:
        ids: ``(W, Hkv, S)`` bucket of each key.
    """
    windows, G = len(texts.keys_after), texts.queries_after.shape[1] // texts.heads
    share = -(-most // windows)
    queries, targets, seen = [], [], 0
    for window in range(windows):
        before, after = (texts.group(a, window, head) for a in (texts.queries_before, texts.queries_after))
        before, after = (array.reshape(-1, array.shape[-1]) for array in (before, after))
        keys, positions = texts.keys_after[window, head], np.tile(texts.positions[window], G)
        distance = best_distance(after, keys, positions, distances=distances)
        rows = np.flatnonzero((distance > distances.farthest_top) & (positions >= distances.exact))
        seen += len(distance)
        if len(rows) > share:
            rows = np.sort(np.random.default_rng([seed, window]).choice(rows, share, replace=False))
        if not len(rows):
            continue
        options: dict[str, Any] = {"buckets": buckets, "distances": distances, "scale": texts.scale}
        mass = bucket_mass(after[rows], keys, ids[window, head], positions[rows], **options)
        far = mass.sum(axis=1)
        queries.append(before[rows][far > 0])
        targets.append((mass[far > 0] / far[far > 0, None]).astype(np.float16))
    D = texts.keys_before.shape[-1]
    queries, targets = queries or [np.empty((0, D), np.float32)], targets or [np.empty((0, buckets), np.float16)]
    sizes = np.bincount(ids[:, head, distances.sink_tokens :].ravel(), minlength=buckets)
    share = (np.maximum(sizes, 1) / sizes.sum()).astype(np.float32)
    return Rows(np.concatenate(queries), np.concatenate(targets), seen, share)
