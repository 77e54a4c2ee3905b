"""Read, measure or estimate the crossover length of sparse attention on this machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import psutil  # type: ignore[import-untyped]
from mlx_lm.models.base import scaled_dot_product_attention

from . import __version__
from .blas import in_use
from .cache.kv_cache import SparseKVCache, SparseQuantizedKVCache
from .cache.sparse_cache import SparseCache
from .checks import ArtefactError
from .core.base import NEVER, Method, Prefill, Step
from .core.blocks.layout import Layout
from .files import cache_directory, read_regular, replace_file

SECONDS = {"gpu": 3.0, "cpu": 10.0}  # longest time of a measurement
SHORT = 1024  # keys; a shorter context does not trigger a measurement
LONGEST = 65_536  # keys that are timed
MIN_SPEEDUP = 1.05  # dense over sparse time at which sparse attention wins; above 1 because of noise
PRECISION = 1.1  # the search ends if the shortest win is at most this factor above the longest loss
BUSY, BUSY_SHARE = 1.5, 0.25  # a larger spread of the crossover (factor) or density (difference): busy machine
PAIRS = (5, 15)  # minimum and maximum number of dense and sparse steps of one timing of a length
TIMINGS = 4  # maximum number of timings of a length, if it is unclear which side is faster
CONFIDENCE = 0.9  # confidence level of the interval around the median ratio of a length
PROMPT_TURNS = 3
DENSITIES = (0.125, 0.5)  # densities at which a prefill chunk is timed
ROOM = 256  # free rows of a cache for the keys of the timed steps, as in mlx-lm's caches
TILE = 1024  # random rows; longer contexts repeat them with other scales
NEEDED = 4  # memory in units of K and V of a layer: caches of dense and sparse steps, and auxiliary cache state
FREE_SHARE = 0.25  # share of the free memory that a measurement may use
WORKING_SET = 128 << 20  # bytes of K and V that a timed step should read: more than most last-level caches
LEAST_LAYERS = 2  # per timed step
MOST_LAYERS = {"cpu": 8, "gpu": 32}  # per timed step; more layers reduce the share of the wait for a GPU

MEASURED, MODELED, GIVEN = "measured on this machine", "modeled", "given"

Pairs = Sequence[tuple[float, float]]  # seconds of a dense and a sparse step that ran one after the other


@dataclass(frozen=True)
class Threshold:
    """Threshold between dense and sparse attention in a layer.

    Attributes:
        value: crossover length in keys for decode steps; for prefill, the largest density at which sparse attention
            is faster.
        how: source of ``value``: `MEASURED`, `MODELED` or `GIVEN`.
        best: optimistic end of the measured range; None if there is no range. ``value`` is the conservative end.
        busy: True if the range is so wide that the next process measures again.
    """

    value: float
    how: str
    best: float | None = None
    busy: bool = False


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
        return 2 * self.step.heads * self.step.row_bytes

    def __str__(self) -> str:
        return f"{self.backend}, {self.step.heads * self.step.G} x {self.step.heads} heads of {self.step.D}"


def describe(config: Method, found: Threshold) -> str:
    """Describe the threshold ``found`` of the method ``config`` in one line, for reports."""
    how, value, best = found.how, found.value, found.best
    if best is not None:
        spread = f"{value:.0%} to {best:.0%}" if isinstance(config, Prefill) else f"{best:,.0f} to {value:,.0f} keys"
        how += f", spread {spread}"
    if found.busy:
        how += "; the machine was busy, so the next run measures again"
    if not isinstance(config, Prefill):
        return f"never sparse ({how})" if value >= NEVER else f"sparse at {value:,.0f} keys and longer ({how})"
    if value <= 0:
        return f"prefill never sparse ({how})"
    share = f" if at most {value:.0%} of the blocks are selected" if value < 1 else ""
    return f"prefill sparse at {config.shortest_context():,} keys and longer{share} ({how})"


# Files: one JSON object per measurement


MeasurementKey = dict[str, str | int]
FORMAT = 3
MAX_BYTES = 1 << 16
WRITING = threading.Lock()  # held while a file is written, so that a program can end between two files


def folder() -> Path:
    """Return the folder of the calibration files."""
    return cache_directory() / "calibration"


def path_of(key: MeasurementKey) -> Path:
    """Return the path of the calibration file for the measurement that has the key ``key``."""
    return folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"


def read_measurement(key: MeasurementKey) -> dict[str, object] | None:
    """Read the stored measurement that has the key ``key``, or return None if there is no file."""
    path = path_of(key)
    try:
        found = json.loads(read_regular(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: expected a measurement, got {str(error)[:80]}.") from None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("result"), dict):
        raise ArtefactError(f"{path}: expected a measurement of this machine and version, got something else.")
    result: dict[str, object] = found["result"]
    return result


def differing(key: MeasurementKey) -> list[str]:
    """Return the fields in which ``key`` differs from the most similar stored key of the same method and layer shape.

    If there is no such key, return an empty list.
    """
    found: list[list[str]] = []
    for path in folder().glob("*.json"):
        try:
            stored = json.loads(read_regular(path, MAX_BYTES))["key"]
            if all(stored[name] == key[name] for name in ("method", "heads", "G", "D")):
                found.append(sorted(name for name in key | stored if key.get(name) != stored.get(name)))
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
            continue  # `read_measurement` reports damaged files
    return min(found, key=len, default=[])


def write_measurement(key: MeasurementKey, result: Mapping[str, object]) -> None:
    """Store ``result`` in the calibration file for ``key``."""
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"key": key, "result": result}, indent=1)
    with WRITING:
        replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))


def _is_number(value: Any) -> bool:
    """Return True if ``value`` is a positive number below `NEVER`. Larger integers may not fit into a float."""
    return type(value) in (int, float) and 0 < value < NEVER


# The search


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


def read_points(result: Mapping[str, Any]) -> list[Point]:
    """Validate the timed lengths in a calibration file, and return one `Point` per length in ascending order."""
    found: list[Any] = result.get("points") or [None]
    for point in found if isinstance(found, list) else [None]:
        if (
            not isinstance(point, list)
            or len(point) != 4
            or not all(map(_is_number, point))
            or type(point[0]) is not int
        ):
            raise ValueError("expected lengths with three ratios each")
    return sorted(Point(*point) for point in found)


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


class Calibration:
    """Thresholds of the layers on this machine, measured or estimated (docs/methods.md).

    Args:
        measures: if True, measure a missing threshold once a context is long enough; if False, estimate the threshold.
        seconds: time limit of a measurement in seconds; None means `SECONDS`.
        chunk: number of tokens in a prefill chunk. The default is mlx-lm's default.
        progress: callback that receives a line of text before and after each measurement.
    """

    longest = LONGEST

    def __init__(
        self,
        *,
        measures: bool = False,
        seconds: float | None = None,
        chunk: int = 2048,
        progress: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.measures, self.chunk, self._seconds, self._progress = measures, chunk, seconds, progress
        self._known: dict[tuple[Method, Layer], Threshold] = {}
        self._tried: set[tuple[Method, Layer]] = set()  # measured in this process, or failed

    def threshold(self, config: Method, layer: Layer, S: int = 0) -> Threshold:
        """Return the threshold of ``config`` for ``layer``.

        If `needs_measurement` is True and the context length ``S`` is large enough, measure the threshold first.
        """
        key = config, layer
        if key not in self._known:
            kept = self.look_up(config, layer) if config.measurable else None
            self._known[key] = kept or self.modeled(config, layer)
        if S >= self.shortest_measured(config) and self.needs_measurement(config, layer):
            self._tried.add(key)  # set first, so that a failed measurement is not repeated
            self._known[key] = self.measure(config, layer) or self._known[key]
        return self._known[key]

    def needs_measurement(self, config: Method, layer: Layer) -> bool:
        """Return True if the layer will be measured as soon as a context is long enough."""
        if not self.measures or not config.measurable or (config, layer) in self._tried:
            return False
        found = self.threshold(config, layer)
        return found.how == MODELED or found.busy

    @staticmethod
    def shortest_measured(config: Method) -> int:
        """Return the shortest context in keys that is measured. In shorter contexts, sparse attention rarely wins."""
        if isinstance(config, Prefill):
            return max(SHORT, config.shortest_context())
        return max(SHORT, 2 * config.attended)

    @staticmethod
    def modeled(config: Method, layer: Layer) -> Threshold:
        """Return the threshold that ``config`` sets or estimates. Nothing is measured."""
        how = MODELED if getattr(config, "dense_below", 0) == "auto" and not config.experiment else GIVEN
        if isinstance(config, Prefill):
            return Threshold(config.max_density(layer.backend), how)
        return Threshold(config.shortest_context(layer.step), how)

    def look_up(self, config: Method, layer: Layer) -> Threshold | None:
        """Return the threshold from a stored measurement, or None if there is no valid measurement."""
        try:
            result = read_measurement(measurement_key(config, layer))
            return None if result is None else self.read(config, layer, result)
        except (ArtefactError, ValueError) as error:
            self._progress(f"a measurement is ignored, and replaced by the next: {error}")
            return None

    def read(self, config: Method, layer: Layer, result: Mapping[str, Any]) -> Threshold:
        """Compute the threshold from the content of a calibration file."""
        if not _is_number(result.get("time")):
            raise ValueError("expected the time of the measurement")
        if isinstance(config, Prefill):
            low, high = result.get("share", -1), result.get("best", -1)
            if not all(type(share) in (int, float) and 0 <= share <= 1 for share in (low, high)):
                raise ValueError("expected shares from 0 to 1")
            value, best, busy = config.max_density(layer.backend, low), high, high - low > BUSY_SHARE
            return Threshold(value, MEASURED, best if best != value else None, busy)
        points = read_points(result)
        possible, won = crossover(points)
        # If dense attention won at the longest length, the model decides for longer contexts.
        keys = won or max(points[-1].S + 1, int(self.modeled(config, layer).value))
        value = config.shortest_context(replace(layer.step, measured=keys))
        best = None if possible is None else config.shortest_context(replace(layer.step, measured=possible))
        busy = possible is not None and keys > BUSY * possible
        return Threshold(value, MEASURED, best if best != value else None, busy)

    @staticmethod
    def timed(config: Method, layer: Layer) -> list[Point]:
        """Return a `Point` for each length at which decode steps were timed on this machine, or an empty list."""
        try:
            return read_points(read_measurement(measurement_key(config, layer)) or {})
        except (ArtefactError, ValueError):
            return []  # `look_up` reports damaged files

    def measure(self, config: Method, layer: Layer) -> Threshold | None:
        """Time dense and sparse attention, store the result and return the threshold.

        Return None if not enough memory is free.
        """
        seconds = self._seconds or SECONDS[device_kind()]
        limit = f"{layer}; up to {seconds:g} s, once"
        self._progress(f"calibrating: finding the context length at which {config.name} is faster ({limit}) ...")
        start = time.monotonic()
        mx.synchronize()
        try:
            if isinstance(config, Prefill):
                result = measure_prefill(config, layer, seconds)
            else:
                result = self._measure_steps(config, layer, seconds)
        except MemoryError as error:
            self._progress(f"not measured: {error}. The documented model decides instead.")
            return None
        finally:
            mx.clear_cache()  # free the memory of the measurement
        result["time"] = round(time.time())
        found = self.read(config, layer, json.loads(json.dumps(result)))
        self._progress(f"{describe(config, found)}; it took {time.monotonic() - start:.1f} s.")
        try:
            write_measurement(measurement_key(config, layer), result)
        except OSError as error:
            self._progress(f"the measurement cannot be saved: {error}. It is used for this run only.")
        return found

    def _measure_steps(self, config: Method, layer: Layer, seconds: float) -> dict[str, object]:
        shortest, first = self.shortest_measured(config), int(self.modeled(config, layer).value)
        most = int(FREE_SHARE * free_memory()) // (LEAST_LAYERS * NEEDED * layer.row)
        if most < shortest:
            raise _not_enough_memory()
        longest = max(min(most, self.longest), shortest)
        measure = partial(self.pairs, config, layer, seconds=seconds / 10)
        points = find(measure, shortest=shortest, longest=longest, first=first, seconds=seconds)
        return {"points": points}

    def pairs(self, config: Method, layer: Layer, S: int, seconds: float) -> Pairs:
        """Time dense and sparse decode steps over ``S`` keys alternately, for about ``seconds``.

        Return pairs of a dense and a sparse time in seconds per layer. A timed step evaluates several layers together.
        Each layer writes a row into its own cache, and the output of a layer is the query of the next layer.
        """
        fit = int(FREE_SHARE * free_memory()) // (NEEDED * layer.row * S)
        layers = max(LEAST_LAYERS, min(MOST_LAYERS[device_kind()], WORKING_SET // (layer.row * S), fit))
        heads, G = layer.step.heads, layer.step.G
        sides = [[_cache(layer, S, n) for n in range(layers)] for _ in ("dense", "sparse")]
        query, row = (_rows(layer, n, 1) for n in (heads * G, heads))
        scale = layer.step.D**-0.5

        def dense(cache: Any, out: mx.array) -> mx.array:
            packed = isinstance(cache, SparseQuantizedKVCache)
            keys, values = cache.keys_and_values() if packed else cache.rows("ops")[:2]
            # out[:] is a new array, because mlx-lm scales the queries of a quantized cache in place.
            return scaled_dot_product_attention(out[:], keys, values, cache=cache, scale=scale, mask=None)

        def sparse(cache: SparseCache, out: mx.array) -> mx.array:
            return cache.attend(out, config, scale=scale, backend=layer.backend)[0]

        def step(attend: Callable[[Any, mx.array], mx.array], caches: list[SparseCache]) -> mx.array:
            out = query
            for cache in caches:
                cache.update_and_fetch(row, row)
                out = attend(cache, out)
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


def measurement_key(config: Method, layer: Layer) -> MeasurementKey:
    """Return the key of a measurement: a dict of method, settings, layer shape, machine, system and versions."""
    info, step = mx.device_info(), layer.step
    packed = {} if step.packed is None else {"kv_bits": step.packed[0], "kv_group_size": step.packed[1]}
    return {
        "format": FORMAT,
        "method": config.name,
        "settings": _settings(config, step.G),
        **{"heads": step.heads, "G": step.G, "D": step.D, "buckets": step.buckets, "network": step.network, **packed},
        **{"dtype": str(layer.dtype).rpartition(".")[2], "L": layer.L, "backend": layer.backend},
        "device": f"{info.get('device_name', '')} {info.get('architecture', '')} {mx.default_device()}",
        "processors": os.cpu_count() or 1,
        "BLAS": in_use() or "",  # a fast BLAS changes mainly dense attention
        **{"system": platform.platform(), "python": platform.python_version()},
        **{"mlx-sparse-attention": __version__, "mlx": version("mlx")},
    }


def _settings(config: Method, G: int) -> str:
    """Return a text with the settings of ``config`` that influence the time of a step."""
    settled = config.for_model(qk_norm=False)  # settings from models are already resolved
    # The alphas change the density, but not the time at a given density.
    settings = {name: value for name, value in settled.parameters(G).items() if not name.startswith("alpha")}
    settings |= {name: getattr(settled, name, None) for name in ("component_score", "score")}
    return ",".join(f"{name}={value}" for name, value in sorted(settings.items()) if value not in (None, "rows"))


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


def _not_enough_memory() -> MemoryError:
    return MemoryError(f"{FREE_SHARE * free_memory() / 1e6:.0f} MB of free memory are too few")


def _cache(layer: Layer, S: int, n: int) -> Any:
    """Return a KV cache with ``S`` random rows and `ROOM` free rows. Each ``n`` gives different rows."""
    cache: Any = SparseKVCache()  # type: ignore[no-untyped-call]
    rows: Any = (_rows(layer, layer.step.heads, S + ROOM, 2 * n + side) for side in range(2))
    if layer.step.packed is not None:
        bits, group_size = layer.step.packed
        cache = SparseQuantizedKVCache(group_size=group_size, bits=bits)
        rows = (mx.quantize(array, group_size=group_size, bits=bits) for array in rows)
    cache.keys, cache.values = rows
    cache.offset = S
    mx.eval(cache.keys, cache.values)
    return cache


def _rows(layer: Layer, heads: int, S: int, seed: int = 0) -> mx.array:
    """Return random rows ``(1, heads, S, D)`` from ``seed``. MLX's global random state does not change."""
    D = layer.step.D
    tiles = -(-S // TILE)
    some = mx.random.normal((1, heads, 1, min(S, TILE), D), dtype=layer.dtype, key=mx.random.key(seed))
    scales = 1 + mx.arange(tiles)[:, None, None] / (4 * tiles)  # no two rows are the same
    rows = (some * scales.astype(layer.dtype)).reshape(1, heads, -1, D)
    return mx.contiguous(rows[:, :, :S])


def measure_prefill(config: Prefill, layer: Layer, seconds: float) -> dict[str, object]:
    """Time dense attention, the selection of blocks, and attention to few and to many blocks in a prefill chunk.

    Return a dict with the lengths "S" and "L" and two estimates of the largest density at which sparse attention is
    faster. "share" is the lower quartile over the turns, and "best" is the upper quartile. The time of attention is
    assumed to be linear in the number of blocks. On a CPU, one head represents all heads.
    """
    step, L = layer.step, layer.L
    heads, G = (1, 1) if device_kind() == "cpu" else (step.heads, step.G)
    S = max(config.shortest_context(), 2 * L)
    S += -S % config.block_size
    # On a CPU, MLX stores the scores of a head.
    needed = 12 * L * S if device_kind() == "cpu" else 8 * heads * G * (S + L) * step.D
    if needed > FREE_SHARE * free_memory():
        raise _not_enough_memory()
    queries = _rows(layer, heads * G, L)
    keys, values = (_rows(layer, heads, S, side + 1) for side in range(2))
    layout = config.layout(L, S)
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, S
    scale = step.D**-0.5

    def attend(blocks: mx.array) -> mx.array:
        return cache.attend_prefill(queries, config, scale=scale, backend=layer.backend, blocks=blocks)[0]

    listed = [_some_blocks(layout, share, heads * G) for share in DENSITIES]
    runs: list[Callable[[], object]] = [
        lambda: mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal"),
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
