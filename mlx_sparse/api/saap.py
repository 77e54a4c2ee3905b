"""SAAP: assign keys to buckets, route queries to them, attend to what is in them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..checks import ConfigError, check_centroids, check_int, check_router, check_saap
from ..common import stats
from ..common.stats import Stats
from ..methods import MAX_BUCKETS, registry
from .call import Call, check_integers


def saap_assign(keys: mx.array, centroids: mx.array, *, backend: str = "auto") -> mx.array:
    """Bucket of each key: the centroid with the largest inner product (saap.1).

    Args:
        keys: ``(B, Hkv, n, D)`` before RoPE.
        centroids: ``(Hkv, C, D)``.

    Returns:
        int32 ``(B, Hkv, n)``.
    """
    check_centroids(keys, centroids)
    check_buckets(centroids.shape[1])
    chosen = registry.resolve(backend, "saap_assign", D=keys.shape[3], G=1)
    ids: mx.array = registry.load("saap_assign", chosen)(keys, centroids)
    return ids


def saap_route(
    queries: mx.array,
    *,
    out_weight: mx.array,
    out_bias: mx.array | None = None,
    hidden_weight: mx.array | None = None,
    hidden_bias: mx.array | None = None,
    probes: int = 32,
    backend: str = "auto",
) -> mx.array:
    """The ``probes`` buckets that the query heads of each KV head visit together (saap.5), (saap.8).

    Args:
        queries: ``(B, Hq, 1, D)`` before RoPE.
        out_weight: ``(Hkv, H, C)``; without a hidden layer ``(Hkv, D, C)``, for k-means ``scale * centroids``.
        out_bias: ``(Hkv, C)``.
        hidden_weight: ``(Hkv, D, H)``.
        hidden_bias: ``(Hkv, H)``.
        probes: 1..C.

    Returns:
        int32 ``(B, Hkv, probes)``, ascending.
    """
    C = check_router(queries, out_weight, out_bias, hidden_weight, hidden_bias)
    check_buckets(C)
    check_int("probes", probes, 1, C)
    sizes = {"D": queries.shape[3], "G": queries.shape[1] // out_weight.shape[0]}
    run = registry.load("saap_route", registry.resolve(backend, "saap_route", **sizes))
    network = {"hidden_weight": hidden_weight, "hidden_bias": hidden_bias}
    visited: mx.array = run(queries, out_weight=out_weight, out_bias=out_bias, **network, probes=probes)
    return visited


def saap_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    bucket_ids: mx.array,
    visited: mx.array,
    sink_tokens: int = 1,
    recent_tokens: int = 2047,
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """One decode step of SAAP attention (docs/spec/saap.md; arXiv 2502.08246).

    Attends the first ``sink_tokens`` and the last ``recent_tokens`` valid keys, the current one included, and every key
    whose bucket is visited. The index over the buckets is built for this one step; a cache keeps it over many.

    Args:
        bucket_ids: ``(B, Hkv, S)`` int; a number that is no bucket's (negative) = in no bucket.
        visited: ``(B, Hkv, n)`` int; negative = empty slot. A bucket listed twice is visited once.
    """
    call = Call(
        "saap",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    n = call.sizes
    check_saap(n, bucket_ids, visited, sink_tokens, recent_tokens)
    check_integers("bucket_ids", bucket_ids)
    check_integers("visited", visited)
    if n.L > 1 or n.S <= sink_tokens + recent_tokens:
        return call.dense()
    largest: Any = visited.max().item() if visited.size else -1
    if largest >= MAX_BUCKETS:
        raise ConfigError(f"visited: expected buckets of at most {MAX_BUCKETS - 1}, got {largest}.")
    # Any negative number is an empty slot; of 64 bits it could become a bucket in 32.
    ascending = mx.sort(mx.where(visited < 0, -1, visited.astype(mx.int32)), axis=-1)
    again = mx.pad(ascending[..., 1:] == ascending[..., :-1], [(0, 0), (0, 0), (1, 0)])[..., : visited.shape[2]]
    window = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    distinct = mx.where(again, -1, ascending)
    if bucket_ids.itemsize == 1:
        bucket_ids = bucket_ids.astype(mx.int16)  # to be compared with the number of buckets
    out, lse, counts = call.run("saap", bucket_ids=bucket_ids, visited=distinct, buckets=max(largest + 1, 0), **window)
    if not return_stats:
        return out
    # (saap.12), (saap.14)
    attended: Any = counts.mean().item()
    padding = mx.zeros(n.B, mx.int32) if call.left_padding is None else call.left_padding
    valid = (n.S - padding)[:, None]
    exact = mx.minimum(valid, sink_tokens + recent_tokens)
    selectivity: Any = ((counts - exact) / mx.maximum(valid - exact, 1)).mean().item()
    moved, dense = stats.saap_elements(n.D, round(attended)), stats.dense_elements(n.S, n.D)
    return out, Stats(moved, dense, attended / n.S, call.mass(lse), selectivity=selectivity)


def check_buckets(buckets: int) -> None:
    """Raise `ConfigError` for more buckets than the backends serve, or none."""
    check_int("buckets", buckets, 1, MAX_BUCKETS)
