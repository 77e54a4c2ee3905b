"""Define numeric helpers for softmax over tiles that have no valid keys, for aligned masks and for 8-bit logits."""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)  # number of int4 scoring keys that share lo and step
# The code of an 8-bit logit is its distance from the largest logit of the tile in units of 1/16 nat.
NO_WEIGHT = tl.constexpr(254)  # -inf, or a distance that does not fit
NO_SOFTMAX = tl.constexpr(255)  # NaN or +inf


@triton.jit
def finite(largest):
    """Return ``largest``, or 0 if it is -inf, so that exp(-inf - largest) is 0 and not NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def widen(loaded, UPCAST: tl.constexpr):
    """Convert ``loaded`` to float32 if ``UPCAST`` is True, because Triton's interpreter cannot compute in bfloat16."""
    return loaded.to(tl.float32) if UPCAST else loaded


@triton.jit
def rounded_up(length):
    """Round ``length`` up to a multiple of 16, so that a mask with this end does not split a 16-byte load."""
    return tl.cdiv(length, 16) * 16


@triton.jit
def rounded_down(first):
    """Round ``first`` down to a multiple of 16, so that a mask with this start does not split a 16-byte load."""
    return first // 16 * 16


@triton.jit
def encode_logit(logit, largest):
    """Encode a logit in 8 bits, as its distance from the ``largest`` logit of the tile in units of 1/16 nat."""
    below = (largest - logit) * 16.0  # +inf, or NaN for a key without weight
    code = tl.where(below < NO_WEIGHT - 0.5, tl.floor(below + 0.5), NO_WEIGHT)
    return tl.where(logit < float("inf"), code, NO_SOFTMAX).to(tl.uint8)


@triton.jit
def decode_logit(code, largest):
    """Decode an 8-bit logit with an error of at most 1/32 nat. `NO_SOFTMAX` becomes NaN."""
    logit = tl.where(code < NO_WEIGHT, largest - code.to(tl.float32) / 16.0, float("-inf"))
    return tl.where(code == NO_SOFTMAX, float("nan"), logit)


@triton.jit
def tile_of(s, first_valid, length, tiles, TILE: tl.constexpr):
    """Return the tile number of each key ``s``. 8-bit logits are relative to the largest logit of their tile.

    Quantized keys form tiles of TILE keys, counted from ``first_valid``. All remaining keys are in the last tile of
    a row. The last tile includes the keys before ``first_valid``, whose softmax weight is 0 in every case.
    """
    place = s - first_valid
    coded = (length - first_valid) // GROUP * GROUP
    return tl.where((place >= 0) & (place < coded), place // TILE, tiles - 1)
