"""Time dense and sparse attention on layers with random keys and values, and search for the crossover length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
import psutil  # type: ignore[import-untyped]
from mlx_lm.models.base import scaled_dot_product_attention

from ..cache.kv_cache import SparseKVCache, SparseQuantizedKVCache
from ..cache.sparse_cache import SparseCache
from ..core import registry
from ..core.base import Method, Prefill, Step
from ..core.blocks.layout import Layout

MIN_SPEEDUP = 1.05  # dense over sparse time at which sparse attention wins; above 1 because of noise
PRECISION = 1.1  # the search ends if the shortest win is at most this factor above the longest loss
TIMINGS = 4  # maximum number of timings of a length, if it is unclear which side is faster
CONFIDENCE = 0.9  # confidence level of the interval around the median ratio of a length
PAIRS = (5, 15)  # minimum and maximum number of dense and sparse steps of one timing of a length
PROMPT_TURNS = 3
DENSITIES = (0.125, 0.5)  # densities at which a prefill chunk is timed
ROOM = 256  # free rows of a cache for the keys of the timed steps, as in mlx-lm's caches
TILE = 1024  # random rows; longer contexts repeat them with other scales
NEEDED = 4  # memory in units of K and V of a layer: caches of dense and sparse steps, and auxiliary cache state
FREE_SHARE = 0.25  # share of the free memory that a measurement may use
WORKING_SET = 128 << 20  # bytes of K and V that a timed step should read: more than most last-level caches
LEAST_LAYERS = 2  # per timed step
MOST_LAYERS = {"cpu": 8, "gpu": 32}  # per timed step; more layers reduce the share of the wait for a GPU

Pairs = Sequence[tuple[float, float]]  # seconds of a dense and a sparse step that ran one after the other


@dataclass(frozen=True)
class Layer:
    """Backend, sizes and dtype of a layer. Equal layers share a threshold.

    Attributes:
        step: sizes of a decode step. Its attribute ``measured`` is None.
        L: number of tokens in a prefill chunk; 1 for decode steps.
    """

    backend: str
    step: Step
    dtype: mx.Dtype
    L: int = 1

    @property
    def row(self) -> int:
        """Bytes of one key row and one value row, summed over all KV heads."""
        return self.step.heads * self.step.pair_bytes

    def __str__(self) -> str:
        return f"{self.backend}, {self.step.heads * self.step.G} x {self.step.heads} heads of {self.step.D}"


def time_steps(config: Method, layer: Layer, S: int, seconds: float) -> Pairs:
    """Time dense and sparse decode steps over ``S`` keys alternately, for about ``seconds``.

    Return pairs of a dense and a sparse time in seconds per layer. A timed step evaluates several layers together.
    Each layer writes a row into its own cache, and waits for the output of the previous layer.
    """
    fit = int(FREE_SHARE * free_memory()) // (NEEDED * layer.row * S)
    layers = max(LEAST_LAYERS, min(MOST_LAYERS[device_kind()], WORKING_SET // (layer.row * S), fit))
    heads, G = layer.step.heads, layer.step.G
    sides = [[_cache(layer, S, n) for n in range(layers)] for _ in ("dense", "sparse")]
    query = _rows(layer, heads * G, 1)
    key, value = _rows(layer, heads, 1), _rows(layer, heads, 1, D=layer.step.Dv)
    scale = layer.step.D**-0.5
    # Attention over latents adds positional scores to the logits.
    scores = mx.random.normal((1, heads * G, 1, S + ROOM), dtype=layer.dtype) if layer.step.latent else None

    def bias_of(cache: SparseCache) -> mx.array | None:
        return None if scores is None else scores[..., : cache.length]

    def sparse(cache: SparseCache, out: mx.array) -> mx.array:
        return cache.attend(out, config, scale=scale, backend=layer.backend, bias=bias_of(cache))[0]

    def dense(cache: SparseCache, out: mx.array) -> mx.array:
        return _dense(layer, cache, out, bias_of(cache))

    def step(attend: Callable[[Any, mx.array], mx.array], caches: list[SparseCache]) -> mx.array:
        out = query
        for cache in caches:
            cache.update_and_fetch(key, value)
            out = attend(cache, mx.depends(query, out))
        return out

    steps = partial(step, dense, sides[0]), partial(step, sparse, sides[1])
    for run in 2 * steps:  # compile, and touch the memory for the first time
        seconds_of(run)
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < PAIRS[0] or (len(pairs) < PAIRS[1] and time.perf_counter() < end):
        first = len(pairs) % 2  # dense and sparse steps alternate in running first
        took = {which: seconds_of(steps[which]) / layers for which in (first, 1 - first)}
        pairs.append((took[0], took[1]))
    return pairs


def _dense(layer: Layer, cache: Any, queries: mx.array, bias: mx.array | None = None) -> mx.array:
    """Run the dense attention of an enabled model, which uses native kernels if its sparse attention does."""
    scale, mask = layer.step.D**-0.5, cast(Any, bias if layer.L == 1 else "causal")
    if layer.backend == "cpu" and bias is None:
        keys, values, length = cache.rows("cpu")
        return cast(mx.array, registry.load("attend_all", "cpu")(queries, keys, values, scale=scale, **length)[0])
    keys, values = cache.keys_and_values() if layer.step.packed else cache.rows("ops")[:2]
    # queries[:] is a new array, because mlx-lm scales the queries of a quantized cache in place.
    return scaled_dot_product_attention(queries[:], keys, values, cache=cache, scale=scale, mask=mask)


def device_kind() -> str:
    """Return "cpu" or "gpu", the type of MLX's default device."""
    return "cpu" if mx.default_device().type == mx.cpu else "gpu"


def free_memory() -> int:
    """Return how many bytes of memory are free on MLX's default device."""
    free = int(psutil.virtual_memory().available)
    if device_kind() == "gpu":
        most = int(mx.device_info().get("max_recommended_working_set_size", free))
        free = min(free, most - mx.get_active_memory())
    return max(free, 0)


def most_keys(layer: Layer, shortest: int) -> int:
    """Return how many keys of a context can be timed in the free memory. If ``shortest`` do not fit, raise an error."""
    most = int(FREE_SHARE * free_memory()) // (LEAST_LAYERS * NEEDED * layer.row)
    if most < shortest:
        raise _not_enough_memory()
    return most


def _not_enough_memory() -> MemoryError:
    return MemoryError(f"{FREE_SHARE * free_memory() / 1e6:.0f} MB of free memory are too few")


def _cache(layer: Layer, S: int, n: int) -> Any:
    """Return a KV cache with ``S`` random rows and `ROOM` free rows. Each ``n`` gives different rows."""
    cache: Any = SparseKVCache()  # type: ignore[no-untyped-call]
    step = layer.step
    rows: Any = (_rows(layer, step.heads, S + ROOM, 2 * n + side, D) for side, D in enumerate((step.D, step.Dv)))
    if layer.step.packed is not None:
        bits, group_size = layer.step.packed
        cache = SparseQuantizedKVCache(group_size=group_size, bits=bits)
        rows = (mx.quantize(array, group_size=group_size, bits=bits) for array in rows)
    cache.keys, cache.values = rows
    cache.offset, cache.latent = S, layer.step.latent
    mx.eval(cache.keys, cache.values)
    return cache


def _rows(layer: Layer, heads: int, S: int, seed: int = 0, D: int = 0) -> mx.array:
    """Return random rows ``(1, heads, S, D)`` from ``seed``. MLX's global random state does not change.

    If ``D`` is 0, it is the head dim of the keys.
    """
    D = D or layer.step.D
    tiles = -(-S // TILE)
    some = mx.random.normal((1, heads, 1, min(S, TILE), D), dtype=layer.dtype, key=mx.random.key(seed))
    scales = 1 + mx.arange(tiles)[:, None, None] / (4 * tiles)  # no two rows are the same
    rows = (some * scales.astype(layer.dtype)).reshape(1, heads, -1, D)
    return mx.contiguous(rows[:, :, :S])


def time_prefill(config: Prefill, layer: Layer, seconds: float) -> dict[str, object]:
    """Time dense attention, the selection of blocks, and attention to few and to many blocks in a prefill chunk.

    Return a dict with the lengths "S" and "L" and two estimates of the largest density at which sparse attention is
    faster. "share" is the lower quartile over the turns, and "best" is the upper quartile. The time of attention is
    assumed to be linear in the number of blocks. On a CPU, one head represents all heads.
    """
    step, L = layer.step, layer.L
    heads, G = (1, 1) if device_kind() == "cpu" else (step.heads, step.G)
    S = max(config.shortest_context(), 2 * L)
    S += -S % config.block_size
    # On a CPU, array operations store the scores of a head.
    needed = 12 * L * S if device_kind() == "cpu" else 8 * heads * G * (S + L) * step.D
    if needed > FREE_SHARE * free_memory():
        raise _not_enough_memory()
    queries = _rows(layer, heads * G, L)
    keys, values = _rows(layer, heads, S, 1), _rows(layer, heads, S, 2, step.Dv)
    layout = config.layout(L, S)
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, S
    scale = step.D**-0.5

    def attend(blocks: mx.array) -> mx.array:
        return cache.attend_prefill(queries, config, scale=scale, backend=layer.backend, blocks=blocks)[0]

    listed = [_some_blocks(layout, share, heads * G) for share in DENSITIES]
    runs: list[Callable[[], object]] = [
        partial(_dense, layer, cache, queries),
        lambda: cache.select_prefill(queries, config, scale=scale, backend=layer.backend, max_density=1.0),
        *(partial(attend, blocks) for blocks in listed),
    ]
    kept = [np.count_nonzero(np.array(blocks) >= 0) / (layout.causal_pairs * heads * G) for blocks in listed]
    turns: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(turns) < 1 + PROMPT_TURNS and (len(turns) < 3 or time.monotonic() < end):
        turns.append([seconds_of(run) for run in runs])
    low, _, high = quantiles([_share(kept, *turn) for turn in turns[1:]], method="inclusive")  # the first compiles
    return {"share": round(low, 3), "best": round(high, 3), "S": S, "L": L}


def _share(kept: Sequence[float], dense: float, select: float, few: float, many: float) -> float:
    """Compute the largest density at which sparse attention is faster than dense attention.

    The times are in seconds. ``kept`` contains the densities of the few and of the many blocks.
    """
    slope = (many - few) / (kept[1] - kept[0])
    left = dense / MIN_SPEEDUP - select - few
    return min(max(kept[0] + left / slope, 0.0), 1.0) if slope > 0 else float(left > 0)


def _some_blocks(layout: Layout, share: float, heads: int) -> mx.array:
    """Return lists ``(1, heads, R, N)`` of evenly spaced key blocks, padded with -1.

    Each row block lists the share ``share`` of its causal key blocks, and always the last causal key block.
    """
    rows = []
    for r in range(layout.row_blocks):
        causal = layout.first_block + r + 1
        count = max(1, round(share * causal))
        rows.append(sorted({causal - 1 - i * causal // count for i in range(count)}))
    width = max(map(len, rows))
    lists = mx.array([row + [-1] * (width - len(row)) for row in rows], dtype=mx.int32)
    return mx.contiguous(mx.broadcast_to(lists, (1, heads, *lists.shape)))


def seconds_of(run: Callable[[], object]) -> float:
    """Call ``run``, evaluate its result, and return the time in seconds."""
    start = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - start


class Point(NamedTuple):
    """Median ``ratio`` of dense to sparse time at ``S`` keys, and its confidence interval from ``low`` to ``high``."""

    S: int
    low: float
    ratio: float
    high: float

    @classmethod
    def of(cls, S: int, pairs: Pairs) -> Point:
        """Compute the median ratio of ``pairs`` and its distribution-free confidence interval at level `CONFIDENCE`.

        The number of ratios below the true median has a binomial distribution with probability 1/2. Therefore, two
        sorted ratios at the same distance from both ends bound the median. More pairs give a narrower interval.
        """
        ratios = sorted(dense / sparse for dense, sparse in pairs)
        n, rank, tail = len(ratios), 0, 0.0
        while rank < (n - 1) // 2 and 2 * (tail := tail + math.comb(n, rank) / 2**n) <= 1 - CONFIDENCE:
            rank += 1
        rank = max(rank - 1, 0)
        return cls(S, ratios[rank], median(ratios), ratios[n - 1 - rank])


def crossover(points: Sequence[Point]) -> tuple[int | None, int | None]:
    """Return the shortest length in keys at which sparse attention may win, and the shortest at which it clearly wins.

    Sparse attention may win if the confidence interval of the ratio ends at `MIN_SPEEDUP` or above. It clearly wins if
    the interval begins at `MIN_SPEEDUP` or above. All longer measured lengths must meet the same condition. If no
    length qualifies, the result is None.
    """

    def shortest(wins: Callable[[Point], bool]) -> int | None:
        slower = max((point.S for point in points if not wins(point)), default=0)
        return next((point.S for point in points if point.S > slower), None)

    return shortest(lambda point: point.high >= MIN_SPEEDUP), shortest(lambda point: point.low >= MIN_SPEEDUP)


def find(measure: Callable[[int], Pairs], *, shortest: int, longest: int, first: int, seconds: float) -> list[Point]:
    """Find the crossover length of decode steps by bisection, and return a `Point` for each timed length.

    The search ends when the crossover length is known to within 10 %, or before a length that would exceed ``seconds``.
    It starts at ``first``, doubles or halves the length until sparse attention has won once and lost once, and then
    bisects. A length is timed again, up to `TIMINGS` times, while its confidence interval contains `MIN_SPEEDUP`.
    """
    end = time.monotonic() + seconds
    points: dict[int, Point] = {}
    won, lost = math.inf, 0  # the shortest length that won so far, and the longest that lost
    S = min(max(first, shortest), longest)
    while True:
        before, last = time.monotonic(), S
        pairs: list[tuple[float, float]] = []
        for timing in range(TIMINGS):
            pairs += measure(S)
            point = points[S] = Point.of(S, pairs)
            # The place of the arrays in memory changes the ratio, so a length needs two timings to win.
            won_twice = timing > 0 and point.low >= MIN_SPEEDUP
            if won_twice or point.high < MIN_SPEEDUP or time.monotonic() > end:
                break
        if point.low >= MIN_SPEEDUP:
            won = S
        else:
            lost = S
        if won == math.inf:
            S = min(2 * lost, longest)
        elif not lost:
            S = max(int(won) // 2, shortest)
        elif won > PRECISION * lost:
            S = round(math.sqrt(won * lost))
        now = time.monotonic()
        if S in points or now + (now - before) * S / last > end:
            return [points[S] for S in sorted(points)]
