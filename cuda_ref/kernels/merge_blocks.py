"""From kept columns and offset bins to the list of key blocks of every row block (sample.7).

A program makes one list: it reads two bytes for each key block up to its diagonal, three bits of which say whether the
block is kept, and writes four bytes an entry.
"""

import triton
import triton.language as tl

from .sample_scores import sampled_rows


@triton.jit(
    do_not_specialize=[
        "length",
        "offset",
        "first_row_block",
        "row_blocks",
        "chunks",
        "first",
        "made",
        "width",
        "key_blocks",
    ]
)
def merge_blocks(
    column_kept,  # (B Hq, C, key blocks) uint8: 1 = kept
    slash_kept,  # likewise
    blocks,  # out: (B Hq, made, width) int32, ascending, then -1
    counts,  # out: (B Hq, row blocks) int32: entries of each list, for the rows of this launch
    length,
    offset,  # position of the first query
    first_row_block,
    row_blocks,
    chunks,
    first,  # row block of this launch, counted from first_row_block
    made,  # row blocks of this launch
    width,
    key_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row, index = (program // made).to(tl.int64), first + program % made
    row_block = first_row_block + index
    # The region: its first row block is c * row_blocks // chunks.
    c = ((index + 1).to(tl.int64) * chunks - 1) // row_blocks
    sample, stop = sampled_rows(c, chunks, first_row_block, row_blocks, offset, length, BLOCK_SIZE)
    sampled = (row_block * BLOCK_SIZE < stop) & ((row_block + 1) * BLOCK_SIZE > sample)
    all_from = tl.where(sampled, 0, row_block)  # the diagonal at least
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
