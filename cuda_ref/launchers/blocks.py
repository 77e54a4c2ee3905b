"""Launch `kernels.attend_blocks`, which computes exact causal attention to listed key blocks or to all key blocks."""

from __future__ import annotations

import math

import torch

from mlx_sparse.core.blocks.layout import Layout

from ..kernels.attend_blocks import attend_blocks as kernel
from . import configs
from .launch import Launch, fake_attention, power_of_2, result_like, rows, strides, upcast

BLOCK_LIST = 1024  # number of list entries that are read at a time to find the end of the list


@torch.library.custom_op("mlx_sparse::attend_blocks", mutates_args=())
def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute exact causal attention of each row block to its listed key blocks, or to all key blocks (sample.8).

    `mlx_sparse.core.blocks.ops.attend_blocks` describes the arguments and the results. The lists must be ascending.
    """
    layout = Layout(queries.shape[2], keys.shape[2], 1, block_size)
    if blocks is not None:
        fresh = (blocks >= 0) & (blocks < layout.key_blocks)  # an int64 number must not wrap to a valid block
        fresh[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]  # attend only once to a block that is listed twice
        blocks = torch.where(fresh, blocks.to(torch.int32), -1)
    prefill = Prefill(rows(queries), rows(keys), rows(values), layout, scale)
    prefill.attend(blocks, 0, layout.row_blocks)
    return prefill.result()


attend_blocks.register_fake(fake_attention)


class Prefill:
    """Inputs and outputs of a prefill. Each launch computes a range of row blocks.

    All arrays have last stride 1. Lists of key blocks are int32 and contiguous.
    """

    def __init__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float
    ) -> None:
        self.queries, self.scale = positive(queries, scale)
        self.keys, self.values, self.layout = keys, values, layout
        self.dtype = queries.dtype
        self.out = result_like(queries)
        self.lse = torch.empty(queries.shape[:3], dtype=torch.float32, device=queries.device)

    def attend(self, blocks: torch.Tensor | None, first: int, stop: int) -> None:
        """Compute the output of row blocks ``first`` to ``stop - 1``, counted from the row block of the first query.

        ``blocks`` has one list of key blocks for each of these row blocks. If None, all key blocks are selected.
        """
        B, Hq, L, D = self.queries.shape
        Hkv, S = self.keys.shape[1:3]
        BLOCK_D = power_of_2(D, 16)
        tile = configs.block_tile(self.queries.device, BLOCK_D, self.layout.block_size, self.keys.element_size())
        tiles = (stop - first) * (self.layout.block_size // tile.queries)
        Launch(
            kernel,
            (tiles * B * Hq, 1, 1),
            {
                "queries": self.queries,
                "keys": self.keys,
                "values": self.values,
                "blocks": blocks,
                "out": self.out,
                "lse": self.lse,
                "count": L,
                "length": S,
                "offset": S - L,
                "first_row_block": self.layout.first_block + first,
                "tiles": tiles,
                "heads": Hq,
                "width": 0 if blocks is None else blocks.shape[3],
                "scale": self.scale,
                **strides("q", self.queries),
                **strides("k", self.keys),
                **strides("v", self.values),
            },
            {
                "D": D,
                "G": Hq // Hkv,
                "BLOCK_SIZE": self.layout.block_size,
                "BLOCK_D": BLOCK_D,
                "BLOCK_M": tile.queries,
                "BLOCK_N": tile.keys,
                "BLOCK_LIST": BLOCK_LIST,
                "UPCAST": upcast(self.keys.dtype),
            },
            {"num_warps": tile.warps, "num_stages": tile.stages},
        ).run()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out.to(self.dtype), self.lse


def positive(queries: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return queries and a positive scale that give the same logits as ``queries`` and ``scale``.

    If the scale is positive, the key with the largest product also has the largest logit.
    """
    return (queries, scale) if scale > 0 else (queries * math.copysign(scale != 0, scale), abs(scale) or 1.0)
