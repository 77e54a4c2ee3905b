"""The public functions on torch tensors: arguments are checked here, then a launcher runs.

Names, shapes and meaning are those of `mlx_sparse`: ``queries (B, Hq, L, D)``, ``keys`` and ``values (B, Hkv, S, D)``
with the current tokens included, ``left_padding (B,)`` int the first valid key of each row. Slices of larger buffers
are taken as they are. Every function returns ``out (B, Hq, L, D)`` in the type of ``queries`` and, with
``return_stats=True``, a `Stats`; ``return_stats="mass"`` also measures the retained attention mass, which costs a dense
pass over the keys. Attention is dense when there is more than one query (``L > 1``) or nothing to leave out.

All raise `ShapeError` for tensors that do not fit together, `ConfigError` for parameters out of range and
`BackendUnavailable` where the kernels cannot run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from mlx_sparse.checks import (
    ShapeError,
    Sizes,
    check_choice,
    check_decode_step,
    check_int,
    check_local_window,
    check_rank,
)
from mlx_sparse.common import stats
from mlx_sparse.common.stats import Stats

from ..checks import as_padding, check_backend, check_call, check_device, check_integers, check_like, check_tensor, rows
from ..launchers import torch_ops


def sparq_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rank: int = 32,
    top_k: int = 128,
    local_window: int | None = None,
    reallocate: str | bool = "auto",
    group_reduce: str = "softmax",
    component_score: str = "query",
    scale: float | None = None,
    left_padding: Any = None,
    keys_t: torch.Tensor | None = None,
    value_mean: torch.Tensor | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """One decode step of SparQ attention (docs/spec/sparq.md; arXiv 2312.04985, Algorithm 1).

    Args:
        rank: components r of the queries used to score every key, 1..D.
        top_k: keys attended per KV head, the local window included.
        local_window: last valid keys that are always attended; None means ``top_k // 4``.
        reallocate: mix in the mean value for the mass left out; "auto" does so for one query head per KV head.
        group_reduce: sum over the query heads of a group of the "softmax" (the paper) or of the "logits" (the
            authors' evaluation code).
        component_score: rank components by |q| ("query", the paper) or by |q| times the spread of the keys
            ("query_key").
        keys_t: ``(B, Hkv, D, S)`` keys stored component-major: without it, nothing is saved. Fast as a slice of a
            buffer whose last axis is a multiple of 16.
        value_mean: ``(B, Hkv, D)`` mean of the valid values, the current one included; computed when absent.
    """
    n = check_call(queries, keys, values, backend, return_stats)
    padding = as_padding(left_padding, n, queries.device)
    check_rank(rank, n.D)
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    check_choice("reallocate", reallocate, ("auto", True, False))
    check_choice("group_reduce", group_reduce, ("softmax", "logits"))
    check_choice("component_score", component_score, ("query", "query_key"))
    check_like("keys_t", keys_t, (n.B, n.Hkv, n.D, n.S), keys.dtype, keys.device)
    check_like("value_mean", value_mean, (n.B, n.Hkv, n.D), None, keys.device)
    scale = float(n.D**-0.5 if scale is None else scale)
    if n.L > 1 or n.S <= top_k:
        return _dense(queries, keys, values, n, scale, padding, return_stats)
    if not (n.G == 1 if reallocate == "auto" else reallocate):
        value_mean = None
    elif value_mean is None:
        value_mean = masked_mean(values, padding)
    out, lse = torch_ops.sparq_decode(
        queries,
        rows(keys),
        rows(values),
        keys.transpose(-1, -2) if keys_t is None else keys_t,
        rank,
        top_k,
        window,
        group_reduce,
        deviation(keys, padding) if component_score == "query_key" else None,
        scale,
        padding,
        value_mean,
    )
    if not return_stats:
        return out
    mass = None
    if return_stats == "mass":
        dense = torch_ops.dense_decode(queries, rows(keys), rows(values), scale, padding)[1]
        mass = torch.where(dense == -torch.inf, 1.0, torch.exp(lse - dense))  # a row with no valid key has lost nothing
    moved = stats.sparq_elements(n.S, n.D, rank=rank, top_k=top_k)
    return out, Stats(moved, stats.dense_elements(n.S, n.D), min(top_k, n.S) / n.S, mass)


def dense_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    left_padding: Any = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Causal attention over all valid keys: one query by our split-KV kernel, several by torch's attention."""
    n = check_call(queries, keys, values, backend, return_stats)
    padding = as_padding(left_padding, n, queries.device)
    return _dense(queries, keys, values, n, float(n.D**-0.5 if scale is None else scale), padding, return_stats)


def attend_indices(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of one query per head over the listed keys (sparq.7).

    Args:
        indices: ``(B, Hkv, N)`` int32, ascending; ``-1``, or any number that is no key's, = empty slot.

    Returns:
        ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``; 0 and -inf where every slot is empty.
    """
    n = check_call(queries, keys, values, backend)
    check_decode_step(n, "attend_indices")
    check_tensor("indices", indices)
    if indices.ndim != 3 or tuple(indices.shape[:2]) != (n.B, n.Hkv):
        raise ShapeError(f"indices: expected shape (B={n.B}, Hkv={n.Hkv}, N), got {tuple(indices.shape)}.")
    check_integers("indices", indices)
    check_device("indices", indices, queries.device)
    listed = indices
    if indices.dtype != torch.int32:  # a number of 64 bits must not become a key's by losing some
        listed = torch.where((indices >= 0) & (indices < n.S), indices, -1).to(torch.int32)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.attend_indices(
        queries, rows(keys), rows(values), listed, float(n.D**-0.5 if scale is None else scale)
    )
    return result


def top_k_select(
    scores: torch.Tensor, *, top_k: int, local_window: int, left_padding: Any = None, backend: str = "auto"
) -> torch.Tensor:
    """The last ``local_window`` valid keys and the best of the rest, ``top_k`` together (sparq.6).

    Args:
        scores: ``(B, Hkv, S)``; scores of invalid keys are ignored, -inf is never chosen, NaN counts as +inf.

    Returns:
        ``(B, Hkv, min(top_k, S))`` int32, ascending, ties to the lower index, -1 in slots that no key fills.
    """
    check_tensor("scores", scores)
    check_backend(backend, scores.device)
    if scores.ndim != 3 or 0 in scores.shape:
        raise ShapeError(f"scores: expected 3 axes (B, Hkv, S), none of them empty, got {tuple(scores.shape)}.")
    B, Hkv, S = scores.shape
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    padding = as_padding(left_padding, Sizes(B, Hkv, Hkv, 1, S, 1), scores.device)
    chosen: torch.Tensor = torch_ops.top_k_select(scores.float(), min(top_k, S), min(window, S), padding)
    return chosen


def masked_mean(rows: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """(sparq.9) float32 mean of ``rows (B, Hkv, S, D)`` over the valid keys: ``(B, Hkv, D)``."""
    if left_padding is None:
        return rows.mean(dim=2, dtype=torch.float32)
    S = rows.shape[2]
    valid = torch.arange(S, device=rows.device) >= left_padding[:, None]
    count = (S - left_padding).clamp(min=1)[:, None, None]
    return torch.where(valid[:, None, :, None], rows, 0).sum(dim=2, dtype=torch.float32) / count


def deviation(keys: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """(sparq.1) float32 standard deviation of each component over the valid keys: ``(B, Hkv, D)``."""
    centred = keys.float() - masked_mean(keys, left_padding)[:, :, None, :]
    return masked_mean(centred**2, left_padding).sqrt()


def _dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    n: Sizes,
    scale: float,
    padding: torch.Tensor | None,
    return_stats: bool | str,
) -> Any:
    if n.L == 1:
        out, _ = torch_ops.dense_decode(queries, rows(keys), rows(values), scale, padding)
    else:
        out = _prompt(queries, keys, values, n, scale, padding)
    if not return_stats:
        return out
    moved = stats.dense_elements(n.S, n.D)
    mass = torch.ones(n.B, n.Hq, n.L, device=queries.device) if return_stats == "mass" else None
    return out, Stats(moved, moved, 1.0, mass)


def _prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    n: Sizes,
    scale: float,
    padding: torch.Tensor | None,
) -> torch.Tensor:
    """Several queries: torch's own attention, which has a fast causal form for a whole prompt only."""
    if padding is None and n.L == n.S:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=n.G > 1
        )
    position = torch.arange(n.S, device=queries.device)
    mask = position <= position[n.S - n.L :, None]
    if padding is not None:
        valid = position >= padding[:, None]
        mask = mask & valid[:, None, None, :]
        # Padded rows may hold anything, and 0 * inf is NaN.
        keys, values = (torch.where(valid[:, None, :, None], rows, 0) for rows in (keys, values))
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=n.G > 1
    )
    return torch.where(mask.any(dim=-1, keepdim=True), out, 0)
