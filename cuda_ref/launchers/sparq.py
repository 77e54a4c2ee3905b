"""Launch the SparQ kernels (docs/spec/sparq.md). A decode step has three launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.methods.sparq.scoring_keys import CODE_BITS, GROUP, KeyCodes

from ..kernels.sparq_code_scores import sparq_code_scores as code_kernel
from ..kernels.sparq_scores import sparq_scores as kernel
from . import configs
from .attend import Listed, Reallocation, attend
from .launch import Launch, contiguous, fake_attention, power_of_2, rows, strides, upcast
from .select import GroupScores, select

MOST_COMPONENTS = 64  # maximum number of components per tile; the kernel sums more components over several tiles
PROGRAMS_PER_PROCESSOR = 4  # target number of programs, which determines the number of splits
CODE_COMPONENTS = 16  # components of int4 scoring keys per product; more would not fit into the registers


def sparq_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    keys_t: torch.Tensor | KeyCodes | None,
    reallocate: bool,
    value_mean: torch.Tensor | None,
    **selection: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `sparq_decode`. The arguments are the same as for `sparq_attention` of the `ops` backend.

    `KeyCodes` are converted to a list of tensors, because `sparq_decode` is a torch operator.
    """
    scored = [keys.mT] if keys_t is None else list(keys_t) if isinstance(keys_t, KeyCodes) else [keys_t]
    mean = value_mean if reallocate else None
    result: tuple[torch.Tensor, torch.Tensor] = sparq_decode(
        queries, keys, values, scored, value_mean=mean, **selection
    )
    return result


@torch.library.custom_op("mlx_sparse::sparq_decode", mutates_args=())
def sparq_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scored: Sequence[torch.Tensor],
    rank: int,
    top_k: int,
    local_window: int,
    scale: float,
    component_weight: torch.Tensor | None = None,
    left_padding: torch.Tensor | None = None,
    value_mean: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one decode step of SparQ (sparq.1 to sparq.21).

    Return ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``.

    Args:
        scored: a list with the component-major keys ``(B, Hkv, D, S)``, or with the four arrays of `KeyCodes`.
        value_mean: ``(B, Hkv, D)`` mean of the values for reallocation. If None, skip reallocation.
    """
    queries, keys = queries.contiguous(), rows(keys)
    component_weight, left_padding = contiguous(component_weight), contiguous(left_padding)
    keys_t = scored[0] if len(scored) == 1 else KeyCodes(*scored)
    selection = Selection(rank, top_k, local_window, scale, component_weight, left_padding, keys_t)
    indices, scores = sparq_select(queries, keys, selection, exact=value_mean is not None)
    reallocation = None
    if value_mean is not None:
        reallocation = Reallocation(scores.logits, scores.softmax, value_mean.float().contiguous())
    listed = Listed(indices, tickets=scores.tickets)
    return attend(queries, keys, rows(values), listed, scale=scale, reallocation=reallocation)


sparq_decode.register_fake(fake_attention)


def sparq_select(
    queries: torch.Tensor, keys: torch.Tensor, selection: Selection, *, exact: bool
) -> tuple[torch.Tensor, GroupScores]:
    """Select the keys of one decode step. Return int32 ``indices (B, Hkv, min(top_k, S))`` and the approximate logits.

    Args:
        exact: True if reallocation needs float32 logits. If False, logits from int4 scoring keys have 8 bits.
    """
    if isinstance(selection.keys_t, KeyCodes):
        scores = sparq_code_scores(queries, keys, selection, narrow=not exact)
    else:
        scores = sparq_scores(queries, selection)
    indices = select(
        scores,
        keys.shape[2],
        top_k=selection.top_k,
        local_window=selection.local_window,
        left_padding=selection.left_padding,
    )
    return indices, scores


def sparq_scores(queries: torch.Tensor, selection: Selection) -> GroupScores:
    """Compute approximate logits of all keys from ``rank`` components (sparq.3).

    Args:
        queries: ``(B, Hq, 1, D)``, contiguous.
        selection: settings and arrays for selecting keys. ``keys_t`` may have any strides. Reads are fastest if the
            last stride is 1 and all other strides are multiples of 16.
    """
    keys_t = selection.keys_t
    B, Hkv, _, S = keys_t.shape
    G, D = queries.shape[1] // Hkv, queries.shape[3]
    tiles = configs.SCORES
    BLOCK_D = power_of_2(D, 32)
    BLOCK_R = power_of_2(min(selection.rank, MOST_COMPONENTS), 16)
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
            **strides("k", keys_t, "bhds"),
            "component_weight": selection.component_weight,
            "left_padding": selection.left_padding,
            "logits": found.logits,
            "statistics": found.statistics,
            "tickets": found.tickets,
            "length": S,
            "blocks": share // BLOCK_S,
            "scale": selection.scale,
            "stride_l": found.logits.stride(2),
        },
        {
            "D": D,
            "G": G,
            "RANK": selection.rank,
            "BLOCK_D": BLOCK_D,
            "BLOCK_G": power_of_2(G, 8),
            "BLOCK_R": BLOCK_R,
            "BLOCK_S": BLOCK_S,
            "ALIGNED": readable_beyond(keys_t),
            "UPCAST": upcast(keys_t.dtype),
        },
        {
            "num_warps": configs.score_warps(tiles, BLOCK_D),
            # float32 has no matrix units. A loop with more than two stages would need too many registers.
            "num_stages": min(tiles.stages, 2) if keys_t.dtype == torch.float32 else tiles.stages,
        },
    ).run()
    return found


def readable_beyond(keys_t: torch.Tensor) -> bool:
    """Return True if each row of ``keys_t (B, Hkv, D, S)`` may be read up to the next multiple of 16 keys.

    The result is True for slices of a cache whose capacity is a multiple of 16. If it is False, the mask must end at S,
    which turns loads of 16 bytes into loads of single elements.
    """
    S = keys_t.shape[3]
    beyond = -S % 16
    if keys_t.stride(3) != 1 or any(stride % 16 for stride in keys_t.stride()[:3]):
        return False
    last = keys_t.storage_offset() + sum(
        (n - 1) * stride for n, stride in zip(keys_t.shape, keys_t.stride(), strict=True)
    )
    return (last + beyond + 1) * keys_t.element_size() <= keys_t.untyped_storage().nbytes()


def sparq_code_scores(queries: torch.Tensor, keys: torch.Tensor, selection: Selection, *, narrow: bool) -> GroupScores:
    """Compute approximate logits of all keys from ``rank`` components of int4 scoring keys (sparq.21).

    Args:
        queries: ``(B, Hq, 1, D)``, contiguous.
        keys: ``(B, Hkv, S, D)``, last stride 1; only keys outside full groups are read.
        selection: settings and arrays for selecting keys. ``keys_t`` has the codes of all full groups. Reads are
            fastest if all last strides are 1 and all other strides of ``codes`` are multiples of 16.
        narrow: if True, write the logits as 8-bit codes.
    """
    B, Hkv, S, D = keys.shape
    G = queries.shape[1] // Hkv
    codes, lo, step = map(rows, selection.keys_t[:3])
    if lo.stride() != step.stride():
        lo, step = lo.contiguous(), step.contiguous()
    tiles = configs.SCORES
    BLOCK_D = power_of_2(D, 32)
    warps = configs.score_warps(tiles, BLOCK_D)
    BLOCK_S = 32 * warps * 16 * 8 // (CODE_COMPONENTS * CODE_BITS)  # each thread loads 16 bytes
    full = S // GROUP * GROUP  # number of keys in full groups of a row without padding
    share = configs.share(full, BLOCK_S, B * Hkv, PROGRAMS_PER_PROCESSOR, queries.device)
    tail = int(full < S or selection.left_padding is not None)
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
            "center": selection.keys_t.center.contiguous(),
            "keys": keys,
            **strides("k", keys),
            "component_weight": selection.component_weight,
            "left_padding": selection.left_padding,
            "logits": found.logits,
            "statistics": found.statistics,
            "tickets": found.tickets,
            "length": S,
            "blocks": share // BLOCK_S,
            "tiles": parts,
            "scale": selection.scale,
            "stride_l": found.logits.stride(2),
            **strides("c", codes, "bhd"),
            **strides("r", lo, "bhd"),
        },
        {
            "D": D,
            "G": G,
            "RANK": selection.rank,
            "BLOCK_D": BLOCK_D,
            "BLOCK_G": power_of_2(G),
            "BLOCK_R": CODE_COMPONENTS,
            "BLOCK_S": BLOCK_S,
        },
        {"num_warps": warps, "num_stages": tiles.stages},
    ).run()
    return found
