"""What the query networks of a layer learn from: queries that look far away, and where their attention goes.

docs/spec/saap.md, (saap.3), (saap.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..checks import check_int

Array = npt.NDArray[Any]
CHUNK = 1 << 23  # scores at a time: 32 MiB, held a few times over


@dataclass(frozen=True)
class Distances:
    """What counts as far.

    Attributes:
        sink_tokens, recent_tokens: the part that is attended exactly: a key counts for a query if it is at least
            ``recent_tokens`` positions away and no sink.
        farthest_top: a query is learnt from if its best key, sinks aside, is more than this many positions away.
    """

    sink_tokens: int = 1
    recent_tokens: int = 2047
    farthest_top: int = 1024

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 1)
        check_int("farthest_top", self.farthest_top, 0)


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
        """KV heads."""
        return int(self.keys_before.shape[1])

    def group(self, array: Array, window: int, head: int) -> Array:
        """Float32 ``(G, n, D)`` of the queries that share a KV head."""
        G = array.shape[1] // self.heads
        return np.asarray(array[window, head * G : (head + 1) * G], np.float32)


@dataclass(frozen=True)
class Mass:
    """Attention of some queries, by bucket of far keys.

    Attributes:
        mass: ``(n, C)`` float32 share of each query's whole attention; rows add up to its far share.
        distance: ``(n,)`` int32 to the best key, sinks aside; -1 where there is none.
    """

    mass: Array
    distance: Array


def bucket_mass(
    queries: Array,
    keys: Array,
    ids: Array,
    positions: Array,
    *,
    buckets: int,
    distances: Distances,
    scale: float,
) -> Mass:
    """Where the attention of ``queries (n, D)`` at ``positions (n,)`` goes, of which each sees the keys before it.

    Args:
        keys: ``(S, D)`` of a whole text, after RoPE as the queries are.
        ids: ``(S,)`` bucket of each key.
    """
    on_device = mx.array(np.asarray(keys, np.float32)), mx.array(np.asarray(ids, np.int32))
    found = []
    for rows in _chunks(len(queries), len(keys)):
        chunk = mx.array(queries[rows]), mx.array(np.asarray(positions[rows], np.int32))
        mass, distance = _bucket_mass(*chunk, *on_device, buckets, distances, scale)
        mx.eval(mass, distance)
        found.append((np.array(mass), np.array(distance)))
    masses, far = zip(*found, strict=True)
    return Mass(np.concatenate(masses), np.concatenate(far))


def _bucket_mass(
    queries: mx.array,
    positions: mx.array,
    keys: mx.array,
    ids: mx.array,
    buckets: int,
    distances: Distances,
    scale: float,
) -> tuple[mx.array, mx.array]:
    logits = (queries * scale) @ keys.T
    key = mx.arange(len(keys))
    behind = positions[:, None] - key
    no_sink = key >= distances.sink_tokens
    seen = behind >= 0
    logits = mx.where(seen, logits, -mx.inf)
    best = mx.argmax(mx.where(no_sink, logits, -mx.inf), axis=1).astype(mx.int32)
    visible = mx.any(seen & no_sink, axis=1)
    distance = mx.where(visible, positions - best, -1)
    attention = mx.exp(logits - mx.max(logits, axis=1, keepdims=True))
    total = attention.sum(axis=1, keepdims=True)
    far = no_sink & (behind >= distances.recent_tokens)
    attention = mx.where(far, attention, 0.0) / total
    # One row of the sum per bucket, so that each key adds a whole row of it.
    by_bucket = mx.zeros((buckets, len(queries))).at[ids].add(mx.contiguous(attention.T))
    return by_bucket.T, distance


@dataclass(frozen=True)
class Rows:
    """What one query network learns from.

    Attributes:
        queries: ``(N, D)`` float32 before RoPE.
        target: ``(N, C)`` float16 share of the far attention in each bucket; rows add up to 1.
        seen: how many queries were looked at to find these.
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
    """The rows of one KV head, from all its query heads and texts, at most ``most`` of them.

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
        found = bucket_mass(
            after.reshape(-1, after.shape[-1]),
            texts.keys_after[window, head],
            ids[window, head],
            np.tile(texts.positions[window], G),
            buckets=buckets,
            distances=distances,
            scale=texts.scale,
        )
        far = found.mass.sum(axis=1)
        rows = np.flatnonzero((found.distance > distances.farthest_top) & (far > 0))
        seen += len(far)
        if len(rows) > share:
            rows = np.sort(np.random.default_rng([seed, window]).choice(rows, share, replace=False))
        queries.append(before.reshape(-1, before.shape[-1])[rows])
        targets.append((found.mass[rows] / far[rows, None]).astype(np.float16))
    sizes = np.bincount(ids[:, head, distances.sink_tokens :].ravel(), minlength=buckets)
    share = (np.maximum(sizes, 1) / sizes.sum()).astype(np.float32)
    return Rows(np.concatenate(queries), np.concatenate(targets), seen, share)


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(CHUNK // columns, 1)
    return (slice(start, start + size) for start in range(0, rows, size))
