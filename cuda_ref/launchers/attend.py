"""Launchers of `kernels.attend`: exact attention of one query per head over a list of keys, or over all."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..kernels.attend import attend as kernel
from . import configs
from .launch import Launch, power_of_2, result_like, strides, upcast

PROGRAMS_PER_PROCESSOR = 2  # splits are made until there are so many
BLOCK_SPLITS = 8  # merged at a time
MOST_ROWS = 1024  # whose counts are looked at at a time


@dataclass(frozen=True)
class Reallocation:
    """What (sparq.8) and (sparq.10) need: ``logits`` and ``softmax`` of `GroupScores`, float32 ``value_mean``."""

    logits: torch.Tensor
    softmax: torch.Tensor | None
    value_mean: torch.Tensor


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    *,
    scale: float,
    counts: torch.Tensor | None = None,
    left_padding: torch.Tensor | None = None,
    reallocation: Reallocation | None = None,
    tickets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of one query per head (sparq.7), split over the keys and merged exactly.

    Args:
        queries: ``(B, Hq, 1, D)``, contiguous.
        keys, values: ``(B, Hkv, S, D)``, last stride 1.
        indices: ``(B, Hkv, N)`` int32, any number that is no key's = empty slot; None for all keys from
            ``left_padding`` on.
        counts: ``(B, Hkv)`` int32, contiguous; entries from there on are empty slots. Programs share out what is before
            them, over all rows together, so that neither long rows nor empty slots cost time.
        tickets: int32 ``(B, Hkv, 2)``, of which the second is 0; made when absent.

    Returns:
        ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``; 0 and -inf where nothing is
        attended.
    """
    B, Hq, _, D = queries.shape
    Hkv, S = keys.shape[1:3]
    G = Hq // Hkv
    entries = S if indices is None else indices.shape[2]
    chosen = configs.config(queries.device)
    tiles = chosen.dense if indices is None else chosen.listed
    BLOCK_D = power_of_2(D, 16)
    BLOCK_N = configs.rows(tiles, BLOCK_D, keys.itemsize)
    share = configs.share(entries, BLOCK_N, B * Hkv, PROGRAMS_PER_PROCESSOR, queries.device)
    grid = (max(1, -(-entries // share)), Hkv, B)
    if counts is not None:
        grid = (programs_for_counts(B * Hkv, entries, BLOCK_N, queries.device), 1, 1)
    real: dict[str, Any] = {"dtype": torch.float32, "device": queries.device}
    if tickets is None:
        tickets = torch.zeros(B, Hkv, 2, dtype=torch.int32, device=queries.device)
    out = result_like(queries)
    lse = torch.empty(B, Hq, 1, **real)
    splits = prod(grid) if grid[0] > 1 else 0
    Launch(
        kernel,
        grid,
        {
            "queries": queries,
            "keys": keys,
            "values": values,
            **strides("k", keys),
            **strides("v", values),
            "indices": indices,
            "counts": counts,
            "left_padding": left_padding,
            "logits": None if reallocation is None else reallocation.logits,
            "softmax": None if reallocation is None else reallocation.softmax,
            "value_mean": None if reallocation is None else reallocation.value_mean,
            "out": out,
            "lse": lse,
            "parts": torch.empty(splits, G, D, **real),
            "part_sums": torch.empty(splits, G, 3, **real),
            "tickets": tickets,
            "length": S,
            "entries": entries,
            "share": share,
            "rows": B * Hkv,
            "heads": Hkv,
            "scale": scale,
            "stride_l": 0 if reallocation is None else reallocation.logits.stride(2),
        },
        {
            "D": D,
            "G": G,
            "BLOCK_D": BLOCK_D,
            "BLOCK_G": power_of_2(G, 16),
            "BLOCK_N": BLOCK_N,
            "GROUP": power_of_2(G),
            "BLOCK_SPLITS": BLOCK_SPLITS,
            "BLOCK_ROWS": power_of_2(min(B * Hkv, MOST_ROWS)),
            "UPCAST": upcast(keys.dtype),
        },
        {
            "num_warps": configs.warps(tiles, BLOCK_D, keys.itemsize),
            "num_stages": tiles.stages,
        },
    ).run()
    return out.to(queries.dtype), lse


def programs_for_counts(rows: int, entries: int, block: int, device: torch.device) -> int:
    """How many programs keep every processor busy: one for each row and as many again, if there are as many blocks."""
    wanted = max(PROGRAMS_PER_PROCESSOR * configs.processors(device), 2 * rows)
    return min(wanted, rows * max(1, -(-entries // block)))


def attend_indices(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` over a list: ``indices (B, Hkv, N)`` int32."""
    return attend(queries, keys, values, indices, counts=counts, scale=scale)


def dense_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` over all valid keys: the dense baseline."""
    return attend(queries, keys, values, None, scale=scale, left_padding=left_padding)
