"""SAAP on torch tensors: arguments are checked here, then a launcher runs.

Names, shapes and meaning are those of `mlx_sparse` and docs/spec/saap.md: ``queries (B, Hq, L, D)``, ``keys`` and
``values (B, Hkv, S, D)`` with the current token included, C buckets. A cache takes `buckets.Index` and
`ops.saap_decode`, which keep an index over many steps.

All raise `ShapeError` for tensors that do not fit together, `ConfigError` for parameters out of range and
`BackendUnavailable` where the kernels cannot run.
"""

from __future__ import annotations

from typing import Any

import torch

from mlx_sparse.checks import (
    ConfigError,
    ShapeError,
    Sizes,
    check_centroids,
    check_int,
    check_router,
    check_saap,
)
from mlx_sparse.common import stats
from mlx_sparse.common.stats import Stats
from mlx_sparse.methods import MAX_BUCKETS

from ..checks import (
    DTYPES,
    as_padding,
    check_backend,
    check_call,
    check_device,
    check_integers,
    check_tensor,
    rows,
    type_name,
)
from ..launchers import saap as launchers
from ..launchers import torch_ops
from .decode import dense_attention

ASSIGNED_AT_ONCE = 1 << 26  # inner products of keys with centroids that are held at once


def saap_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    bucket_ids: torch.Tensor,
    visited: torch.Tensor,
    sink_tokens: int = 1,
    recent_tokens: int = 2047,
    scale: float | None = None,
    left_padding: Any = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """One decode step of SAAP attention (arXiv 2502.08246); dense for more than one query.

    Attends the first ``sink_tokens`` and the last ``recent_tokens`` valid keys, the current one included, and every key
    whose bucket is visited. The index over the buckets is built for this one step.

    Args:
        bucket_ids: ``(B, Hkv, S)`` int; a number that is no bucket's (negative) = in no bucket.
        visited: ``(B, Hkv, n)`` int; negative = empty slot. A bucket listed twice is visited once.
        return_stats: also return a `Stats`; "mass" measures the retained attention mass too, by a dense pass.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries``.
    """
    n = check_call(queries, keys, values, backend, return_stats)
    for name, array in (("bucket_ids", bucket_ids), ("visited", visited)):
        check_tensor(name, array)
        check_integers(name, array)
        check_device(name, array, queries.device)
    check_saap(n, bucket_ids, visited, sink_tokens, recent_tokens)
    padding = as_padding(left_padding, n, queries.device)
    if n.L > 1 or n.S <= sink_tokens + recent_tokens:
        return dense_attention(queries, keys, values, scale=scale, left_padding=left_padding, return_stats=return_stats)
    scale = float(n.D**-0.5 if scale is None else scale)
    covered = n.S - recent_tokens
    places, slots = _as_slots(bucket_ids[..., :covered], visited)
    offsets, key_ids = launchers.saap_index(
        places, buckets=visited.shape[2], sink_tokens=sink_tokens, left_padding=padding
    )
    given = queries, rows(keys), rows(values)
    out, lse, counts = torch_ops.saap_decode(*given, slots, offsets, key_ids, covered, sink_tokens, n.S, scale, padding)
    if not return_stats:
        return out
    mass = None
    if return_stats == "mass":
        dense = torch_ops.dense_decode(*given, scale, padding)[1]
        mass = torch.where(dense == -torch.inf, 1.0, torch.exp(lse - dense))
    # (saap.12), (saap.14)
    attended = float(counts.float().mean())
    valid = torch.full((n.B, 1), n.S, device=queries.device) if padding is None else (n.S - padding)[:, None]
    exact = valid.clamp(max=sink_tokens + recent_tokens)
    selectivity = float(((counts - exact) / (valid - exact).clamp(min=1)).mean())
    moved, whole = stats.saap_elements(n.D, round(attended)), stats.dense_elements(n.S, n.D)
    return out, Stats(moved, whole, attended / n.S, mass, selectivity=selectivity)


def _as_slots(bucket_ids: torch.Tensor, visited: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same visit with the slots of ``visited`` as buckets, so that a bucket's number may be as large as it likes.

    Returns:
        For each key the first slot that holds its bucket, -1 if there is none; and the slots, ``(B, Hkv, n)`` int32.
    """
    slots = torch.arange(visited.shape[2], dtype=torch.int32, device=visited.device).expand(visited.shape).contiguous()
    if not visited.shape[2]:
        return torch.full_like(bucket_ids, -1), slots
    wanted, ids = visited.long().sort(dim=2).values.contiguous(), bucket_ids.long().contiguous()
    place = torch.searchsorted(wanted, ids).clamp(max=visited.shape[2] - 1)
    return torch.where((ids >= 0) & (wanted.gather(2, place) == ids), place, -1), slots


def saap_assign(keys: torch.Tensor, centroids: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Bucket of each key: the centroid with the largest inner product (saap.1), by torch's matrix product.

    Args:
        keys: ``(B, Hkv, n, D)`` before RoPE.
        centroids: ``(Hkv, C, D)``.

    Returns:
        ``(B, Hkv, n)`` int32; keys that hold NaN or inf are in bucket 0.
    """
    check_tensor("keys", keys)
    check_tensor("centroids", centroids)
    check_backend(backend, keys.device)
    check_centroids(keys, centroids)
    check_device("centroids", centroids, keys.device)
    columns = centroids.float().mT
    step = max(1, ASSIGNED_AT_ONCE // (keys.shape[0] * columns.shape[0] * columns.shape[2]))
    ids = torch.empty(keys.shape[:3], dtype=torch.int32, device=keys.device)
    for first in range(0, keys.shape[2], step):
        part = slice(first, first + step)
        best = (keys[:, :, part].float() @ columns).max(dim=3)
        ids[:, :, part] = best.indices.where(best.values.isfinite(), 0)
    return ids


def saap_route(
    queries: torch.Tensor,
    *,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None = None,
    hidden_weight: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
    probes: int = 32,
    backend: str = "auto",
) -> torch.Tensor:
    """The ``probes`` buckets that the query heads of each KV head visit together (saap.5), (saap.8).

    Args:
        queries: ``(B, Hq, 1, D)`` before RoPE.
        out_weight: ``(Hkv, H, C)``; without a hidden layer ``(Hkv, D, C)``, for k-means ``scale * centroids``.
        out_bias: ``(Hkv, C)``.
        hidden_weight: ``(Hkv, D, H)``.
        hidden_bias: ``(Hkv, H)``.
        probes: 1..C.

    Returns:
        ``(B, Hkv, probes)`` int32, ascending; NaN counts as +inf.
    """
    network = {"out_weight": out_weight, "out_bias": out_bias}
    network |= {"hidden_weight": hidden_weight, "hidden_bias": hidden_bias}
    check_tensor("queries", queries)
    for name, array in network.items():
        if array is not None or name == "out_weight":
            _check_real(name, array, queries.device)
    check_backend(backend, queries.device)
    _check_real("queries", queries, queries.device)
    C = check_router(queries, **network)
    check_int("buckets", C, 1, MAX_BUCKETS)
    check_int("probes", probes, 1, C)
    visited: torch.Tensor = torch_ops.saap_route(queries, **network, probes=probes)
    return visited


def saap_index(
    bucket_ids: torch.Tensor, *, buckets: int, sink_tokens: int, left_padding: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in bucket order (saap.9), by torch's sort.

    Args:
        bucket_ids: ``(B, Hkv, n)`` int of keys 0..n-1; any number outside 0..buckets-1 = in no bucket.

    Returns:
        ``offsets (B, Hkv, buckets + 1)`` and ``key_ids (B, Hkv, n)`` int32: bucket c holds the keys
        ``key_ids[offsets[c]:offsets[c + 1]]``, ascending; slots from ``offsets[buckets]`` on hold anything.
    """
    B, Hkv, n = _check_rows("bucket_ids", bucket_ids)
    check_int("buckets", buckets, 1)
    check_int("sink_tokens", sink_tokens, 0)
    padding = as_padding(left_padding, Sizes(B, Hkv, Hkv, 1, n, 1), bucket_ids.device)
    return launchers.saap_index(bucket_ids, buckets=buckets, sink_tokens=sink_tokens, left_padding=padding)


def saap_indices(
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    *,
    length: int,
    covered: int,
    sink_tokens: int,
    capacity: int,
    left_padding: Any = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of one step: sinks, keys from ``covered`` on, keys of the visited buckets (saap.10).

    Args:
        visited: ``(B, Hkv, n)`` int, distinct; numbers that are no bucket's are empty slots.
        offsets, key_ids: as `saap_index` gives them for keys 0..covered-1.
        capacity: slots of a list; keys that do not fit are left out.

    Returns:
        ``indices (B, Hkv, capacity)`` int32, packed in this order, then -1; ``counts (B, Hkv)`` of those used.
    """
    B, Hkv, _ = _check_rows("visited", visited)
    check_backend(backend, visited.device)
    for name, array in (("offsets", offsets), ("key_ids", key_ids)):
        shape = _check_rows(name, array)
        check_device(name, array, visited.device)
        if shape[:2] != (B, Hkv) or (name == "offsets" and shape[2] < 1):
            raise ShapeError(f"{name}: expected (B={B}, Hkv={Hkv}, ...), got {shape}.")
    check_int("length", length, 1)
    check_int("covered", covered, 0, length)
    check_int("sink_tokens", sink_tokens, 0)
    check_int("capacity", capacity, 0)
    padding = as_padding(left_padding, Sizes(B, Hkv, Hkv, 1, length, 1), visited.device)
    # A number of 64 bits must not become a bucket's by losing some.
    slots = torch.where((visited >= 0) & (visited < offsets.shape[2] - 1), visited, -1).to(torch.int32)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.saap_indices(
        slots, offsets.to(torch.int32), key_ids.to(torch.int32), length, covered, sink_tokens, capacity, padding
    )
    return result


def _check_rows(name: str, array: torch.Tensor) -> tuple[int, int, int]:
    """The shape of integers ``(B, Hkv, n)``."""
    check_tensor(name, array)
    if array.ndim != 3 or 0 in array.shape[:2]:
        raise ShapeError(f"{name}: expected shape (B, Hkv, n), got {tuple(array.shape)}.")
    check_integers(name, array)
    B, Hkv, n = array.shape
    return B, Hkv, n


def _check_real(name: str, array: Any, device: torch.device) -> None:
    check_tensor(name, array)
    check_device(name, array, device)
    if array.dtype not in DTYPES:
        raise ConfigError(f"{name}: expected float32, float16 or bfloat16, got {type_name(array.dtype)}.")
