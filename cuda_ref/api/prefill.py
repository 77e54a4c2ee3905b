"""Prefill methods on torch tensors: arguments are checked here, then a launcher runs.

Names, shapes and meaning are those of `mlx_sparse` and docs/spec/sample.md: ``queries (B, Hq, L, D)``, the last of them
at the position of the last key, ``keys`` and ``values (B, Hkv, S, D)``. All but the last axis may have any strides.

All raise `ShapeError` for tensors that do not fit together, `ConfigError` for parameters out of range and
`BackendUnavailable` where the kernels cannot run.
"""

from __future__ import annotations

from typing import Any

import torch

from mlx_sparse.checks import ShapeError, Sizes, check_block_size, check_sample
from mlx_sparse.common import stats
from mlx_sparse.common.block_layout import Layout
from mlx_sparse.common.stats import Stats

from ..checks import check_call, check_device, check_head_dim, check_integers, check_tensor, rows
from ..launchers import torch_ops
from .decode import dense_attention


def sample_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    alpha_column: float = 0.95,
    alpha_slash: float = 0.95,
    chunks: int = 1,
    block_size: int = 128,
    scale: float | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """A prompt, or a piece of one, by SampleAttention (MLSys 2025, Algorithm 1).

    Attention is dense where an alpha is 1 or every row block holds a sampled row, a piece of one block for example.

    Args:
        alpha_column, alpha_slash: share of the sample's attention mass that the kept key blocks, and the kept
            distances, must each hold; above 0, at most 1.
        chunks: regions of the queries with a sample of their own.
        block_size: 32, 64 or 128 tokens.
        return_stats: also return a `Stats`; "mass" measures the retained attention mass too, by a dense pass.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries``.
    """
    n = check_call(queries, keys, values, backend, return_stats)
    check_sample(alpha_column, alpha_slash, chunks, block_size)
    layout = Layout(n.L, n.S, chunks, block_size)
    if alpha_column >= 1 or alpha_slash >= 1 or layout.everything:
        result = dense_attention(queries, keys, values, scale=scale, return_stats=return_stats)
        return (result[0], stats.as_prefill(result[1], layout, n.D)) if return_stats else result
    check_head_dim(n.D)
    scale = float(n.D**-0.5 if scale is None else scale)
    qkv = rows(queries), rows(keys), rows(values)
    out, lse, counts = torch_ops.sample_prefill(
        *qkv, float(alpha_column), float(alpha_slash), chunks, block_size, scale
    )
    if not return_stats:
        return out
    mass = None
    if return_stats == "mass":
        mass = torch.exp(lse - torch_ops.attend_blocks(*qkv, None, block_size, scale)[1])
    density = counts.sum(dim=2) / layout.causal_pairs  # (sample.9)
    share = float(density.mean())
    moved, dense = stats.prefill_elements(layout, n.D, share), stats.prefill_elements(layout, n.D)
    return out, Stats(moved, dense, share, mass, density, layout.sampled_share)


def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact causal attention of every query over the listed key blocks of its row block (sample.8).

    Args:
        blocks: ``(B, Hq, R, N)`` int32, R the row blocks that hold a query; ascending; ``-1``, or any number that is no
            block's, = empty slot.

    Returns:
        ``out (B, Hq, L, D)`` and float32 ``lse (B, Hq, L)``; 0 and -inf for queries with nothing to attend.
    """
    n = check_call(queries, keys, values, backend)
    check_block_size(block_size)
    check_head_dim(n.D)
    layout = Layout(n.L, n.S, 1, block_size)
    check_tensor("blocks", blocks)
    expected = (n.B, n.Hq, layout.row_blocks)
    if blocks.ndim != 4 or tuple(blocks.shape[:3]) != expected:
        raise ShapeError(f"blocks: expected shape (B, Hq, R, N) with {expected} first, got {tuple(blocks.shape)}.")
    check_integers("blocks", blocks)
    check_device("blocks", blocks, queries.device)
    fresh = (blocks >= 0) & (blocks < layout.key_blocks)  # a number of 64 bits must not become a block's by losing some
    fresh[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]  # a block that is listed twice is attended once
    listed = torch.where(fresh, blocks.to(torch.int32), -1)
    scale = float(n.D**-0.5 if scale is None else scale)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.attend_blocks(
        rows(queries), rows(keys), rows(values), listed, block_size, scale
    )
    return result


def sample_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    chunks: int = 1,
    block_size: int = 128,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention mass of each region's sample by key block and by distance (sample.4), (sample.5).

    Returns:
        ``column`` and ``slash``, float32 ``(B, Hq, C, Nk)``.
    """
    n = _check_sampled(queries, keys, 1.0, 1.0, chunks, block_size, backend)
    scale = float(n.D**-0.5 if scale is None else scale)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.sample_scores(
        rows(queries), rows(keys), chunks, block_size, scale
    )
    return result


def sample_select(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    alpha_column: float = 0.95,
    alpha_slash: float = 0.95,
    chunks: int = 1,
    block_size: int = 128,
    scale: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The key blocks that SampleAttention attends (sample.1) to (sample.7).

    Returns:
        ``(B, Hq, R, Nk)`` int32 for `attend_blocks`: as wide as all key blocks, so that nobody waits for the largest
        count. `sample_attention` needs no such memory.
    """
    n = _check_sampled(queries, keys, alpha_column, alpha_slash, chunks, block_size, backend)
    scale = float(n.D**-0.5 if scale is None else scale)
    blocks: torch.Tensor = torch_ops.sample_select(
        rows(queries), rows(keys), float(alpha_column), float(alpha_slash), chunks, block_size, scale
    )
    return blocks


def _check_sampled(
    queries: torch.Tensor,
    keys: torch.Tensor,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    backend: str,
) -> Sizes:
    n = check_call(queries, keys, keys, backend)
    check_sample(alpha_column, alpha_slash, chunks, block_size)
    check_head_dim(n.D)
    return n
