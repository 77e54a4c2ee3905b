"""Select exactly the k largest scores of a row without sorting. All methods share this kernel.

Scores are converted to unsigned integers that keep the order of the scores. Four histograms of 256 bins, one for each
8 bits, find the k-th largest score. The kernel writes the indices of all larger scores and of the first equal scores in
ascending order.

The grid is (tiles of BLOCK keys, Hkv, B). A program reads G * BLOCK logits once, as float32 or uint8, and sums their
softmax over the group. It stores the best k keys of its tile, eight bytes each. The last program of a row selects the
best k of the row from the candidates of all tiles. It reads the candidates once if they fit into one block. The softmax
of the group needs the logits of all tiles, so the kernel that computes the logits cannot build the histograms.
"""

import triton
import triton.language as tl

from .numbers import NO_WEIGHT, decode_logit, finite, rounded_down, rounded_up, tile_of

# Bits of scores that are never selected (invalid or -inf), and bits of keys of the local window, above every score.
NEVER = tl.constexpr(0)
ALWAYS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def ordered_bits(score):
    """Map scores to unsigned integers that keep the order of the scores. NaN counts as +inf."""
    score = tl.where(score < float("inf"), score, float("inf"))
    score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0
    bits = score.to(tl.uint32, bitcast=True)
    ordered = bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000)
    return tl.where(score > float("-inf"), ordered, NEVER).to(tl.uint32)


@triton.jit
def digit_counts(bits, threshold, there, shift):
    """Return a histogram of the eight bits at ``shift`` over the items that share the higher bits of ``threshold``."""
    same = ((bits ^ threshold) >> shift >> 8) == 0  # in two steps: a shift by 32 is undefined
    return tl.histogram(((bits >> shift) & 255).to(tl.int32), 256, mask=there & same)


@triton.jit
def next_digit(counts, wanted):
    """Return the largest digit that ``wanted`` items reach or exceed, and how many items of this digit are selected."""
    digits = tl.arange(0, 256)
    reaching = tl.cumsum(counts, 0, reverse=True)
    digit = tl.max(tl.where(reaching >= wanted, digits, 0), axis=0)
    return digit.to(tl.uint32), wanted - tl.sum(tl.where(digits > digit, counts, 0), axis=0)


@triton.jit
def is_tie(bits, threshold):
    """Return a mask of the items that equal ``threshold``. Items with the bits `NEVER` cannot be selected."""
    return (bits == threshold) & (bits != NEVER)


@triton.jit
def is_best(bits, threshold, ties, ties_before):
    """Return a mask of the items above ``threshold`` and of the first items that equal ``threshold``.

    At most ``ties`` equal items are selected. The limit includes ``ties_before`` equal items in earlier blocks.
    """
    tie = is_tie(bits, threshold)
    return (bits > threshold) | (tie & (ties_before + tl.cumsum(tie.to(tl.int32), 0) <= ties))


@triton.jit
def kth_largest(bits, there, wanted):
    """Return the bits of the ``wanted``-th largest item, and how many items that have these bits are selected.

    If fewer than ``wanted`` items can be selected, the bits are `NEVER`.
    """
    threshold = tl.full([], NEVER, tl.uint32)
    for step in range(4):
        shift = 24 - 8 * step
        digit, wanted = next_digit(digit_counts(bits, threshold, there, shift), wanted)
        threshold = threshold | (digit << shift).to(tl.uint32)
    return threshold, wanted


@triton.jit
def kth_largest_of_many(candidate_bits, count, wanted, BLOCK: tl.constexpr):
    """Return the results of `kth_largest` for ``count`` items, which are loaded from memory in blocks."""
    threshold = tl.full([], NEVER, tl.uint32)
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for first in range(0, count, BLOCK):
            item = first + tl.arange(0, BLOCK)
            bits = tl.load(candidate_bits + item, mask=item < count, other=0, cache_modifier=".cg")
            counts += digit_counts(bits, threshold, item < count, shift)
        digit, wanted = next_digit(counts, wanted)
        threshold = threshold | (digit << shift).to(tl.uint32)
    return threshold, wanted


@triton.jit
def row_softmax(statistics, splits, BLOCK: tl.constexpr):
    """Merge the splits of a row. Return the largest logit and the factor 1 / sum of exp(logit - largest).

    The factor is 0 if there is no valid key, or if a logit is NaN or +inf. In the latter case, the scores of
    the NaN and +inf logits are NaN and all other scores are 0.
    """
    largest = float("-inf")
    total = 0.0
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        tops = tl.load(statistics + split, mask=split < splits, other=float("-inf"))
        sums = tl.load(statistics + splits + split, mask=split < splits, other=0.0)
        top = tl.maximum(largest, tl.max(tops, axis=0))
        total = total * tl.exp(largest - finite(top)) + tl.sum(sums * tl.exp(tops - finite(top)), axis=0)
        largest = top
    return finite(largest), tl.where(total > 0, 1.0 / total, 0.0)


@triton.jit
def head_score(logits, statistics, softmax, g, s, tile, readable, stride_l, splits):
    """Return the scores of keys ``s`` for query head ``g``. If ``tile`` is not None, it is the tile of each key."""
    if tile is None:
        logit = tl.load(logits + g * stride_l + s, mask=readable, other=float("-inf"))
    else:
        code = tl.load(logits + g * stride_l + s, mask=readable, other=NO_WEIGHT)
        logit = decode_logit(code, tl.load(statistics + g * 2 * splits + tile, mask=readable, other=0.0))
    if statistics is not None:
        largest, factor = row_softmax(statistics + g * 2 * splits, splits, 256)
        if tl.program_id(0) == 0:
            tl.store(softmax + g * 2, largest)
            tl.store(softmax + g * 2 + 1, factor)
        logit = tl.exp(logit - largest) * factor
    return logit


@triton.jit
def group_scores(logits, statistics, softmax, s, tile, readable, stride_l, splits, G: tl.constexpr):
    """Return the scores of keys ``s``, summed over the group (sparq.4, sparq.5). For scores from the caller, G is 1."""
    score = tl.zeros(s.shape, tl.float32)
    if G <= 8:  # all heads at once; more do not fit into the registers
        for g in tl.static_range(G):
            score += head_score(logits, statistics, softmax, g, s, tile, readable, stride_l, splits)
    else:
        for g in range(G):
            score += head_score(logits, statistics, softmax, g, s, tile, readable, stride_l, splits)
    return score


@triton.jit
def write_best(indices, bits, index, threshold, ties, written, ties_before):
    """Append the selected items to the list ``indices``. Return the list's new length and the new number of ties."""
    best = is_best(bits, threshold, ties, ties_before)
    slot = written + tl.cumsum(best.to(tl.int32), 0) - 1
    tl.store(indices + slot, index, mask=best)
    ties_here = tl.sum(is_tie(bits, threshold).to(tl.int32), axis=0)
    return written + tl.sum(best.to(tl.int32), axis=0), ties_before + ties_here


@triton.jit
def fill(slots, first, end, value, BLOCK: tl.constexpr):
    """Write ``value`` to the slots ``first`` to ``end - 1``."""
    for start in range(0, end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(slots + slot, tl.zeros([BLOCK], slots.dtype.element_ty) + value, mask=(slot >= first) & (slot < end))


@triton.jit
def merge_tiles(candidate_bits, candidate_indices, count, indices, slots, BLOCK: tl.constexpr):
    """Select the best ``slots`` of the ``count`` candidates of a row, and write their indices in ascending order."""
    if count <= BLOCK:
        item = tl.arange(0, BLOCK)
        bits = tl.load(candidate_bits + item, mask=item < count, other=NEVER, cache_modifier=".cg")
        threshold, ties = kth_largest(bits, item < count, slots)
        index = tl.load(candidate_indices + item, mask=bits != NEVER, other=0, cache_modifier=".cg")
        written, _ = write_best(indices, bits, index, threshold, ties, 0, 0)
        fill(indices, written, slots, -1, BLOCK)
    else:
        threshold, ties = kth_largest_of_many(candidate_bits, count, slots, BLOCK)
        written = 0
        ties_before = 0
        for first in range(0, count, BLOCK):
            item = first + tl.arange(0, BLOCK)
            bits = tl.load(candidate_bits + item, mask=item < count, other=NEVER, cache_modifier=".cg")
            index = tl.load(candidate_indices + item, mask=bits != NEVER, other=0, cache_modifier=".cg")
            written, ties_before = write_best(indices, bits, index, threshold, ties, written, ties_before)
        fill(indices, written, slots, -1, BLOCK)


@triton.jit(do_not_specialize=["length", "top_k", "local_window", "splits"])
def top_k_select(
    logits,  # (B, Hkv, G, stride_l) float32 or uint8 approximate logits, or float32 scores with G = 1
    statistics,  # (B, Hkv, G, 2, splits) float32 of the previous launch; per tile for uint8; None for scores
    softmax,  # out: (B, Hkv, G, 2) float32: largest logit, 1 / sum of exp(logit - largest); None for scores
    left_padding,  # (B,) int32, or None
    candidate_bits,  # scratch: (B, Hkv, tiles, min(top_k, BLOCK)) int32
    candidate_indices,  # scratch, same shape and type
    indices,  # out: (B, Hkv, min(top_k, length)) int32, ascending, then -1
    tickets,  # (B, Hkv, 2) int32, zeros: counters of finished programs
    length,
    top_k,
    local_window,
    splits,
    stride_l,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of logits can be read up to the next multiple of 16 keys
    TILE: tl.constexpr,  # quantized keys that share one largest logit, for 8-bit logits; 0 for float32
):
    tile, b = tl.program_id(0), tl.program_id(2)
    tiles = tl.num_programs(0)
    row = (b * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    logits += row * G * stride_l
    if statistics is not None:
        statistics += row * G * 2 * splits
        softmax += row * G * 2
    slots = tl.minimum(top_k, length)
    indices += row * slots

    # (sparq.6)
    s = tile * BLOCK + tl.arange(0, BLOCK)
    readable = s < (rounded_up(length) if ALIGNED else length)
    first_valid = 0
    if left_padding is not None:
        first_valid = tl.load(left_padding + b)
        readable &= s >= rounded_down(first_valid)
    within = tile_of(s, first_valid, length, splits, TILE) if TILE else None
    score = group_scores(logits, statistics, softmax, s, within, readable, stride_l, splits, G)
    bits = tl.where(s >= length - local_window, ALWAYS, ordered_bits(score))
    bits = tl.where(s < length, bits, NEVER)
    if left_padding is not None:
        bits = tl.where(s >= first_valid, bits, NEVER)
    bits = bits.to(tl.uint32)
    kept = tl.minimum(top_k, BLOCK)
    threshold, ties = kth_largest(bits, s >= 0, kept)
    if tiles == 1:
        written, _ = write_best(indices, bits, s, threshold, ties, 0, 0)
        fill(indices, written, slots, -1, BLOCK)
    else:
        candidate_bits += row * tiles * kept
        candidate_indices += row * tiles * kept
        first = tile * kept
        best = is_best(bits, threshold, ties, 0)
        slot = first + tl.cumsum(best.to(tl.int32), 0) - 1
        tl.store(candidate_bits + slot, bits.to(tl.int32, bitcast=True), mask=best)
        tl.store(candidate_indices + slot, s, mask=best)
        fill(candidate_bits + first, tl.sum(best.to(tl.int32), axis=0), kept, 0, BLOCK)
        # All threads write before the atomic add on the ticket, so the last program sees all results.
        tl.debug_barrier()
        if tl.atomic_add(tickets + row * 2, 1, sem="acq_rel") == tiles - 1:
            tl.debug_barrier()
            merge_tiles(
                candidate_bits.to(tl.pointer_type(tl.uint32), bitcast=True),
                candidate_indices,
                tiles * kept,
                indices,
                slots,
                BLOCK,
            )
