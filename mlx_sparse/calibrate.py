"""When sparse attention pays on this machine: looked up in the user's cache folder, measured there, or modelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from .cache.kv_cache import SparseKVCache
from .checks import ArtefactError
from .common import crossing, measured
from .common.crossing import Crossing, Noisy, Pairs, Point
from .methods import Method, Prefill, Step

SHORT = 1024  # keys: for a shorter context nobody waits for a measurement
LONGEST = 65_536  # keys that are timed
SECONDS = {"gpu": 3.0, "cpu": 10.0}  # that a measurement takes at most
FREE_SHARE = 0.25  # of the memory that is free, which it may use
WORKING_SET = 128 << 20  # bytes of K and V that a step goes through if it can: more than most last-level caches
LAYERS = (2, 8)  # that a step goes through, at least and at most
ROOM = 256  # rows behind the context for the tokens of the steps; mlx-lm makes room for as many
TILE = 1024  # random rows; longer contexts repeat them at other scales
PAIRS = (5, 15)  # steps of each kind at a length, at least and at most
DENSITIES = (0.125, 0.5)  # at which the blocks of a prompt are timed
PROMPT_TURNS = 3

MEASURED, MODELLED, GIVEN = "measured on this machine", "modelled", "given"


@dataclass(frozen=True)
class Threshold:
    """When a layer is sparse.

    Attributes:
        value: keys from which a step is sparse; of prompts, the density up to which it pays.
        how: one of `MEASURED`, `MODELLED` and `GIVEN`.
    """

    value: float
    how: str


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer, and what runs it: what a threshold holds for.

    Attributes:
        step: with one sequence's heads, nothing measured.
        L: tokens of a prompt's piece; 1 for decode steps.
    """

    backend: str
    step: Step
    dtype: mx.Dtype
    L: int = 1

    @property
    def sizes(self) -> dict[str, str | int]:
        """For `measured.question`."""
        step = self.step
        sizes = {"heads": step.heads, "G": step.G, "D": step.D, "buckets": step.buckets, "network": step.network}
        return {**sizes, "dtype": str(self.dtype), "L": self.L}

    def __str__(self) -> str:
        return f"{self.backend}, {self.step.heads * self.step.G} x {self.step.heads} heads of {self.step.D}"


class Calibration:
    """The thresholds of one user: those of this machine where they are known, or may be measured.

    Args:
        measures: whether what is not known is measured, when a context is long enough; otherwise the model decides.
        seconds: of a measurement; None for `SECONDS`.
        piece: tokens of a prompt that are processed at a time; mlx-lm's default if nobody says otherwise.
        say: is told before and after a measurement.
    """

    def __init__(
        self,
        *,
        measures: bool = False,
        seconds: float | None = None,
        piece: int = 2048,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.measures, self.piece, self._seconds, self._say = measures, piece, seconds, say
        self._known: dict[tuple[Method, Layer], Threshold] = {}
        self._asked: set[tuple[Method, Layer]] = set()  # what was measured, or tried, in this process
        self._lock = threading.Lock()

    def of(self, config: Method, layer: Layer, S: int = 0) -> Threshold:
        """When ``config`` is sparse in a layer.

        Args:
            S: keys of the context; from `worth_asking` on it is measured, if this may.
        """
        known = self._known.get((config, layer))
        if known is None or (self.measures and known.how == MODELLED and S >= self.worth_asking(config)):
            with self._lock:  # whoever comes second finds the answer
                known = self._find(config, layer, S)
        return known

    @staticmethod
    def worth_asking(config: Method) -> int:
        """The shortest context for which anybody waits: below, sparse attention hardly pays on any machine."""
        prompts = isinstance(config, Prefill)
        return max(SHORT, config.shortest_context() if prompts else 2 * config.attended)

    def _find(self, config: Method, layer: Layer, S: int) -> Threshold:
        asked = (config, layer)
        found = self._known.get(asked)
        if found is None:
            found = self._known[asked] = self._look_up(config, layer) or modelled(config, layer)
        may = self.measures and found.how == MODELLED and asked not in self._asked
        if may and config.measurable and S >= self.worth_asking(config):
            self._asked.add(asked)  # not again, if it fails
            found = self._known[asked] = self.measure(config, layer) or found
        return found

    def _look_up(self, config: Method, layer: Layer) -> Threshold | None:
        if not config.measurable:
            return None
        try:
            answer = measured.read(question(config, layer))
            return None if answer is None else read_answer(config, layer, answer)
        except (ArtefactError, ValueError) as error:
            self._say(f"a measurement is ignored, and replaced by the next: {error}")
            return None

    def timed(self, config: Method, layer: Layer) -> tuple[Point, ...]:
        """The lengths at which decode steps were timed on this machine before; none if that is not known."""
        if not config.measurable or isinstance(config, Prefill):
            return ()
        try:
            answer = measured.read(question(config, layer))
            return () if answer is None else Crossing.of(answer).points
        except (ArtefactError, ValueError):
            return ()  # `of` says so

    def measure(self, config: Method, layer: Layer) -> Threshold | None:
        """Time dense and sparse attention now, and keep the answer; None if this machine is too noisy, or too full."""
        seconds = self._seconds or SECONDS[device_kind()]
        self._say(f"measuring from where on {config.name} pays here ({layer}; up to {seconds:g} s, once) ...")
        start = time.monotonic()
        try:
            if isinstance(config, Prefill):
                answer = measure_prompt(config, layer, seconds)
            else:
                answer = measure_steps(config, layer, seconds)
        except (Noisy, MemoryError) as error:
            self._say(f"not measured: {error}. The documented model decides instead.")
            return None
        found = read_answer(config, layer, answer)
        self._say(f"{describe(config, found)}; it took {time.monotonic() - start:.1f} s.")
        try:
            measured.write(question(config, layer), answer)
        except OSError as error:
            self._say(f"the measurement cannot be kept: {error}. It holds for this run.")
        return found


def describe(config: Method, found: Threshold) -> str:
    """A threshold in words."""
    if isinstance(config, Prefill):
        share = f" where at most {found.value:.0%} of the blocks are kept" if found.value < 1 else ""
        return f"prompts sparse from {config.shortest_context():,} keys on{share} ({found.how})"
    return f"sparse from {found.value:,.0f} keys on ({found.how})"


def modelled(config: Method, layer: Layer) -> Threshold:
    """What holds where nothing was measured."""
    how = MODELLED if getattr(config, "dense_below", 0) == "auto" and not config.experiment else GIVEN
    if isinstance(config, Prefill):
        return Threshold(config.fullest(layer.backend), how)
    return Threshold(config.shortest_context(layer.step), how)


def read_answer(config: Method, layer: Layer, answer: Mapping[str, Any]) -> Threshold:
    """The threshold that a measurement tells.

    Raises:
        ValueError: it is none.
    """
    if isinstance(config, Prefill):
        share = answer.get("share")
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError("share is a number from 0 to 1")
        return Threshold(config.fullest(layer.backend, float(share)), MEASURED)
    found = Crossing.of(answer)
    step = layer.step
    # Where dense attention won as far as was looked, the model decides beyond.
    keys = found.keys or max(found.up_to + 1, config.shortest_context(step))
    return Threshold(config.shortest_context(replace(step, measured=keys)), MEASURED)


def question(config: Method, layer: Layer) -> measured.Question:
    """What is asked of this machine."""
    info = mx.device_info()
    device = f"{info.get('device_name', '')} {info.get('architecture', '')} {mx.default_device()}"
    settings = {name: value for name, value in config.parameters(layer.step.G).items() if value is not None}
    more = {"component_score": found} if (found := getattr(config, "component_score", None)) else {}
    text = ",".join(f"{name}={value}" for name, value in sorted((settings | more).items()))
    return measured.question(layer.backend, device, ("mlx",), **layer.sizes, method=config.name, settings=text)


def device_kind() -> str:
    """A key of `SECONDS`."""
    return "cpu" if mx.default_device().type == mx.cpu else "gpu"


def free_memory() -> int:
    """Bytes that nobody uses now, of what MLX's device can use."""
    free = int(psutil.virtual_memory().available)
    if device_kind() == "gpu":
        most = int(mx.device_info().get("max_recommended_working_set_size", free))
        free = min(free, most - mx.get_active_memory())
    return max(free, 0)


# Decode steps


def measure_steps(config: Method, layer: Layer, seconds: float) -> dict[str, Any]:
    """Time decode steps at several lengths.

    Raises:
        Noisy: steps took too different times.
        MemoryError: too little is free for the shortest context.
    """
    step = layer.step
    row = 3 * step.heads * step.D * step.itemsize  # K, V and what is kept beside them, at most as much as K
    most = int(FREE_SHARE * free_memory()) // (row * LAYERS[0]) - ROOM
    shortest = Calibration.worth_asking(config)
    if most < shortest:
        raise MemoryError(f"{most * row * LAYERS[0] / 1e6:.0f} MB of free memory are too few")
    mx.synchronize()
    found = crossing.find(
        partial(step_times, config, layer, seconds=seconds / 8),
        shortest=shortest,
        longest=min(most, LONGEST),
        first=config.shortest_context(step),
        seconds=seconds,
    )
    return found.as_dict()


def step_times(config: Method, layer: Layer, S: int, seconds: float) -> Pairs:
    """Seconds of dense and sparse decode steps over ``S`` keys, in turns, as a model takes them.

    A step goes through several layers in one evaluation. Each writes a row into a cache of its own, and what a layer
    returns is the next one's query.
    """
    heads, G, D = layer.step.heads, layer.step.G, layer.step.D
    sides = [_caches(layer, S) for _ in ("dense", "sparse")]
    query, row = (_rows(layer, n, 1) for n in (heads * G, heads))
    scale = D**-0.5

    def dense(cache: SparseKVCache, out: mx.array) -> mx.array:
        keys, values, _ = cache.rows("ops")
        return mx.fast.scaled_dot_product_attention(out, keys, values, scale=scale, mask=None)

    def sparse(cache: SparseKVCache, out: mx.array) -> mx.array:
        return cache.attend(out, config, scale=scale, backend=layer.backend)[0]

    def timed(attend: Callable[[SparseKVCache, mx.array], mx.array], caches: list[SparseKVCache]) -> float:
        start = time.perf_counter()
        out = query
        for cache in caches:
            cache.update_and_fetch(row, row)
            out = attend(cache, out)
        mx.eval(out)
        return time.perf_counter() - start

    turns = [(dense, sides[0]), (sparse, sides[1])]
    for attend, caches in turns:  # what is compiled, copied or touched for the first time
        timed(attend, caches)
        timed(attend, caches)
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < PAIRS[0] or (len(pairs) < PAIRS[1] and time.perf_counter() < end):
        first = len(pairs) % 2  # nobody is always first
        took = {which: timed(*turns[which]) / len(sides[0]) for which in (first, 1 - first)}
        pairs.append((took[0], took[1]))
    return pairs


def _caches(layer: Layer, S: int) -> list[SparseKVCache]:
    """A cache of ``S`` random rows for each layer, with room for more."""
    step = layer.step
    size = 2 * step.heads * S * step.D * step.itemsize
    fit = int(FREE_SHARE * free_memory()) // (4 * size)  # both sides, and what is kept beside them
    made = []
    for n in range(max(LAYERS[0], min(LAYERS[1], WORKING_SET // size, fit))):
        cache = SparseKVCache()  # type: ignore[no-untyped-call]
        cache.keys, cache.values = (_rows(layer, step.heads, S + ROOM, 2 * n + side) for side in range(2))
        cache.offset = S
        mx.eval(cache.keys, cache.values)
        made.append(cache)
    return made


def _rows(layer: Layer, heads: int, S: int, seed: int = 0) -> mx.array:
    """``(1, heads, S, D)``, the same for the same sizes; the user's random numbers stay as they are."""
    D = layer.step.D
    tiles = -(-S // TILE)
    some = mx.random.normal((1, heads, 1, min(S, TILE), D), dtype=layer.dtype, key=mx.random.key(seed))
    scales = 1 + mx.arange(tiles)[:, None, None] / (4 * tiles)  # no two rows are the same
    rows = (some * scales.astype(layer.dtype)).reshape(1, heads, -1, D)
    return mx.contiguous(rows[:, :, :S])


# Prompts


def measure_prompt(config: Prefill, layer: Layer, seconds: float) -> dict[str, Any]:
    """Time a piece of a prompt: dense attention, the choice of blocks, and attending to some and to many of them.

    The time of attending is taken to grow evenly with the blocks. On a CPU one head stands for all.

    Raises:
        Noisy: a piece took too different times.
        MemoryError: too little is free.
    """
    step, L = layer.step, layer.L
    heads, G = (1, 1) if device_kind() == "cpu" else (step.heads, step.G)
    S = max(config.shortest_context(), 2 * L)
    S += -S % config.block_size
    needed = 12 * L * S if device_kind() == "cpu" else 8 * heads * G * (S + L) * step.D  # there the scores of a head
    if needed > FREE_SHARE * free_memory():
        raise MemoryError(f"{FREE_SHARE * free_memory() / 1e6:.0f} MB of free memory are too few")
    queries = _rows(layer, heads * G, L)
    keys, values = (_rows(layer, heads, S, side + 1) for side in range(2))
    layout = config.layout(L, S)
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, S
    scale = step.D**-0.5
    runs: list[Callable[[], Any]] = [
        lambda: mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal"),
        lambda: cache.select_prompt(queries, config, scale=scale, backend=layer.backend, fullest=1.0),
    ]
    listed = [_some_blocks(layout, share, heads * G) for share in DENSITIES]
    runs += [partial(_attend, cache, queries, config, layer.backend, blocks) for blocks in listed]
    taken: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(taken) < 1 + PROMPT_TURNS and (len(taken) < 2 or time.monotonic() < end):
        taken.append([_seconds(run) for run in runs])
    kept = [_count(blocks) / (layout.causal_pairs * heads * G) for blocks in listed]
    turns = taken[1:]  # the first compiles
    ratios = [dense / few for dense, _, few, _ in turns]
    if len(ratios) > 1:
        low, middle, high = quantiles(ratios, method="inclusive")
        if high - low > crossing.SPREAD * middle:
            raise Noisy(f"times of a prompt vary from {low:.2f} to {high:.2f} times")
    dense, select, few, many = (median(column) for column in zip(*turns, strict=True))
    slope = (many - few) / (kept[1] - kept[0])
    left = dense / crossing.WORTH - select - few
    share = min(max(kept[0] + left / slope, 0.0), 1.0) if slope > 0 else float(left > 0)
    times = {"dense": dense, "select": select, "few": few, "many": many}
    return {"share": round(share, 3), "S": S, "L": L, "seconds": times, "densities": kept}


def _attend(cache: SparseKVCache, queries: mx.array, config: Prefill, backend: str, blocks: mx.array) -> mx.array:
    return cache.attend_prompt(queries, config, scale=queries.shape[-1] ** -0.5, backend=backend, blocks=blocks)[0]


def _some_blocks(layout: Any, share: float, heads: int) -> mx.array:
    """``(1, heads, R, N)`` blocks: of each row block the last, the first, and evenly spaced ones between them."""
    rows = []
    for r in range(layout.row_blocks):
        causal = layout.first_block + r + 1
        count = max(1, round(share * causal))
        rows.append(sorted({causal - 1 - i * causal // count for i in range(count)}))
    width = max(map(len, rows))
    lists = mx.array([row + [-1] * (width - len(row)) for row in rows], dtype=mx.int32)
    return mx.contiguous(mx.broadcast_to(lists, (1, heads, *lists.shape)))


def _count(blocks: mx.array) -> int:
    found: Any = (blocks >= 0).sum().item()
    return int(found)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - start
