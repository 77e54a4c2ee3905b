"""Keys in few bits: docs/spec/sparq.md, equations (sparq.17) to (sparq.22)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import check_choice
from ..common.key_codes import GROUP, KEY_BITS, LARGEST, KeyCodes
from .select import valid_keys

Array = npt.NDArray[Any]


def code_keys(keys: npt.ArrayLike, *, key_bits: int, left_padding: npt.ArrayLike | None = None) -> KeyCodes:
    """Code the full groups of ``keys (B, Hkv, S, D)``; invalid keys may hold anything.

    Raises:
        ConfigError: ``key_bits`` is neither 8 nor 4.
    """
    check_choice("key_bits", key_bits, KEY_BITS[1:])
    rows = np.asarray(keys, np.float32)
    B, Hkv, S, D = rows.shape
    groups, largest = S // GROUP, np.float32(2**key_bits - 1)
    # (B, Hkv, groups, GROUP, D)
    valid = valid_keys(B, S, left_padding)[:, : groups * GROUP].reshape(B, 1, groups, GROUP, 1)
    rows = rows[:, :, : groups * GROUP].reshape(B, Hkv, groups, GROUP, D)
    with np.errstate(all="ignore"):
        centre = _centre(rows, valid)
        # (sparq.18)
        x = np.where(valid, rows - centre[:, :, None, None], np.float32(0))
        some = valid.any(axis=3)
        least = np.where(some, np.where(valid, x, np.inf).min(axis=3, initial=np.inf), np.float32(0))
        most = np.where(some, np.where(valid, x, -np.inf).max(axis=3, initial=-np.inf), np.float32(0))
        # (sparq.19)
        odd = ~np.isfinite(x).all(axis=3)
        lo = np.where(odd, np.nan, np.clip(least, -LARGEST, LARGEST)).astype(np.float16)
        step = np.where(odd, np.nan, np.minimum((most - least) / largest, np.float32(LARGEST))).astype(np.float16)
        # (sparq.20)
        lows, steps = (array.astype(np.float32)[:, :, :, None] for array in (lo, step))
        code = np.clip(np.rint((x - lows) / steps), np.float32(0), largest)
        code = np.where(valid & (steps > 0), code, 0).astype(np.uint8)
    code = code.transpose(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP)
    if key_bits == 4:
        code = code[..., 0::2] | code[..., 1::2] << 4
    lo, step = (np.ascontiguousarray(array.transpose(0, 1, 3, 2)) for array in (lo, step))
    return KeyCodes(code, lo, step, centre)


def _centre(rows: Array, valid: Array) -> Array:
    """(sparq.17) of groups ``(B, Hkv, groups, GROUP, D)``: float32 ``(B, Hkv, D)``."""
    B, Hkv, _, _, D = rows.shape
    centre = np.zeros((B, Hkv, D), np.float32)
    for b in range(B):
        full = np.flatnonzero(valid[b].any(axis=(0, 2, 3)))
        if full.size:
            first = rows[b, :, full[0]][:, valid[b, 0, full[0], :, 0]]
            half = np.float32(0.5)
            centre[b] = first.min(axis=1) * half + first.max(axis=1) * half
    return np.where(np.isfinite(centre), centre, np.float32(0))


def unpack(codes: Array, *, key_bits: int) -> Array:
    """Codes of single keys ``(..., groups * GROUP)`` uint8."""
    if key_bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def approximate_keys(keys: Array, coded: KeyCodes, *, key_bits: int) -> Array:
    """What (sparq.21) takes for ``keys (B, Hkv, S, D)``, in float64: codes for what is coded, else the key itself."""
    coded_keys = coded.lo.shape[-1] * GROUP
    lo, step = (np.repeat(array.astype(np.float64), GROUP, axis=-1) for array in (coded.lo, coded.step))
    decoded = lo + step * unpack(coded.codes, key_bits=key_bits)
    tail = keys[:, :, coded_keys:] - coded.centre[:, :, None]
    return np.concatenate([decoded.swapaxes(-1, -2), tail], axis=2)


def key_spread(coded: KeyCodes, exact: Array, *, key_bits: int, left_padding: npt.ArrayLike | None = None) -> Array:
    """(sparq.22) of each component: float64 ``(B, Hkv, D)``; ``exact`` of it where nothing valid is coded."""
    B, _, _, groups = coded.lo.shape
    lo = coded.lo.astype(np.float64)
    hi = lo + (2**key_bits - 1) * coded.step.astype(np.float64)
    # Groups with a valid key.
    there = valid_keys(B, groups * GROUP, left_padding)[:, GROUP - 1 :: GROUP][:, None, None]
    count = np.maximum(there.sum(axis=-1), 1)
    middle = np.where(there, (lo + hi) / 2, 0)
    apart = np.where(there, middle - (middle.sum(axis=-1) / count)[..., None], 0)
    width = np.where(there, hi - lo, 0)
    found = np.sqrt((apart**2).sum(axis=-1) / count + (width**2).sum(axis=-1) / (16 * count))
    return np.where(there.any(axis=-1), found, exact)
