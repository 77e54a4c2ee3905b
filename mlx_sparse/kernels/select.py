"""Select on the GPU: the k best of a row without sorting it, shared by every method (metal/top_k_select.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from .launch import KEPT, LANES, Kernel, Launch, Outputs, integer, padding_or_zeros

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


def listing(
    kernel: Kernel,
    B: int,
    Hkv: int,
    items: int,
    top_k: int,
    numbers: Sequence[mx.array],
    *,
    more: Outputs = (),
    template: Mapping[str, Any] = MappingProxyType({}),
) -> Launch:
    """A launch that lists the best ``top_k`` of each tile of rows of so many ``items``.

    Its outputs are ``bits`` and ``indices (B, Hkv, tiles * slots)``, and ``more``. Where these are ``min(top_k,
    items)``, one tile, they are the best of the row.
    """
    tiles, threads, slots = tiles_of(items, top_k)
    listed = (B, Hkv, tiles * slots)
    return Launch(
        kernel,
        [(listed, mx.uint32), (listed, mx.int32), *more],
        numbers,
        template=template,
        groups=(tiles, Hkv, B),
        threads=threads,
    )


def merge(bits: mx.array, indices: mx.array, top_k: int) -> mx.array:
    """The best of what a `listing` left, in as many rounds as it takes to be left with one tile.

    Returns:
        ``indices (B, Hkv, top_k)`` int32, ascending, -1 in slots that no key fills.
    """
    while bits.shape[2] > top_k:
        bits, indices = _merging(*bits.shape, top_k)(bits, indices)
    return indices


@lru_cache(maxsize=KEPT)
def _merging(B: int, Hkv: int, left: int, top_k: int) -> Launch:
    return listing(CANDIDATES, B, Hkv, left, top_k, [integer(top_k)])


def top_k_select(scores: mx.array, *, top_k: int, local_window: int, left_padding: mx.array | None) -> mx.array:
    """The last ``local_window`` valid keys and the best of the rest, ``top_k`` together (sparq.6).

    Args:
        scores: float32 ``(B, Hkv, S)``; scores of invalid keys are ignored, -inf is never chosen, NaN counts as +inf.

    Returns:
        ``(B, Hkv, min(top_k, S))`` int32, ascending, ties to the lower index, -1 in slots that no key fills.
    """
    B, Hkv, S = scores.shape
    bits, indices = scored_listing(B, Hkv, S, local_window, top_k)(scores, padding_or_zeros(left_padding, B))
    return merge(bits, indices, min(top_k, S))


@lru_cache(maxsize=KEPT)
def scored_listing(B: int, Hkv: int, S: int, local_window: int, top_k: int) -> Launch:
    """A `listing` of float32 scores ``(B, Hkv, S)``."""
    return listing(SCORES, B, Hkv, S, top_k, [integer(S), integer(local_window), integer(top_k)])
