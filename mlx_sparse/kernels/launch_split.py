"""Split prefill into several launches, so that no command buffer blocks a GPU that also draws the screen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx

# Multiply-adds of one launch if it attended every key. macOS ends a process that occupies the GPU for seconds; the
# limit is not documented. The smallest Apple GPU (2.3 TFLOP/s) takes 1 s for this work at a quarter of its peak, and
# sparse lists need less.
MAX_WORK = 1 << 38
# Minimum number of query rows of a launch: one tile of the kernels for matrix units.
MIN_ROWS = 32

Attend = Callable[[mx.array, mx.array, int], tuple[mx.array, mx.array]]


def launch_rows(heads: int, S: int, D: int) -> int:
    """Return the query rows per launch, a power of two, for ``heads`` query heads of all sequences and ``S`` keys."""
    rows = MAX_WORK // (2 * heads * S * D)
    return max(1 << rows.bit_length() - 1 if rows else 0, MIN_ROWS)


def query_ranges(L: int, S: int, rows: int) -> list[tuple[int, int]]:
    """Return the query range ``[start, stop)`` of each launch; positions at the borders are multiples of ``rows``."""
    first = S - L
    cuts = [0, *(position - first for position in range((first // rows + 1) * rows, S, rows)), L]
    return list(pairwise(cuts))


def attend_in_launches(
    attend: Attend, queries: mx.array, blocks: mx.array, *, S: int, block_size: int
) -> tuple[mx.array, mx.array]:
    """Compute ``out`` and ``lse`` of `attend_blocks` in several launches of ``attend``.

    Args:
        attend: function of the queries of one launch, the lists of its row blocks and the number of keys up to its last
            query.
        queries: ``(B, Hq, L, D)`` at positions ``S - L ..``.
        blocks: ``(B, Hq, R, N)``.
    """
    B, Hq, L, D = queries.shape
    ranges = query_ranges(L, S, launch_rows(B * Hq, S, D))
    if len(ranges) == 1:
        return attend(queries, blocks, S)
    first_block = (S - L) // block_size
    outs, lses = [], []
    for start, stop in ranges:
        length = S - L + stop
        touched = slice((S - L + start) // block_size - first_block, (length - 1) // block_size + 1 - first_block)
        out, lse = attend(queries[:, :, start:stop], blocks[:, :, touched], length)
        # This ends the command buffer without waiting for it.
        mx.async_eval(out, lse)  # type: ignore[no-untyped-call]
        outs.append(out)
        lses.append(lse)
    return mx.concatenate(outs, axis=2), mx.concatenate(lses, axis=2)
