"""Long prompts in pieces: no command buffer holds more work than a GPU that also draws the screen may be kept busy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx

# Multiply-adds of one piece if it attended everything. macOS ends what keeps the GPU for seconds, how many is not
# documented; the smallest Apple GPU (2.3 TFLOP/s) takes 1 s for this at a quarter of its peak, and lists hold less.
PIECE = 1 << 38
# Rows that a piece has at least: a tile of the matrix units' kernels.
FEWEST_ROWS = 32

Attend = Callable[[mx.array, mx.array, int], tuple[mx.array, mx.array]]


def piece_rows(heads: int, S: int, D: int) -> int:
    """Query rows of a piece, a power of two, for ``heads`` query heads of all sequences over ``S`` keys."""
    rows = PIECE // (2 * heads * S * D)
    return max(1 << rows.bit_length() - 1 if rows else 0, FEWEST_ROWS)


def pieces(L: int, S: int, rows: int) -> list[tuple[int, int]]:
    """Queries ``[start, stop)`` of each piece of ``L``, cut where positions are multiples of ``rows``."""
    first = S - L
    cuts = [0, *(position - first for position in range((first // rows + 1) * rows, S, rows)), L]
    return list(pairwise(cuts))


def attend_in_pieces(
    attend: Attend, queries: mx.array, blocks: mx.array, *, S: int, block_size: int
) -> tuple[mx.array, mx.array]:
    """``out`` and ``lse`` of `attend_blocks`, one launch of ``attend`` after the other.

    Args:
        attend: called with the queries of a piece, the blocks of its row blocks and the number of keys up to its last
            query.
        queries: ``(B, Hq, L, D)`` at positions ``S - L ..``.
        blocks: ``(B, Hq, R, N)``.
    """
    B, Hq, L, D = queries.shape
    cut = pieces(L, S, piece_rows(B * Hq, S, D))
    if len(cut) == 1:
        return attend(queries, blocks, S)
    first_block = (S - L) // block_size
    outs, lses = [], []
    for start, stop in cut:
        length = S - L + stop
        touched = slice((S - L + start) // block_size - first_block, (length - 1) // block_size + 1 - first_block)
        out, lse = attend(queries[:, :, start:stop], blocks[:, :, touched], length)
        # Ends the command buffer without waiting for it.
        mx.async_eval(out, lse)  # type: ignore[no-untyped-call]
        outs.append(out)
        lses.append(lse)
    return mx.concatenate(outs, axis=2), mx.concatenate(lses, axis=2)
