"""Compute exact softmax attention over all keys or over a list of keys, for all methods."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..select.oracle import valid_keys

Array = np.ndarray


def float64(array: npt.ArrayLike) -> Array:
    """Convert an array to float64."""
    promoted: Array = np.asarray(array, dtype=np.float64)
    return promoted


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


def add_bias(scores: Array, bias: npt.ArrayLike, mask: Array) -> tuple[Array, Array]:
    """Return ``scores`` plus ``bias``, and ``mask`` without the keys that the bias hides (sparq.25, sparq.26)."""
    return scores + float64(bias), mask & ~is_hidden(bias)


def is_hidden(bias: npt.ArrayLike) -> Array:
    """Return a bool mask, True if a number is -inf or the lowest finite number of its type (sparq.26)."""
    array = np.asarray(bias)
    return np.asarray(array <= np.finfo(array.dtype).min)


def visible_keys(bias: npt.ArrayLike, Hkv: int) -> Array:
    """Return a mask ``(B, Hkv, S)`` of the keys that ``bias (B, Hq, 1, S)`` hides from some heads at most."""
    hidden = is_hidden(bias)
    visible: Array = np.logical_not(hidden.reshape(len(hidden), Hkv, -1, hidden.shape[3]).all(axis=2))
    return visible


def weighted_values(weights: Array, values: Array, mask: Array) -> Array:
    """Sum ``values (B, Hkv, N, D)`` with ``weights (B, Hkv, G, L, N)``, and return ``(B, Hkv, G, L, D)``.

    If ``mask`` is False for a key and all queries, the value of this key may be NaN or inf.
    """
    attended = np.any(mask, axis=(2, 3))[..., None]
    out: Array = np.einsum("bhgln,bhnd->bhgld", weights, np.where(attended, values, 0.0))
    return out


def attend_indices(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    scale: float,
    bias: npt.ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Compute exact attention of one query per head over the listed keys (sparq.7).

    Args:
        queries: ``(B, Hq, 1, D)``.
        keys, values: ``(B, Hkv, S, D)``.
        indices: ``(B, Hkv, N)`` ascending int32 key indices. Numbers that are not a key index are empty slots.
        scale: factor by which the dot products are multiplied.
        bias: ``(B, Hq, 1, S)`` numbers that are added to the logits of all keys (sparq.25).

    Returns:
        ``out (B, Hq, 1, D)`` and ``lse (B, Hq, 1)``. If a list has only empty slots, its out is 0 and its lse is -inf.
    """
    q, k, v = float64(queries), float64(keys), float64(values)
    index = np.asarray(indices)
    filled = (index >= 0) & (index < k.shape[2])
    gathered = np.where(filled, index, 0)[..., None]
    keys_n = np.where(filled[..., None], np.take_along_axis(k, gathered, axis=2), 0.0)
    values_n = np.take_along_axis(v, gathered, axis=2)
    mask, scores = filled[:, :, None, None, :], logits(q, keys_n, scale)
    if bias is not None:
        of_group = np.asarray(bias).reshape(*scores.shape[:4], -1)
        listed = np.broadcast_to(gathered[..., 0][:, :, None, None], scores.shape)
        scores, mask = add_bias(scores, np.take_along_axis(of_group, listed, axis=4), mask)
    weights, lse = softmax_lse(scores, mask)
    out = weighted_values(weights, values_n, mask)
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def dense_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> Array:
    """Compute dense causal attention. The queries are at the last ``L`` of the ``S`` positions.

    Args:
        queries: ``(B, Hq, L, D)``.
        keys, values: ``(B, Hkv, S, D)``, including the current tokens.
        left_padding: ``(B,)`` index of the first valid key of each sequence.
    """
    q, v = float64(queries), float64(values)
    weights, _, mask = dense_softmax(q, keys, scale=scale, left_padding=left_padding)
    return weighted_values(weights, v, mask).reshape(*q.shape[:3], -1)


def dense_lse(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    scale: float,
    left_padding: npt.ArrayLike | None,
    bias: npt.ArrayLike | None = None,
) -> Array:
    """Return the log-sum-exp ``(B, Hq, L)`` of `dense_attention`, for one query also with a ``bias (B, Hq, 1, S)``."""
    lse = dense_softmax(queries, keys, scale=scale, left_padding=left_padding, bias=bias)[1]
    return lse.reshape(np.shape(queries)[:3])


def dense_softmax(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    *,
    scale: float,
    left_padding: npt.ArrayLike | None,
    bias: npt.ArrayLike | None = None,
) -> tuple[Array, Array, Array]:
    """Return the weights ``(B, Hkv, G, L, S)``, log-sum-exp and mask of dense causal attention."""
    q, k = float64(queries), float64(keys)
    B, S, L = len(k), k.shape[2], q.shape[2]
    causal: Array = np.less_equal(np.arange(S), np.arange(S - L, S)[:, None])
    mask: Array = np.logical_and(valid_keys(B, S, left_padding)[:, None, None, None, :], causal)
    attended: Array = np.logical_or.reduce(mask, axis=(2, 3))
    scores = logits(q, np.where(attended[..., None], k, 0.0), scale)  # NaN or inf in padding must not reach the logits
    mask = np.broadcast_to(mask, scores.shape)
    if bias is not None:
        scores, mask = add_bias(scores, np.reshape(bias, scores.shape), mask)
    return *softmax_lse(scores, mask), mask
