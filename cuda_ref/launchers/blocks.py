"""Launcher of `kernels.attend_blocks`: exact attention of a prompt over listed key blocks, or over all."""

from __future__ import annotations

import math

import torch

from mlx_sparse.methods.block_layout import Layout

from ..kernels.attend_blocks import attend_blocks as kernel
from . import configs
from .launch import Launch, power_of_2, result_like, upcast

BLOCK_LIST = 1024  # entries of a list that are read at a time to find its end


def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor | None,
    *,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact causal attention over the key blocks that are listed for each row block (sample.8).

    Args:
        queries: ``(B, Hq, L, D)``, last stride 1; query i sits at position ``S - L + i``.
        keys, values: ``(B, Hkv, S, D)``, last stride 1.
        blocks: ``(B, Hq, R, N)`` int32, contiguous, ascending, any number that is no block's = empty slot; None for
            all key blocks.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, L)``; 0 and -inf where nothing is
        attended.
    """
    layout = Layout(queries.shape[2], keys.shape[2], 1, block_size)
    prefill = Prefill(queries, keys, values, layout, scale)
    prefill.attend(blocks, 0, layout.row_blocks)
    return prefill.result()


class Prefill:
    """A prompt's attention, which several launches may fill in, each for some row blocks."""

    def __init__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float
    ) -> None:
        self.queries, self.scale = positive(queries, scale)
        self.keys, self.values, self.layout = keys, values, layout
        self.dtype = queries.dtype
        self.out = result_like(queries)
        self.lse = torch.empty(queries.shape[:3], dtype=torch.float32, device=queries.device)

    def attend(self, blocks: torch.Tensor | None, first: int, stop: int) -> None:
        """Row blocks ``first`` to ``stop``, counted from the first that holds a query, with one list each."""
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
                "stride_qb": self.queries.stride(0),
                "stride_qh": self.queries.stride(1),
                "stride_qn": self.queries.stride(2),
                "stride_kb": self.keys.stride(0),
                "stride_kh": self.keys.stride(1),
                "stride_kn": self.keys.stride(2),
                "stride_vb": self.values.stride(0),
                "stride_vh": self.values.stride(1),
                "stride_vn": self.values.stride(2),
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
        """``out`` and ``lse``."""
        return self.out.to(self.dtype), self.lse


def positive(queries: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same scores with a scale above 0: the largest score is the largest product then."""
    return (queries, scale) if scale > 0 else (queries * math.copysign(scale != 0, scale), abs(scale) or 1.0)
