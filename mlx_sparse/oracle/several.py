"""Calls of several queries: docs/spec/several.md, equations (several.1) to (several.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..common.several import fold
from .attend import logits, softmax_lse, weighted_values
from .select import valid_keys

Array = npt.NDArray[Any]
Step = Callable[[Array, Array, Array], tuple[Array, Array]]


def several(
    step: Step,
    queries: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    left_padding: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    """A call of ``queries (B, Hq, L, D)`` that makes one choice of keys for all of them; of one query, its step.

    Args:
        step: ``out (B, H, 1, D)`` and ``lse (B, H, 1)`` of one query per head over some first keys and values.

    Returns:
        ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``.
    """
    B, Hq, L, D = queries.shape
    if L == 1:
        return step(queries, keys, values)
    # (several.1) the keys that the first query sees, (several.2) the method's own step over them
    prefix = keys.shape[2] - L + 1
    out, lse = step(fold(queries), keys[:, :, :prefix], values[:, :, :prefix])
    parts = [(out.reshape(B, Hq, L, D), lse.reshape(B, Hq, L))]
    parts.append(attend_own(queries, keys, values, scale=scale, left_padding=left_padding))
    # (several.4)
    outs, lses = (np.stack(list(array)) for array in zip(*parts, strict=True))
    weights, total = softmax_lse(np.moveaxis(lses, 0, -1), np.ones((*lses.shape[1:], len(lses)), dtype=bool))
    merged: Array = (np.moveaxis(weights, -1, 0)[..., None] * outs).sum(axis=0)
    return merged, total


def attend_own(
    queries: Array, keys: Array, values: Array, *, scale: float, left_padding: npt.ArrayLike | None
) -> tuple[Array, Array]:
    """(several.3) query i over the i keys behind the first query's: ``out (B, Hq, L, D)`` and ``lse (B, Hq, L)``."""
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    own = slice(S - L + 1, S)
    causal: Array = np.less_equal(np.arange(1, L), np.arange(L)[:, None])
    valid = valid_keys(B, S, left_padding)[:, None, None, None, own]
    mask = np.broadcast_to(np.logical_and(valid, causal), (B, Hkv, Hq // Hkv, L, L - 1))
    there: Array = np.logical_or.reduce(mask, axis=(2, 3))[..., None]
    weights, lse = softmax_lse(logits(queries, np.where(there, keys[:, :, own], 0.0), scale), mask)
    out = weighted_values(weights, values[:, :, own], mask)
    return out.reshape(B, Hq, L, D), lse.reshape(B, Hq, L)
