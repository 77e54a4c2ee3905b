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

from mlx_sparse import stats
from mlx_sparse.checks import (
    BackendUnavailable,
    ConfigError,
    ShapeError,
    Sizes,
    check_choice,
    check_decode_step,
    check_int,
    check_local_window,
    check_qkv,
    check_rank,
    check_shape,
)
from mlx_sparse.stats import Stats

from . import configs, ops
from .availability import interpreted, unavailable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRID_LIMIT = 65535  # programs that CUDA starts along the second and the third axis of a grid


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
    n = _check(queries, keys, values, backend, return_stats)
    padding = _padding(left_padding, n, queries.device)
    check_rank(rank, n.D)
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    check_choice("reallocate", reallocate, ("auto", True, False))
    check_choice("group_reduce", group_reduce, ("softmax", "logits"))
    check_choice("component_score", component_score, ("query", "query_key"))
    _check_like("keys_t", keys_t, (n.B, n.Hkv, n.D, n.S), keys.dtype, keys.device)
    _check_like("value_mean", value_mean, (n.B, n.Hkv, n.D), None, keys.device)
    scale = float(n.D**-0.5 if scale is None else scale)
    if n.L > 1 or n.S <= top_k:
        return _dense(queries, keys, values, n, scale, padding, return_stats)
    if not (n.G == 1 if reallocate == "auto" else reallocate):
        value_mean = None
    elif value_mean is None:
        value_mean = masked_mean(values, padding)
    out, lse = ops.sparq_decode(
        queries,
        _rows(keys),
        _rows(values),
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
        dense = ops.dense_decode(queries, _rows(keys), _rows(values), scale, padding)[1]
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
    n = _check(queries, keys, values, backend, return_stats)
    padding = _padding(left_padding, n, queries.device)
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
    n = _check(queries, keys, values, backend)
    check_decode_step(n, "attend_indices")
    _check_tensor("indices", indices)
    if indices.ndim != 3 or tuple(indices.shape[:2]) != (n.B, n.Hkv):
        raise ShapeError(f"indices: expected shape (B={n.B}, Hkv={n.Hkv}, N), got {tuple(indices.shape)}.")
    _check_integers("indices", indices)
    _check_device("indices", indices, queries.device)
    listed = indices
    if indices.dtype != torch.int32:  # a number of 64 bits must not become a key's by losing some
        listed = torch.where((indices >= 0) & (indices < n.S), indices, -1).to(torch.int32)
    result: tuple[torch.Tensor, torch.Tensor] = ops.attend_indices(
        queries, _rows(keys), _rows(values), listed, float(n.D**-0.5 if scale is None else scale)
    )
    return result


def top_k_select(
    scores: torch.Tensor, *, top_k: int, local_window: int, left_padding: Any = None, backend: str = "auto"
) -> torch.Tensor:
    """The last ``local_window`` valid keys and the best of the rest, ``top_k`` together (sparq.6).

    Args:
        scores: ``(B, Hkv, S)``; scores of invalid keys are ignored, -inf and NaN are never chosen.

    Returns:
        ``(B, Hkv, min(top_k, S))`` int32, ascending, ties to the lower index, -1 in slots that no key fills.
    """
    _check_tensor("scores", scores)
    _check_backend(backend, scores.device)
    if scores.ndim != 3 or 0 in scores.shape:
        raise ShapeError(f"scores: expected 3 axes (B, Hkv, S), none of them empty, got {tuple(scores.shape)}.")
    B, Hkv, S = scores.shape
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    padding = _padding(left_padding, Sizes(B, Hkv, Hkv, 1, S, 1), scores.device)
    chosen: torch.Tensor = ops.top_k_select(scores.float(), min(top_k, S), min(window, S), padding)
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
        out, _ = ops.dense_decode(queries, _rows(keys), _rows(values), scale, padding)
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


def _rows(array: torch.Tensor) -> torch.Tensor:
    """Rows whose elements lie side by side, as the kernels read them; caches have them so."""
    return array if array.stride(-1) == 1 else array.contiguous()


def _check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    backend: str,
    return_stats: bool | str = False,
) -> Sizes:
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        _check_tensor(name, array)
    n = check_qkv(queries, keys, values)
    if max(n.B, n.Hkv) > GRID_LIMIT:
        raise ShapeError(f"queries: expected at most {GRID_LIMIT} sequences and KV heads, got {(n.B, n.Hkv)}.")
    check_choice("return_stats", return_stats, (False, True, "mass"))
    _check_backend(backend, queries.device)
    if queries.dtype not in DTYPES:
        raise ConfigError(f"queries: expected float32, float16 or bfloat16, got {_name(queries.dtype)}.")
    for name, array in (("keys", keys), ("values", values)):
        _check_like(name, array, tuple(keys.shape), queries.dtype, queries.device)
    low, high = configs.HEAD_DIMS
    if n.L == 1 and (n.D % 8 or not low <= n.D <= high):
        raise BackendUnavailable(
            f"backend: expected head dims that are multiples of 8 from {low} to {high}, got {n.D}."
        )
    return n


def _check_backend(backend: str, device: torch.device) -> None:
    if backend not in ("auto", "triton"):
        raise BackendUnavailable(f"backend: expected auto or triton for mlx_sparse.cuda_ref, got {backend}.")
    reason = unavailable()
    if reason is None and device.type != "cuda" and not (interpreted() and device.type == "cpu"):
        reason = f"the tensors are on {device.type}; move them to the GPU"
    if reason is not None:
        raise BackendUnavailable(f"backend: expected a machine for Triton's kernels, got none ({reason}).")


def _check_like(
    name: str, array: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Check shape, type and device of an optional tensor."""
    if array is None:
        return
    _check_tensor(name, array)
    check_shape(name, array, shape)
    if dtype is not None and array.dtype != dtype:
        raise ConfigError(f"{name}: expected the type of the other tensors, {_name(dtype)}, got {_name(array.dtype)}.")
    _check_device(name, array, device)


def _check_tensor(name: str, array: Any) -> None:
    if not isinstance(array, torch.Tensor):
        raise ConfigError(f"{name}: expected a tensor of torch, got {type(array).__name__}.")


def _check_device(name: str, array: torch.Tensor, device: torch.device) -> None:
    if array.device != device:
        raise ConfigError(f"{name}: expected a tensor on {device}, got {array.device}.")


def _check_integers(name: str, array: torch.Tensor) -> None:
    if array.dtype.is_floating_point or array.dtype.is_complex or array.dtype == torch.bool:
        raise ShapeError(f"{name}: expected integers, got {_name(array.dtype)}.")


def _padding(left_padding: Any, n: Sizes, device: torch.device) -> torch.Tensor | None:
    """``left_padding`` as the kernels take it: int32 within 0..S, on the device of the tensors."""
    if left_padding is None:
        return None
    try:
        first = torch.as_tensor(left_padding)
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"left_padding: expected {n.B} integers, got {left_padding!r}.") from None
    check_shape("left_padding", first, (n.B,))
    _check_integers("left_padding", first)
    return first.to(device).clamp(0, n.S).to(torch.int32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
