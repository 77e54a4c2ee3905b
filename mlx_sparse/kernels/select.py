"""Select on the GPU: the k best of a row without sorting it, shared by every method (metal/top_k_select.h)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .launch import LANES, Kernel, integer, padding_or_zeros

ITEMS = 16  # per thread in registers: TOP_K_ITEMS
FEW, MANY = 256, 512  # threads per tile; more would leave too few registers on some GPUs

SCORES = Kernel(
    "top_k_scores",
    "top_k_select.h",
    ("scores", "left_padding", "length", "local_window", "top_k"),
    ("bits", "indices"),
)
CANDIDATES = Kernel(
    "top_k_candidates", "top_k_select.h", ("candidate_bits", "candidate_indices", "top_k"), ("bits", "indices")
)


def tiles_of(items: int, top_k: int) -> tuple[int, int, int]:
    """How a row is cut: tiles, threads per tile, and result slots per tile.

    One tile takes what fits into its registers. A longer row is cut so that many cores work on it, into tiles that are
    clearly larger than what is kept of each. Where ``top_k`` is too large for that one threadgroup reads the row again
    and again.
    """
    threads = next((n for n in (FEW, MANY) if items <= ITEMS * n), 0)
    if threads:
        return 1, min(threads, -(-items // LANES) * LANES), min(top_k, items)
    for threads in (FEW, MANY):
        size = ITEMS * threads
        if 2 * top_k <= size:
            return -(-items // size), threads, top_k
    return 1, MANY, min(top_k, items)


First = Callable[[int, int, int], tuple[mx.array, mx.array]]


def candidates(first: First, B: int, Hkv: int, S: int, top_k: int) -> tuple[mx.array, mx.array]:
    """Run ``first(tiles, threads, slots)``: bits and indices ``(B, Hkv, tiles * slots)`` of the best of each tile.

    Where that is ``min(top_k, S)``, one tile, they are the best of the row.
    """
    tiles, threads, slots = tiles_of(S, top_k)
    bits, indices = first(tiles, threads, slots)
    return bits.reshape(B, Hkv, tiles * slots), indices.reshape(B, Hkv, tiles * slots)


def merge(bits: mx.array, indices: mx.array, top_k: int) -> mx.array:
    """The best of what `candidates` left, in as many rounds as it takes to be left with one tile.

    Returns:
        ``indices (B, Hkv, top_k)`` int32, ascending, -1 in slots that no key fills.
    """
    B, Hkv, left = bits.shape
    while left > top_k:
        tiles, threads, slots = tiles_of(left, top_k)
        bits, indices = CANDIDATES(
            {"candidate_bits": bits, "candidate_indices": indices, "top_k": integer(top_k)},
            [((B, Hkv, tiles, slots), mx.uint32), ((B, Hkv, tiles, slots), mx.int32)],
            template={},
            groups=(tiles, Hkv, B),
            threads=threads,
        )
        left = tiles * slots
        bits, indices = bits.reshape(B, Hkv, left), indices.reshape(B, Hkv, left)
    return indices


def reduce(first: First, B: int, Hkv: int, S: int, top_k: int) -> mx.array:
    """`candidates`, then `merge`: ``indices (B, Hkv, min(top_k, S))``."""
    return merge(*candidates(first, B, Hkv, S, top_k), min(top_k, S))


def top_k_select(scores: mx.array, *, top_k: int, local_window: int, left_padding: mx.array | None) -> mx.array:
    """The last ``local_window`` valid keys and the best of the rest, ``top_k`` together (sparq.6).

    Args:
        scores: float32 ``(B, Hkv, S)``; scores of invalid keys are ignored, -inf is never chosen, NaN counts as +inf.

    Returns:
        ``(B, Hkv, min(top_k, S))`` int32, ascending, ties to the lower index, -1 in slots that no key fills.
    """
    B, Hkv, S = scores.shape

    def first(tiles: int, threads: int, slots: int) -> tuple[mx.array, mx.array]:
        bits, indices = SCORES(
            {
                "scores": scores,
                "left_padding": padding_or_zeros(left_padding, B),
                "length": integer(S),
                "local_window": integer(local_window),
                "top_k": integer(top_k),
            },
            [((B, Hkv, tiles, slots), mx.uint32), ((B, Hkv, tiles, slots), mx.int32)],
            template={},
            groups=(tiles, Hkv, B),
            threads=threads,
        )
        return bits, indices

    return reduce(first, B, Hkv, S, top_k)
