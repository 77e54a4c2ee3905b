"""Compute SparQ's approximate logits of all keys from the components with the largest scores.

The grid is (splits of the keys, Hkv, B). Every program repeats the selection of components of its KV head. The
selection is cheap: it reads D numbers per query head, but a program reads thousands of keys. Each program reads RANK
components of `blocks * BLOCK_S` keys, RANK * itemsize bytes per key, once for the query group. It writes G float32
logits per key, and the largest logit and the sum of exponentials of each query head.
"""

import triton
import triton.language as tl

from .numbers import finite, rounded_up, widen


@triton.jit
def component_keys(queries, component_weight, d, D: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return distinct integers that rank the components ``d`` by their scores (sparq.1).

    The high bits are the bits of the float32 score, which sort correctly because scores are not negative. The low bits
    sort equal scores by index.
    """
    score = tl.zeros(d.shape, tl.float32)
    for g in tl.static_range(G):
        score += tl.abs(tl.load(queries + g * D + d, mask=d < D, other=0.0).to(tl.float32))
    if component_weight is not None:
        score *= tl.load(component_weight + d, mask=d < D, other=0.0)
    score = tl.where(score < float("inf"), score, float("inf"))
    bits = tl.where(d < D, score.to(tl.int32, bitcast=True), -1)
    return (bits.to(tl.int64) << 32) | (BLOCK_D - 1 - d)


@triton.jit
def component_ranks(
    queries, component_weight, D: tl.constexpr, G: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return the rank of each component (sparq.2). The highest score has rank 0.

    If all components are selected, the rank is the index of the component.
    """
    before = tl.arange(0, BLOCK_D)
    if RANK < D:
        keys = component_keys(queries, component_weight, before, D, G, BLOCK_D)
        before = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), axis=0)
    return before


@triton.jit
def component_at(before, rank):
    """Return the index of the component at each ``rank``. ``before`` contains the rank of each component."""
    d = tl.arange(0, before.shape[0])
    return tl.sum(tl.where(before[:, None] == rank[None, :], d[:, None], 0), axis=0)


@triton.jit
def query_components(queries, component, wanted, D: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr):
    """Load the selected components of the group's queries. Return ``(components, BLOCK_G)``."""
    g = tl.arange(0, BLOCK_G)[None, :]
    return tl.load(queries + g * D + component[:, None], mask=(g < G) & wanted[:, None], other=0.0)


@triton.jit
def logit_factors(
    queries,
    before,
    scale,
    D: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Return the factor c / t (sparq.3) of each query head for components that were selected by |q| alone."""
    d = tl.arange(0, BLOCK_D)
    q = tl.abs(query_components(queries, d, d < D, D, G, BLOCK_G).to(tl.float32))
    total = tl.sum(q, axis=0)
    covered = tl.sum(tl.where(before[:, None] < RANK, q, 0.0), axis=0)
    # If all selected components of a head are 0, the approximate logits of this head are 0 for any factor.
    return scale * tl.where(covered > 0, tl.sqrt(total / tl.where(covered > 0, covered, 1.0)), 1.0)


@triton.jit(do_not_specialize=["length", "blocks"])
def sparq_scores(
    queries,  # (B, Hkv, G, D)
    keys_t,  # (B, Hkv, D, length); fast if the last stride is 1
    component_weight,  # (B, Hkv, D) float32, or None for the paper's rule
    left_padding,  # (B,) int32, or None
    logits,  # out: (B, Hkv, G, stride_l) float32, -inf for keys that are not valid
    statistics,  # out: (B, Hkv, G, 2, splits) float32: largest logit, sum of exp(logit - largest)
    tickets,  # out: (B, Hkv, 2) int32, zeros for the launches that follow
    length,
    blocks,  # number of blocks of BLOCK_S keys per program
    scale,
    stride_l,
    stride_kb,
    stride_kh,
    stride_kd,
    stride_ks,
    D: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of keys_t can be read up to the next multiple of 16 keys
    UPCAST: tl.constexpr,
):
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (b * tl.num_programs(1) + h).to(tl.int64)
    queries += row * G * D
    first_key = b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    if component_weight is not None:
        component_weight += row * D
    first_valid = 0
    if left_padding is not None:
        first_valid = tl.load(left_padding + b)
    if split == 0:
        tl.store(tickets + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))

    before = component_ranks(queries, component_weight, D, G, RANK, BLOCK_D)
    factor = tl.full([BLOCK_G], 1.0, tl.float32) * scale
    if component_weight is None:
        factor = logit_factors(queries, before, scale, D, G, RANK, BLOCK_D, BLOCK_G)

    g = tl.arange(0, BLOCK_G)
    heads = row * G + g
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    readable = rounded_up(length) if ALIGNED else length
    share = blocks * BLOCK_S  # the constant factor lets the compiler assume aligned tiles
    for start in range(split * share, tl.minimum((split + 1) * share, length), BLOCK_S):
        # Keys are the rows of the product. Matrix units have 16 rows and 8 columns, and a group is closer to 8 columns.
        s = start + tl.arange(0, BLOCK_S)
        approximate = tl.zeros([BLOCK_S, BLOCK_G], tl.float32)
        for first in tl.static_range(0, RANK, BLOCK_R):
            rank = first + tl.arange(0, BLOCK_R)
            component = component_at(before, rank)
            q = query_components(queries, component, rank < RANK, D, G, BLOCK_G)
            k = tl.load(
                keys_t + first_key + component[None, :].to(tl.int64) * stride_kd + s[:, None].to(tl.int64) * stride_ks,
                mask=(rank < RANK)[None, :] & (s < readable)[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            approximate = tl.dot(widen(k, UPCAST), widen(q, UPCAST), approximate, input_precision="ieee")
        valid = (s < length) & (s >= first_valid)
        approximate = tl.where(valid[:, None], approximate * factor[None, :], float("-inf"))
        tl.store(
            logits + heads[None, :] * stride_l + s[:, None],
            approximate,
            mask=(g[None, :] < G) & (s[:, None] < stride_l),
        )
        top = tl.maximum(largest, tl.max(approximate, axis=0))
        exponentials = tl.exp(approximate - finite(top)[None, :])
        total = total * tl.exp(largest - finite(top)) + tl.sum(exponentials, axis=0)
        largest = top
    # Softmax statistics of this split (sparq.4)
    splits = tl.num_programs(0)
    tl.store(statistics + heads * 2 * splits + split, largest, mask=g < G)
    tl.store(statistics + heads * 2 * splits + splits + split, total, mask=g < G)
