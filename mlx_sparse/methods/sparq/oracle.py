"""Implement SparQ and its int4 scoring keys in NumPy.

Equation numbers refer to docs/spec/sparq.md, (sparq.1) to (sparq.10) and (sparq.17) to (sparq.22).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import add_bias, attend_indices, float64, softmax_lse, visible_keys
from ...core.select.oracle import ranked, top_k_select, valid_keys
from .config import Selection
from .scoring_keys import (
    CAPTURED,
    FITTED_ROWS,
    GROUP,
    LARGEST,
    LARGEST_CODE,
    RIDGE,
    KeyCodes,
    Projection,
)

Array = np.ndarray


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
    B, Hq, _, _ = q.shape
    _, Hkv, S, _ = k.shape
    G, padding, std = Hq // Hkv, selection.left_padding, selection.component_weight
    valid = valid_keys(B, S, padding)
    k = np.where(valid[:, None, :, None], k, 0.0)
    grouped = q.reshape(B, Hkv, G, -1)
    if selection.projection is not None:  # (low_rank.3)
        grouped, k = grouped @ selection.projection.queries, k @ selection.projection.keys
    if isinstance(selection.keys_t, KeyCodes):
        k = approximate_keys(k, selection.keys_t, padding)  # (sparq.21)

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
    mask, visible = np.broadcast_to(valid[:, None, None, :], logits.shape), None
    if selection.bias is not None:
        logits, mask = add_bias(logits, np.reshape(selection.bias, logits.shape), mask)  # (sparq.25)
        visible = visible_keys(selection.bias, Hkv)
    s_hat, _ = softmax_lse(logits, mask)
    scores = s_hat.sum(axis=2)
    # (sparq.6) selection of the keys
    window, top_k = selection.local_window, selection.top_k
    indices = top_k_select(scores, top_k=top_k, local_window=window, left_padding=padding, visible=visible)
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
    out, lse = attend_indices(queries, keys, values, indices, scale=selection.scale, bias=selection.bias)
    _, Hkv, S, _ = np.shape(keys)
    by_group = alpha.reshape(len(alpha), Hkv, -1)
    if reallocate and selection.top_k < S:
        # (sparq.9), (sparq.10); with S <= top_k every key is attended to and alpha is 1
        assert value_mean is not None
        share = alpha[..., None, None]
        mixed = share * out + (1.0 - share) * np.repeat(float64(value_mean), by_group.shape[2], axis=1)[:, :, None, :]
        out = np.where(lse[..., None] == -np.inf, 0.0, mixed)  # no key was attended to
    return out, lse, by_group.mean(axis=2)


def code_keys(keys: npt.ArrayLike, left_padding: npt.ArrayLike | None = None) -> KeyCodes:
    """Quantize ``keys (B, Hkv, S, D)`` to int4 in groups of `GROUP` keys. Keys after the last full group are omitted.

    Padded keys may contain any number.
    """
    rows = np.asarray(keys, np.float32)
    B, Hkv, S, D = rows.shape
    groups, largest = S // GROUP, np.float32(LARGEST_CODE)
    lo, step = np.zeros((2, B, Hkv, D, groups), np.float16)
    codes, center = np.zeros((B, Hkv, D, groups * GROUP), np.uint8), np.zeros((B, Hkv, D), np.float32)
    for b, (first, M) in enumerate(coded_groups(B, S, left_padding)):
        # (Hkv, D, M, GROUP)
        k = rows[b, :, first : first + M * GROUP].reshape(Hkv, M, GROUP, D).transpose(0, 3, 1, 2)
        with np.errstate(all="ignore"):
            # (sparq.17)
            if M > 0:
                half = np.float32(0.5)
                middle = k[:, :, 0].min(axis=-1) * half + k[:, :, 0].max(axis=-1) * half
                center[b] = np.where(np.isfinite(middle), middle, np.float32(0))
            # (sparq.18)
            x = k - center[b, :, :, None, None]
            # (sparq.19)
            odd, least, most = ~np.isfinite(x).all(axis=-1), x.min(axis=-1), x.max(axis=-1)
            lo[b, :, :, :M] = np.where(odd, np.nan, np.clip(least, -LARGEST, LARGEST))
            step[b, :, :, :M] = np.where(odd, np.nan, np.minimum((most - least) / largest, np.float32(LARGEST)))
            # (sparq.20)
            lows, steps = (array[b, :, :, :M, None].astype(np.float32) for array in (lo, step))
            code = np.where(steps > 0, np.clip(np.rint((x - lows) / steps), np.float32(0), largest), 0)
        codes[b, :, :, : M * GROUP] = code.astype(np.uint8).reshape(Hkv, D, M * GROUP)
    return KeyCodes(codes[..., 0::2] | codes[..., 1::2] << 4, lo, step, center)


def coded_groups(B: int, S: int, left_padding: npt.ArrayLike | None) -> list[tuple[int, int]]:
    """Return the index of the first valid key and the number of full groups for each of ``B`` sequences."""
    return [(S - int(count), int(count) // GROUP) for count in valid_keys(B, S, left_padding).sum(axis=1)]


def unpack(codes: Array) -> Array:
    """Unpack the two int4 codes in each byte of ``codes``, and return uint8 ``(..., groups * GROUP)``."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def approximate_keys(keys: Array, coded: KeyCodes, left_padding: npt.ArrayLike | None = None) -> Array:
    """Subtract ``coded.center`` from the scoring keys, and return float64 ``(B, Hkv, S, D)`` (sparq.21).

    Keys in full groups are dequantized from ``coded``. The remaining keys are exact.
    """
    lo, step = (np.repeat(array.astype(np.float64), GROUP, axis=-1) for array in (coded.lo, coded.step))
    decoded = (lo + step * unpack(coded.codes)).swapaxes(-1, -2)
    found: Array = keys - coded.center[:, :, None]
    B, _, S, _ = keys.shape
    for b, (first, M) in enumerate(coded_groups(B, S, left_padding)):
        found[b, :, first : first + M * GROUP] = decoded[b, :, : M * GROUP]
    return found


def key_spread(coded: KeyCodes, keys: npt.ArrayLike, left_padding: npt.ArrayLike | None = None) -> Array:
    """Estimate the standard deviation of each component, float64 ``(B, Hkv, D)``, from its int4 codes (sparq.22)."""
    B, _, S, _ = np.shape(keys)
    found = deviation(keys, left_padding)  # for sequences without a coded group
    lo = coded.lo.astype(np.float64)
    width = LARGEST_CODE * coded.step.astype(np.float64)
    middle = lo + width / 2
    for b, (_, M) in enumerate(coded_groups(B, S, left_padding)):
        if M > 0:
            variance = middle[b, :, :, :M].var(axis=-1) + (width[b, :, :, :M] ** 2).mean(axis=-1) / 16
            found[b] = np.sqrt(variance)
    return found


def fit_low_rank(query_covariance: npt.ArrayLike, latents: npt.ArrayLike, rank: int) -> Projection:
    """Fit the projection of one sequence from its valid ``latents (1, Hkv, n, D)``, (low_rank.1) to (low_rank.5).

    Args:
        query_covariance: ``C_q (D, D)``.
        rank: smallest number of components.
    """
    rows = float64(latents)[:, :, :: max(1, -(-np.shape(latents)[2] // FITTED_ROWS))]
    D = rows.shape[-1]
    C_q = _regular(float64(query_covariance))
    found = []
    for head in rows[0]:
        finite = head[np.isfinite(head).all(axis=-1)]
        C_k = _regular(np.cov(finite, rowvar=False, bias=True).reshape(D, D) if len(finite) else np.zeros((D, D)))
        (root_q, inverse_q), (root_k, inverse_k) = _roots(C_q), _roots(C_k)
        U, S, Vt = np.linalg.svd(root_q @ root_k)  # (low_rank.2)
        found.append((inverse_q @ U * np.sqrt(S), inverse_k @ Vt.T * np.sqrt(S), np.cumsum(S**2) / np.sum(S**2)))
    queries, keys, shares = (np.stack(parts)[None] for parts in zip(*found, strict=True))
    enough = (r for r in (rank, 2 * rank, 4 * rank) if r < D and shares[..., r - 1].min() >= CAPTURED)
    r = next(enough, D)  # (low_rank.5)
    return Projection(queries[..., :r], keys[..., :r], shares[..., r - 1])


def _regular(covariance: Array) -> Array:
    """Divide a covariance by its mean eigenvalue and add `RIDGE` (low_rank.1)."""
    D = len(covariance)
    mean = np.trace(covariance) / D
    return covariance / mean + RIDGE * np.eye(D) if np.isfinite(mean) and mean > 0 else np.eye(D)


def _roots(covariance: Array) -> tuple[Array, Array]:
    """Return the symmetric square root of a matrix and the inverse of the root."""
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, RIDGE)
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def masked_mean(rows: npt.ArrayLike, left_padding: npt.ArrayLike | None, bias: npt.ArrayLike | None = None) -> Array:
    """Return the mean ``(B, Hkv, D)`` of the valid ``rows (B, Hkv, S, D)``, or 0 if there are none (sparq.9).

    Rows that ``bias`` hides from all heads of a group do not count.
    """
    rows = float64(rows)
    valid = valid_keys(rows.shape[0], rows.shape[2], left_padding)[:, None]
    valid = valid if bias is None else valid & visible_keys(bias, rows.shape[1])
    count = np.maximum(valid.sum(axis=2), 1)[..., None]
    mean: Array = np.where(valid[..., None], rows, 0.0).sum(axis=2) / count
    return mean


def deviation(keys: npt.ArrayLike, left_padding: npt.ArrayLike | None) -> Array:
    """Return the standard deviation ``(B, Hkv, D)`` of each component over the valid keys (sparq.1)."""
    centered = float64(keys) - masked_mean(keys, left_padding)[:, :, None, :]
    spread: Array = np.sqrt(masked_mean(centered**2, left_padding))
    return spread
