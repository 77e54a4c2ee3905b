"""Compute SparQ's approximate logits of all keys from the selected components of int4 scoring keys.

The grid is (splits of the quantized keys plus one program for the tail, Hkv, B). A program reads RANK components of
`blocks` tiles of BLOCK_S keys, RANK * 9 / 16 bytes per key, once for the query group. The program for the tail scores
the keys after the last full group, RANK * itemsize bytes per key. A program writes G logits per key, as float32 or
uint8. For each tile and query head, it writes the largest logit and the sum of exponentials.

Tiles are counted from a row's first valid key, so that reads of codes are aligned. All rows have as many tiles as the
longest row. In a shorter row, the programs do not read the tiles after the last full group. They write these tiles as
tiles that have no valid key.
"""

import triton
import triton.language as tl

from .numbers import GROUP, NO_WEIGHT, encode_logit, finite, rounded_down
from .sparq_scores import component_at, component_ranks, logit_factors, query_components


@triton.jit
def repeat_for_keys(ranges, ROWS: tl.constexpr, GROUPS: tl.constexpr, TIMES: tl.constexpr):
    """Repeat each number in ``ranges (ROWS, GROUPS)`` for ``TIMES`` columns. Return ``(ROWS, GROUPS * TIMES)``."""
    return tl.reshape(tl.broadcast_to(ranges[:, :, None], [ROWS, GROUPS, TIMES]), [ROWS, GROUPS * TIMES])


@triton.jit
def write_tile(logits, statistics, approximate, s, end, heads, there, tile, tiles, stride_l):
    """Write the logits ``(BLOCK_G, keys)`` of a tile up to key ``end``, and the tile's softmax statistics (sparq.4)."""
    largest = tl.max(approximate, axis=1)
    total = tl.sum(tl.exp(approximate - finite(largest)[:, None]), axis=1)
    tl.store(statistics + heads * 2 * tiles + tile, largest, mask=there)
    tl.store(statistics + heads * 2 * tiles + tiles + tile, total, mask=there)
    if logits.dtype.element_ty == tl.uint8:
        approximate = encode_logit(approximate, largest[:, None])
    tl.store(logits + heads[:, None] * stride_l + s[None, :], approximate, mask=there[:, None] & (s < end)[None, :])


@triton.jit
def write_margin(logits, first, end, heads, there, stride_l):
    """Write logits with softmax weight 0 to columns ``first`` to ``end - 1``, at most 16 columns.

    Aligned loads also read these columns.
    """
    column = first + tl.arange(0, 16)
    weight = tl.full([16], NO_WEIGHT if logits.dtype.element_ty == tl.uint8 else float("-inf"), tl.float32)
    weight = weight.to(logits.dtype.element_ty)
    places = logits + heads[:, None] * stride_l + column[None, :]
    tl.store(places, weight[None, :], mask=there[:, None] & (column < end)[None, :])


@triton.jit(do_not_specialize=["length", "blocks", "tiles"])
def sparq_code_scores(
    queries,  # (B, Hkv, G, D)
    codes,  # (B, Hkv, D, groups * 32) uint8, last stride 1; each row starts at its first valid key
    lo,  # (B, Hkv, D, groups) float16, last stride 1
    step,  # same type, shape and strides as lo
    center,  # (B, Hkv, D) float32
    keys,  # (B, Hkv, length, D), last stride 1; only keys after the last full group are read
    component_weight,  # (B, Hkv, D) float32, or None for the paper's rule
    left_padding,  # (B,) int32, or None
    logits,  # out: (B, Hkv, G, stride_l) float32 or uint8 (`encode_logit`); not written before the first valid key
    statistics,  # out: (B, Hkv, G, 2, tiles) float32: largest logit, sum of exp(logit - largest)
    tickets,  # out: (B, Hkv, 2) int32, zeros for the launches that follow
    length,
    blocks,  # number of tiles per program
    tiles,
    scale,
    stride_l,
    stride_cb,
    stride_ch,
    stride_cd,
    stride_rb,
    stride_rh,
    stride_rd,
    stride_kb,
    stride_kh,
    stride_kn,
    D: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,  # number of keys per tile
):
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (b * tl.num_programs(1) + h).to(tl.int64)
    queries += row * G * D
    center += row * D
    b, h = b.to(tl.int64), h.to(tl.int64)
    codes += b * stride_cb + h * stride_ch
    lo += b * stride_rb + h * stride_rh
    step += b * stride_rb + h * stride_rh
    if component_weight is not None:
        component_weight += row * D
    first_valid = 0
    if left_padding is not None:
        first_valid = tl.load(left_padding + b)
    if split == 0:
        tl.store(tickets + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))

    before = component_ranks(queries, component_weight, D, G, RANK, BLOCK_D)
    factor = tl.full([BLOCK_G], 1.0, tl.float32) * scale
    if component_weight is None:
        factor = logit_factors(queries, before, scale, D, G, RANK, BLOCK_D, BLOCK_G)

    BYTES: tl.constexpr = GROUP // 2  # bytes of codes per group
    GROUPS: tl.constexpr = BLOCK_S // GROUP
    g = tl.arange(0, BLOCK_G)
    heads = row * G + g
    groups = (length - first_valid) // GROUP
    coded_tiles = tl.cdiv(length // GROUP * GROUP, BLOCK_S)  # number of tiles of the longest row
    if split * blocks < coded_tiles:
        for tile in range(split * blocks, tl.minimum((split + 1) * blocks, coded_tiles)):
            # (sparq.21): `q lo` is summed once per group. `step code` is exact (11 bits times 4 bits). Therefore
            # `q (step code)` has one rounding error less than `(q step) code`, and all heads share `step code`.
            group = tile * GROUPS + tl.arange(0, GROUPS)
            byte = tile * (GROUPS * BYTES) + tl.arange(0, GROUPS * BYTES)
            base = tl.zeros([BLOCK_G, GROUPS], tl.float32)
            first_keys = tl.zeros([BLOCK_G, GROUPS * BYTES], tl.float32)  # logits of the first key of each byte
            second_keys = tl.zeros([BLOCK_G, GROUPS * BYTES], tl.float32)
            for first in tl.static_range(0, RANK, BLOCK_R):
                rank = first + tl.arange(0, BLOCK_R)
                wanted = (rank < RANK)[:, None]
                component = component_at(before, rank)
                q = tl.trans(query_components(queries, component, rank < RANK, D, G, BLOCK_G).to(tl.float32))
                line = component.to(tl.int64)[:, None]
                ranges, there = line * stride_rd + group[None, :], wanted & (group < groups)[None, :]
                least = tl.load(lo + ranges, mask=there, other=0.0).to(tl.float32)
                width = tl.load(step + ranges, mask=there, other=0.0).to(tl.float32)
                packed = tl.load(
                    codes + line * stride_cd + byte[None, :],
                    mask=wanted & (byte < groups * BYTES)[None, :],
                    other=0,
                    eviction_policy="evict_first",
                )
                widths = repeat_for_keys(width, BLOCK_R, GROUPS, BYTES)
                base = tl.dot(q, least, base, input_precision="ieee")
                first_keys = tl.dot(q, (packed & 15).to(tl.float32) * widths, first_keys, input_precision="ieee")
                second_keys = tl.dot(q, (packed >> 4).to(tl.float32) * widths, second_keys, input_precision="ieee")
            approximate = tl.interleave(first_keys, second_keys) + repeat_for_keys(base, BLOCK_G, GROUPS, GROUP)
            place = tile * BLOCK_S + tl.arange(0, BLOCK_S)
            coded = place < groups * GROUP
            approximate = tl.where(coded[None, :], approximate * factor[:, None], float("-inf"))
            end = first_valid + groups * GROUP
            write_tile(logits, statistics, approximate, first_valid + place, end, heads, g < G, tile, tiles, stride_l)
    else:
        first = first_valid + groups * GROUP
        s = first + tl.arange(0, GROUP)
        keys += b * stride_kb + h * stride_kh
        approximate = tl.zeros([BLOCK_G, GROUP], tl.float32)
        for first_rank in tl.static_range(0, RANK, BLOCK_R):
            rank = first_rank + tl.arange(0, BLOCK_R)
            wanted = rank < RANK
            component = component_at(before, rank)
            q = tl.trans(query_components(queries, component, wanted, D, G, BLOCK_G).to(tl.float32))
            at = (s.to(tl.int64) * stride_kn)[None, :] + component[:, None]
            k = tl.load(keys + at, mask=wanted[:, None] & (s < length)[None, :], other=0.0)
            middle = tl.load(center + component, mask=wanted, other=0.0)
            approximate = tl.dot(q, k.to(tl.float32) - middle[:, None], approximate, input_precision="ieee")
        approximate = tl.where((s < length)[None, :], approximate * factor[:, None], float("-inf"))
        write_tile(logits, statistics, approximate, s, stride_l, heads, g < G, tiles - 1, tiles, stride_l)
        if left_padding is not None:
            write_margin(logits, rounded_down(first_valid), first_valid, heads, g < G, stride_l)
            write_margin(logits, first + GROUP, stride_l, heads, g < G, stride_l)
