"""Rows of keys or values of one head, as they lie in a cache: a tile of them in registers, from numbers or unpacked."""

import triton
import triton.language as tl

from .numbers import rounded, widen


@triton.jit
def row_tile(
    rows,  # (.., D); of packed rows the codes, (.., D * BITS / 32) uint32
    scales,  # (.., D / GROUP_SIZE), or None for rows that are not packed
    biases,  # likewise
    place,  # of each row, of 64 bits: in elements, of packed rows their number
    there,
    D: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The rows, 0 where not ``there`` and from D on: ``(rows, BLOCK_D)``."""
    d = tl.arange(0, BLOCK_D)
    if scales is None:
        mask = there[:, None] & (d < D)[None, :]
        tile = widen(tl.load(rows + place[:, None] + d[None, :], mask=mask, other=0.0), UPCAST)
    else:
        # (quantised.1). With 16 bits s c is exact, so that it may be fused with the sum.
        GROUPS: tl.constexpr = D // GROUP_SIZE
        shape: tl.constexpr = [place.shape[0], BLOCK_D // GROUP_SIZE, GROUP_SIZE]
        group = tl.arange(0, BLOCK_D // GROUP_SIZE)
        mask = there[:, None] & (group < GROUPS)[None, :]
        at = place[:, None] * GROUPS + group[None, :]
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(biases + at, mask=mask, other=0.0).to(tl.float32)
        codes = tl.reshape(unpacked(rows, place, there, D, BITS, BLOCK_D), shape)
        numbers = codes.to(tl.float32) * scale[:, :, None] + bias[:, :, None]
        tile = rounded(tl.reshape(numbers, [shape[0], BLOCK_D]), scales.dtype.element_ty, UPCAST)
    return tile


@triton.jit
def unpacked(codes, place, there, D: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The codes of the rows: ``(rows, BLOCK_D)``, or as many of them in three axes."""
    WORDS: tl.constexpr = D * BITS // 32
    first = codes + place[:, None] * WORDS
    if 32 % BITS == 0:  # whole words are loaded, 16 bytes at a time, and each is taken apart where it is
        PER_WORD: tl.constexpr = 32 // BITS
        w = tl.arange(0, BLOCK_D // PER_WORD)[None, :]
        words = tl.load(first + w, mask=there[:, None] & (w < WORDS), other=0)[:, :, None]
        found = words >> (tl.arange(0, PER_WORD) * BITS)[None, None, :]
    else:  # a code may lie in two words, and 32 of them in a number of words that is no power of 2
        bit = tl.arange(0, BLOCK_D)[None, :] * BITS
        shift = bit % 32
        inside = there[:, None] & (bit < 32 * WORDS)
        word = tl.load(first + bit // 32, mask=inside, other=0)
        next_word = tl.load(first + bit // 32 + 1, mask=inside & (shift + BITS > 32), other=0)
        found = (word >> shift) | (next_word << ((32 - shift) % 32))
    return found & (2**BITS - 1)
