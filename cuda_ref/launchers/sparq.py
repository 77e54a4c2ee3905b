"""Launchers of SparQ (docs/spec/sparq.md): three launches on a decode step."""

from __future__ import annotations

from typing import Any

import torch

from mlx_sparse.methods.scoring_keys import CODE_BITS, GROUP, KeyCodes

from ..kernels.sparq_code_scores import sparq_code_scores as code_kernel
from ..kernels.sparq_scores import sparq_scores as kernel
from . import configs
from .attend import Reallocation, attend
from .launch import Launch, power_of_2, strides, upcast
from .select import GroupScores, select

MOST_COMPONENTS = 64  # in a tile; more are added up
PROGRAMS_PER_PROCESSOR = 4  # splits are made until there are so many
CODE_COMPONENTS = 16  # of codes that are multiplied at a time: more would not fit into the registers


def sparq_scores(
    queries: torch.Tensor,
    keys_t: torch.Tensor,
    *,
    rank: int,
    component_weight: torch.Tensor | None,
    scale: float,
    left_padding: torch.Tensor | None,
) -> GroupScores:
    """Approximate logits of all keys from ``rank`` components (sparq.3).

    Args:
        queries: ``(B, Hq, 1, D)``, contiguous.
        keys_t: ``(B, Hkv, D, S)`` of any strides; fast where the last is 1 and the others are multiples of 16.
        component_weight: float32 ``(B, Hkv, D)``, or None for the paper's rule.
    """
    B, Hkv, _, S = keys_t.shape
    G, D = queries.shape[1] // Hkv, queries.shape[3]
    tiles = configs.config(queries.device).scores
    BLOCK_D = power_of_2(D, 32)
    BLOCK_R = power_of_2(min(rank, MOST_COMPONENTS), 16)
    BLOCK_S = configs.rows(tiles, BLOCK_R, keys_t.itemsize)
    share = configs.share(S, BLOCK_S, B * Hkv, PROGRAMS_PER_PROCESSOR, queries.device)
    grid = (-(-S // share), Hkv, B)
    found = GroupScores.empty(B, Hkv, G, S, grid[0], queries.device)
    Launch(
        kernel,
        grid,
        {
            "queries": queries,
            "keys_t": keys_t,
            **{f"stride_k{axis}": stride for axis, stride in zip("bhds", keys_t.stride(), strict=True)},
            "component_weight": component_weight,
            "left_padding": left_padding,
            "logits": found.logits,
            "statistics": found.statistics,
            "tickets": found.tickets,
            "length": S,
            "blocks": share // BLOCK_S,
            "scale": scale,
            "stride_l": found.logits.stride(2),
        },
        {
            "D": D,
            "G": G,
            "RANK": rank,
            "BLOCK_D": BLOCK_D,
            "BLOCK_G": power_of_2(G, 8),
            "BLOCK_R": BLOCK_R,
            "BLOCK_S": BLOCK_S,
            "ALIGNED": readable_beyond(keys_t),
            "UPCAST": upcast(keys_t.dtype),
        },
        {
            "num_warps": configs.score_warps(tiles, BLOCK_D),
            # Without matrix units a loop of more than two stages runs out of registers.
            "num_stages": min(tiles.stages, 2) if keys_t.dtype == torch.float32 else tiles.stages,
        },
    ).run()
    return found


def readable_beyond(keys_t: torch.Tensor) -> bool:
    """Whether each row of ``keys_t (B, Hkv, D, S)`` may be read up to the next multiple of 16 keys.

    So it is with slices of a cache whose capacity is a multiple of 16. Masks that end at S would cut the loads, which
    are of 16 bytes, into single elements.
    """
    S = keys_t.shape[3]
    beyond = -S % 16
    if keys_t.stride(3) != 1 or any(stride % 16 for stride in keys_t.stride()[:3]):
        return False
    last = keys_t.storage_offset() + sum(
        (n - 1) * stride for n, stride in zip(keys_t.shape, keys_t.stride(), strict=True)
    )
    return (last + beyond + 1) * keys_t.element_size() <= keys_t.untyped_storage().nbytes()


def sparq_code_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    coded: KeyCodes,
    *,
    narrow: bool,
    rank: int,
    component_weight: torch.Tensor | None,
    scale: float,
    left_padding: torch.Tensor | None,
) -> GroupScores:
    """Approximate logits of all keys from codes of ``rank`` components (sparq.21).

    Args:
        queries: ``(B, Hq, 1, D)``, contiguous.
        keys: ``(B, Hkv, S, D)``, last stride 1; those that are not coded are read.
        coded: of all full groups; fast where the last strides are 1 and those of ``codes`` else multiples of 16.
        narrow: whether the logits are written in 8 bits.
        component_weight: float32 ``(B, Hkv, D)``, or None for the paper's rule.
    """
    B, Hkv, S, D = keys.shape
    G = queries.shape[1] // Hkv
    codes, lo, step = (array if array.stride(-1) == 1 else array.contiguous() for array in coded[:3])
    if lo.stride() != step.stride():
        lo, step = lo.contiguous(), step.contiguous()
    tiles = configs.config(queries.device).scores
    BLOCK_D = power_of_2(D, 32)
    warps = configs.score_warps(tiles, BLOCK_D)
    BLOCK_S = 32 * warps * 16 * 8 // (CODE_COMPONENTS * CODE_BITS)  # a load of 16 bytes for each thread
    full = S // GROUP * GROUP  # of the longest row
    share = configs.share(full, BLOCK_S, B * Hkv, PROGRAMS_PER_PROCESSOR, queries.device)
    tail = int(full < S or left_padding is not None)
    parts = -(-full // BLOCK_S) + tail
    found = GroupScores.empty(B, Hkv, G, S, parts, queries.device, tile=BLOCK_S if narrow else 0)
    Launch(
        code_kernel,
        (-(-full // share) + tail, Hkv, B),
        {
            "queries": queries,
            "codes": codes,
            "lo": lo,
            "step": step,
            "centre": coded.centre.contiguous(),
            "keys": keys,
            **strides("k", keys),
            "component_weight": component_weight,
            "left_padding": left_padding,
            "logits": found.logits,
            "statistics": found.statistics,
            "tickets": found.tickets,
            "length": S,
            "blocks": share // BLOCK_S,
            "tiles": parts,
            "scale": scale,
            "stride_l": found.logits.stride(2),
            "stride_cb": codes.stride(0),
            "stride_ch": codes.stride(1),
            "stride_cd": codes.stride(2),
            "stride_rb": lo.stride(0),
            "stride_rh": lo.stride(1),
            "stride_rd": lo.stride(2),
        },
        {
            "D": D,
            "G": G,
            "RANK": rank,
            "BLOCK_D": BLOCK_D,
            "BLOCK_G": power_of_2(G),
            "BLOCK_R": CODE_COMPONENTS,
            "BLOCK_S": BLOCK_S,
        },
        {"num_warps": warps, "num_stages": tiles.stages},
    ).run()
    return found


def sparq_select(
    queries: torch.Tensor,
    keys_t: torch.Tensor | KeyCodes,
    *,
    rank: int,
    top_k: int,
    local_window: int,
    component_weight: torch.Tensor | None,
    scale: float,
    left_padding: torch.Tensor | None,
    keys: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[torch.Tensor, GroupScores]:
    """Choose the keys of one decode step: ``indices (B, Hkv, min(top_k, S))`` int32, and what they were chosen by.

    Args:
        keys_t: component-major keys or their codes.
        keys: ``(B, Hkv, S, D)``, last stride 1; needed for those that are not coded.
        exact: whether the logits have to be float32, as reallocation reads them. Those of keys of 16 bits always are.
    """
    scoring: dict[str, Any] = {
        "rank": rank,
        "component_weight": component_weight,
        "scale": scale,
        "left_padding": left_padding,
    }
    if isinstance(keys_t, KeyCodes):
        assert keys is not None
        narrow = not exact
        S = keys.shape[2]
        scores = sparq_code_scores(queries, keys, keys_t, narrow=narrow, **scoring)
    else:
        S = keys_t.shape[3]
        scores = sparq_scores(queries, keys_t, **scoring)
    indices = select(
        scores,
        S,
        top_k=top_k,
        local_window=local_window,
        left_padding=left_padding,
    )
    return indices, scores


def sparq_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    keys_t: torch.Tensor | KeyCodes,
    *,
    top_k: int,
    scale: float,
    value_mean: torch.Tensor | None,
    **selection: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step: ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``.

    Args:
        value_mean: ``(B, Hkv, D)`` to reallocate to; None for none.
        selection: the other parameters of `sparq_select`.
    """
    exact = value_mean is not None
    indices, scores = sparq_select(queries, keys_t, keys=keys, exact=exact, top_k=top_k, scale=scale, **selection)
    reallocation = None if value_mean is None else Reallocation(scores.logits, scores.softmax, value_mean.float())
    return attend(queries, keys, values, indices, scale=scale, reallocation=reallocation, tickets=scores.tickets)
