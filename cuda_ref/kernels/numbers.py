"""Provide numeric helpers of the kernels: softmax of tiles without valid keys, aligned masks, and 8-bit logits."""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)  # int4 scoring keys that share lo and step
# An 8-bit logit is the distance from the largest logit of its tile in units of 1/16 nat.
NO_WEIGHT = tl.constexpr(254)  # -inf, or a distance that exceeds 8 bits
NO_SOFTMAX = tl.constexpr(255)  # NaN or +inf


@triton.jit
def finite(largest):
    """Return ``largest``, or 0 if it is -inf, so that exp(-inf - largest) is 0 and not NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def widen(loaded, UPCAST: tl.constexpr):
    """Convert a load to float32 in the interpreter, which stores bfloat16 as bits and cannot compute with them."""
    return loaded.to(tl.float32) if UPCAST else loaded


@triton.jit
def rounded_up(length):
    """Round up to a multiple of 16. Masks that end there do not split loads of 16 bytes."""
    return tl.cdiv(length, 16) * 16


@triton.jit
def rounded_down(first):
    """Round ``first`` down to a multiple of 16. Masks that begin there do not split loads of 16 bytes."""
    return first // 16 * 16


@triton.jit
def encode_logit(logit, largest):
    """Encode a logit of a tile with this ``largest`` logit in 8 bits."""
    below = (largest - logit) * 16.0  # +inf or NaN without weight
    code = tl.where(below < NO_WEIGHT - 0.5, tl.floor(below + 0.5), NO_WEIGHT)
    return tl.where(logit < float("inf"), code, NO_SOFTMAX).to(tl.uint8)


@triton.jit
def decode_logit(code, largest):
    """Decode an 8-bit logit with an error of at most 1/32; NaN if it has no softmax."""
    logit = tl.where(code < NO_WEIGHT, largest - code.to(tl.float32) / 16.0, float("-inf"))
    return tl.where(code == NO_SOFTMAX, float("nan"), logit)


@triton.jit
def tile_of(s, first_valid, length, tiles, TILE: tl.constexpr):
    """Return the tiles of keys ``s``, whose largest logit is the reference of 8-bit logits.

    Quantized keys are in tiles of TILE keys, counted from ``first_valid``. All other keys are in the last tile of a
    row. Keys before ``first_valid`` are assigned to it too, because they have no weight in any tile.
    """
    place = s - first_valid
    coded = (length - first_valid) // GROUP * GROUP
    return tl.where((place >= 0) & (place < coded), place // TILE, tiles - 1)
