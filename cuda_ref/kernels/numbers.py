"""What the kernels agree on: softmax pieces that a tile without a valid key leaves at -inf and 0, logits of 8 bits."""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)  # keys in few bits that share lo and step
# A logit of 8 bits: sixteenths of a nat below the largest of its tile.
NO_WEIGHT = tl.constexpr(254)  # -inf, or too far below
NO_SOFTMAX = tl.constexpr(255)  # NaN or +inf


@triton.jit
def finite(largest):
    """Return ``largest``, or 0 where there is none, so that exp(-inf - largest) is 0 and not NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def widen(loaded, UPCAST: tl.constexpr):
    """Return a load as float32 in the interpreter, which stores bfloat16 as bits and cannot compute with them."""
    return loaded.to(tl.float32) if UPCAST else loaded


@triton.jit
def rounded_up(length):
    """Return the next multiple of 16. Masks that end there leave loads of 16 bytes whole."""
    return tl.cdiv(length, 16) * 16


@triton.jit
def rounded_down(first):
    """Return the last multiple of 16 up to ``first``. Masks that begin there leave loads of 16 bytes whole, too."""
    return first // 16 * 16


@triton.jit
def narrowed(logit, largest):
    """Return a logit in 8 bits, in a tile with this ``largest``."""
    below = (largest - logit) * 16.0  # +inf or NaN without weight
    code = tl.where(below < NO_WEIGHT - 0.5, tl.floor(below + 0.5), NO_WEIGHT)
    return tl.where(logit < float("inf"), code, NO_SOFTMAX).to(tl.uint8)


@triton.jit
def widened(code, largest):
    """Return the logit behind 8 bits, within 1/32; NaN where it has no softmax."""
    logit = tl.where(code < NO_WEIGHT, largest - code.to(tl.float32) / 16.0, float("-inf"))
    return tl.where(code == NO_SOFTMAX, float("nan"), logit)


@triton.jit
def tile_of(s, first_valid, length, tiles, TILE: tl.constexpr):
    """Return the tile of keys ``s`` whose largest logit 8 bits count from.

    Coded keys are in tiles of TILE from ``first_valid`` on. All others are in the last tile of a row; keys before
    ``first_valid`` count as such, for they have no weight in any tile.
    """
    place = s - first_valid
    coded = (length - first_valid) // GROUP * GROUP
    return tl.where((place >= 0) & (place < coded), place // TILE, tiles - 1)
