"""Implement int4 scoring keys in NumPy (docs/spec/sparq.md, sparq.17 to sparq.22)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.attend.oracle import float64
from ...core.select.oracle import valid_keys
from .scoring_keys import GROUP, LARGEST, LARGEST_CODE, KeyCodes

Array = npt.NDArray[Any]


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


def masked_mean(rows: npt.ArrayLike, left_padding: npt.ArrayLike | None) -> Array:
    """Return the mean ``(B, Hkv, D)`` of the valid ``rows (B, Hkv, S, D)``, or 0 if there are none (sparq.9)."""
    rows = float64(rows)
    valid = valid_keys(rows.shape[0], rows.shape[2], left_padding)
    count = np.maximum(valid.sum(axis=1), 1)[:, None, None]
    mean: Array = np.where(valid[:, None, :, None], rows, 0.0).sum(axis=2) / count
    return mean


def deviation(keys: npt.ArrayLike, left_padding: npt.ArrayLike | None) -> Array:
    """Return the standard deviation ``(B, Hkv, D)`` of each component over the valid keys (sparq.1)."""
    centered = float64(keys) - masked_mean(keys, left_padding)[:, :, None, :]
    return np.sqrt(masked_mean(centered**2, left_padding))
