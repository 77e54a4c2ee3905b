"""Split prefill into several launches, because a long command buffer blocks a GPU that also draws the screen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx

# Maximum number of multiply-adds in one launch, computed as if each query attended to every key. macOS kills a process
# that occupies the GPU for seconds; the limit is not documented. The smallest Apple GPU (2.3 TFLOP/s) does this work in
# 1 s at a quarter of its peak rate. Sparse attention does less work.
MAX_WORK = 1 << 38
# Minimum number of query rows per launch: one tile of the kernels for matrix units.
MIN_ROWS = 32

Attend = Callable[[mx.array, mx.array, int], tuple[mx.array, mx.array]]


def launch_rows(heads: int, S: int, D: int) -> int:
    """Return the number of query rows per launch, a power of two.

    Args:
        heads: number of query heads in the batch, B * Hq.
    """
    rows = MAX_WORK // (2 * heads * S * D)
    return max(1 << rows.bit_length() - 1 if rows else 0, MIN_ROWS)


def query_ranges(L: int, S: int, rows: int) -> list[tuple[int, int]]:
    """Split the ``L`` queries at all positions divisible by ``rows``. Return ranges ``[start, stop)`` of query indices.

    The queries are at the last ``L`` of ``S`` positions.
    """
    first = S - L
    cuts = [0, *(position - first for position in range((first // rows + 1) * rows, S, rows)), L]
    return list(pairwise(cuts))


def attend_in_launches(
    attend: Attend, queries: mx.array, blocks: mx.array, *, S: int, block_size: int
) -> tuple[mx.array, mx.array]:
    """Compute ``out`` and ``lse`` of `attend_blocks` with several calls to ``attend``.

    Args:
        attend: function that launches the kernel once. Its arguments are queries, the block lists of their row blocks,
            and the number of keys up to the last query.
        queries: ``(B, Hq, L, D)`` for positions ``S - L`` to ``S - 1``.
        blocks: ``(B, Hq, R, N)`` lists of key blocks.
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
        # `async_eval` ends the command buffer without waiting for the results.
        mx.async_eval(out, lse)  # type: ignore[no-untyped-call]
        outs.append(out)
        lses.append(lse)
    return mx.concatenate(outs, axis=2), mx.concatenate(lses, axis=2)
