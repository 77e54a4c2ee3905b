"""Compute exact softmax attention over all keys or over a list of keys, for all methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...checks import BackendUnavailable, ShapeError, Sizes, check_qkv, check_shape
from ..select.oracle import valid_keys
from ..stats import Stats, dense_elements

Array = npt.NDArray[Any]


def float64(array: npt.ArrayLike) -> Array:
    """Convert an array to float64."""
    promoted: Array = np.asarray(array, dtype=np.float64)
    return promoted


def checked(
    queries: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike, backend: str
) -> tuple[Array, Array, Array, Sizes]:
    """Convert queries, keys and values to float64, and return the arrays and their sizes.

    Raises:
        BackendUnavailable: ``backend`` is neither "auto" nor "oracle".
        ShapeError: the shapes are incompatible.
    """
    if backend not in ("auto", "oracle"):
        raise BackendUnavailable(f"backend: expected auto or oracle for mlx_sparse.oracle, got {backend!r}.")
    q, k, v = float64(queries), float64(keys), float64(values)
    return q, k, v, check_qkv(q, k, v)


def logits(queries: Array, keys: Array, scale: float) -> Array:
    """Return the scaled dot products ``(B, Hkv, G, L, S)`` of each query with the keys of its KV head."""
    B, Hq, L, D = queries.shape
    Hkv = keys.shape[1]
    grouped = queries.reshape(B, Hkv, Hq // Hkv, L, D)
    scores: Array = np.einsum("bhgld,bhsd->bhgls", grouped, keys) * scale
    return scores


def softmax_lse(scores: Array, mask: Array) -> tuple[Array, Array]:
    """Return the softmax and log-sum-exp over the last axis, restricted to scores where ``mask`` is True.

    If ``mask`` is False for a whole row, the weights of the row are 0 and its log-sum-exp is -inf. If a row has NaN or
    +inf scores, the weights of these scores are NaN and all other weights are 0.
    """
    masked = np.where(mask, scores, -np.inf)
    top = np.max(np.where(np.isnan(masked), np.inf, masked), axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top > -np.inf, top, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        exps = np.exp(masked - top)
        total = exps.sum(axis=-1, keepdims=True)
        lse = np.log(total[..., 0]) + top[..., 0]
    weights: Array = exps / np.where(total > 0, total, 1.0)
    return weights, lse


def attention_recall(lse: Array, dense_lse: Array) -> Array:
    """Return the attention recall ``exp(lse - dense_lse)`` of each query, or 1 if the query has no valid keys."""
    some = dense_lse != -np.inf
    recall: Array = np.exp(np.where(some, lse, 0.0) - np.where(some, dense_lse, 0.0))
    return recall


def weighted_values(weights: Array, values: Array, mask: Array) -> Array:
    """Sum ``values (B, Hkv, N, D)`` with ``weights (B, Hkv, G, L, N)``, and return ``(B, Hkv, G, L, D)``.

    If ``mask`` is False for a key and all queries, the value of this key may be NaN or inf.
    """
    attended = np.any(mask, axis=(2, 3))[..., None]
    out: Array = np.einsum("bhgln,bhnd->bhgld", weights, np.where(attended, values, 0.0))
    return out


def attend_indices(
    queries: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike, indices: npt.ArrayLike, *, scale: float
) -> tuple[Array, Array]:
    """Compute exact attention of one query per head over the listed keys (sparq.7).

    Args:
        queries: ``(B, Hq, 1, D)``.
        keys, values: ``(B, Hkv, S, D)``.
        indices: ``(B, Hkv, N)`` ascending int32 key indices. Numbers that are not a key index are empty slots.
        scale: factor by which the dot products are multiplied.

    Returns:
        ``out (B, Hq, 1, D)`` and ``lse (B, Hq, 1)``. If a list has only empty slots, its out is 0 and its lse is -inf.

    Raises:
        ShapeError: ``indices`` does not fit the keys.
    """
    q, k, v = float64(queries), float64(keys), float64(values)
    index = np.asarray(indices)
    if index.ndim != 3 or index.shape[:2] != k.shape[:2]:
        raise ShapeError(f"indices: expected shape (B, Hkv, N) with {k.shape[:2]} first, got {index.shape}.")
    filled = (index >= 0) & (index < k.shape[2])
    gathered = np.where(filled, index, 0)[..., None]
    keys_n = np.where(filled[..., None], np.take_along_axis(k, gathered, axis=2), 0.0)
    values_n = np.take_along_axis(v, gathered, axis=2)
    mask = filled[:, :, None, None, :]
    weights, lse = softmax_lse(logits(q, keys_n, scale), mask)
    out = weighted_values(weights, values_n, mask)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def dense_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    scale: float | None = None,
    left_padding: npt.ArrayLike | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Compute dense causal attention. The queries are at the last ``L`` of the ``S`` positions.

    Args:
        queries: ``(B, Hq, L, D)``.
        keys, values: ``(B, Hkv, S, D)``, including the current tokens.
        left_padding: ``(B,)`` index of the first valid key of each sequence.

    Returns:
        ``out (B, Hq, L, D)``, and a `Stats` if ``return_stats`` is set.
    """
    q, k, v, _ = checked(queries, keys, values, backend)
    out, lse = dense_with_lse(q, k, v, scale=scale, left_padding=left_padding)
    if not return_stats:
        return out
    S, D = k.shape[2:]
    recall = np.ones_like(lse) if return_stats == "recall" else None
    return out, Stats(dense_elements(S, D), dense_elements(S, D), 1.0, recall)


def dense_with_lse(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    scale: float | None,
    left_padding: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    """Return the output ``(B, Hq, L, D)`` of `dense_attention` and its log-sum-exp ``(B, Hq, L)``."""
    q, k, v = float64(queries), float64(keys), float64(values)
    n = check_qkv(q, k, v)
    check_shape("left_padding", None if left_padding is None else np.asarray(left_padding), (n.B,))
    positions = np.arange(n.S - n.L, n.S)
    causal: Array = np.less_equal(np.arange(n.S), positions[:, None])
    mask: Array = np.logical_and(valid_keys(n.B, n.S, left_padding)[:, None, None, None, :], causal)
    attended: Array = np.logical_or.reduce(mask, axis=(2, 3))
    k = np.where(attended[..., None], k, 0.0)  # NaN or inf in padding must not reach the logits
    mask = np.broadcast_to(mask, (n.B, n.Hkv, n.G, n.L, n.S))
    weights, lse = softmax_lse(logits(q, k, n.D**-0.5 if scale is None else scale), mask)
    out = weighted_values(weights, v, mask)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def with_stats(
    out: Array,
    lse: Array,
    qkv: tuple[Array, Array, Array],
    scale: float,
    left_padding: npt.ArrayLike | None,
    moved: int,
    top_k: int,
    return_stats: bool | str,
) -> Any:
    """Return ``out``. If ``return_stats`` is set, also return the `Stats` of the decode step.

    ``moved`` is the number of elements that the decode step moves per KV head.
    """
    if not return_stats:
        return out
    S, D = qkv[1].shape[2:]
    recall = None
    if return_stats == "recall":
        recall = attention_recall(lse, dense_with_lse(*qkv, scale=scale, left_padding=left_padding)[1])
    return out, Stats(moved, dense_elements(S, D), min(top_k, S) / S, recall)
