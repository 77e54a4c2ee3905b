"""Select the top-k keys by score, for all top-k methods."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = np.ndarray


def valid_keys(B: int, S: int, left_padding: npt.ArrayLike | None) -> Array:
    """Return a bool mask ``(B, S)``, True for key j of sequence b if ``j >= left_padding[b]``."""
    first = np.zeros(B, dtype=np.int64) if left_padding is None else np.asarray(left_padding)
    return np.arange(S) >= first[:, None]


def ranked(scores: Array) -> Array:
    """Replace NaN with +inf, so that every selection ranks NaN first."""
    return np.where(np.isnan(scores), np.inf, scores)


def top_k_select(
    scores: npt.ArrayLike,
    *,
    top_k: int,
    local_window: int,
    left_padding: npt.ArrayLike | None = None,
    visible: Array | None = None,
) -> Array:
    """Select ``top_k`` keys, which are the last ``local_window`` valid keys and the best remaining keys (sparq.6).

    Args:
        scores: ``(B, Hkv, S)``. Scores of invalid keys are ignored. -inf is never selected, and NaN counts as +inf.
        left_padding: ``(B,)`` index of the first valid key of each sequence.
        visible: bool ``(B, Hkv, S)``, False for further invalid keys.

    Returns:
        Ascending int32 key indices ``(B, Hkv, min(top_k, S))``, padded with -1. Ties go to the lower index.
    """
    score = ranked(np.asarray(scores, dtype=np.float64))
    B, Hkv, S = score.shape
    valid = np.broadcast_to(valid_keys(B, S, left_padding)[:, None], score.shape)
    valid = valid if visible is None else valid & visible
    local = valid & (np.cumsum(valid[..., ::-1], axis=-1)[..., ::-1] <= local_window)
    indices = np.full((B, Hkv, min(top_k, S)), -1, dtype=np.int32)
    for b in range(B):
        for h in range(Hkv):
            forced = np.flatnonzero(local[b, h])
            free = np.flatnonzero(valid[b, h] & ~local[b, h] & (score[b, h] > -np.inf))
            best = free[np.argsort(-score[b, h, free], kind="stable")][: top_k - len(forced)]
            chosen = np.sort(np.concatenate([forced, best]))
            indices[b, h, : len(chosen)] = chosen
    return indices
