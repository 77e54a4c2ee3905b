"""Launch the SAAP kernels (docs/spec/saap.md). A decode step has four launches, or three for a linear router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..kernels.saap import saap_expand as expand_kernel
from ..kernels.saap import saap_hidden as hidden_kernel
from ..kernels.saap import saap_route as route_kernel
from . import configs
from .attend import Listed, attend
from .launch import Launch, contiguous, fake_attention, power_of_2, rows

PROBABILITIES_AT_ONCE = 4096  # number of bucket probabilities that a program loads at a time
MOST_ROWS = 32  # maximum number of query rows that share one read of the weights
SLOTS = 128  # number of list slots per program
VISITED = 64  # number of visited buckets that are read at a time


@torch.library.custom_op("mlx_sparse::saap_route", mutates_args=())
def saap_route(
    queries: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    hidden_weight: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    probes: int,
) -> torch.Tensor:
    """Select the ``probes`` buckets that the group of each KV head visits (saap.8).

    `mlx_sparse.methods.saap.oracle.saap_route` describes the arguments and the result. The result is padded with -1 if
    fewer buckets have a probability above 0.
    """
    queries, out_weight = queries.contiguous(), out_weight.contiguous()
    B, Hq = queries.shape[:2]
    Hkv, K, C = out_weight.shape
    G = Hq // Hkv
    device = queries.device
    GROUP = power_of_2(G)
    BLOCK_M = max(16, GROUP, min(MOST_ROWS, GROUP * power_of_2(B)))
    parts = -(-B // (BLOCK_M // GROUP))
    group = {"G": G, "GROUP": GROUP, "BLOCK_M": BLOCK_M}
    if hidden_weight is None:
        x, tickets = queries, torch.zeros(parts, Hkv, dtype=torch.int32, device=device)
    else:
        x, tickets = _hidden(queries, hidden_weight.contiguous(), contiguous(hidden_bias), parts, group)
    BLOCK_C = power_of_2(C, 256)
    visited = torch.empty(B, Hkv, probes, dtype=torch.int32, device=device)
    tiles = configs.columns(C, out_weight.element_size(), BLOCK_M, Hkv * parts, device)
    Launch(
        route_kernel,
        (-(-C // tiles.columns), Hkv, parts),
        {
            "x": x,
            "weight": out_weight,
            "bias": contiguous(out_bias),
            "logits": torch.empty(B, Hkv, G, C, dtype=torch.float32, device=device),
            "visited": visited,
            "tickets": tickets,
            "batch": B,
            "probes": probes,
            "K": K,
            "C": C,
        },
        {
            **group,
            "BLOCK_K": tiles.rows,
            "BLOCK_N": tiles.columns,
            "BLOCK_G": min(GROUP, max(1, PROBABILITIES_AT_ONCE // BLOCK_C)),
            "BLOCK_C": BLOCK_C,
        },
        {"num_warps": tiles.warps, "num_stages": tiles.stages},
    ).run()
    return visited


@saap_route.register_fake
def _(queries: torch.Tensor, out_weight: torch.Tensor, *given: Any) -> torch.Tensor:
    return queries.new_empty(queries.shape[0], out_weight.shape[0], given[-1], dtype=torch.int32)


def _hidden(
    queries: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int, rows: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the hidden layer. Return float32 outputs ``(B, Hkv, G, H)`` and zeroed counters for `saap_route`."""
    B, D = queries.shape[0], queries.shape[3]
    Hkv, _, H = weight.shape
    device = queries.device
    out = torch.empty(B, Hkv, rows["G"], H, dtype=torch.float32, device=device)
    tickets = torch.empty(parts, Hkv, dtype=torch.int32, device=device)
    tiles = configs.columns(H, weight.element_size(), rows["BLOCK_M"], Hkv * parts, device)
    Launch(
        hidden_kernel,
        (-(-H // tiles.columns), Hkv, parts),
        {"x": queries, "weight": weight, "bias": bias, "out": out, "tickets": tickets, "batch": B, "K": D, "N": H},
        {**rows, "BLOCK_K": tiles.rows, "BLOCK_N": tiles.columns},
        {"num_warps": tiles.warps, "num_stages": tiles.stages},
    ).run()
    return out, tickets


def saap_index(
    bucket_ids: torch.Tensor, *, buckets: int, sink_tokens: int, left_padding: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the keys by bucket (saap.9). Return ``offsets (B, Hkv, C + 1)`` and ``key_ids (B, Hkv, n)``."""
    position = torch.arange(bucket_ids.shape[2], device=bucket_ids.device)
    sink_tokens = min(sink_tokens, bucket_ids.shape[2])  # later sums fit into int32
    first = sink_tokens if left_padding is None else (left_padding + sink_tokens)[:, None, None]
    indexed = (bucket_ids >= 0) & (bucket_ids < buckets) & (position >= first)
    ids = torch.where(indexed, bucket_ids, buckets).to(torch.int32).contiguous()
    ordered, key_ids = ids.sort(dim=2, stable=True)
    starts = torch.arange(buckets + 1, dtype=torch.int32, device=bucket_ids.device)
    starts = starts.expand(*bucket_ids.shape[:2], -1).contiguous()
    return torch.searchsorted(ordered, starts, out_int32=True), key_ids.to(torch.int32)


@torch.library.custom_op("mlx_sparse::saap_indices", mutates_args=())
def saap_indices(
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    length: int,
    covered: int,
    sink_tokens: int,
    capacity: int,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the keys of a decode step (saap.10). Return int32 ``indices (B, Hkv, capacity)`` and ``counts (B, Hkv)``."""
    listed = expand(visited, offsets, key_ids, length, covered, sink_tokens, capacity, left_padding)
    assert listed.counts is not None
    return listed.indices, listed.counts


@saap_indices.register_fake
def _(visited: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return visited.new_empty(*visited.shape[:2], given[-2]), visited.new_empty(visited.shape[:2])


def expand(
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    length: int,
    covered: int,
    sink_tokens: int,
    capacity: int,
    left_padding: torch.Tensor | None,
) -> Listed:
    """List the keys that a decode step attends to (saap.10). All arrays are int32.

    Keys from index ``covered`` on are in no bucket and are always attended to.
    """
    B, Hkv, probes = visited.shape
    indices = torch.empty(B, Hkv, capacity, dtype=torch.int32, device=visited.device)
    counts = torch.empty(B, Hkv, dtype=torch.int32, device=visited.device)
    tickets = torch.empty(B, Hkv, 2, dtype=torch.int32, device=visited.device)
    Launch(
        expand_kernel,
        (max(1, -(-capacity // SLOTS)), Hkv, B),
        {
            "visited": visited.contiguous(),
            "offsets": offsets.contiguous(),
            "key_ids": key_ids.contiguous(),
            "left_padding": contiguous(left_padding),
            "indices": indices,
            "counts": counts,
            "tickets": tickets,
            "length": length,
            "covered": covered,
            "sink_tokens": min(sink_tokens, covered),  # later sums fit into int32
            "capacity": capacity,
            "probes": probes,
            "buckets": offsets.shape[2] - 1,
            "indexed": key_ids.shape[2],
        },
        {"BLOCK": SLOTS, "BLOCK_P": VISITED},
        {"num_warps": 8, "num_stages": 1},
    ).run()
    return Listed(indices, counts, tickets)


@torch.library.custom_op("mlx_sparse::saap_decode", mutates_args=())
def saap_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    covered: int,
    sink_tokens: int,
    capacity: int,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one decode step over visited buckets. Return ``out``, ``lse`` and counts ``(B, Hkv)`` of attended keys."""
    listed = expand(visited, offsets, key_ids, keys.shape[2], covered, sink_tokens, capacity, left_padding)
    assert listed.counts is not None
    return *attend(queries.contiguous(), rows(keys), rows(values), listed, scale=scale), listed.counts


@saap_decode.register_fake
def _(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visited: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *fake_attention(queries), visited.new_empty(visited.shape[:2])


def saap_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    bucket_ids: torch.Tensor,
    visited: torch.Tensor,
    sink_tokens: int,
    recent_tokens: int,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Build the index of the visited buckets and run one decode step (saap.9 to saap.11)."""
    S = keys.shape[2]
    covered = S - recent_tokens
    places, slots = _as_slots(bucket_ids[..., :covered], visited)
    offsets, key_ids = saap_index(places, buckets=visited.shape[2], sink_tokens=sink_tokens, left_padding=left_padding)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = saap_decode(
        queries, keys, values, slots, offsets, key_ids, covered, sink_tokens, S, scale, left_padding
    )
    return result


def _as_slots(bucket_ids: torch.Tensor, visited: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the numbers of the visited buckets, which may be any integers, by 0, 1, 2, ...

    Returns:
        The new bucket number of each key (-1 for keys in unvisited buckets) and the new ``visited`` (int32).
    """
    slots = torch.arange(visited.shape[2], dtype=torch.int32, device=visited.device).expand(visited.shape).contiguous()
    if not visited.shape[2]:
        return torch.full_like(bucket_ids, -1), slots
    wanted, ids = visited.long().sort(dim=2).values.contiguous(), bucket_ids.long().contiguous()
    place = torch.searchsorted(wanted, ids).clamp(max=visited.shape[2] - 1)
    return torch.where((ids >= 0) & (wanted.gather(2, place) == ids), place, -1), slots
