"""Compute exact causal attention for prefill, to listed key blocks or to all key blocks.

A program processes BLOCK_M queries of one row block of one query head. It loads BLOCK_N keys and values of the listed
key blocks at a time. A key and its value together have 2 * D * itemsize bytes. The last row blocks have the most work,
so their programs start first. Heads that share keys start together, so that most reads of keys and values hit the L2
cache.
"""

import triton
import triton.language as tl

from .numbers import finite, widen

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def listed_end(blocks, row_block, width, BLOCK: tl.constexpr):
    """Return the length of the list ``blocks`` up to its last entry that is a key block at or before ``row_block``."""
    end = 0
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        block = tl.load(blocks + place, mask=place < width, other=-1)
        attended = (block >= 0) & (block <= row_block)
        end = tl.maximum(end, tl.max(tl.where(attended, place + 1, 0), axis=0))
    return end


@triton.jit
def load_rows(rows, place, stride, there, d, D: tl.constexpr):
    """Load the rows at the indices ``place``. Each row has length ``D``, and is 0 where ``there`` is False."""
    return tl.load(rows + place[:, None] * stride + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def write_rows(out, lse, place, there, d, largest, total, weighted, D: tl.constexpr):
    """Normalize and store the output rows and their log-sum-exp. For a row that has no keys, store 0 and -inf."""
    some = total != 0  # True for NaN, so that NaN reaches the output
    safe = tl.where(some, total, 1.0)
    result = weighted * (1.0 / safe)[:, None]
    tl.store(out + place[:, None] * D + d[None, :], result, mask=there[:, None] & (d < D)[None, :])
    tl.store(lse + place, tl.where(some, finite(largest) + tl.log(safe), float("-inf")), mask=there)


@triton.jit(do_not_specialize=["length", "offset", "first_row_block", "tiles", "heads", "width"])
def attend_blocks(
    queries,  # (B, Hq, count, D), last stride 1
    keys,  # (B, Hkv, length, D), last stride 1
    values,  # same as keys
    blocks,  # (B, Hq, row blocks of this launch, width) int32, ascending; invalid: empty slot; None: all blocks
    out,  # out: (B, Hq, count, D)
    lse,  # out: (B, Hq, count) float32
    count,
    length,
    offset,  # position of the first query
    first_row_block,
    tiles,  # number of tiles of BLOCK_M queries in this launch
    heads,
    width,
    scale,  # above 0
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LIST: tl.constexpr,
    UPCAST: tl.constexpr,
):
    program = tl.program_id(0)
    rows_of_heads = tl.num_programs(0) // tiles
    tile = tiles - 1 - program // rows_of_heads
    row = program % rows_of_heads
    b, h = row // heads, row % heads
    row_block = first_row_block + tile // (BLOCK_SIZE // BLOCK_M)
    queries += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    keys += b.to(tl.int64) * stride_kb + (h // G).to(tl.int64) * stride_kh
    values += b.to(tl.int64) * stride_vb + (h // G).to(tl.int64) * stride_vh

    first = first_row_block * BLOCK_SIZE + tile * BLOCK_M
    position = first + tl.arange(0, BLOCK_M)
    query = position - offset
    there = (query >= 0) & (query < count)
    d = tl.arange(0, BLOCK_D)
    place = query.to(tl.int64)
    q = widen(load_rows(queries, place, stride_qn, there, d, D), UPCAST)
    end = row_block + 1
    if blocks is not None:
        row_blocks = tiles // (BLOCK_SIZE // BLOCK_M)
        blocks += (row.to(tl.int64) * row_blocks + (row_block - first_row_block)) * width
        end = listed_end(blocks, row_block, width, BLOCK_LIST)

    STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    factor = scale * LOG2_E
    # The loop body is inline, because calls would make the interpreter twice as slow.
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for step in range(0, end * STEPS):
        block = step // STEPS
        if blocks is not None:
            block = tl.load(blocks + block)
            # Replace an entry that is not a key block up to the diagonal by a block beyond the keys.
            block = tl.where((block >= 0) & (block <= row_block), block, tl.cdiv(length, BLOCK_SIZE))
        start = block * BLOCK_SIZE + step % STEPS * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        line = key.to(tl.int64)[:, None]
        exists = (key < length)[:, None] & (d < D)[None, :]
        k = tl.load(keys + line * stride_kn + d[None, :], mask=exists, other=0.0)
        v = tl.load(values + line * stride_vn + d[None, :], mask=exists, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if start + BLOCK_N > first + 1:  # on the diagonal
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        top = tl.maximum(largest, tl.max(score, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top * factor)
        weights = tl.exp2(score * factor - shift[:, None])
        shrink = tl.exp2(largest * factor - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
        largest = top

    write_rows(out, lse, row.to(tl.int64) * count + place, there, d, largest * scale, total, weighted, D)
