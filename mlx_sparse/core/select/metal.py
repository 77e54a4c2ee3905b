"""Select the exact top-k keys on the GPU without sorting, for SparQ (metal/top_k_select.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import mlx.core as mx

from ..launch import LANES, LAUNCH_CACHE_SIZE, Kernel, Launch, Outputs, integer

ITEMS = 16  # items per thread, in registers: TOP_K_ITEMS
FEW_THREADS, MANY_THREADS = 256, 512  # threads per tile; with more threads, some GPUs have too few registers

CANDIDATES = Kernel(
    "top_k_candidates", "top_k_select.h", ("candidate_bits", "candidate_indices", "top_k"), ("bits", "indices")
)


def tiles_of(items: int, top_k: int) -> tuple[int, int, int]:
    """Return how many tiles each row has, and how many threads and result slots each tile has.

    A row that fits into the registers of a threadgroup is one tile. A longer row is divided among threadgroups, with
    at least ``2 * top_k`` items per tile. If ``top_k`` is too large for the registers, one threadgroup reads the whole
    row several times.
    """
    threads = next((n for n in (FEW_THREADS, MANY_THREADS) if items <= ITEMS * n), 0)
    if threads:
        return 1, min(threads, -(-items // LANES) * LANES), min(top_k, items)
    for threads in (FEW_THREADS, MANY_THREADS):
        size = ITEMS * threads
        if 2 * top_k <= size:
            return -(-items // size), threads, top_k
    return 1, MANY_THREADS, min(top_k, items)


def top_k_launch(
    kernel: Kernel,
    B: int,
    Hkv: int,
    items: int,
    top_k: int,
    numbers: Sequence[mx.array],
    *,
    more: Outputs = (),
    template: Mapping[str, object] = MappingProxyType({}),
) -> Launch:
    """Build the launch that selects the best ``top_k`` items in each tile of a row of length ``items``.

    The first output is uint32 ``bits (B, Hkv, tiles * slots)``, the scores as ordered integers. The second output is
    int32 ``indices`` in the shape of ``bits``. The outputs in ``more`` follow. If a row has only one tile, the
    selection is complete and ``slots`` is ``min(top_k, items)``.
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


def merge(bits: mx.array, indices: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """Select the best ``top_k`` candidates from a `top_k_launch`, in as many launches as needed.

    Returns:
        uint32 ``bits (B, Hkv, top_k)`` and ascending int32 ``indices (B, Hkv, top_k)``, padded with -1.
    """
    while bits.shape[2] > top_k:
        bits, indices = _merging(*bits.shape, top_k)(bits, indices)
    return bits, indices


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _merging(B: int, Hkv: int, left: int, top_k: int) -> Launch:
    return top_k_launch(CANDIDATES, B, Hkv, left, top_k, [integer(top_k)])
