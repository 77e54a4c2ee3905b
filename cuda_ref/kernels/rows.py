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
        codes = unpacked(rows, place, there, D, BITS, BLOCK_D)
        scale = of_groups(scales, place, there, D, GROUP_SIZE, BLOCK_D).to(tl.float32)
        bias = of_groups(biases, place, there, D, GROUP_SIZE, BLOCK_D).to(tl.float32)
        tile = rounded(codes.to(tl.float32) * scale + bias, scales.dtype.element_ty, UPCAST)
    return tile


@triton.jit
def of_groups(ranges, place, there, D: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Scales or biases of the rows, each for all components of its group: ``(rows, BLOCK_D)``."""
    # Loaded for eight components at a time: of one number a group, fewer than there are threads, the compiler would
    # have each thread load those of all rows.
    STEP: tl.constexpr = 8
    d = tl.arange(0, BLOCK_D // STEP)[None, :] * STEP
    at = ranges + place[:, None] * (D // GROUP_SIZE) + d // GROUP_SIZE
    return repeated(tl.load(at, mask=there[:, None] & (d < D), other=0.0), STEP)


@triton.jit
def repeated(values, TIMES: tl.constexpr):
    """Each of ``values (rows, n)`` as often as that, one beside the other; in registers, where this costs nothing."""
    if TIMES > 1:
        values = repeated(tl.interleave(values, values), TIMES // 2)
    return values


@triton.jit
def unpacked(codes, place, there, D: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The codes of the rows: ``(rows, BLOCK_D)``. Words are loaded, 16 bytes at a time where codes fill them."""
    WHOLE: tl.constexpr = 32 % BITS == 0
    TOGETHER: tl.constexpr = 32 // BITS if WHOLE else 4  # codes that are loaded at once
    WORDS: tl.constexpr = D * BITS // 32
    i = tl.arange(0, BLOCK_D // TOGETHER)[None, :]
    bit = i * (TOGETHER * BITS)
    first = codes + place[:, None] * WORDS + (i if WHOLE else bit // 32)
    inside = there[:, None] & (i < D // TOGETHER)
    words = tl.load(first, mask=inside, other=0)
    if not WHOLE:  # four codes may lie in two words
        shift = bit % 32
        rest = tl.load(first + 1, mask=inside & (shift + TOGETHER * BITS > 32), other=0)
        words = (words >> shift) | (rest << ((32 - shift) % 32))
    d = tl.arange(0, BLOCK_D)[None, :]
    return (repeated(words, TOGETHER) >> (d % TOGETHER * BITS)) & (2**BITS - 1)
