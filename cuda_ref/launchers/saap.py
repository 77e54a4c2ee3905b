"""Launchers of SAAP (docs/spec/saap.md): four launches on a decode step, three without a hidden layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..kernels.saap import saap_expand as expand_kernel
from ..kernels.saap import saap_hidden as hidden_kernel
from ..kernels.saap import saap_route as route_kernel
from . import configs
from .attend import attend
from .launch import Launch, power_of_2

CHOSEN_FROM = 4096  # probabilities that a program holds at a time
MOST_ROWS = 32  # of queries that share what is read of the weights
SLOTS = 128  # of a list, that a program fills
VISITED = 64  # buckets that are looked at at a time
FOLD_EVERY = 256  # tokens after which an index is made anew


class Network(NamedTuple):
    """A query network for each KV head (saap.5); without a hidden layer a linear router.

    Attributes:
        out_weight: ``(Hkv, H, C)``, or ``(Hkv, D, C)`` without a hidden layer.
        out_bias: ``(Hkv, C)``.
        hidden_weight, hidden_bias: ``(Hkv, D, H)`` and ``(Hkv, H)``.
    """

    out_weight: torch.Tensor
    out_bias: torch.Tensor | None = None
    hidden_weight: torch.Tensor | None = None
    hidden_bias: torch.Tensor | None = None


def saap_route(queries: torch.Tensor, network: Network, *, probes: int) -> torch.Tensor:
    """The ``probes`` buckets that the group of each KV head visits (saap.8).

    Args:
        queries: ``(B, Hq, 1, D)`` before RoPE, contiguous; the network's arrays are contiguous too.

    Returns:
        ``(B, Hkv, probes)`` int32, ascending; -1 in slots that no bucket with a probability fills.
    """
    B, Hq = queries.shape[:2]
    Hkv, K, C = network.out_weight.shape
    G = Hq // Hkv
    device = queries.device
    GROUP = power_of_2(G)
    BLOCK_M = max(16, GROUP, min(MOST_ROWS, GROUP * power_of_2(B)))
    parts = -(-B // (BLOCK_M // GROUP))
    rows = {"G": G, "GROUP": GROUP, "BLOCK_M": BLOCK_M}
    if network.hidden_weight is None:
        x, tickets = queries, torch.zeros(parts, Hkv, dtype=torch.int32, device=device)
    else:
        x, tickets = _hidden(queries, network.hidden_weight, network.hidden_bias, parts, rows)
    BLOCK_C = power_of_2(C, 256)
    visited = torch.empty(B, Hkv, probes, dtype=torch.int32, device=device)
    tiles = configs.columns(C, network.out_weight.element_size(), BLOCK_M, Hkv * parts, device)
    Launch(
        route_kernel,
        (-(-C // tiles.columns), Hkv, parts),
        {
            "x": x,
            "weight": network.out_weight,
            "bias": network.out_bias,
            "logits": torch.empty(B, Hkv, G, C, dtype=torch.float32, device=device),
            "visited": visited,
            "tickets": tickets,
            "batch": B,
            "probes": probes,
            "K": K,
            "C": C,
        },
        {
            **rows,
            "BLOCK_K": tiles.rows,
            "BLOCK_N": tiles.columns,
            "BLOCK_G": min(GROUP, max(1, CHOSEN_FROM // BLOCK_C)),
            "BLOCK_C": BLOCK_C,
        },
        {"num_warps": tiles.warps, "num_stages": tiles.stages},
    ).run()
    return visited


def _hidden(
    queries: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int, rows: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden layer, float32 ``(B, Hkv, G, H)``, and tickets for the launch that follows."""
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
    """Keys in bucket order (saap.9); of ``bucket_ids (B, Hkv, n)``: ``offsets (B, Hkv, C + 1)`` and ``key_ids``."""
    position = torch.arange(bucket_ids.shape[2], device=bucket_ids.device)
    sink_tokens = min(sink_tokens, bucket_ids.shape[2])  # what is added to it fits int32
    first = sink_tokens if left_padding is None else (left_padding + sink_tokens)[:, None, None]
    indexed = (bucket_ids >= 0) & (bucket_ids < buckets) & (position >= first)
    ids = torch.where(indexed, bucket_ids, buckets).to(torch.int32).contiguous()
    ordered, key_ids = ids.sort(dim=2, stable=True)
    starts = torch.arange(buckets + 1, dtype=torch.int32, device=bucket_ids.device)
    starts = starts.expand(*bucket_ids.shape[:2], -1).contiguous()
    return torch.searchsorted(ordered, starts, out_int32=True), key_ids.to(torch.int32)


def saap_indices(
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    *,
    length: int,
    covered: int,
    sink_tokens: int,
    capacity: int,
    left_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys of one step (saap.10). All arrays are int32 and contiguous.

    Returns:
        ``indices (B, Hkv, capacity)``, packed, then -1; ``counts (B, Hkv)``; and tickets for `attend`.
    """
    B, Hkv, probes = visited.shape
    whole: dict[str, Any] = {"dtype": torch.int32, "device": visited.device}
    indices = torch.empty(B, Hkv, capacity, **whole)
    counts = torch.empty(B, Hkv, **whole)
    tickets = torch.empty(B, Hkv, 2, **whole)
    Launch(
        expand_kernel,
        (max(1, -(-capacity // SLOTS)), Hkv, B),
        {
            "visited": visited,
            "offsets": offsets,
            "key_ids": key_ids,
            "left_padding": left_padding,
            "indices": indices,
            "counts": counts,
            "tickets": tickets,
            "length": length,
            "covered": covered,
            "sink_tokens": min(sink_tokens, covered),  # what is added to it fits int32
            "capacity": capacity,
            "probes": probes,
            "buckets": offsets.shape[2] - 1,
            "indexed": key_ids.shape[2],
        },
        {"BLOCK": SLOTS, "BLOCK_P": VISITED},
        {"num_warps": 8, "num_stages": 1},
    ).run()
    return indices, counts, tickets


@dataclass(frozen=True)
class Index:
    """The keys of a cache in bucket order, as steps use it until it is made anew.

    Attributes:
        offsets, key_ids: of `saap_index`.
        covered: keys that it knows; those behind are attended.
        sink_tokens: first keys, which it does not list.
        capacity: slots of a list, so that every step's fits.
    """

    offsets: torch.Tensor
    key_ids: torch.Tensor
    covered: int
    sink_tokens: int
    capacity: int

    @classmethod
    def of(
        cls,
        bucket_ids: torch.Tensor,
        *,
        buckets: int,
        probes: int,
        sink_tokens: int,
        recent_tokens: int,
        left_padding: torch.Tensor | None = None,
    ) -> Index:
        """An index for a cache of ``bucket_ids (B, Hkv, S)``; the device is waited for, once in `FOLD_EVERY` tokens."""
        covered = max(bucket_ids.shape[2] - recent_tokens, 0)
        offsets, key_ids = saap_index(
            bucket_ids[..., :covered], buckets=buckets, sink_tokens=sink_tokens, left_padding=left_padding
        )
        largest = offsets.diff(dim=2).topk(probes, dim=2).values.sum(dim=2).max()
        return cls(offsets, key_ids, covered, sink_tokens, sink_tokens + recent_tokens + FOLD_EVERY + int(largest))


def saap_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visited: torch.Tensor,
    index: Index,
    *,
    scale: float,
    left_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One decode step over the visited buckets: `attend`'s results, and ``counts (B, Hkv)`` of the attended keys."""
    indices, counts, tickets = saap_indices(
        visited,
        index.offsets,
        index.key_ids,
        length=keys.shape[2],
        covered=index.covered,
        sink_tokens=index.sink_tokens,
        capacity=index.capacity,
        left_padding=left_padding,
    )
    return *attend(queries, keys, values, indices, counts=counts, scale=scale, tickets=tickets), counts
