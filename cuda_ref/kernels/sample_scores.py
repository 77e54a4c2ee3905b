"""Select key blocks with SampleAttention: sum the softmax weights of sampled queries, and write lists of key blocks.

An offset bin is a range of BLOCK_SIZE distances between query and key. The kernels do not store the scores, and compute
each product of a query and a key only once. A program of `sample_scores` reads the keys of its share of the key blocks,
D * itemsize bytes each, once for each query head. For each sampled query and key block, it stores two log-sums, which
are float32 logarithms of sums of exponentials. Each is for one offset bin, because the keys of a block are in at most
two bins of a query. A key is in the second bin if its index in its key block exceeds the query's index in its row
block. The log-sums are not normalized, so no program needs the largest score or the sum of the whole row. `sample_sums`
reads the two log-sums twice, once by column and once by diagonal. With 128 sampled queries, writing and reading the
log-sums moves 24 bytes per key and query head. For up to about 200k keys, the log-sums fit into the L2 cache. A second
pass over the keys would read D * itemsize bytes per key and repeat the products.

`merge_blocks` writes the list of key blocks of every row block (sample.7), one list per program. It reads two bytes for
each key block up to the diagonal, and writes four bytes per entry. A block is selected by its column or by one of two
offset bins.
"""

import triton
import triton.language as tl

from .numbers import finite, widen

LOG2_E = tl.constexpr(1.4426950408889634)
LAYOUT = ["length", "offset", "first_row_block", "row_blocks", "chunks"]  # numbers that change with every chunk


@triton.jit
def sampled_rows(c, chunks, first_row_block, row_blocks, offset, length, BLOCK_SIZE: tl.constexpr):
    """Return the start and the stop position of the sampled queries of region ``c`` (sample.2)."""
    first = (first_row_block + c.to(tl.int64) * row_blocks // chunks) * BLOCK_SIZE
    stop = (first_row_block + (c + 1).to(tl.int64) * row_blocks // chunks) * BLOCK_SIZE
    stop = tl.minimum(stop, length)
    return tl.maximum(tl.maximum(stop - BLOCK_SIZE, first), offset).to(tl.int32), stop.to(tl.int32)


@triton.jit
def log2_of(mass):
    """Return the base-2 logarithm of ``mass``, or -inf for 0."""
    return tl.where(mass > 0, tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=[*LAYOUT, "rows", "heads"])
def sample_scores(
    queries,  # (B, Hq, length - offset, D), last stride 1
    keys,  # (B, Hkv, length, D), last stride 1
    parts,  # out: (C, B Hq, key blocks, 2, BLOCK_SIZE) float32: log2 of the sum of exponentials, not normalized
    statistics,  # out: (C, B Hq, splits, 2, BLOCK_SIZE) float32: largest logit, sum of exp(logit - largest), for base 2
    length,
    offset,  # position of the first query
    first_row_block,
    row_blocks,
    chunks,
    rows,  # B Hq
    heads,  # Hq
    scale,  # above 0
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_M
    program, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile = program % TILES
    c, row = program // TILES // rows, program // TILES % rows
    b, h = row // heads, row % heads
    queries += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    keys += b.to(tl.int64) * stride_kb + (h // G).to(tl.int64) * stride_kh
    sample, stop = sampled_rows(c, chunks, first_row_block, row_blocks, offset, length, BLOCK_SIZE)
    region = (program // TILES).to(tl.int64)
    key_blocks = tl.cdiv(length, BLOCK_SIZE)
    statistics += (region * splits + split) * 2 * BLOCK_SIZE
    parts += region * key_blocks * 2 * BLOCK_SIZE

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position = sample + m
    place = position % BLOCK_SIZE
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    query = (position - offset).to(tl.int64)
    there = (position < stop)[:, None] & inside[None, :]
    q = widen(tl.load(queries + query[:, None] * stride_qn + d[None, :], mask=there, other=0.0), UPCAST)
    factor = scale * LOG2_E
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, BLOCK_N)
    # The loop body is inline, because calls would make the interpreter twice as slow.
    seen = tl.cdiv(stop, BLOCK_SIZE)  # number of key blocks up to the last sampled query
    share = tl.cdiv(seen, splits)
    for block in range(split * share, tl.minimum((split + 1) * share, seen)):
        near = tl.zeros([BLOCK_M], tl.float32)  # sum over the keys up to the query's index in its block
        far = tl.zeros([BLOCK_M], tl.float32)
        for first in tl.static_range(0, BLOCK_SIZE, BLOCK_N):
            key = block * BLOCK_SIZE + first + n
            k = tl.load(
                keys + key[:, None].to(tl.int64) * stride_kn + d[None, :],
                mask=(key < length)[:, None] & inside[None, :],
                other=0.0,
            )
            if UPCAST:
                k = k.to(tl.float32)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            if block * BLOCK_SIZE + first + BLOCK_N > sample + 1:  # on the diagonal
                score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
            top = tl.maximum(largest, tl.max(score, axis=1))
            shift = tl.where(top == float("-inf"), 0.0, top * factor)
            mass = tl.exp2(score * factor - shift[:, None])
            shrink = tl.exp2(largest * factor - shift)
            is_near = (first + n)[None, :] <= place[:, None]
            near = near * shrink + tl.sum(tl.where(is_near, mass, 0.0), axis=1)
            far = far * shrink + tl.sum(tl.where(is_near, 0.0, mass), axis=1)
            total = total * shrink
            largest = top
        total += near + far
        shift = finite(largest) * factor
        tl.store(parts + block * 2 * BLOCK_SIZE + m, log2_of(near) + shift)
        tl.store(parts + (block * 2 + 1) * BLOCK_SIZE + m, log2_of(far) + shift)
    tl.store(statistics + m, largest * factor)
    tl.store(statistics + BLOCK_SIZE + m, total)


@triton.jit
def row_logarithms(statistics, splits, m, BLOCK_SIZE: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Return log2 of each sampled query's sum of exponentials. For a sum of 0, return +inf, so that weights are 0."""
    largest = tl.full(m.shape, float("-inf"), tl.float32)
    total = tl.zeros(m.shape, tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        place = (split * 2 * BLOCK_SIZE)[:, None] + m[None, :]
        there = (split < splits)[:, None]
        tops = tl.load(statistics + place, mask=there, other=float("-inf"))
        sums = tl.load(statistics + BLOCK_SIZE + place, mask=there, other=0.0)
        top = tl.maximum(largest, tl.max(tops, axis=0))
        sums *= tl.exp2(tops - finite(top)[None, :])
        total = total * tl.exp2(largest - finite(top)) + tl.sum(sums, axis=0)
        largest = top
    return finite(largest) + tl.where(total > 0, tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))


@triton.jit
def bin_weight(parts, block, which: tl.constexpr, m, seen, logarithm, BLOCK_SIZE: tl.constexpr):
    """Return the softmax weight of one of the two offset bins of each key block, summed over the queries ``m``.

    ``which`` is 0 for the first bin (near keys), and 1 for the second bin (far keys).
    """
    place = (block * 2 + which) * BLOCK_SIZE + m[None, :]
    part = tl.load(parts + place, mask=(block >= 0) & (block < seen), other=float("-inf"))
    return tl.sum(tl.exp2(part - logarithm[None, :]), axis=1)


@triton.jit(do_not_specialize=[*LAYOUT, "rows", "splits", "key_blocks"])
def sample_sums(
    parts,  # output of `sample_scores`
    statistics,  # output of `sample_scores`
    column,  # out: (B Hq, C, key blocks) float32
    slash,  # out: same as column
    length,
    offset,
    first_row_block,
    row_blocks,
    chunks,
    rows,
    splits,
    key_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    region = tl.program_id(0)
    c, row = region // rows, region % rows
    sample, stop = sampled_rows(c, chunks, first_row_block, row_blocks, offset, length, BLOCK_SIZE)
    m = tl.arange(0, BLOCK_SIZE)
    position = sample + m
    parts += region.to(tl.int64) * key_blocks * 2 * BLOCK_SIZE
    statistics += region.to(tl.int64) * splits * 2 * BLOCK_SIZE
    logarithm = row_logarithms(statistics, splits, m, BLOCK_SIZE, BLOCK_SPLITS)
    logarithm = tl.where(position < stop, logarithm, float("inf"))
    seen = tl.cdiv(stop, BLOCK_SIZE)

    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = (row.to(tl.int64) * chunks + c) * key_blocks + index
    # (sample.4): both bins of a key block
    block = tl.broadcast_to(index[:, None], [BLOCK, BLOCK_SIZE])
    mass = bin_weight(parts, block, 0, m, seen, logarithm, BLOCK_SIZE)
    mass += bin_weight(parts, block, 1, m, seen, logarithm, BLOCK_SIZE)
    tl.store(column + out, mass, mask=index < key_blocks)
    # (sample.5): the near bin of the key block at this distance, and the far bin of the key block before that block
    block = (position // BLOCK_SIZE)[None, :] - index[:, None]
    mass = bin_weight(parts, block, 0, m, seen, logarithm, BLOCK_SIZE)
    mass += bin_weight(parts, block - 1, 1, m, seen, logarithm, BLOCK_SIZE)
    tl.store(slash + out, mass, mask=index < key_blocks)


@triton.jit(do_not_specialize=[*LAYOUT, "first", "made", "width", "key_blocks"])
def merge_blocks(
    column_kept,  # (B Hq, C, key blocks) uint8: 1 = selected
    slash_kept,  # same as column_kept
    blocks,  # out: (B Hq, made, width) int32, ascending, then -1
    counts,  # out: (B Hq, row blocks) int32: entries of each list, for the rows of this launch
    length,
    offset,  # position of the first query
    first_row_block,
    row_blocks,
    chunks,
    first,  # first row block of this launch, counted from first_row_block
    made,  # number of row blocks of this launch
    width,
    key_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row, index = (program // made).to(tl.int64), first + program % made
    row_block = first_row_block + index
    # Find region c of the row block. The first row block of a region is c * row_blocks // chunks.
    c = ((index + 1).to(tl.int64) * chunks - 1) // row_blocks
    sample, stop = sampled_rows(c, chunks, first_row_block, row_blocks, offset, length, BLOCK_SIZE)
    sampled = (row_block * BLOCK_SIZE < stop) & ((row_block + 1) * BLOCK_SIZE > sample)
    all_from = tl.where(sampled, 0, row_block)  # the diagonal block is always attended
    column_kept += (row * chunks + c) * key_blocks
    slash_kept += (row * chunks + c) * key_blocks
    blocks += program.to(tl.int64) * width
    written = 0
    for start in range(0, row_block + 1, BLOCK):
        block = start + tl.arange(0, BLOCK)
        away = row_block - block
        kept = tl.load(column_kept + block, mask=away >= 0, other=0) != 0
        kept |= tl.load(slash_kept + away, mask=away >= 0, other=0) != 0
        kept |= tl.load(slash_kept + away - 1, mask=away >= 1, other=0) != 0
        kept = (kept | (block == 0) | (block >= all_from)) & (away >= 0)
        slot = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(blocks + slot, block, mask=kept)
        written += tl.sum(kept.to(tl.int32), axis=0)
    for start in range(written // BLOCK * BLOCK, width, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(blocks + slot, tl.full([BLOCK], -1, tl.int32), mask=(slot >= written) & (slot < width))
    tl.store(counts + row * row_blocks + index, written)
