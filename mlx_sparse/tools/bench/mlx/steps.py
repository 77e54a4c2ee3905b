"""Decode steps: each method against dense attention.

A step goes through several layers, each with a cache of its own, as in a model: on a GPU a single small attention would
drown in the cost of `mx.eval`, and one cache used again and again would stay in the chip's last-level cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import mlx.core as mx

from ....cache.kv_cache import SparseKVCache
from ....methods import H2O, NEVER, SAAP, Method, Streaming
from ...environment import memory
from ...formats import table
from ..core import Case, Contender, Row, Sample, Shape, Turns, enter, take_turns, too_large
from .dense import LARGEST_SHARE, Dense, cache_of, dense_ways, read, timed
from .methods import DecodeStep, H2OStep, StreamingStep, normal, wrong_result
from .rows import compare, method_row
from .saap import saap_steps

WORKING_SET = 256 << 20  # bytes of K and V that a step goes through if it can: more than a last-level cache
MOST_LAYERS = 32
WARM_UP = 2


def steps_of(config: Method, backend: str, shape: Shape) -> list[DecodeStep]:
    """The steps to time: one, or with SAAP's query networks one for each size of network."""
    if isinstance(config, SAAP):
        return saap_steps(config, backend, shape)
    kinds: dict[type, type[DecodeStep]] = {Streaming: StreamingStep, H2O: H2OStep}
    return [kinds.get(type(config), DecodeStep)(config, backend, shape)]


def layers_of(case: Case) -> int:
    """How many layers a step goes through."""
    return max(1, min(MOST_LAYERS, WORKING_SET // (2 * case.keys)))


class Layers:
    """A query, and the caches of all layers without what a method keeps beside them."""

    def __init__(self, case: Case) -> None:
        self._case = case

    @cached_property
    def queries(self) -> mx.array:
        """``(B, Hq, 1, D)``."""
        return normal(self._case.B, self._case.shape.Hq, 1, self._case.shape.D, self._kind)

    @cached_property
    def plain(self) -> list[SparseKVCache]:
        """A cache for each layer."""
        sizes = self._case.B, self._case.shape.Hkv, self._case.S, self._case.shape.D, self._kind
        return [cache_of(normal(*sizes), normal(*sizes)) for _ in range(layers_of(self._case))]

    @property
    def _kind(self) -> mx.Dtype:
        found: mx.Dtype = getattr(mx, self._case.dtype)
        return found

    def runs(self) -> dict[str, Callable[[int], Sample]]:
        """Every way to attend densely."""
        ways = dense_ways(self._kind, 1)
        return {
            name: timed(partial(through, self.queries, self.plain, partial(_dense, way))) for name, way in ways.items()
        }


def _dense(way: Dense, queries: mx.array, cache: SparseKVCache) -> mx.array:
    return way(queries, cache.keys, cache.values)


class MethodStep(Contender):
    """A method's step through all layers.

    Attributes:
        upkeep: seconds per step of what steps leave for once in a while.
    """

    def __init__(self, case: Case, method: DecodeStep, layers: Layers) -> None:
        first = method.config.shortest_context(method.sizes(case.B, case.item))
        details = {"layers": layers_of(case), "default_from": None if first >= NEVER else first}
        details |= {"bytes_formula": method.bytes(case.B, case.S, case.item), "bytes_plain": 2 * case.keys}
        super().__init__(method_row(case, method.label, method.backend, details))
        self.case, self.method, self._layers, self.upkeep = case, method, layers, 0.0

    def prepare(self) -> None:
        caches = [self.method.cache(cache.keys, cache.values) for cache in self._layers.plain]
        self.upkeep = self.method.upkeep(caches)
        self._run = timed(partial(through, self._layers.queries, caches, self.method.attend, self.method.beside))

    def check(self) -> str | None:
        found = wrong_result(self.method, self.case.B, self.case.S, getattr(mx, self.case.dtype))
        gc.collect()  # the arrays of the check, before the next ones
        return found

    def step(self, turn: int) -> Sample:
        return self._run(turn)


def measure(case: Case, methods: Sequence[DecodeStep], repeat: int) -> list[Row]:
    """Check the result of every step, then time those that are right in turns: a row for each."""
    layers = Layers(case)
    contenders = [MethodStep(case, method, layers) for method in methods]
    needed = 2 * case.keys * layers_of(case) * (1 + 0.5 * len(methods))
    large = too_large(needed, memory(), LARGEST_SHARE)
    for one in contenders:
        everything = one.method.config.attended >= case.S
        one.row.note = f"dense: all of {case.S} keys are attended" if everything else large
    if entered := [one for one in contenders if enter(one)]:
        dense = layers.runs()
        look = {"read": timed(lambda: [read(cache) for cache in layers.plain])}
        ours = {f"method {i}": one.step for i, one in enumerate(entered)}
        taken = take_turns(dense | look | ours, Turns(repeat, WARM_UP))
        seconds = {name: found.seconds for name, found in taken.items()}
        for name, one in zip(ours, entered, strict=True):
            sparse = [sample + one.upkeep for sample in seconds[name]]
            compare(one.row, {way: seconds[way] for way in dense}, sparse, seconds["read"], layers_of(case))
    return [one.row for one in contenders]


def through(
    queries: mx.array,
    caches: Sequence[SparseKVCache],
    attend: Callable[[mx.array, SparseKVCache], mx.array],
    beside: Callable[[SparseKVCache], list[mx.array]] | None = None,
) -> list[Any]:
    """A step through all layers: what a layer returns is the next one's query."""
    out, more = queries, []
    for cache in caches:
        out = attend(out, cache)
        more += beside(cache) if beside else []
    return [out, *more]


HEADER = [
    *("method", "backend", "type", "heads", "batch", "keys", "dense, us", "by", "sparse, us", "dense / sparse"),
    *("bytes, of K and V", "dense, of a plain read", "sparse, of a plain read", "sparse by default from"),
]


def text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = []
    for row in rows:
        case, found = row.case, row.details
        cells = [row.name, found["backend"], case.dtype, case.shape, case.B, f"{case.S:,}"]
        if not row.turns:
            lines.append([*cells, "", "", row.note, *[""] * (len(HEADER) - len(cells) - 3)])
            continue
        cells += [row.spreads["dense_us"], found["dense"], row.spreads["sparse_us"], f"{found['ratio']:.2f}"]
        cells += [_share(found["bytes_formula"] / found["bytes_plain"])]
        cells += [_share(found["dense_of_read"]), _share(found["sparse_of_read"])]
        lines.append([*cells, f"{found['default_from']:,}" if found["default_from"] else "never"])
    return f"A decode step of one layer, median (first to third quartile):\n\n{table(HEADER, lines)}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"
