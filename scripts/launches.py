"""What each launch of a decode step moves and computes on Apple's GPUs, by formula.

tests/kernels/test_traffic.py holds the bytes to what the harness counts. Cycles are counted by hand from metal/*.h, in
round numbers: one for a SIMD instruction, shared by the four schedulers of a core; the selection
needs all of its rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mlx_sparse.checks import check_local_window
from mlx_sparse.common.key_codes import GROUP
from mlx_sparse.kernels import attend, saap, select, sparq
from mlx_sparse.kernels.launch import LANES
from mlx_sparse.methods import SAAP, SparQ
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.bench.inputs import network_weights

ITEM = 2  # bytes: float16
FLOAT = 4
LINE = 128  # bytes that memory delivers at once
SCALARS = 6 * LINE  # lengths, shapes and parameters, each a line of its own

SCHEDULERS = 4
REDUCTION = 17  # cycles of simd_sum
EXP = 8

GROWTH = 256  # tokens after which the cache's buffers grow and are copied
ANSWER = 128  # tokens over which building the component-major keys is spread

# Bytes per key and head that array operations move when SAAP lists the keys anew, by the number of passes: compare,
# number, sort in eight passes or so, take apart.
LISTED = 25 * 2 * FLOAT

# Array operations of a cache per step, by (query_key, reallocate); the first writes the new key's column.
SIDE_LAUNCHES = {(False, False): 1, (False, True): 3, (True, False): 3, (True, True): 5}
# With coded keys, by reallocate. What codes a group every 64 tokens counts as one more.
CODED_SIDE_LAUNCHES = {False: 0, True: 2}


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
        groups: threadgroups.
        once: bytes of all lines it touches, each counted once.
        each: the same, counted once per threadgroup that touches it.
        cycles: of one threadgroup on a core of its own, memory aside.
    """

    name: str
    groups: int
    once: float
    each: float
    cycles: int = 0


@dataclass(frozen=True)
class Network:
    """The query network of a KV head; ``hidden`` is 0 for centroids that route."""

    buckets: int
    hidden: int

    def weights(self, D: int) -> int:
        """Numbers in it."""
        return network_weights(D, self.hidden, self.buckets)


def sparq_launches(shape: Shape, S: int, config: SparQ) -> list[Launch]:
    """A step of SparQ over ``S`` keys, with what the cache does for it."""
    reallocate = config.reallocates(shape.G)
    weighted = config.component_score == "query_key"
    if config.key_bits < 16:
        first = [*_coded_side(shape, S, config.key_bits, reallocate), _coded_scores(shape, S, config, weighted)]
    else:
        first = [*_side(shape, S, SIDE_LAUNCHES[weighted, reallocate]), _scores(shape, S, config.rank, weighted)]
    selection, left = _selection(shape, S, config)
    return [*first, *selection, *_attend(shape, S, min(config.top_k, S), reallocate, candidates=left)]


def saap_launches(shape: Shape, S: int, config: SAAP, router: Network, share: float) -> list[Launch]:
    """A step of SAAP over ``S`` keys, with what the cache does for it.

    Args:
        share: of the keys outside the exact part that are in visited buckets.
    """
    far = max(S - config.attended, 0)
    listed = round(share * far)
    tail = config.attended + config.fold_every
    folding = shape.Hkv * S * LISTED / config.fold_every
    return [
        Launch("fold", ceil(folding / 4096), folding, folding),
        _route(shape, router, config.probes),
        _list(shape, router.buckets, config.probes, listed, tail + listed),
        *_attend(shape, S, config.attended + listed, False, tail + listed),
    ]


@dataclass(frozen=True)
class DenseKernel:
    """A kernel of MLX and into how many parts it cuts the keys; several parts take a second launch to merge."""

    name: str
    blocks: int

    @property
    def launches(self) -> int:
        return 1 if self.blocks == 1 else 2


def dense_kernel(letter: str, shape: Shape, S: int) -> DenseKernel:
    """What `mx.fast.scaled_dot_product_attention` runs for one query per head and ``S`` keys, as of MLX 0.32.

    Args:
        letter: the last one of the GPU's architecture: g (base and Pro chips), s (Max), d (Ultra).
    """
    G = shape.G
    if not (letter in "sd" and S >= 1024) and not (G > 1 and S >= 4096):
        return DenseKernel("sdpa_vector", 1)
    shared = G == 8 and shape.D in (64, 128) and S >= 8192
    name = "sdpa_vector_2pass_1_gqa" if shared else "sdpa_vector_2pass_1"
    return DenseKernel(name, {"g": _base, "s": _max, "d": _ultra}[letter](G, S))


def _base(G: int, S: int) -> int:
    return 64 if G >= 4 else 32


def _max(G: int, S: int) -> int:
    if S <= 1024 or G <= 4:
        return 64
    return next((blocks for limit, blocks in ((8192, 128), (32768, 256), (65536, 512)) if limit >= S), 1024)


def _ultra(G: int, S: int) -> int:
    if G <= 2:
        return 256 if S > 8192 else 128
    if G < 6 or S < 16384:
        return 128
    return 512 if S < 65536 else 1024


def dense_launches(kernel: DenseKernel, shape: Shape, S: int) -> list[Launch]:
    """MLX's dense attention over ``S`` keys. It is assumed to compute as fast as it reads."""
    cache = 2 * shape.Hkv * S * shape.D * ITEM
    ends = shape.Hq * shape.D * ITEM  # queries, or a result of each
    if kernel.launches == 1:
        return [_kernel(kernel.name, shape.Hq, cache + 2 * ends, cache * shape.G + 2 * ends)]
    results = kernel.blocks * ends
    # With a result of each block its largest score and sum; within a threadgroup each of them is a line of its own.
    once, each = (results + kernel.blocks * shape.Hq * 2 * size for size in (FLOAT, LINE))
    groups = shape.Hkv * kernel.blocks
    return [
        _kernel(kernel.name, groups, cache + ends + once, cache + results + each),
        _kernel("sdpa_vector_2pass_2", shape.Hq, once + ends, once + ends),
    ]


def _kernel(name: str, groups: int, once: float, each: float, cycles: int = 0) -> Launch:
    return Launch(name, groups, once + SCALARS, each + SCALARS * groups, cycles)


def _side(shape: Shape, S: int, launches: int) -> list[Launch]:
    """The new key's column, a line of memory for each component; building and growing spread over the steps."""
    column = 2 * LINE * shape.Hkv * shape.D
    copies = 2 * shape.Hkv * S * shape.D * ITEM * (1 / GROWTH + 1 / ANSWER)
    sums = 3 * shape.Hkv * shape.D * FLOAT
    append = Launch("append", ceil((column + copies) / 4096), column + copies, column + copies)
    return [append] + [Launch("sums", shape.Hkv, sums, sums)] * (launches - 1)


def _scores(shape: Shape, S: int, rank: int, weighted: bool) -> Launch:
    Hkv, D, G = shape.Hkv, shape.D, shape.G
    simdgroups = sparq.THREADS // LANES
    groups = Hkv * ceil(S / (sparq.KEYS * sparq.THREADS))
    rows = Hkv * (rank * _lines(S * ITEM) + S * G * FLOAT) + groups * G * 2 * FLOAT
    query = G * D * ITEM + weighted * D * FLOAT
    per_simdgroup = rank * (12 + 6 * G) + G * (2 * REDUCTION + sparq.KEYS * (EXP + 4) + 20)
    cycles = (simdgroups * per_simdgroup + D * D * 6 // LANES) // SCHEDULERS
    return _kernel("sparq_scores", groups, rows + Hkv * query, rows + groups * query, cycles)


def _coded_side(shape: Shape, S: int, bits: int, reallocate: bool) -> list[Launch]:
    """Coding a group, its building and growing spread over the steps."""
    coded = shape.Hkv * shape.D * (bits / 8 + 1 / 16)  # bytes a key
    row = shape.Hkv * shape.D * ITEM
    moved = row + coded + S * ((row + coded) / ANSWER + 2 * coded / GROWTH)
    sums = 3 * shape.Hkv * shape.D * FLOAT
    launches = CODED_SIDE_LAUNCHES[reallocate]
    return [Launch("append", ceil(moved / 4096), moved, moved)] + [Launch("sums", shape.Hkv, sums, sums)] * launches


def _narrow(config: SparQ, G: int) -> bool:
    """Whether scores are held in 8 bits."""
    return config.key_bits < 16 and config.group_reduce == "softmax" and not config.reallocates(G)


def _score_tiles(S: int, config: SparQ) -> int:
    if config.key_bits == 16:
        return ceil(S / (sparq.KEYS * sparq.THREADS))
    return ceil(S // GROUP * GROUP / sparq.CODE_TILE) + 1


def _coded_scores(shape: Shape, S: int, config: SparQ, weighted: bool) -> Launch:
    Hkv, D, G, rank = shape.Hkv, shape.D, shape.G, config.rank
    tiles, keys = _score_tiles(S, config), sparq.keys_per_thread(G, config.key_bits)
    coded, tail = S // GROUP, S % GROUP
    codes = rank * _lines(coded * 8 * config.key_bits)
    ranges = rank * 2 * _lines(coded * ITEM)
    rows = tail * min(rank * LINE, _lines(D * ITEM)) + (min(rank * LINE, D * FLOAT) if tail else 0)
    written = S * G * (1 if _narrow(config, G) else FLOAT) + tiles * G * 2 * FLOAT
    query = G * D * ITEM + weighted * D * FLOAT
    once = Hkv * (codes + ranges + rows + written + query)
    each = Hkv * (codes + (tiles - 1) * rank * 2 * LINE + rows + written + tiles * query)
    per_simdgroup = rank * (20 + 3 * keys + G * (3 + keys)) + G * (2 * REDUCTION + keys * (EXP + 8) + 20)
    cycles = (sparq.CODE_TILE // keys // LANES * per_simdgroup + D * D * 6 // LANES) // SCHEDULERS
    return _kernel("sparq_code_scores", Hkv * tiles, once, each, cycles)


def _selection(shape: Shape, S: int, config: SparQ) -> tuple[list[Launch], int]:
    """What finds the keys before attention to them, and the candidates that it leaves if attention finds the best."""
    Hkv, G = shape.Hkv, shape.G
    tiles, threads, slots = select.tiles_of(S, config.top_k)
    window = check_local_window(config.local_window, config.top_k)
    narrow = _narrow(config, G)
    statistics = _score_tiles(S, config) * G * 2 * FLOAT
    logits = max(S - window, 0) * G * (1 if narrow else FLOAT)
    once = Hkv * (logits + statistics + tiles * slots * 2 * FLOAT + G * 2 * FLOAT)
    each = once + Hkv * (tiles - 1) * statistics
    cycles = _select_cycles(S, tiles, threads, G * ((8 if narrow else 4) + EXP) + 10)
    launches = [_kernel("sparq_code_candidates" if narrow else "sparq_candidates", Hkv * tiles, once, each, cycles)]
    fused = attend.takes_candidates(shape.D, G, tiles * slots, config.top_k) and not config.reallocates(G)
    if fused and tiles > 1:
        return launches, tiles * slots
    while tiles > 1:
        left = tiles * slots
        tiles, threads, slots = select.tiles_of(left, config.top_k)
        moved = Hkv * (left * FLOAT + min(left, 32 * slots) * FLOAT + tiles * slots * 2 * FLOAT)
        cycles = _select_cycles(left, tiles, threads, 6)
        launches.append(_kernel("top_k_candidates", Hkv * tiles, moved, moved, cycles))
    return launches, 0


def _select_cycles(items: int, tiles: int, threads: int, load: int) -> int:
    """Load 16 items per lane, find the threshold in 16 rounds, write what reaches it."""
    blocks = ceil(items / threads / select.ITEMS) if tiles == 1 else 1
    rounds = 16 * (select.ITEMS * 5 + 4 * REDUCTION + 20)
    writing = select.ITEMS * (4 * REDUCTION + 14)
    reading = select.ITEMS * load * (18 if blocks > 1 else 1)  # an item beyond the registers is loaded in every round
    return threads // LANES * (blocks * (reading + writing) + blocks * rounds) // SCHEDULERS


def _route(shape: Shape, router: Network, probes: int) -> Launch:
    Hkv, D, G = shape.Hkv, shape.D, shape.G
    weights, C = router.weights(D), router.buckets
    layers = [C, router.hidden] if router.hidden else [C]
    width, threads = saap.shape_of(G, *layers)
    moved = weights * ITEM + G * D * ITEM + 2 * sum(layers) * G * FLOAT + 2 * probes * FLOAT
    multiplying = ceil(weights * (G + (2 * G + 2) / width) / LANES)
    softmax = G * (ceil(C / LANES) * (EXP + 8) + 2 * REDUCTION)
    cycles = (multiplying + softmax) // SCHEDULERS + _select_cycles(C, 1, threads, G * (4 + EXP) + 10)
    return _kernel("saap_route", Hkv, Hkv * moved, Hkv * moved, cycles)


def _list(shape: Shape, buckets: int, probes: int, listed: int, slots: int) -> Launch:
    tiles = ceil(slots / saap.LIST_TILE)
    sizes = probes * FLOAT + min(probes * LINE, _lines(buckets * FLOAT))
    once = sizes + listed * FLOAT + min(probes, listed) * LINE + slots * FLOAT
    simdgroups, entries = saap.LIST_THREADS // LANES, saap.LIST_TILE // saap.LIST_THREADS
    cycles = simdgroups * (entries * (30 + 8 * probes.bit_length()) + 3 * REDUCTION + 40) // SCHEDULERS
    return _kernel(
        "saap_indices", shape.Hkv * tiles, shape.Hkv * once, shape.Hkv * (once + (tiles - 1) * sizes), cycles
    )


def _attend(
    shape: Shape, S: int, N: int, reallocate: bool, slots: int | None = None, candidates: int = 0
) -> list[Launch]:
    """Attention over ``N`` keys, in lists with room for ``slots`` if that is more, or the best of ``candidates``."""
    Hkv, D, G = shape.Hkv, shape.D, shape.G
    splits = attend.splits_of(slots or N, Hkv)
    heads, simdgroups = attend.heads_of(D, G)
    size = ITEM if splits == 1 else FLOAT
    logits = reallocate * (N * min(LINE, S * G * FLOAT) + D * FLOAT)
    listed = candidates * FLOAT + min(candidates, 32 * N) * FLOAT if candidates else N * FLOAT
    rows_and_list = Hkv * (2 * N * D * ITEM + listed)
    moved = rows_and_list + Hkv * (logits + splits * G * (D * size + (1 + reallocate) * FLOAT))
    query = G * D * ITEM
    lanes = min(LANES, 1 << (D // 4 - 1).bit_length())
    chunks, rows = ceil(D / 4 / lanes), LANES // lanes
    tiles = ceil(N / splits / attend.TILE)
    passes = ceil(min(attend.TILE, N) / (simdgroups * rows))
    scoring = passes * (8 * chunks + heads * (chunks * 5 + 2 * lanes.bit_length() + 6))
    adding = passes * (8 * chunks + heads * chunks * 6)
    softmax = ceil(heads / simdgroups) * (4 * (EXP + 8) + 3 * REDUCTION)
    merging = heads * (chunks * 10 + D * simdgroups // (simdgroups * LANES) * 4)
    cycles = simdgroups * (tiles * (scoring + softmax + adding) + merging) // SCHEDULERS
    name = "attend_reallocate" if reallocate else "attend_candidates" if candidates else "attend_indices"
    if candidates:
        cycles += _select_cycles(candidates, 1, simdgroups * LANES, 6)
    parts = G // heads
    each = moved + (parts - 1) * rows_and_list + Hkv * splits * query
    launches = [_kernel(name, Hkv * splits * parts, moved + Hkv * query, each, cycles)]
    if splits > 1:
        merged = shape.Hq * (splits * (D * FLOAT + 2 * FLOAT) + D * ITEM)
        launches.append(_kernel("merge", shape.Hq, merged, merged))
    return launches


def _lines(size: int) -> int:
    return ceil(size / LINE) * LINE
