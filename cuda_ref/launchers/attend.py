"""Launch `kernels.attend`, which computes exact attention of one query per head to listed keys or to all keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ..kernels.attend import attend as kernel
from . import configs
from .launch import Launch, contiguous, fake_attention, power_of_2, result_like, rows, strides, upcast

PROGRAMS_PER_PROCESSOR = 2  # target number of programs, which determines the number of splits
BLOCK_SPLITS = 8  # number of splits that are merged at a time
MOST_ROWS = 1024  # maximum number of rows whose counts are read at a time


@dataclass(frozen=True)
class Listed:
    """The keys that a decode step attends to.

    Attributes:
        indices: ``(B, Hkv, N)`` int32, contiguous; numbers that are not key indices are empty slots.
        counts: ``(B, Hkv)`` int32, contiguous: number of used entries per row. The used entries of all rows are divided
            equally among the programs. If None, all entries are used.
        tickets: int32 ``(B, Hkv, 2)`` counters of finished programs, where ``[..., 1]`` must be 0. If None, new
            counters are allocated.
    """

    indices: torch.Tensor
    counts: torch.Tensor | None = None
    tickets: torch.Tensor | None = None


@dataclass(frozen=True)
class Reallocation:
    """Inputs for reallocation (sparq.8, sparq.10). ``logits`` and ``softmax`` are fields of `GroupScores`.

    ``value_mean`` is the float32 mean ``(B, Hkv, D)`` of the values.
    """

    logits: torch.Tensor
    softmax: torch.Tensor | None
    value_mean: torch.Tensor


@torch.library.custom_op("mlx_sparse::dense_decode", mutates_args=())
def dense_decode(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left_padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one dense decode step. Return ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``."""
    return attend(
        queries.contiguous(), rows(keys), rows(values), None, scale=scale, left_padding=contiguous(left_padding)
    )


@torch.library.custom_op("mlx_sparse::attend_indices", mutates_args=())
def attend_indices(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the listed keys (sparq.7). Return ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``.

    ``counts (B, Hkv)`` int32 is the number of used entries of each list. If None, all entries are used.
    """
    if indices.dtype != torch.int32:  # an int64 number must not wrap to a valid key
        indices = torch.where((indices >= 0) & (indices < keys.shape[2]), indices, -1).to(torch.int32)
    listed = Listed(indices.contiguous(), contiguous(counts))
    return attend(queries.contiguous(), rows(keys), rows(values), listed, scale=scale)


for _operator in (dense_decode, attend_indices):
    _operator.register_fake(fake_attention)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    listed: Listed | None,
    *,
    scale: float,
    left_padding: torch.Tensor | None = None,
    reallocation: Reallocation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention of one query per head (sparq.7).

    The keys are split among programs, whose results are merged exactly.

    See `mlx_sparse.core.attend.ops.attend_indices` for the shapes and the results.

    Args:
        queries: contiguous. ``keys`` and ``values`` have last stride 1.
        listed: the keys to attend to. If None, attend to all valid keys.
        reallocation: inputs for mixing in the mean value (sparq.10). If None, skip reallocation.
    """
    B, Hq, _, D = queries.shape
    Hkv, S = keys.shape[1:3]
    G = Hq // Hkv
    indices, counts = (None, None) if listed is None else (listed.indices, listed.counts)
    entries = S if indices is None else indices.shape[2]
    tiles = configs.DENSE if indices is None else configs.LISTED
    BLOCK_D = power_of_2(D, 16)
    BLOCK_N = configs.rows(tiles, BLOCK_D, keys.itemsize)
    share = configs.share(entries, BLOCK_N, B * Hkv, PROGRAMS_PER_PROCESSOR, queries.device)
    grid = (max(1, -(-entries // share)), Hkv, B)
    if counts is not None:
        grid = (programs_for_counts(B * Hkv, entries, BLOCK_N, queries.device), 1, 1)
    tickets = None if listed is None else listed.tickets
    if tickets is None:
        tickets = torch.zeros(B, Hkv, 2, dtype=torch.int32, device=queries.device)
    out = result_like(queries)
    lse = torch.empty(B, Hq, 1, dtype=torch.float32, device=queries.device)
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
            "parts": torch.empty(splits, G, D, dtype=torch.float32, device=queries.device),
            "part_sums": torch.empty(splits, G, 3, dtype=torch.float32, device=queries.device),
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
        {"num_warps": configs.warps(tiles, BLOCK_D, keys.itemsize), "num_stages": tiles.stages},
    ).run()
    return out.to(queries.dtype), lse


def programs_for_counts(rows: int, entries: int, block: int, device: torch.device) -> int:
    """Return the number of programs to launch for ``rows`` lists, each of at most ``entries`` keys.

    The programs keep all processors busy. There are at least two programs per list, but at most one per ``block`` keys.
    """
    wanted = max(PROGRAMS_PER_PROCESSOR * configs.processors(device), 2 * rows)
    return min(wanted, rows * max(1, -(-entries // block)))
