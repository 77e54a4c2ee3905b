"""Implement SparQ attention in NumPy (docs/spec/sparq.md, sparq.1 to sparq.10 and sparq.21)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import attend_indices, float64, softmax_lse
from ...core.select.oracle import ranked, top_k_select, valid_keys
from .config import Selection
from .oracle_codes import approximate_keys
from .scoring_keys import KeyCodes

Array = npt.NDArray[Any]


class SparQSelection(NamedTuple):
    """Selected keys and intermediate results of steps 1 and 2 of SparQ.

    Attributes:
        indices: ``(B, Hkv, min(top_k, S))`` int32 indices of the keys to attend to.
        alpha: ``(B, Hq)`` approximate attention recall, the softmax mass of the selected keys (sparq.8).
        scores: ``(B, Hkv, S)`` score of each key, summed over the query heads of a group (sparq.5).
        s_hat: ``(B, Hq, S)`` approximate softmax weights (sparq.4).
    """

    indices: Array
    alpha: Array
    scores: Array
    s_hat: Array


def sparq_select(queries: npt.ArrayLike, keys: npt.ArrayLike, selection: Selection) -> SparQSelection:
    """Score ``keys (B, Hkv, S, D)`` with ``rank`` components of ``queries (B, Hq, 1, D)``, and select the best keys.

    An array as ``selection.keys_t`` repeats the data of ``keys``, so it is not read.
    """
    q, k = float64(queries), float64(keys)
    B, Hq, _, D = q.shape
    _, Hkv, S, _ = k.shape
    G, padding, std = Hq // Hkv, selection.left_padding, selection.component_weight
    valid = valid_keys(B, S, padding)
    k = np.where(valid[:, None, :, None], k, 0.0)
    if isinstance(selection.keys_t, KeyCodes):
        k = approximate_keys(k, selection.keys_t, padding)  # (sparq.21)
    grouped = q.reshape(B, Hkv, G, D)

    # (sparq.1) one score per component, shared by the group
    component = np.abs(grouped).sum(axis=2)
    if std is not None:
        component = component * std
    # (sparq.2) select the r largest
    i1 = np.argsort(-ranked(component), axis=-1, kind="stable")[..., : selection.rank]

    # (sparq.3) approximate logits
    q_r = np.take_along_axis(grouped, i1[:, :, None, :], axis=-1)
    k_r = np.take_along_axis(k, i1[:, :, None, :], axis=-1)
    logits = np.einsum("bhgr,bhsr->bhgs", q_r, k_r) * selection.scale
    if std is None:
        total = np.abs(grouped).sum(axis=-1)
        covered = np.abs(q_r).sum(axis=-1)
        coverage = covered / np.where(covered > 0, total, 1.0)
        logits = logits / np.sqrt(np.where(covered > 0, coverage, 1.0))[..., None]

    # (sparq.4) approximate attention, (sparq.5) summed over the group
    s_hat, _ = softmax_lse(logits, np.broadcast_to(valid[:, None, None, :], logits.shape))
    scores = s_hat.sum(axis=2)
    # (sparq.6) selection of the keys
    window, top_k = selection.local_window, selection.top_k
    indices = top_k_select(scores, top_k=top_k, local_window=window, left_padding=padding)
    # (sparq.8) approximate softmax mass of the selected keys
    filled = indices >= 0
    chosen = np.take_along_axis(s_hat, np.where(filled, indices, 0)[:, :, None, :], axis=-1)
    alpha = np.where(filled[:, :, None, :], chosen, 0.0).sum(axis=-1).reshape(B, Hq)
    return SparQSelection(indices, alpha, scores, s_hat.reshape(B, Hq, S))


def sparq_attention(
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    reallocate: bool,
    value_mean: npt.ArrayLike | None,
    **parameters: Any,
) -> tuple[Array, Array, Array]:
    """Run one decode step of SparQ.

    Args:
        reallocate: if True, add ``value_mean (B, Hkv, D)``, weighted by the softmax mass of the skipped keys.
        parameters: the fields of `Selection`.

    Returns:
        ``out (B, Hq, 1, D)``, ``lse (B, Hq, 1)`` and the estimated attention recall ``(B, Hkv)`` (sparq.24).
    """
    selection = Selection(**parameters)
    indices, alpha, _, _ = sparq_select(queries, keys, selection)
    out, lse = attend_indices(queries, keys, values, indices, scale=selection.scale)
    _, Hkv, S, _ = np.shape(keys)
    by_group = alpha.reshape(len(alpha), Hkv, -1)
    if reallocate and selection.top_k < S:
        # (sparq.9), (sparq.10); with S <= top_k every key is attended to and alpha is 1
        assert value_mean is not None
        share = alpha[..., None, None]
        mixed = share * out + (1.0 - share) * np.repeat(float64(value_mean), by_group.shape[2], axis=1)[:, :, None, :]
        out = np.where(lse[..., None] == -np.inf, 0.0, mixed)  # no key was attended to
    return out, lse, by_group.mean(axis=2)
