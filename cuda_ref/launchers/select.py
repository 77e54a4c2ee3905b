"""Launch `kernels.top_k_select`, which selects exactly the k best keys of a row without sorting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.top_k_select import top_k_select as kernel
from . import configs
from .launch import Launch, contiguous

LINE = 16  # each row of logits starts at a multiple of this number of elements


@dataclass(frozen=True)
class GroupScores:
    """Approximate logits of all keys, from which each group of query heads selects keys.

    Attributes:
        logits: float32 ``(B, Hkv, G, S rounded up to a multiple of 16)``, or uint8 distances from the largest logit of
            the tile in units of 1/16 nat (`kernels.numbers.encode_logit`). Logits of invalid keys are -inf or not
            written.
        statistics: float32 ``(B, Hkv, G, 2, splits)`` largest logit and sum of exp(logit - largest) of each split.
        softmax: float32 ``(B, Hkv, G, 2)`` largest logit and 1 / sum of exp(logit - largest), written by `select`.
        tickets: int32 ``(B, Hkv, 2)`` counters of finished programs, which must be 0 before the next two launches.
        tile: number of quantized keys per split for uint8 logits, counted from the first valid key of a row. The
            unquantized keys form the last split. If the logits are float32, ``tile`` is 0.
    """

    logits: torch.Tensor
    statistics: torch.Tensor | None
    softmax: torch.Tensor | None
    tickets: torch.Tensor
    tile: int = 0

    @classmethod
    def empty(
        cls, B: int, Hkv: int, G: int, S: int, splits: int, device: torch.device, *, tile: int = 0
    ) -> GroupScores:
        """Allocate arrays for ``S`` keys that are divided into ``splits`` parts.

        If ``tile`` is 0, the logits are float32. Otherwise they are uint8 and quantized per tile (see `GroupScores`).
        """
        return cls(
            torch.empty(B, Hkv, G, S + -S % LINE, dtype=torch.uint8 if tile else torch.float32, device=device),
            torch.empty(B, Hkv, G, 2, splits, dtype=torch.float32, device=device),
            torch.empty(B, Hkv, G, 2, dtype=torch.float32, device=device),
            torch.empty(B, Hkv, 2, dtype=torch.int32, device=device),
            tile,
        )


@torch.library.custom_op("mlx_sparse::top_k_select", mutates_args=())
def top_k_select(
    scores: torch.Tensor, top_k: int, local_window: int, left_padding: torch.Tensor | None
) -> torch.Tensor:
    """Run `select` for float32 ``scores (B, Hkv, S)``. A score of -inf is never selected, and NaN counts as +inf."""
    B, Hkv, S = scores.shape
    tickets = torch.zeros(B, Hkv, 2, dtype=torch.int32, device=scores.device)
    given = GroupScores(scores.contiguous()[:, :, None], None, None, tickets)
    return select(given, S, top_k=top_k, local_window=local_window, left_padding=contiguous(left_padding))


@top_k_select.register_fake
def _(scores: torch.Tensor, top_k: int, *_: object) -> torch.Tensor:
    B, Hkv, S = scores.shape
    return scores.new_empty(B, Hkv, min(top_k, S), dtype=torch.int32)


def block_size(S: int, top_k: int) -> int:
    """Return the smallest tile size, in keys, at which one block can merge the candidates of all tiles."""
    return next(
        (block for block in configs.SELECT_WARPS if -(-S // block) * min(top_k, block) <= block),
        max(configs.SELECT_WARPS),
    )


def select(
    scores: GroupScores, S: int, *, top_k: int, local_window: int, left_padding: torch.Tensor | None
) -> torch.Tensor:
    """Select keys by the summed softmax of each group (sparq.6). See `mlx_sparse.core.select.oracle.top_k_select`."""
    B, Hkv, G, stride = scores.logits.shape
    device = scores.logits.device
    BLOCK = block_size(S, top_k)
    grid = (-(-S // BLOCK), Hkv, B)
    kept = min(top_k, BLOCK) if grid[0] > 1 else 0
    indices = torch.empty(B, Hkv, min(top_k, S), dtype=torch.int32, device=device)
    candidates = torch.empty(2, B, Hkv, grid[0], kept, dtype=torch.int32, device=device)
    splits = 0 if scores.statistics is None else scores.statistics.shape[4]
    Launch(
        kernel,
        grid,
        {
            "logits": scores.logits,
            "statistics": scores.statistics,
            "softmax": scores.softmax,
            "left_padding": left_padding,
            "candidate_bits": candidates[0],
            "candidate_indices": candidates[1],
            "indices": indices,
            "tickets": scores.tickets,
            "length": S,
            "top_k": top_k,
            "local_window": local_window,
            "splits": splits,
            "stride_l": scores.logits.stride(2),
        },
        {"G": G, "BLOCK": BLOCK, "ALIGNED": stride >= S + -S % LINE, "TILE": scores.tile},
        {"num_warps": configs.SELECT_WARPS[BLOCK], "num_stages": 1},
    ).run()
    return indices
