"""Implement SAAP in NumPy (docs/spec/saap.md, saap.1 to saap.14)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...checks import check_int
from ...core.attend.oracle import attend_indices, float64, softmax_lse
from ...core.select.oracle import ranked, valid_keys

Array = np.ndarray


def saap_assign(keys: npt.ArrayLike, centroids: npt.ArrayLike) -> Array:
    """Assign each pre-RoPE key to the centroid with the largest inner product (saap.1).

    Args:
        keys: ``(B, Hkv, n, D)`` before RoPE.
        centroids: ``(Hkv, C, D)``.

    Returns:
        int32 bucket ids ``(B, Hkv, n)``. Ties go to the lower bucket. Keys that contain NaN or inf get bucket 0.
    """
    k = float64(keys)
    products = np.einsum("bhnd,hcd->bhnc", k, float64(centroids))
    ids: Array = np.where(np.isfinite(k).all(axis=-1), np.argmax(products, axis=-1), 0).astype(np.int32)
    return ids


def kmeans_step(keys: npt.ArrayLike, centroids: npt.ArrayLike) -> Array:
    """Run one iteration of spherical k-means (saap.2).

    Args:
        keys: ``(N, D)`` of one KV head, before RoPE.
        centroids: ``(C, D)``.

    Returns:
        New centroids ``(C, D)``, which are the sums of the keys in each bucket, normalized to length 1. If a bucket is
        empty or its sum is not finite, its centroid does not change.
    """
    k, c = float64(keys), float64(centroids)
    bucket = saap_assign(k[None, None], c[None])[0, 0]
    total = np.zeros_like(c)
    np.add.at(total, bucket, k)
    length = np.linalg.norm(total, axis=-1, keepdims=True)
    sound = (length > 0) & (length < np.inf)
    moved: Array = np.where(sound, total / np.where(sound, length, 1.0), c)
    return moved


class Target(NamedTuple):
    """Training targets for a query network.

    Attributes:
        mass: ``(n, C)`` share of a query's long-range attention that each bucket receives (saap.4). Each row sums to 1.
        rows: ``(n,)`` positions of the queries that have long-range attention.
        far: ``(n,)`` share of a query's attention that the long-range keys receive.
    """

    mass: Array
    rows: Array
    far: Array


def saap_target(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    bucket_ids: npt.ArrayLike,
    *,
    buckets: int,
    sink_tokens: int = 1,
    recent_tokens: int = 2047,
    farthest_top: int = 1024,
    scale: float | None = None,
    causal: bool = True,
) -> Target:
    """Compute the share of each query's long-range attention that each bucket receives (saap.3, saap.4).

    Args:
        queries: ``(S, D)`` of one query head, after RoPE, at positions 0..S-1.
        keys: ``(S, D)`` of the KV head of this query head, after RoPE.
        bucket_ids: ``(S,)`` bucket of each key.
        recent_tokens: minimum distance, in tokens, between a query and its long-range keys.
        farthest_top: distance in tokens. A query is used only if the key with its largest logit is farther away than
            this distance. Sinks are not considered.
        causal: if True, queries attend only to keys up to their own position, as in decoding. If False, queries attend
            to all keys, as in the paper.
    """
    q, k = float64(queries), float64(keys)
    S, D = q.shape
    ids = np.asarray(bucket_ids)
    logits = q @ k.T * (D**-0.5 if scale is None else scale)
    distance = np.arange(S)[:, None] - np.arange(S)
    seen = distance >= 0 if causal else np.ones((S, S), dtype=bool)
    attention, _ = softmax_lse(logits, seen)
    # (saap.3) queries whose best key is far away
    candidates = seen & (np.arange(S) >= sink_tokens)
    best = np.argmax(np.where(candidates, logits, -np.inf), axis=1)
    looks_far = candidates.any(axis=1) & (np.abs(np.arange(S) - best) > farthest_top)
    # (saap.4) mass by bucket, renormalized over far keys
    far = seen & (np.abs(distance) >= recent_tokens) & (np.arange(S) >= sink_tokens)
    kept = np.where(far, attention, 0.0)
    share = kept.sum(axis=1)
    rows = np.flatnonzero(looks_far & (share > 0))
    mass = np.zeros((S, buckets))
    for bucket in range(buckets):
        mass[:, bucket] = kept[:, ids == bucket].sum(axis=1)
    return Target(mass[rows] / share[rows, None], rows, share[rows])


def query_network(
    queries: npt.ArrayLike,
    *,
    out_weight: npt.ArrayLike,
    out_bias: npt.ArrayLike | None = None,
    hidden_weight: npt.ArrayLike | None = None,
    hidden_bias: npt.ArrayLike | None = None,
) -> Array:
    """Run the query network on pre-RoPE queries, and return the probability of each bucket (saap.5).

    Args:
        queries: ``(B, Hq, 1, D)``.
        out_weight, out_bias: output layer, ``(Hkv, H, C)`` and ``(Hkv, C)``. If there is no hidden layer, H is D.
        hidden_weight, hidden_bias: hidden layer, ``(Hkv, D, H)`` and ``(Hkv, H)``; None if there is no hidden layer.

    Returns:
        Probabilities ``(B, Hkv, G, C)``, which sum to 1 for each query.
    """
    q, w2 = float64(queries), float64(out_weight)
    B, Hq, _, D = q.shape
    Hkv = w2.shape[0]
    x = q.reshape(B, Hkv, Hq // Hkv, D)
    if hidden_weight is not None:
        x = np.einsum("bhgd,hde->bhge", x, float64(hidden_weight))
        x = np.maximum(x if hidden_bias is None else x + float64(hidden_bias)[:, None, :], 0.0)
    logits = np.einsum("bhge,hec->bhgc", x, w2)
    if out_bias is not None:
        logits = logits + float64(out_bias)[:, None, :]
    probabilities, _ = softmax_lse(logits, np.ones(logits.shape, dtype=bool))
    return probabilities


def fold_batch_norm(
    weight: npt.ArrayLike,
    bias: npt.ArrayLike,
    *,
    mean: npt.ArrayLike,
    variance: npt.ArrayLike,
    gain: npt.ArrayLike,
    shift: npt.ArrayLike,
    eps: float = 1e-5,
) -> tuple[Array, Array]:
    """Merge the batch norm after a linear layer into the layer's weight ``(D, H)`` and bias ``(H,)`` (saap.6)."""
    factor = float64(gain) / np.sqrt(float64(variance) + eps)
    folded: Array = (float64(bias) - float64(mean)) * factor + float64(shift)
    return float64(weight) * factor, folded


def saap_route(queries: npt.ArrayLike, *, probes: int, **network: npt.ArrayLike | None) -> Array:
    """Select ``probes`` buckets per KV head. All query heads of a KV head share the buckets (saap.8).

    Args:
        queries: ``(B, Hq, 1, D)`` before RoPE.
        network: the other arguments of `query_network`.

    Returns:
        Ascending int32 bucket ids ``(B, Hkv, probes)``. Ties go to the lower bucket, and NaN counts as +inf.
    """
    scores = route_scores(queries, **network)
    order = np.argsort(-ranked(scores), axis=-1, kind="stable")[..., :probes]
    visited: Array = np.sort(order, axis=-1).astype(np.int32)
    return visited


def route_scores(queries: npt.ArrayLike, **network: Any) -> Array:
    """Return bucket probabilities ``(B, Hkv, C)``, each summed over the query heads of a KV head."""
    scores: Array = query_network(queries, **network).sum(axis=2)
    return scores


def saap_index(
    bucket_ids: npt.ArrayLike, *, buckets: int, sink_tokens: int, left_padding: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Build the index that lists the keys of each bucket (saap.9).

    Args:
        bucket_ids: ``(B, Hkv, n)`` bucket of each key. The index omits sinks, padding and keys whose bucket is not in
            ``0 .. buckets - 1``.

    Returns:
        int32 ``offsets (B, Hkv, buckets + 1)`` and ``key_ids (B, Hkv, n)``. Bucket c has the keys
        ``key_ids[offsets[c]:offsets[c + 1]]``, ascending. Slots at ``offsets[buckets]`` and above are -1.
    """
    ids = np.asarray(bucket_ids)
    B, Hkv, n = ids.shape
    first = _first(B, left_padding)
    offsets = np.zeros((B, Hkv, buckets + 1), dtype=np.int32)
    key_ids = np.full((B, Hkv, n), -1, dtype=np.int32)
    for b, h in np.ndindex(B, Hkv):
        indexed = np.arange(n) >= first[b] + sink_tokens
        for c in range(buckets):
            members = np.flatnonzero(indexed & (ids[b, h] == c))
            start = offsets[b, h, c]
            offsets[b, h, c + 1] = start + len(members)
            key_ids[b, h, start : start + len(members)] = members
    return offsets, key_ids


def saap_indices(
    visited: npt.ArrayLike,
    offsets: npt.ArrayLike,
    key_ids: npt.ArrayLike,
    *,
    length: int,
    covered: int | npt.ArrayLike,
    sink_tokens: int,
    capacity: int,
    left_padding: npt.ArrayLike | None = None,
) -> tuple[Array, Array]:
    """List the keys that a decode step attends to (saap.10).

    Args:
        visited: ``(B, Hkv, n)`` distinct bucket ids. A number that is not a bucket id, such as -1, is an empty slot.
        offsets, key_ids: results of `saap_index` for the first ``covered`` keys.
        covered: number of keys in the index, as an int or as ``(B,)``.

    Returns:
        int32 ``indices (B, Hkv, capacity)``, padded with -1, and ``counts (B, Hkv)``, the number of keys per list. Each
        list contains the sinks, then the keys outside the index, then the keys of the visited buckets.
    """
    chosen, starts, ids = (np.asarray(array) for array in (visited, offsets, key_ids))
    B, Hkv, _ = chosen.shape
    C = starts.shape[2] - 1
    first, known = _first(B, left_padding), np.broadcast_to(covered, B).tolist()
    indices = np.full((B, Hkv, capacity), -1, dtype=np.int32)
    counts = np.zeros((B, Hkv), dtype=np.int32)
    for b, h in np.ndindex(B, Hkv):
        start, end = first[b], known[b]
        parts = [np.arange(start, min(start + sink_tokens, end)), np.arange(max(end, start), length)]
        for c in chosen[b, h]:
            if 0 <= c < C:
                parts.append(ids[b, h, starts[b, h, c] : starts[b, h, c + 1]])
        listed = np.concatenate(parts)
        counts[b, h] = len(listed)
        indices[b, h, : len(listed)] = listed
    return indices, counts


def saap_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    bucket_ids: npt.ArrayLike,
    visited: npt.ArrayLike,
    scale: float,
    left_padding: npt.ArrayLike | None,
    **window: int,
) -> tuple[Array, Array, Array]:
    """Run one decode step of SAAP: attend to sinks, recent keys and the keys in the visited buckets.

    Args:
        window: the arguments ``sink_tokens`` and ``recent_tokens`` of `saap_keys`.

    Returns:
        ``out (B, Hq, 1, D)``, ``lse (B, Hq, 1)`` and the number of attended keys ``(B, Hkv)``.
    """
    attended = saap_keys(np.asarray(bucket_ids), np.asarray(visited), **window, left_padding=left_padding)
    counts = attended.sum(axis=-1)
    indices = np.full(attended.shape, -1, dtype=np.int32)
    for row in np.ndindex(counts.shape):
        indices[row][: counts[row]] = np.flatnonzero(attended[row])
    return *attend_indices(queries, keys, values, indices, scale=scale), counts


def saap_keys(
    bucket_ids: Array, visited: Array, sink_tokens: int, recent_tokens: int, left_padding: npt.ArrayLike | None = None
) -> Array:
    """Return a bool mask ``(B, Hkv, S)``, True for the keys that a decode step attends to (saap.9, saap.10)."""
    exact, valid = _exact(bucket_ids.shape[0], bucket_ids.shape[2], sink_tokens, recent_tokens, left_padding)
    in_visited = (bucket_ids[..., None] == np.where(visited >= 0, visited, -1)[:, :, None, :]) & (
        bucket_ids[..., None] >= 0
    )
    keys: Array = valid[:, None, :] & (exact[:, None, :] | in_visited.any(axis=-1))
    return keys


def selectivity(
    bucket_ids: Array,
    visited: Array,
    sink_tokens: int,
    recent_tokens: int,
    left_padding: npt.ArrayLike | None = None,
) -> float:
    """Return the share of the keys that are in visited buckets, averaged over sequences and KV heads (saap.12).

    Sinks and recent keys are not counted. If a sequence has only sinks and recent keys, its share is 0.
    """
    exact, valid = _exact(bucket_ids.shape[0], bucket_ids.shape[2], sink_tokens, recent_tokens, left_padding)
    outside = (valid & ~exact)[:, None, :]
    keys = saap_keys(bucket_ids, visited, sink_tokens, recent_tokens, left_padding)
    total = outside.sum(axis=-1)
    share = (keys & outside).sum(axis=-1) / np.maximum(total, 1)
    return float(share.mean())


def _first(B: int, left_padding: npt.ArrayLike | None) -> list[int]:
    return [0] * B if left_padding is None else [int(first) for first in np.asarray(left_padding)]


def _exact(
    B: int, S: int, sink_tokens: int, recent_tokens: int, left_padding: npt.ArrayLike | None
) -> tuple[Array, Array]:
    """Return two bool masks ``(B, S)``. One is True for keys that are always attended to, the other for valid keys."""
    valid = valid_keys(B, S, left_padding)
    first = np.argmax(valid, axis=1)[:, None]
    position = np.arange(S)
    return valid & ((position < first + sink_tokens) | (position >= S - recent_tokens)), valid


def imbalance(bucket_ids: npt.ArrayLike, buckets: int) -> float:
    """Return the imbalance ``buckets * sum(sizes^2) / sum(sizes)^2`` of the bucket sizes (saap.13).

    If all buckets have the same size, the imbalance is 1.
    """
    check_int("buckets", buckets, 1)
    ids = np.asarray(bucket_ids).ravel()
    sizes = np.bincount(ids[(ids >= 0) & (ids < buckets)], minlength=buckets).astype(np.float64)
    return float(buckets * (sizes**2).sum() / max(sizes.sum(), 1.0) ** 2)
