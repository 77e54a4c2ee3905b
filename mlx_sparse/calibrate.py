"""When sparse attention pays on this machine: looked up in the user's cache folder, measured there, or modelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median, quantiles
from typing import Any

import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from mlx_lm.models.base import scaled_dot_product_attention

from . import crossing, measured, thresholds
from .cache.kv_cache import SparseKVCache, SparseQuantizedKVCache
from .cache.sparse_cache import SparseCache
from .crossing import Noisy, Pairs
from .methods import Method, Prefill
from .thresholds import (
    FREE_SHARE,
    GIVEN,
    MEASURED,
    MODELLED,
    SECONDS,
    SHORT,
    Layer,
    Threshold,
    Thresholds,
    settings_text,
)

__all__ = ["GIVEN", "MEASURED", "MODELLED", "SECONDS", "Calibration", "Layer", "Threshold", "describe", "device_kind"]

ROOM = 256  # rows behind the context for the tokens of the steps; mlx-lm makes room for as many
TILE = 1024  # random rows; longer contexts repeat them at other scales
DENSITIES = (0.125, 0.5)  # at which the blocks of a prompt are timed
PROMPT_TURNS = 3


class Calibration(Thresholds):
    """The thresholds of one user with MLX: those of this machine where they are known, or may be measured.

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
        super().__init__(measures=measures, seconds=seconds, say=say)
        self.piece = piece

    def kind(self, layer: Layer) -> str:
        return device_kind()

    @staticmethod
    def worth_asking(config: Method) -> int:
        if isinstance(config, Prefill):
            return max(SHORT, config.shortest_context())
        return Thresholds.worth_asking(config)

    def describe(self, config: Method, found: Threshold) -> str:
        return describe(config, found)

    def modelled(self, config: Method, layer: Layer) -> Threshold:
        found = super().modelled(config, layer)
        return Threshold(config.fullest(layer.backend), found.how) if isinstance(config, Prefill) else found

    def read(self, config: Method, layer: Layer, answer: Mapping[str, Any]) -> Threshold:
        if not isinstance(config, Prefill):
            return super().read(config, layer, answer)
        share = answer.get("share")
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError("share is a number from 0 to 1")
        return Threshold(config.fullest(layer.backend, float(share)), MEASURED)

    def question(self, config: Method, layer: Layer) -> measured.Question:
        info = mx.device_info()
        device = f"{info.get('device_name', '')} {info.get('architecture', '')} {mx.default_device()}"
        settings = settings_text(config, layer.step.G)
        return measured.question(layer.backend, device, ("mlx",), **layer.sizes, method=config.name, settings=settings)

    def free_memory(self, layer: Layer) -> int:
        return free_memory()

    def answer(self, config: Method, layer: Layer, seconds: float) -> dict[str, Any]:
        mx.synchronize()
        try:
            if isinstance(config, Prefill):
                return measure_prompt(config, layer, seconds)
            return super().answer(config, layer, seconds)
        finally:
            mx.clear_cache()  # memory that only this needed

    def pairs(self, config: Method, layer: Layer, S: int, seconds: float) -> Pairs:
        """A step goes through several layers in one evaluation.

        Each writes a row into a cache of its own, and what a layer returns is the next one's query.
        """
        heads, G, D = layer.step.heads, layer.step.G, layer.step.D
        layers = range(self.layers(layer, S))
        sides = [[_cache(layer, S, n) for n in layers] for _ in ("dense", "sparse")]
        query, row = (_rows(layer, n, 1) for n in (heads * G, heads))
        scale = D**-0.5

        def dense(cache: Any, out: mx.array) -> mx.array:
            packed = isinstance(cache, SparseQuantizedKVCache)
            keys, values = cache.keys_and_values() if packed else cache.rows("ops")[:2]
            # A handle of its own: over packed rows mlx-lm scales the queries in place.
            return scaled_dot_product_attention(out[:], keys, values, cache=cache, scale=scale, mask=None)

        def sparse(cache: SparseCache, out: mx.array) -> mx.array:
            return cache.attend(out, config, scale=scale, backend=layer.backend)[0]

        def timed(attend: Callable[[Any, mx.array], mx.array], caches: list[Any]) -> float:
            start = time.perf_counter()
            out = query
            for cache in caches:
                cache.update_and_fetch(row, row)
                out = attend(cache, out)
            mx.eval(out)
            return (time.perf_counter() - start) / len(caches)

        return crossing.in_turns(partial(timed, dense, sides[0]), partial(timed, sparse, sides[1]), seconds)


def describe(config: Method, found: Threshold) -> str:
    """A threshold in words."""
    if isinstance(config, Prefill):
        if found.value <= 0:
            return f"prompts never sparse ({found.how})"
        share = f" where at most {found.value:.0%} of the blocks are kept" if found.value < 1 else ""
        return f"prompts sparse from {config.shortest_context():,} keys on{share} ({found.how})"
    return thresholds.describe(found)


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


def _cache(layer: Layer, S: int, n: int) -> Any:
    """``S`` random rows, others for each ``n``, with room for more."""
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
