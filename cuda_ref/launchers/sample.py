"""Launch the SampleAttention kernels (docs/spec/sample.md): score the sample, select key blocks, and attend to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mlx_sparse.core.blocks.layout import Layout

from ..kernels.sample_scores import merge_blocks as merge_kernel
from ..kernels.sample_scores import sample_scores as parts_kernel
from ..kernels.sample_scores import sample_sums as sums_kernel
from . import configs
from .blocks import Prefill, positive
from .launch import Launch, fake_attention, power_of_2, rows, strides, upcast

PROGRAMS_PER_PROCESSOR = 2  # target number of programs, which determines the number of splits of the keys
SUMMED = 32  # number of key blocks and of offset bins per program of `sample_sums`
BLOCK_SPLITS = 8  # number of splits whose statistics are read at a time
MERGED = 1024  # number of key blocks that are read at a time
LIST_BYTES = 512 << 20  # maximum bytes of block lists; all lists of a million keys and 32 heads would need 8.6 GB


class SampleMasks(NamedTuple):
    """uint8 masks ``(B, Hq, C, Nk)`` of the selected columns and offset bins. A selected entry is 1."""

    column: torch.Tensor
    slash: torch.Tensor


@torch.library.custom_op("mlx_sparse::sample_prefill", mutates_args=())
def sample_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run SampleAttention. Return ``out``, float32 ``lse (B, Hq, L)`` and int32 ``counts (B, Hq, R)``.

    ``counts`` is the number of key blocks that each row block attends to. Row blocks are processed in ranges whose
    lists fit into `LIST_BYTES`.
    """
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    B, Hq = queries.shape[:2]
    counts = torch.empty(B, Hq, layout.row_blocks, dtype=torch.int32, device=queries.device)
    queries, keys = rows(queries), rows(keys)
    kept = select_masks(queries, keys, layout, alpha_column=alpha_column, alpha_slash=alpha_slash, scale=scale)
    prefill = Prefill(queries, keys, rows(values), layout, scale)
    for first, stop in portions(layout, 4 * B * Hq):
        prefill.attend(merge_kept(kept, layout, first, stop, layout.first_block + stop, counts), first, stop)
    return *prefill.result(), counts


@sample_attention.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = Layout(queries.shape[2], keys.shape[2], 1, given[-2])
    counts = queries.new_empty(*queries.shape[:2], layout.row_blocks, dtype=torch.int32)
    return *fake_attention(queries), counts


@torch.library.custom_op("mlx_sparse::sample_select", mutates_args=())
def sample_select(
    queries: torch.Tensor,
    keys: torch.Tensor,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Select key blocks for each row block (sample.1 to sample.7). Return int32 ``(B, Hq, R, Nk)``, padded with -1."""
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    counts = torch.empty(*queries.shape[:2], layout.row_blocks, dtype=torch.int32, device=queries.device)
    alphas = {"alpha_column": alpha_column, "alpha_slash": alpha_slash}
    kept = select_masks(rows(queries), rows(keys), layout, **alphas, scale=scale)
    return merge_kept(kept, layout, 0, layout.row_blocks, layout.key_blocks, counts)


@sample_select.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, *given: Any) -> torch.Tensor:
    layout = Layout(queries.shape[2], keys.shape[2], 1, given[-2])
    return queries.new_empty(*queries.shape[:2], layout.row_blocks, layout.key_blocks, dtype=torch.int32)


@torch.library.custom_op("mlx_sparse::sample_scores", mutates_args=())
def sample_scores(
    queries: torch.Tensor, keys: torch.Tensor, chunks: int, block_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Create the `Layout` of a prefill, and return the sums ``column`` and ``slash`` that `score` computes."""
    return score(rows(queries), rows(keys), Layout(queries.shape[2], keys.shape[2], chunks, block_size), scale=scale)


@sample_scores.register_fake
def _(
    queries: torch.Tensor, keys: torch.Tensor, chunks: int, block_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = Layout(queries.shape[2], keys.shape[2], chunks, block_size)
    shape = (*queries.shape[:2], min(chunks, layout.row_blocks), layout.key_blocks)
    return queries.new_empty(shape, dtype=torch.float32), queries.new_empty(shape, dtype=torch.float32)


def score(
    queries: torch.Tensor, keys: torch.Tensor, layout: Layout, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums of `api.parts.sample_scores`. The last stride of ``queries`` and ``keys`` is 1."""
    queries, scale = positive(queries, scale)
    B, Hq, _, D = queries.shape
    Hkv = keys.shape[1]
    size, C = layout.block_size, len(layout.regions)
    device = queries.device
    BLOCK_D = power_of_2(D, 16)
    tile = configs.sample_tile(size, keys.element_size())
    programs = C * B * Hq * (size // tile.queries)
    splits = configs.splits(layout.key_blocks, programs, PROGRAMS_PER_PROCESSOR, device)
    parts = torch.empty(C, B, Hq, layout.key_blocks, 2, size, dtype=torch.float32, device=device)
    statistics = torch.empty(C, B, Hq, splits, 2, size, dtype=torch.float32, device=device)
    Launch(
        parts_kernel,
        (programs, splits, 1),
        {
            "queries": queries,
            "keys": keys,
            "parts": parts,
            "statistics": statistics,
            **_sizes(layout),
            "rows": B * Hq,
            "heads": Hq,
            "scale": scale,
            **strides("q", queries),
            **strides("k", keys),
        },
        {
            "D": D,
            "G": Hq // Hkv,
            "BLOCK_SIZE": size,
            "BLOCK_D": BLOCK_D,
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "UPCAST": upcast(keys.dtype),
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
    ).run()
    column, slash = (torch.empty(B, Hq, C, layout.key_blocks, dtype=torch.float32, device=device) for _ in range(2))
    Launch(
        sums_kernel,
        (C * B * Hq, -(-layout.key_blocks // SUMMED), 1),
        {
            "parts": parts,
            "statistics": statistics,
            "column": column,
            "slash": slash,
            **_sizes(layout),
            "rows": B * Hq,
            "splits": splits,
            "key_blocks": layout.key_blocks,
        },
        {"BLOCK_SIZE": size, "BLOCK": SUMMED, "BLOCK_SPLITS": BLOCK_SPLITS},
        {"num_warps": 4, "num_stages": 1},
    ).run()
    return column, slash


def select_share(scores: torch.Tensor, alpha: float) -> torch.Tensor:
    """Select the largest of ``scores (..., Nk)`` until their share of the sum reaches ``alpha - 1e-6`` (sample.6).

    Returns:
        uint8 mask in the shape of ``scores``, with 1 for the selected scores. Ties go to the lower index. If the shares
        are NaN, all scores are selected.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    share = ordered.cumsum(dim=-1) / ordered.sum(dim=-1, keepdim=True)
    # The first score is always selected. A later score is selected if the sum of the earlier scores is below alpha.
    needed = torch.ones_like(order, dtype=torch.uint8)
    needed[..., 1:] = ~(share[..., :-1] >= alpha - 1e-6)
    return torch.empty_like(needed).scatter_(-1, order, needed)


def select_masks(
    queries: torch.Tensor, keys: torch.Tensor, layout: Layout, *, alpha_column: float, alpha_slash: float, scale: float
) -> SampleMasks:
    """Score the sampled queries of each region, and select key blocks (columns) and offset bins by these scores."""
    column, slash = score(queries, keys, layout, scale=scale)
    return SampleMasks(select_share(column, alpha_column), select_share(slash, alpha_slash))


def merge_kept(
    kept: SampleMasks, layout: Layout, first: int, stop: int, width: int, counts: torch.Tensor
) -> torch.Tensor:
    """List the key blocks (sample.7) of row blocks ``first`` to ``stop - 1``, counted from the first query's block.

    Args:
        width: number of slots per list, at least the number of key blocks up to the diagonal of the last row block.
        counts: int32 ``(B, Hq, R)`` array. The call writes the number of key blocks in each list to this array.

    Returns:
        Ascending int32 block indices ``(B, Hq, stop - first, width)``, padded with -1.
    """
    B, Hq = kept.column.shape[:2]
    blocks = torch.empty(B, Hq, stop - first, width, dtype=torch.int32, device=counts.device)
    Launch(
        merge_kernel,
        (B * Hq * (stop - first), 1, 1),
        {
            "column_kept": kept.column,
            "slash_kept": kept.slash,
            "blocks": blocks,
            "counts": counts,
            **_sizes(layout),
            "first": first,
            "made": stop - first,
            "width": width,
            "key_blocks": layout.key_blocks,
        },
        {"BLOCK_SIZE": layout.block_size, "BLOCK": min(MERGED, power_of_2(layout.key_blocks, 16))},
        {"num_warps": 4, "num_stages": 1},
    ).run()
    return blocks


def portions(layout: Layout, entry: int) -> Iterator[tuple[int, int]]:
    """Yield ranges ``(first, stop)`` of row blocks whose lists fit into `LIST_BYTES`. The last range comes first.

    ``entry`` is the number of bytes of one list entry for all query heads of the batch.
    """
    stop = layout.row_blocks
    while stop > 0:
        width = layout.first_block + stop
        first = max(0, stop - max(1, LIST_BYTES // (entry * width)))
        yield first, stop
        stop = first


def _sizes(layout: Layout) -> dict[str, int]:
    return {
        "length": layout.S,
        "offset": layout.S - layout.L,
        "first_row_block": layout.first_block,
        "row_blocks": layout.row_blocks,
        "chunks": len(layout.regions),
    }
