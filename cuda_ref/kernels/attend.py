"""Compute exact attention of one query per head to listed keys or to all keys. All methods share this kernel.

A row is a pair of a sequence and a KV head. The grid is (splits, Hkv, B), or (programs,) if list lengths differ. A
program reads `share` keys and values once for the query group, and updates a running softmax. A key and its value
together have 2 * D * itemsize bytes. If there are several splits, each program writes G * (D + 3) float32 numbers. The
last program of a row merges the splits. The merge is exact, because every split stores its largest logit and its sum of
exponentials.
"""

import triton
import triton.language as tl

from .numbers import finite, widen


@triton.jit
def times_values(weights, values, total):
    """Return ``total + weights @ values``. Each float32 weight is split into two numbers of the values' dtype."""
    high = weights.to(values.dtype)
    total = tl.dot(high, values, total, input_precision="ieee")
    if values.dtype != tl.float32:
        low = (weights - high.to(tl.float32)).to(values.dtype)
        total = tl.dot(low, values, total, input_precision="ieee")
    return total


@triton.jit
def reallocated(mean, alpha, value_mean, d, D: tl.constexpr):
    """Reallocate the softmax mass of unselected keys: return ``alpha * mean + (1 - alpha) * value_mean`` (sparq.10)."""
    return alpha * mean + (1.0 - alpha) * tl.load(value_mean + d, mask=d < D, other=0.0)


@triton.jit
def write_result(out, lse, value_mean, top, total, weighted, alpha, g, d, D: tl.constexpr, G: tl.constexpr):
    """Normalize the output, add the mean value if ``value_mean`` is given, and store output and log-sum-exp.

    If a query head has no keys, its output is 0 and its log-sum-exp is -inf.
    """
    some = total != 0  # True for NaN, so that NaN reaches the output
    result = weighted / tl.where(some, total, 1.0)[:, None]
    if value_mean is not None:
        mixed = reallocated(result, alpha[:, None], value_mean, d[None, :], D)
        result = tl.where(some[:, None], mixed, 0.0)
    tl.store(out + g[:, None] * D + d[None, :], result, mask=(g[:, None] < G) & (d[None, :] < D))
    tl.store(lse + g, tl.where(some, finite(top) + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=g < G)


@triton.jit
def merge_splits(
    parts,
    part_sums,
    splits,
    out,
    lse,
    value_mean,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the splits of one row (sequence and KV head), and store the output and its log-sum-exp."""
    g = tl.arange(0, GROUP)
    d = tl.arange(0, BLOCK_D)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    alpha = tl.zeros([GROUP], tl.float32)
    weighted = tl.zeros([GROUP, BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        there = (split[:, None] < splits) & (g[None, :] < G)
        head = split[:, None] * G + g[None, :]
        tops = tl.load(part_sums + head * 3, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_sums + head * 3 + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(
            parts + head[:, :, None] * D + d[None, None, :],
            mask=there[:, :, None] & (d[None, None, :] < D),
            other=0.0,
            cache_modifier=".cg",
        )
        new = tl.maximum(top, tl.max(tops, axis=0))
        shrink = tl.exp(top - finite(new))
        weights = tl.exp(tops - finite(new)[None, :])
        total = total * shrink + tl.sum(totals * weights, axis=0)
        weighted = weighted * shrink[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        top = new
        if value_mean is not None:
            alpha += tl.sum(tl.load(part_sums + head * 3 + 2, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
    write_result(out, lse, value_mean, top, total, weighted, alpha, g, d, D, G)


@triton.jit
def assigned_work(program, programs, counts, rows, entries, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Assign ``program`` to a row and to a share of the row's entries. ``counts`` is the number of entries per row.

    Returns:
        The row, its first program, its number of programs, its number of entries, and its number of entries per
        program. The last number is a multiple of BLOCK_N. If ``program`` has no work, the number of programs is 0.
    """
    total = tl.zeros([], tl.int64)
    for first in range(0, rows, BLOCK_ROWS):
        r = first + tl.arange(0, BLOCK_ROWS)
        count = tl.minimum(tl.load(counts + r, mask=r < rows, other=0), entries)
        total += tl.sum(count.to(tl.int64), axis=0)
    # The last program of a row may have fewer entries than the share. A row without entries has one program.
    spare = tl.maximum(programs - rows, 1)
    share = tl.maximum(tl.cdiv(tl.cdiv(total, spare), BLOCK_N), 1).to(tl.int32) * BLOCK_N
    row, start, splits, found = 0, 0, 0, 0
    before = 0
    for first in range(0, rows, BLOCK_ROWS):
        r = first + tl.arange(0, BLOCK_ROWS)
        count = tl.minimum(tl.load(counts + r, mask=r < rows, other=0), entries)
        parts = tl.where(r < rows, tl.maximum(tl.cdiv(count, share), 1), 0)
        stop = before + tl.cumsum(parts, 0)
        here = (program >= stop - parts) & (program < stop)
        row += tl.sum(tl.where(here, r, 0), axis=0)
        start += tl.sum(tl.where(here, stop - parts, 0), axis=0)
        splits += tl.sum(tl.where(here, parts, 0), axis=0)
        found += tl.sum(tl.where(here, count, 0), axis=0)
        before += tl.sum(parts, axis=0)
    return row, start, splits, found, share


@triton.jit(do_not_specialize=["length", "entries", "share", "rows", "heads"])
def attend(
    queries,  # (B, Hkv, G, D)
    keys,  # (B, Hkv, length, D), last stride 1
    values,  # same as keys
    indices,  # (B, Hkv, entries) int32, or None for keys left_padding to length
    counts,  # (B, Hkv) int32: used entries, divided by `assigned_work`; None: all entries, in equal shares
    left_padding,  # (B,) int32, or None; used only without a list
    logits,  # (B, Hkv, G, stride_l) float32 of sparq_scores, or None without reallocation
    softmax,  # (B, Hkv, G, 2) float32 of top_k_select, or None
    value_mean,  # (B, Hkv, D) float32, or None
    out,  # out: (B, Hkv, G, D)
    lse,  # out: (B, Hkv, G) float32
    parts,  # scratch: (programs, G, D) float32 weighted sums of values
    part_sums,  # scratch: (programs, G, 3) float32: largest logit, sum of exp(logit - largest), part of alpha
    tickets,  # (B, Hkv, 2) int32, zeros: counters of finished programs
    length,
    entries,
    share,
    rows,
    heads,
    scale,
    stride_l,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    if counts is None:
        split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        splits, used = tl.num_programs(0), entries
        row = (b * heads + h).to(tl.int64)
        first_part = row * splits
    else:
        place, first_part, splits, used, share = assigned_work(
            tl.program_id(0), tl.num_programs(0), counts, rows, entries, BLOCK_N, BLOCK_ROWS
        )
        if splits == 0:
            return
        split, h, b = tl.program_id(0) - first_part, place % heads, place // heads
        row = place.to(tl.int64)
    key_row = b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    value_row = b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh
    queries += row * G * D
    out += row * G * D
    lse += row * G
    first_valid = 0
    if left_padding is not None:
        first_valid = tl.load(left_padding + b)
    if indices is not None:
        indices += row * entries
    if logits is not None:
        logits += row * G * stride_l
        softmax += row * G * 2
        value_mean += row * D
    start = split * share
    end = tl.minimum(start + share, used)
    start = tl.maximum(start, first_valid // BLOCK_N * BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(queries + g[:, None] * D + d[None, :], mask=(g[:, None] < G) & (d < D)[None, :], other=0.0)
    q = widen(q, UPCAST)
    # Over entries `start` to `end`: largest logit, sum of exponentials, weighted sum of values, and part of alpha.
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    weighted = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    alpha = tl.zeros([BLOCK_G], tl.float32)
    for first in range(start, end, BLOCK_N):
        entry = first + tl.arange(0, BLOCK_N)
        if indices is None:
            key = entry
            filled = (entry < end) & (entry >= first_valid)
        else:
            key = tl.load(indices + entry, mask=entry < end, other=-1)
            filled = (key >= 0) & (key < length)
        line, there = key.to(tl.int64), filled[:, None] & (d < D)[None, :]
        k = tl.load(keys + (key_row + line * stride_kn)[:, None] + d[None, :], mask=there, other=0.0)
        v = tl.load(values + (value_row + line * stride_vn)[:, None] + d[None, :], mask=there, other=0.0)
        k, v = widen(k, UPCAST), widen(v, UPCAST)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(filled[None, :], score, float("-inf"))
        top = tl.maximum(largest, tl.max(score, axis=1))
        weights = tl.exp(score - finite(top)[:, None])
        shrink = tl.exp(largest - finite(top))
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = times_values(weights, v, weighted * shrink[:, None])
        largest = top
        if logits is not None:  # (sparq.8)
            in_group = g[:, None] < G
            logit = tl.load(
                logits + g[:, None] * stride_l + key[None, :], mask=in_group & filled[None, :], other=float("-inf")
            )
            most = tl.load(softmax + g * 2, mask=g < G, other=0.0)
            factor = tl.load(softmax + g * 2 + 1, mask=g < G, other=0.0)
            alpha += tl.sum(tl.exp(logit - most[:, None]), axis=1) * factor
    if splits == 1:
        write_result(out, lse, value_mean, largest, total, weighted, alpha, g, d, D, G)
    else:
        parts += first_part.to(tl.int64) * G * D
        part_sums += first_part.to(tl.int64) * G * 3
        head = split * G + g
        tl.store(parts + head[:, None] * D + d[None, :], weighted, mask=(g[:, None] < G) & (d[None, :] < D))
        tl.store(part_sums + head * 3, largest, mask=g < G)
        tl.store(part_sums + head * 3 + 1, total, mask=g < G)
        tl.store(part_sums + head * 3 + 2, alpha, mask=g < G)
        # All threads write before the atomic add on the ticket, so the last program sees all results.
        tl.debug_barrier()
        if tl.atomic_add(tickets + row * 2 + 1, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            merge_splits(parts, part_sums, splits, out, lse, value_mean, D, G, BLOCK_D, GROUP, BLOCK_SPLITS)
