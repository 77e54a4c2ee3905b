"""Quest: bounds on what the keys of each page can score (docs/spec/quest.md)."""

import triton
import triton.language as tl

from .numbers import widen


@triton.jit
def page_tile(bounds, page, pages, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """``(pages, BLOCK_D)`` bounds, zeros where there are none."""
    d = tl.arange(0, BLOCK_D)
    there = (page < pages)[:, None] & (d < D)[None, :]
    tile = tl.load(bounds + page[:, None].to(tl.int64) * stride + d[None, :], mask=there, other=0.0)
    return widen(tile, UPCAST)


@triton.jit(do_not_specialize=["pages"])
def quest_scores(
    queries,  # (B, Hkv, G, D)
    page_min,  # (B, Hkv, pages - 1 or more, D), last stride 1
    page_max,  # the same
    scores,  # out: (B, Hkv, stride_s) float32 (quest.3), +inf for the current page, -inf behind it
    tickets,  # out: (B, Hkv, 2) int32, zeros for the launches that follow
    pages,
    stride_s,
    stride_lb,
    stride_lh,
    stride_lp,
    stride_hb,
    stride_hh,
    stride_hp,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tiles of BLOCK_P pages, Hkv, B).

    A program reads both bounds of its pages, 2 * D * itemsize bytes each, once for the whole group, and writes one
    float32 number a page. Pages are the rows of both products, as keys are in `sparq_scores`.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (b * tl.num_programs(1) + h).to(tl.int64)
    if tile == 0:
        tl.store(tickets + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    d, g = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, BLOCK_G)[None, :]
    q = widen(tl.load(queries + (row * G + g) * D + d, mask=(g < G) & (d < D), other=0.0), UPCAST)
    page = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    low = page_min + b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh
    high = page_max + b.to(tl.int64) * stride_hb + h.to(tl.int64) * stride_hh
    # (quest.2), in which a query that is NaN stays what it is
    zero = tl.zeros_like(q)
    most = page_tile(high, page, pages - 1, stride_hp, D, BLOCK_D, UPCAST)
    bounds = tl.dot(most, tl.where(q > 0, q, zero), input_precision="ieee")
    least = page_tile(low, page, pages - 1, stride_lp, D, BLOCK_D, UPCAST)
    bounds = tl.dot(least, tl.where(q > 0, zero, q), bounds, input_precision="ieee")
    # (quest.3): NaN counts as +inf
    bounds = tl.where(bounds < float("inf"), bounds, float("inf"))
    score = tl.max(tl.where(g < G, bounds, float("-inf")), axis=1)
    score = tl.where(page < pages - 1, score, tl.where(page < pages, float("inf"), float("-inf")))
    tl.store(scores + row * stride_s + page, score, mask=page < stride_s)
