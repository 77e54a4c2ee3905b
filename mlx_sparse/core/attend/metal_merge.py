"""Merge the attention results for parts of the keys exactly, on the GPU (metal/merge.h)."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..launch import LAUNCH_CACHE_SIZE, Kernel, Launch

UNSPLIT = 512  # maximum length of a list that one threadgroup attends to, so that no merge is needed
GROUPS = 512  # number of threadgroups that fills the largest GPU several times

MERGE = Kernel("merge_parts", "merge.h", ("part_out", "part_lse"), ("out", "lse"))
MERGE_REALLOCATE = Kernel(
    "merge_reallocate", "merge.h", ("part_out", "part_lse", "part_alpha", "value_mean"), ("out", "lse", "alpha")
)


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def merging(B: int, Hkv: int, G: int, D: int, dtype: mx.Dtype, mixed: bool = False) -> Launch:
    """Build the launch that merges the attention results for ``splits`` parts of the keys.

    The inputs are float32 ``out (B, Hkv, splits, G, D)`` and ``lse (B, Hkv, splits, G)``. The outputs are
    ``out (B, Hkv * G, 1, D)`` and ``lse (B, Hkv * G, 1)``. If ``mixed`` is True, the launch also mixes in the
    mean value (sparq.10).
    """
    Hq = Hkv * G
    statistic = ((B, Hq, 1), mx.float32)
    return Launch(
        MERGE_REALLOCATE if mixed else MERGE,
        [((B, Hq, 1, D), dtype), *[statistic] * (1 + mixed)],
        template={"O": dtype, "D": D, "G": G},
        groups=(1, Hq, B),
        threads=D,
    )
