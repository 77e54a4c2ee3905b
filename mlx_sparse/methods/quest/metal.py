"""Run Quest on the GPU (docs/spec/quest.md, equations (quest.2) to (quest.5)).

Kernel launches score all pages, select the best pages and attend to the keys of these pages. MLX operations convert
page indices to key indices.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...core.attend.metal import attend_indices
from ...core.launch import Kernel, integer, padding_or_zeros
from ...core.select.metal import top_k_select
from .ops import page_bounds as page_bounds  # once every `page_size` tokens
from .ops import page_keys as page_keys  # only a few numbers per page
from .ops import with_bounds

PAGES, THREADS = 64, 256  # pages and threads per threadgroup

SCORES = Kernel(
    "quest_scores",
    "threadgroup.h",
    ("queries", "page_min", "page_max", "left_padding", "length", "page_size"),
    ("scores",),
)


def quest_select(
    queries: mx.array,
    keys: mx.array,
    *,
    page_size: int,
    top_k: int,
    left_padding: mx.array | None,
    page_min: mx.array,
    page_max: mx.array,
    length: int | None = None,
) -> mx.array:
    """Select the keys of the best K = ceil(top_k / page_size) pages (quest.5).

    Args:
        page_min, page_max: ``(B, Hkv, capacity, D)`` bounds of the pages before the current page, which are not copied.
        length: number of keys in use, which must fill more than K pages. If None, all keys are in use.

    Returns:
        int32 key indices ``(B, Hkv, K * page_size)``.
    """
    length = keys.shape[2] if length is None else length
    (B, Hkv, _, D), count = page_min.shape, -(-length // page_size)
    G = queries.shape[1] // Hkv
    (scores,) = SCORES(
        {
            "queries": queries,
            "page_min": page_min,
            "page_max": page_max,
            "left_padding": padding_or_zeros(left_padding, B),
            "length": integer(length),
            "page_size": integer(page_size),
        },
        [((B, Hkv, count), mx.float32)],
        template={"T": page_min.dtype, "D": D, "G": G},
        groups=(-(-count // PAGES), Hkv, B),
        threads=THREADS,
    )
    pages = top_k_select(scores, top_k=-(-top_k // page_size), local_window=0, left_padding=None)
    listed: mx.array = page_keys(pages, left_padding, page_size=page_size, length=length)
    return listed


def quest_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, length: int | None = None, **selection: Any
) -> tuple[mx.array, mx.array]:
    """Run a Quest decode step. Return ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``.

    Args:
        keys, values: ``(B, Hkv, capacity, D)`` buffers, which are not copied. The first ``length`` rows are in use.
        selection: the other arguments of `quest_select`. Page bounds are computed if they are absent.
    """
    indices = quest_select(queries, keys, length=length, **with_bounds(keys, selection))
    return attend_indices(queries, keys, values, indices, scale=scale, length=length)
