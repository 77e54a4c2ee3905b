"""Run SAAP with MLX array operations (docs/spec/saap.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...core.attend.ops import attend_indices, group_queries, softmax_lse
from .kmeans import saap_assign as saap_assign


def saap_route(
    queries: mx.array,
    *,
    out_weight: mx.array,
    out_bias: mx.array | None = None,
    hidden_weight: mx.array | None = None,
    hidden_bias: mx.array | None = None,
    probes: int,
) -> mx.array:
    """Select ``probes`` buckets per KV head (saap.5, saap.8). See `methods.saap.oracle.saap_route`."""
    x = group_queries(queries, out_weight.shape[0])
    if hidden_weight is not None:
        x = mx.maximum(_layer(x, hidden_weight, hidden_bias), 0.0)
    scores = softmax_lse(_layer(x, out_weight, out_bias), None)[0].sum(axis=2)
    scores = mx.where(mx.isnan(scores), mx.inf, scores)
    C = scores.shape[-1]
    order = mx.argpartition(-scores, kth=probes - 1, axis=-1)[..., :probes] if probes < C else mx.arange(C)
    return mx.sort(mx.broadcast_to(order, (*scores.shape[:2], probes)).astype(mx.int32), axis=-1)


def _layer(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    y = x @ weight.astype(mx.float32)
    return y if bias is None else y + bias.astype(mx.float32)[:, None, :]


def saap_indices(
    visited: mx.array,
    offsets: mx.array,
    key_ids: mx.array,
    *,
    length: int,
    covered: int | mx.array,
    sink_tokens: int,
    capacity: int,
    left_padding: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """List the keys that a decode step attends to (saap.10). See `methods.saap.oracle.saap_indices`.

    Keys that do not fit into a list of length ``capacity`` are omitted.
    """
    B, Hkv, n = visited.shape
    C = offsets.shape[2] - 1
    first = mx.zeros((B, 1, 1), mx.int32) if left_padding is None else left_padding[:, None, None].astype(mx.int32)
    known = mx.array(covered, mx.int32).reshape(-1, 1, 1)
    # A list consists of runs of consecutive numbers: sinks, tail, then one run per bucket. `begin` and `size` describe
    # each run. The first two runs are keys; the runs of buckets are positions in key_ids.
    real = (visited >= 0) & (visited < C)
    bucket = mx.where(real, visited, 0).astype(mx.int32)
    begin = mx.take_along_axis(offsets, bucket, axis=-1)
    size = mx.where(real, mx.take_along_axis(offsets, bucket + 1, axis=-1) - begin, 0)
    exact_begin = mx.concatenate([first, mx.maximum(first, known)], axis=-1)
    sinks_end = mx.minimum(first + min(sink_tokens, length), known)  # a larger sum could overflow 32 bits
    exact_end = mx.concatenate([sinks_end, mx.full((B, 1, 1), length)], axis=-1)
    exact_size = mx.maximum(exact_end - exact_begin, 0)
    begin = mx.concatenate([mx.broadcast_to(exact_begin, (B, Hkv, 2)), begin], axis=-1).astype(mx.int32)
    size = mx.concatenate([mx.broadcast_to(exact_size, (B, Hkv, 2)), size], axis=-1).astype(mx.int32)
    stop = mx.cumsum(size, axis=-1)
    # Each output slot belongs to the run with index = number of runs that end at or before the slot.
    rows, heads = mx.arange(B)[:, None, None], mx.arange(Hkv)[None, :, None]
    ends = mx.zeros((B, Hkv, capacity + 1), mx.int32).at[rows, heads, mx.minimum(stop, capacity)].add(1)
    run = mx.minimum(mx.cumsum(ends[..., :capacity], axis=-1), n + 1)
    slot = mx.arange(capacity)
    number = slot - mx.take_along_axis(stop - size - begin, run, axis=-1)
    listed = number
    if key_ids.shape[2]:
        listed = mx.take_along_axis(key_ids, mx.clip(number, 0, key_ids.shape[2] - 1), axis=-1)
    counts = mx.minimum(stop[..., -1], capacity)
    indices = mx.where(run < 2, number, listed)
    return mx.where(slot < counts[..., None], indices, -1).astype(mx.int32), counts


def saap_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, **visit: Any
) -> tuple[mx.array, mx.array, mx.array]:
    """Build a bucket index and run one decode step of SAAP (saap.9 to saap.11).

    Args:
        visit: the other arguments of `list_keys`.

    Returns:
        ``out (B, Hq, 1, D)``, float32 ``lse (B, Hq, 1)`` and ``counts (B, Hkv)``, the number of attended keys.
    """
    indices, counts = list_keys(saap_indices, keys.shape[2], **visit)
    return *attend_indices(queries, keys, values, indices, scale=scale, counts=counts), counts


def list_keys(
    expand: Callable[..., tuple[mx.array, mx.array]],
    S: int,
    *,
    bucket_ids: mx.array,
    visited: mx.array,
    buckets: int,
    sink_tokens: int,
    recent_tokens: int,
    left_padding: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Build a bucket index, and list the keys that one decode step attends to.

    The index covers all keys except the last ``recent_tokens``. The function returns the results of ``expand``.

    Args:
        expand: `saap_indices` of a backend.
        S: number of keys in the KV cache.
        bucket_ids: ``(B, Hkv, S or more)`` int bucket of each key. A key that has no valid bucket is attended to
            only if it is a sink or a recent key.
        visited: ``(B, Hkv, n)`` distinct int ids of the visited buckets.
    """
    window: dict[str, Any] = {"sink_tokens": sink_tokens, "left_padding": left_padding}
    covered = max(S - recent_tokens, 0)
    index = saap_index(bucket_ids[..., :covered], buckets=buckets, **window)
    return expand(visited, *index, length=S, covered=covered, capacity=S, **window)


def saap_index(
    bucket_ids: mx.array, *, buckets: int, sink_tokens: int, left_padding: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """List the keys of each bucket (saap.9). See `methods.saap.oracle.saap_index`.

    Slots of ``key_ids`` at ``offsets[buckets]`` and above are undefined.
    """
    B, Hkv, n = bucket_ids.shape
    if n == 0:
        return mx.zeros((B, Hkv, buckets + 1), mx.int32), mx.zeros((B, Hkv, 0), mx.int32)
    sink_tokens = min(sink_tokens, n)  # a larger number could overflow 32 bits
    first = mx.array(sink_tokens) if left_padding is None else (left_padding + sink_tokens)[:, None, None]
    listed = (bucket_ids >= 0) & (bucket_ids < buckets) & (mx.arange(n) >= first)
    ids = mx.where(listed, bucket_ids, buckets).astype(mx.int32)
    counts = mx.zeros((B, Hkv, buckets + 1), mx.int32)
    counts = counts.at[mx.arange(B)[:, None, None], mx.arange(Hkv)[:, None], ids].add(1)[..., :buckets]
    offsets = mx.pad(mx.cumsum(counts, axis=-1), [(0, 0), (0, 0), (1, 0)])
    # Sort by bucket * n + key. These numbers are unique, so the sort need not be stable.
    wide = mx.uint32 if (buckets + 1) * n <= 2**32 else mx.int64
    order = mx.sort(ids.astype(wide) * n + mx.arange(n).astype(wide), axis=-1)
    return offsets, (order % n).astype(mx.int32)
