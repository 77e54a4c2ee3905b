"""Run SAAP's query network, select the buckets that each group visits, and list the keys of these buckets.

`saap_hidden` and `saap_route` compute the two layers of the network. Each tile of weight columns has one program, which
reads the weights once for up to 32 query rows. All programs together read K * N * itemsize bytes per layer and KV head.
For the network in the paper, this is 2.4 MB per KV head. The keys and values of 4,608 tokens have the same size if D is
128 and numbers have 16 bits. Each product of queries and weights is a sum of three TF32 products. The sum is exact for
16-bit weights and keeps 22 bits of float32 numbers of any magnitude. The last program of a query tile reads the tile's
logits, 4 * C bytes per query head, and selects the buckets.

`saap_expand` writes the key list of a step. It reads and writes 4 bytes for each key of a visited bucket and writes 4
bytes for each other slot. Every program finds the keys of its own slots, so several programs can share a large bucket.
"""

import triton
import triton.language as tl

from .numbers import finite
from .top_k_select import fill, kth_largest, ordered_bits, write_best


@triton.jit
def affine(
    x, weight, bias, starts, there, n, K, N, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return columns ``n`` of ``x @ weight + bias`` in float32. ``starts`` are the offsets of the rows of ``x``."""
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        part = tl.load(x + starts[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
        inside = (k < K)[:, None] & (n < N)[None, :]
        w = tl.load(weight + k[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0)
        y = tl.dot(part.to(tl.float32), w.to(tl.float32), y, input_precision="tf32x3")
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def rows_of_tile(sequence, batch, h, heads, G: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the query row indices of a tile whose first sequence is ``sequence``, and a mask of the existing rows."""
    m = tl.arange(0, BLOCK_M)
    b, g = sequence + m // GROUP, m % GROUP
    return (b.to(tl.int64) * heads + h) * G + g, (b < batch) & (g < G)


@triton.jit(do_not_specialize=["batch"])
def saap_hidden(
    x,  # (B, Hkv, G, K)
    weight,  # (Hkv, K, N)
    bias,  # (Hkv, N), or None
    out,  # out: (B, Hkv, G, N) float32
    tickets,  # out: (tiles of rows, Hkv) int32, zeros for `saap_route`
    batch,
    K,
    N,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    row, there = rows_of_tile(part * (BLOCK_M // GROUP), batch, h, heads, G, GROUP, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if tile == 0:
        tl.store(tickets + part * heads + h, 0)
    weight += h.to(tl.int64) * K * N
    if bias is not None:
        bias += h * N
    y = affine(x, weight, bias, row * K, there, n, K, N, BLOCK_M, BLOCK_K, BLOCK_N)
    hidden = tl.where(y < 0.0, 0.0, y)  # ReLU; tl.maximum would drop a NaN
    tl.store(out + row[:, None] * N + n[None, :], hidden, mask=there[:, None] & (n < N)[None, :])


@triton.jit
def select_buckets(logits, visited, C, probes, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write one group's ``probes`` most probable buckets (saap.5, saap.8) to ``visited``, in ascending order."""
    c = tl.arange(0, BLOCK_C)
    score = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, G, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)
        there = (g < G)[:, None] & (c < C)[None, :]
        logit = tl.load(logits + g[:, None] * C + c[None, :], mask=there, other=float("-inf"), cache_modifier=".cg")
        exponentials = tl.exp(logit - finite(tl.max(logit, axis=1))[:, None])
        total = tl.sum(exponentials, axis=1)
        # If a logit of a head is NaN or +inf, its NaN and +inf logits become probability NaN, and all others 0.
        score += tl.sum(exponentials / tl.where(total > 0, total, float("inf"))[:, None], axis=0)
    bits = ordered_bits(tl.where(c < C, score, float("-inf")))
    threshold, ties = kth_largest(bits, c < C, probes)
    written, _ = write_best(visited, bits, c, threshold, ties, 0, 0)
    fill(visited, written, probes, -1, BLOCK_C)


@triton.jit(do_not_specialize=["batch", "probes"])
def saap_route(
    x,  # (B, Hkv, G, K)
    weight,  # (Hkv, K, C)
    bias,  # (Hkv, C), or None
    logits,  # scratch: (B, Hkv, G, C) float32
    visited,  # out: (B, Hkv, probes) int32, ascending
    tickets,  # (tiles of rows, Hkv) int32, zeros: counters of finished programs
    batch,
    probes,
    K,
    C,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    first = part * (BLOCK_M // GROUP)
    row, there = rows_of_tile(first, batch, h, heads, G, GROUP, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight += h.to(tl.int64) * K * C
    if bias is not None:
        bias += h * C
    y = affine(x, weight, bias, row * K, there, n, K, C, BLOCK_M, BLOCK_K, BLOCK_N)
    tl.store(logits + row[:, None] * C + n[None, :], y, mask=there[:, None] & (n < C)[None, :])
    # All threads write before the atomic add on the ticket, so the last program sees all results.
    tl.debug_barrier()
    if tl.atomic_add(tickets + part * heads + h, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.debug_barrier()
        for b in range(first, tl.minimum(first + BLOCK_M // GROUP, batch)):
            group = h.to(tl.int64) + b * heads
            select_buckets(logits + group * G * C, visited + group * probes, C, probes, G, BLOCK_G, BLOCK_C)


@triton.jit(do_not_specialize=["length", "covered", "sink_tokens", "capacity", "probes", "buckets", "indexed"])
def saap_expand(
    visited,  # (B, Hkv, probes) int32; numbers that are not buckets are empty slots
    offsets,  # (B, Hkv, buckets + 1) int32
    key_ids,  # (B, Hkv, indexed) int32
    left_padding,  # (B,) int32, or None
    indices,  # out: (B, Hkv, capacity) int32, packed, then -1
    counts,  # out: (B, Hkv) int32
    tickets,  # out: (B, Hkv, 2) int32, zeros for `attend`
    length,
    covered,
    sink_tokens,
    capacity,
    probes,
    buckets,
    indexed,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    tile, b = tl.program_id(0), tl.program_id(2)
    row = (b * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    visited += row * probes
    offsets += row * (buckets + 1)
    slot = tile * BLOCK + tl.arange(0, BLOCK)
    # (saap.10) sink tokens, then the unindexed tail. Both are consecutive keys.
    first_valid = 0
    if left_padding is not None:
        first_valid = tl.load(left_padding + b)
    sinks = tl.maximum(tl.minimum(first_valid + sink_tokens, covered) - first_valid, 0)
    tail = tl.maximum(covered, first_valid)
    used = sinks + tl.maximum(length - tail, 0)
    key = tl.where(slot < sinks, first_valid + slot, tail + slot - sinks)
    # The difference between an index in key_ids and its slot, for slots of visited buckets
    shift = tl.zeros([BLOCK], tl.int32)
    listed = used
    for first in range(0, probes, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        bucket = tl.load(visited + p, mask=p < probes, other=-1)
        is_one = (bucket >= 0) & (bucket < buckets)
        begin = tl.load(offsets + bucket, mask=is_one, other=0)
        size = tl.load(offsets + bucket + 1, mask=is_one, other=0) - begin
        stop = listed + tl.cumsum(size, 0)
        start = stop - size
        inside = (slot[:, None] >= start[None, :]) & (slot[:, None] < stop[None, :])
        shift += tl.sum(tl.where(inside, (begin - start)[None, :], 0), axis=1)
        listed += tl.sum(size, axis=0)
    place = slot + shift
    in_bucket = (slot >= used) & (slot < listed) & (place >= 0) & (place < indexed)
    found = tl.load(key_ids + row * indexed + place, mask=in_bucket, other=-1)
    key = tl.where(slot < used, key, found)
    tl.store(indices + row * capacity + slot, key, mask=slot < capacity)
    if tile == 0:
        tl.store(counts + row, tl.minimum(listed, capacity))
        tl.store(tickets + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
