"""Launchers of Quest (docs/spec/quest.md), and its operator of torch: three launches on a step, and torch's own."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..checks import rows
from ..kernels.quest import quest_scores as kernel
from ..packed_rows import Rows
from . import configs
from .attend import attend
from .launch import Launch, power_of_2, upcast
from .operands import rows_of
from .select import LINE, GroupScores, select


def page_bounds(keys: Rows, left_padding: torch.Tensor | None, *, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(quest.1) smallest and largest of each component over the valid keys of each page.

    Returns:
        Two ``(B, Hkv, P, D)`` in the type of ``keys``; +inf and -inf for a page without a valid key.
    """
    keys = keys[:]
    B, Hkv, S, D = keys.shape
    bounds = []
    for nothing, reduce in ((float("inf"), torch.amin), (float("-inf"), torch.amax)):
        given = keys
        if left_padding is not None:
            valid = torch.arange(S, device=keys.device) >= left_padding[:, None]
            given = torch.where(valid[:, None, :, None], keys, nothing)
        given = functional.pad(given, (0, 0, 0, -S % page_size), value=nothing)
        bounds.append(reduce(given.reshape(B, Hkv, -1, page_size, D), dim=3))
    return bounds[0], bounds[1]


def page_keys(pages: torch.Tensor, left_padding: torch.Tensor | None, *, page_size: int, length: int) -> torch.Tensor:
    """(quest.5) the keys of ``pages (B, Hkv, K)``: ``(B, Hkv, K * page_size)`` int32, -1 in empty slots."""
    listed = pages[..., None] * page_size + torch.arange(page_size, dtype=torch.int32, device=pages.device)
    there = (pages[..., None] >= 0) & (listed < length)
    if left_padding is not None:
        there &= listed >= left_padding[:, None, None, None]
    return torch.where(there, listed, -1).flatten(2)


def quest_select(
    queries: torch.Tensor,
    keys: Rows,
    *,
    page_size: int,
    top_k: int,
    left_padding: torch.Tensor | None,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
) -> torch.Tensor:
    """The keys of one decode step (quest.5): ``(B, Hkv, K * page_size)`` int32, of more than K pages."""
    (B, Hkv, S, D), count = keys.shape, -(-keys.shape[2] // page_size)
    page_min, page_max = rows(page_min), rows(page_max)
    G = queries.shape[1] // Hkv
    tiles = configs.config(queries.device).scores
    BLOCK_D = power_of_2(D, 32)
    BLOCK_G = power_of_2(G, 8)
    BLOCK_P = configs.rows(tiles, 2 * BLOCK_D, page_min.element_size(), BLOCK_G)
    scores = torch.empty(B, Hkv, 1, count + -count % LINE, dtype=torch.float32, device=queries.device)
    tickets = torch.empty(B, Hkv, 2, dtype=torch.int32, device=queries.device)
    names = ("stride_lb", "stride_lh", "stride_lp", "stride_hb", "stride_hh", "stride_hp")
    strides = dict(zip(names, (*page_min.stride()[:3], *page_max.stride()[:3]), strict=True))
    bounds = {"queries": queries.contiguous(), "page_min": page_min, "page_max": page_max}
    written = {"scores": scores, "tickets": tickets}
    Launch(
        kernel,
        (-(-scores.shape[3] // BLOCK_P), Hkv, B),
        {**bounds, **written, "pages": count, "stride_s": scores.shape[3], **strides},
        {
            "D": D,
            "G": G,
            "BLOCK_D": BLOCK_D,
            "BLOCK_G": BLOCK_G,
            "BLOCK_P": BLOCK_P,
            "UPCAST": upcast(page_min.dtype),
        },
        {"num_warps": configs.warps(tiles, BLOCK_D, page_min.element_size(), BLOCK_G), "num_stages": 1},
    ).run()
    first = None if left_padding is None else left_padding // page_size
    chosen = -(-top_k // page_size)
    found = GroupScores(scores, None, None, tickets)
    pages = select(found, count, top_k=chosen, local_window=1, left_padding=first, sum_softmax=False)
    return page_keys(pages, left_padding, page_size=page_size, length=S)


@torch.library.custom_op("mlx_sparse::quest_decode", mutates_args=())
def quest_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    left_padding: torch.Tensor | None,
    page_size: int,
    top_k: int,
    scale: float,
    row_bits: int = 16,
    key_scales: torch.Tensor | None = None,
    key_biases: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    value_biases: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Quest: ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``; packed rows as in `torch_ops`."""
    bounds = {"page_min": page_min, "page_max": page_max}
    pair = rows_of(keys, values, row_bits, key_scales, key_biases, value_scales, value_biases)
    indices = quest_select(queries, pair[0], page_size=page_size, top_k=top_k, left_padding=left_padding, **bounds)
    return attend(queries.contiguous(), *pair, indices, scale=scale)


@quest_decode.register_fake
def _(queries: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    return out, queries.new_empty(queries.shape[:3], dtype=torch.float32)
