"""Time of one decode step: each method against dense attention, interleaved in one run.

A step goes through several layers, each with a cache of its own, as in a model: on a GPU a single small attention would
drown in the cost of `mx.eval`, and one cache used again and again would stay in the chip's last-level cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..cache import SparseKVCache
from ..config import NEVER
from ..forms import table
from .dense import Shape
from .rows import Row, Times
from .steps import DecodeStep, normal, wrong_result
from .timing import Dense, Run, cache_of, dense_ways, in_turns, read, too_large

WORKING_SET = 256 << 20  # bytes of K and V that a step goes through if it can: more than a last-level cache
MOST_LAYERS = 32
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """What all methods of a run share."""

    dtype: str
    shape: Shape
    B: int
    S: int

    @property
    def kind(self) -> mx.Dtype:
        found: mx.Dtype = getattr(mx, self.dtype)
        return found

    @property
    def bytes(self) -> int:
        """Of the keys and values of a layer."""
        return 2 * self.B * self.shape.Hkv * self.S * self.shape.D * self.kind.size

    @property
    def layers(self) -> int:
        return max(1, min(MOST_LAYERS, WORKING_SET // self.bytes))


def measure(case: Case, steps: Sequence[DecodeStep], repeat: int) -> list[Row]:
    """Check the result of every step, then time those that are right in turns: a row for each."""
    found: list[Row] = []
    entered = []
    large = too_large(case.bytes * case.layers * (1 + 0.5 * len(steps)))
    for step in steps:
        row = _row(case, step)
        if step.config.attended >= case.S:
            row = row.without_times(f"dense: all of {case.S} keys are attended")
        elif large:
            row = row.without_times(large)
        elif wrong := wrong_result(step, case.B, case.S, case.kind):
            row = row.without_times(wrong, failed=True)
        else:
            entered.append((len(found), step))
        found.append(row)
        gc.collect()  # the arrays of the check, before the next ones
    times = _times(case, [step for _, step in entered], repeat) if entered else []
    for (place, _), timed in zip(entered, times, strict=True):
        found[place] = replace(found[place], times=timed)
    return found


def _row(case: Case, step: DecodeStep) -> Row:
    item = case.kind.size
    first = step.config.shortest_context(step.sizes(case.B, item))
    details = {"layers": case.layers, "default_from": None if first >= NEVER else first}
    moved = step.bytes(case.B, case.S, item)
    return Row(step.label, step.backend, case.dtype, case.shape, case.B, case.S, details, moved, case.bytes)


def _times(case: Case, steps: Sequence[DecodeStep], repeat: int) -> list[Times]:
    """Of each step, and of dense attention and a plain read in the same turns, per layer."""
    shape, layers = case.shape, range(case.layers)
    queries = normal(case.B, shape.Hq, 1, shape.D, case.kind)
    rows = [[normal(case.B, shape.Hkv, case.S, shape.D, case.kind) for _ in "kv"] for _ in layers]
    plain = [cache_of(keys, values) for keys, values in rows]
    own = [[step.cache(keys, values) for keys, values in rows] for step in steps]
    upkeep = [step.upkeep(caches) for step, caches in zip(steps, own, strict=True)]
    dense: dict[str, Run] = {
        name: partial(through, queries, plain, partial(_dense, way)) for name, way in dense_ways(case.kind, 1).items()
    }
    runs: dict[str, Run] = dense | {"read": lambda: [read(cache) for cache in plain]}
    for i, (step, caches) in enumerate(zip(steps, own, strict=True)):
        runs[f"step {i}"] = partial(through, queries, caches, step.attend, step.beside)
    samples = in_turns(runs, repeat, WARM_UP)
    found = []
    for i, share in enumerate(upkeep):
        sparse = [seconds + share for seconds in samples[f"step {i}"]]
        found.append(Times.of({name: samples[name] for name in dense}, sparse, samples["read"], case.layers))
    return found


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


def text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    header = ["method", "backend", "type", "heads", "batch", "keys", "dense, us", "by", "sparse, us", "dense / sparse"]
    header += ["bytes, of K and V", "dense, of a plain read", "sparse, of a plain read", "sparse by default from"]
    lines = []
    for row in rows:
        cells = [row.method, row.backend, row.dtype, row.shape, row.batch, f"{row.S:,}"]
        if row.times is None:
            lines.append([*cells, "", "", row.note, *[""] * (len(header) - len(cells) - 3)])
            continue
        first, times = row.details["default_from"], row.times
        cells += [times.dense, times.by, times.sparse, f"{times.ratio:.2f}"]
        cells += [_share((row.bytes_formula or 0) / (row.bytes_plain or 1))]
        sides = ((times.dense, row.bytes_plain), (times.sparse, row.bytes_formula))
        cells += [_share(row.of_read(spread, moved)) for spread, moved in sides]
        lines.append([*cells, f"{first:,}" if first else "never"])
    return f"A decode step of one layer, median (first to third quartile):\n\n{table(header, lines)}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"
