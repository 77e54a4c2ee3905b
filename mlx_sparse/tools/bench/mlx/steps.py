"""Decode steps: each method, as an enabled model takes it, against dense attention.

A step goes through several layers, each with a cache of its own, as in a model: on a GPU a single small attention would
drown in the cost of `mx.eval`, and one cache used again and again would stay in the chip's last-level cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....cache.h2o_state import Received, Scores
from ....cache.kv_cache import SparseKVCache
from ....calibrate import Calibration, Layer
from ....methods import NEVER, Method, Step, registry
from ...formats import table
from .. import inputs
from ..core import Case, Row, Sample, Shape
from .dense import Dense, cache_of, dense_ways, double, fused, normal, read, timed, wrong_result
from .rows import MethodContender, method_row

Rows = npt.NDArray[np.int64]
# A step whose answer is known: queries, a cache, and by sequence and KV head the rows that are attended.
Known = tuple[mx.array, SparseKVCache, list[list[Rows]]]

WORKING_SET = 256 << 20  # bytes of K and V that a step goes through if it can: more than a last-level cache
MOST_LAYERS = 32
# Planted keys stand out by so many logits: enough to be told by a few components, and so few that the other keys have a
# share of dense attention that shows; but nearly none where a method counts that share.
GAP, SURE = 3.0, 60.0
NOISE = 1 / 32  # of the components of keys: less than what the fewest components tell


def layers_of(case: Case) -> int:
    """How many layers a step goes through."""
    return max(1, min(MOST_LAYERS, WORKING_SET // (2 * case.keys)))


def kind_of(case: Case) -> mx.Dtype:
    """MLX's type of a case."""
    found: mx.Dtype = getattr(mx, case.dtype)
    return found


class Layers:
    """A query, and the caches of all layers without what a method keeps beside them; made when they are needed."""

    def __init__(self, case: Case) -> None:
        self._case, self._kind = case, kind_of(case)

    @cached_property
    def queries(self) -> mx.array:
        """``(B, Hq, 1, D)``."""
        return normal(self._case.B, self._case.Hq, 1, self._case.D, self._kind)

    @cached_property
    def plain(self) -> list[SparseKVCache]:
        """A cache for each layer."""
        sizes = self._case.B, self._case.Hkv, self._case.S, self._case.D, self._kind
        return [cache_of(normal(*sizes), normal(*sizes)) for _ in range(layers_of(self._case))]

    def sides(self) -> tuple[dict[str, Callable[[int], Sample]], Callable[[int], Sample]]:
        """Every way to attend densely, and a plain read."""
        ways = {
            name: timed(partial(through, self.queries, self.plain, partial(_dense, way)))
            for name, way in dense_ways(self._kind, 1).items()
        }
        return ways, timed(lambda: [read(cache) for cache in self.plain])


def _dense(way: Dense, queries: mx.array, cache: SparseKVCache) -> mx.array:
    return way(queries, cache.keys, cache.values)


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


class WrongChoice(Exception):
    """A method has chosen what it should not."""


class DecodeStep(MethodContender):
    """A method's step through all layers; here of one that keeps nothing, or what its first step makes.

    Attributes:
        backend: one that can run it.
    """

    def __init__(self, case: Case, config: Any, backend: str, layers: Layers | None = None) -> None:
        self.case, self.config, self.backend, self._layers = case, config, backend, layers or Layers(case)
        layer = Layer(backend, replace(self.sizes(), heads=case.Hkv), kind_of(case))
        first = Calibration().of(config, layer)
        details: dict[str, Any] = {"layers": layers_of(case), "default": first.how}
        details["default_from"] = None if first.value >= NEVER else int(first.value)
        details |= {"bytes_formula": self.bytes(), "bytes_plain": 2 * case.keys}
        note = f"dense: all of {case.S} keys are attended" if config.attended >= case.S else None
        super().__init__(method_row(case, self.label, backend, details, note))

    @property
    def label(self) -> str:
        """Which of a table's rows are its own."""
        return str(self.config)

    @classmethod
    def check_config(cls, config: Method, shape: Shape) -> None:
        """Raise `ConfigError` if a setting does not fit."""
        config.check_head_dim(shape.D)

    def prepare(self) -> None:
        caches = [self.cache(plain.keys, plain.values) for plain in self._layers.plain]
        self.upkeep = self.once_in_a_while(caches)
        self._run = timed(partial(through, self._layers.queries, caches, self.attend, self.beside))

    def step(self, turn: int) -> Sample:
        return self._run(turn)

    def check(self) -> str | None:
        """What is wrong with the result; None if nothing is.

        It is known which rows are attended. It may be off from float64 attention over these by twice as much as MLX's
        own attention over them, and one unit in the last place.
        """
        try:
            queries, cache, rows = self.known()
        except WrongChoice as error:
            return f"wrong result: {error}"
        case = self.case
        out = double(self.attend(queries, cache)).reshape(case.B, case.Hkv, case.G, -1)
        expected, dense = np.empty_like(out), np.empty_like(out)
        grouped = queries.reshape(case.B, case.Hkv, case.G, -1)
        for b, h in np.ndindex(out.shape[:2]):
            chosen = mx.array(rows[b][h])
            q = grouped[b, h][None, :, None]
            keys, values = (array[b, h][chosen][None, None] for array in (cache.key_rows, cache.value_rows))
            expected[b, h] = inputs.attention(double(q)[0, :, 0], double(keys)[0, 0], double(values)[0, 0])
            dense[b, h] = double(fused(q, keys, values))[0, :, 0]
        gc.collect()  # the arrays of the check, before the next ones
        return wrong_result(out, expected, float(np.abs(dense - expected).max()), kind_of(case))

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        """A cache over these rows with what the method keeps beside them, unless its first step makes that."""
        return cache_of(keys, values)

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        """The step in one layer."""
        return cache.attend(queries, self.config, scale=self.case.scale, backend=self.backend)[0]

    def beside(self, cache: SparseKVCache) -> list[mx.array]:
        """What a step computes besides its result."""
        return []

    def once_in_a_while(self, caches: Sequence[SparseKVCache]) -> float:
        """Seconds per step of what steps leave for once in a while."""
        return 0.0

    def bytes(self) -> int:
        """What a layer's step moves, by the method's formula."""
        return int(self.case.rows * self.config.elements(self.case.S, self.case.D) * self.case.item)

    def sizes(self) -> Step:
        """What tells from what context on the method pays."""
        gpu = registry.gpu_kind() if self.backend == "metal" else ""
        return Step(self.case.rows, self.case.G, self.case.D, self.case.item, gpu)

    def known(self) -> Known:
        """As many planted keys as the method can choose, each of some weight, and those that it always attends."""
        case, kind = self.case, kind_of(self.case)
        B, Hkv, S, D = case.B, case.Hkv, case.S, case.D
        first, last = self.config.always
        gap = GAP if self.config.serves_sinks(case.G) else SURE
        base = mx.random.normal((B, Hkv, 1, D))
        queries = (base + 0.5 * mx.random.normal((B, Hkv, case.G, D))).reshape(B, case.Hq, 1, D).astype(kind)
        keys, values = (normal(B, Hkv, S, D, kind) for _ in "kv")
        position, together = np.arange(S), self.config.together
        unit = position // together
        always = (position < first) | (unit >= (unit[S - last] if last else unit[-1] + (together == 1)))
        count = self.config.attended // together - np.unique(unit[always]).size
        chosen = np.isin(unit, [i * np.unique(unit[~always]).size // count for i in range(count)])
        rows = np.flatnonzero(chosen | always)
        planted = (chosen | (position == rows[-1]))[:, None]
        direction = base * (gap * D**0.5 / (base**2).sum(axis=-1, keepdims=True))
        keys = NOISE * keys + mx.where(mx.array(planted), direction.astype(kind), 0)
        return queries, self.cache(keys, values), [[rows] * Hkv] * B

    def random(self) -> tuple[mx.array, SparseKVCache]:
        """A query, and a cache of random rows."""
        case, kind = self.case, kind_of(self.case)
        rows = (normal(case.B, case.Hkv, case.S, case.D, kind) for _ in "kv")
        return normal(case.B, case.Hq, 1, case.D, kind), self.cache(*rows)


class ReceivedStep(DecodeStep):
    """A method that attends the last keys and those that have received the most attention, here as if at random."""

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        cache = cache_of(keys, values)
        B, Hkv, S, _ = keys.shape
        # All different, so that there are no ties.
        received = np.random.default_rng(0).permuted(np.tile(np.arange(S - 1, dtype=np.float32), (B, Hkv, 1)), axis=2)
        cache.hold(self.config.name, Received([Scores(S - 1, mx.array(received))]))
        return cache

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        self._received(cache).rewind(cache.length - 1)  # the state before this step: the same step again
        return super().attend(queries, cache)

    def beside(self, cache: SparseKVCache) -> list[mx.array]:
        return [self._received(cache).states[-1].scores]

    def _received(self, cache: SparseKVCache) -> Received:
        received = cache.state_of(self.config.name)
        assert isinstance(received, Received)
        return received

    def known(self) -> Known:
        queries, cache = self.random()
        _, window = self.config.always
        older = np.array(self.beside(cache)[0])[..., : self.case.S - window]
        heavy = np.argsort(-older, axis=-1)[..., : self.config.attended - window]
        last = np.arange(self.case.S - window, self.case.S)
        return queries, cache, [[np.concatenate([np.sort(own), last]) for own in some] for some in heavy]


HEADER = [
    *("method", "backend", "type", "heads", "batch", "keys", "dense, us", "by", "sparse, us", "dense / sparse"),
    *("bytes, of K and V", "dense, of a plain read", "sparse, of a plain read", "sparse by default from"),
]


def text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = []
    for row in rows:
        case, found = row.case, row.details
        kind = f"{found['kv_bits']} bits" if found.get("kv_bits") else case.dtype
        cells = [row.name, found["backend"], kind, case.shape, case.B, f"{case.S:,}"]
        if not row.turns:
            lines.append([*cells, "", "", row.note, *[""] * (len(HEADER) - len(cells) - 3)])
            continue
        cells += [row.spreads["dense_us"], found["dense"], row.spreads["sparse_us"], f"{found['ratio']:.2f}"]
        shares = found["bytes_formula"] / found["bytes_plain"], found["dense_of_read"], found["sparse_of_read"]
        cells += ["" if share is None else f"{share:.2f}" for share in shares]
        lines.append([*cells, f"{found['default_from']:,}" if found["default_from"] else "never"])
    return f"A decode step of one layer, median (first to third quartile):\n\n{table(HEADER, lines)}"
