"""Decode steps of SparQ and of others, every contender and type of caches in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_sparse.checks import ConfigError, check_local_window
from mlx_sparse.methods.scoring_keys import GROUP
from mlx_sparse.tools.bench.core import Contender, Row, Sample, Turns, too_large, wrong
from mlx_sparse.tools.bench.run import Plan, Request
from mlx_sparse.tools.bench.thresholds import Bar, bar_table, length, ratio
from mlx_sparse.tools.environment import machine, memory

from ..build import operator_model
from ..operators import coded_axes
from .bound import (
    HALF,
    Bound,
    group_query_attention,
    of_torch,
    ort_step,
    plain_read,
    session,
    standard,
    unavailable,
)
from .caches import Caches, Problem
from .report import by_threads, tables, where

TORCH = {"torch-gqa": "torch SDPA, enable_gqa", "torch-rows": "torch SDPA, group as rows"}
CODED = ("native-sparq-4",)
NAMES = {  # in the order of the table
    "read": "plain read of K and V",
    "gqa": "ORT GroupQueryAttention, shared buffers",
    "standard": "ORT standard operators, group as rows",
    **TORCH,
    "body-dense": "our CachedAttention, function body",
    "body-sparq": "our SparQAttention, function body",
    "native-dense": "our CachedAttention, native",
    "native-sparq": "our SparQAttention, native",
    "native-sparq-4": "our SparQCodedAttention, 4 bits, native",
}
TYPES = {
    **dict.fromkeys(NAMES, HALF),
    "gqa": (*HALF, "int8"),
    "standard": ("float32",),
    **dict.fromkeys(TORCH, (*HALF, "bfloat16")),
    **dict.fromkeys(CODED, ("float16",)),
}
CONTENDERS = [(name, dtype) for name in NAMES for dtype in TYPES[name]]
PAUSE = 0.003  # seconds between two contenders: pools that spin for a moment after their work do so here
# How long our threads may wait for a processor: a share of the sample's time, or some seconds. Beyond both, others
# disturbed it.
MOST_DELAY, LEAST_DELAY = 0.06, 5e-5
MOST_TRIES = 3  # samples for each that is wanted; what is still disturbed then is kept, and said
LONGEST = 3.0  # seconds of samples after which a contender leaves, if it has enough
LARGEST_SHARE = 0.8  # of the memory of the machine
Build = Callable[[str, str, Caches, int], Bound]
K = 1024
HELD_TO = 2  # threads
HELD_IN = "float16"
# What is slow and what is fast, and the least ratio of both times by number of keys.
DENSE, SPARQ, GQA = ("native-dense", HELD_IN), ("native-sparq", HELD_IN), ("gqa", "float32")
OF_TORCH = [(name, dtype) for name in TORCH for dtype in TYPES[name]]
FOREIGN = [GQA, ("gqa", "float16"), ("standard", "float32"), *OF_TORCH]
BODIES = [("body-sparq", dtype) for dtype in HALF]
BARS: list[tuple[str, list[tuple[str, str]], list[tuple[str, str]], dict[int, float]]] = [
    ("native SparQ over native dense", [DENSE], [SPARQ], {4 * K: 2.3, 16 * K: 4.0, 64 * K: 5.2, 128 * K: 5.5}),
    (
        "bandwidth of native dense over the plain read",
        [("read", HELD_IN)],
        [DENSE],
        dict.fromkeys((16 * K, 64 * K, 128 * K), 0.65),
    ),
    (
        "native dense over torch's best view of any type",
        OF_TORCH,
        [DENSE],
        dict.fromkeys((4 * K, 16 * K, 64 * K, 128 * K), 1.0),
    ),
    (
        "native SparQ over ORT GroupQueryAttention float32",
        [GQA],
        [SPARQ],
        {4 * K: 8.0, 16 * K: 25.0, 64 * K: 40.0, 128 * K: 40.0},
    ),
    ("SparQ's function body over the best float dense that is not ours", FOREIGN, BODIES, {64 * K: 2.5}),
]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Every bar at the lengths that were measured, with two threads."""
    held = [row for row in rows if row.details.get("threads") == HELD_TO]
    times = {(row.name, row.details["dtype"], row.case.S): row.median for row in held}

    def best(S: int, contenders: Iterable[tuple[str, str]]) -> float | None:
        return min((t for name in contenders if (t := times.get((*name, S))) is not None), default=None)

    lengths = sorted({row.case.S for row in held})
    return [
        Bar(what, S, least[S], ratio(best(S, slow), best(S, fast)))
        for what, slow, fast, least in BARS
        for S in lengths
        if S in least
    ]


def plan(request: Request, config: Any) -> Plan:
    """Decode steps with SparQ and without.

    Raises:
        ConfigError: the rank does not fit the shape, or a length is none that SparQ chooses from.
    """
    (shape,), window = request.shapes, check_local_window(config.local_window, config.top_k)
    config.check_head_dim(shape.D)
    if short := [S for S in request.lengths if config.top_k >= S]:
        raise ConfigError(
            f"--lengths: expected more than the {config.top_k} keys that SparQ attends to, got {short[0]}."
        )
    head = (
        f"{where()}\n\nOne decode step in milliseconds, median (minimum): {shape.Hq} query heads, {shape.Hkv} "
        f"KV heads, D = {shape.D}; SparQ with rank {config.rank} and top_k {config.top_k} of which {window} are the "
        "last keys."
    )

    def text(rows: Sequence[Row]) -> str:
        title = f"### Bars ({HELD_TO} threads, medians; ours with {HELD_IN} caches)"
        held = [f"{title}\n\n{bar_table(found)}"] if (found := bars(rows)) else []
        return "\n\n".join([head, text_of(rows, NAMES), *held])

    return Plan(
        machine(),
        [Problem("", shape, 1, S, config.rank, config.top_k, window) for S in request.lengths],
        lambda problem, _: measured(problem, CONTENDERS, request.threads, request.repeat, build),
        text,
        lambda rows: [bar.as_dict() for bar in bars(rows)],
    )


class CpuStep(Contender):
    """A decode step on the CPU: of two steps on two sets of caches the second. As in a model, its threads are awake."""

    def __init__(self, row: Row, caches: Any, build: Build) -> None:
        super().__init__(row)
        self._caches, self._build = caches, build

    def prepare(self) -> None:
        details = self.row.details
        self._bound = self._build(self.row.name, details["dtype"], self._caches, details["threads"])

    def check(self) -> str | None:
        expected, allowed = self._caches.plant()
        self._bound.bind(0)
        self._bound.run()
        out = None if self._bound.output is None else self._bound.output().astype(np.float64)
        self._caches.restore()
        return None if out is None else wrong(float(np.abs(out.reshape(expected.shape) - expected).max()), allowed)

    def step(self, turn: int) -> Sample:
        time.sleep(PAUSE)
        self._bound.bind(2 * turn)
        self._bound.run()
        self._bound.bind(2 * turn + 1)
        before, start = _waited(), time.perf_counter()
        self._bound.run()
        seconds = time.perf_counter() - start
        return Sample(seconds, _waited() - before > max(MOST_DELAY * seconds, LEAST_DELAY))


def _waited() -> float:
    """Seconds that threads of ours that could run had to wait for a processor so far; 0 where the system is silent."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_bytes().split()[1])
        except (OSError, IndexError):  # a thread that ended meanwhile
            continue
    return total / 1e9


def measured(
    problem: Problem, names: Sequence[tuple[str, str]], threads: Iterable[int], repeat: int, build: Build
) -> Iterator[Row]:
    """Rows of contenders and types of caches, for each number of threads.

    Args:
        build: makes a contender over caches.
    """
    types = dict.fromkeys(dtype for _, dtype in names)
    large = too_large(problem.memory(types), memory(), LARGEST_SHARE)
    component_major = [dtype for dtype in HALF if any(name.endswith("sparq") for name, _ in names)]
    coded = [dtype for name, dtype in names if name in CODED]
    caches = {
        dtype: Caches(problem, dtype, component_major=dtype in component_major, coded=dtype in coded)
        for dtype in types
        if not large
    }

    def rows_of(n: int) -> list[Row]:
        sizes = {dtype: 2 * problem.bytes(dtype) * problem.S // problem.C for dtype in types}
        return [
            Row(
                problem,
                name,
                details={"dtype": dtype, "threads": n, "bytes": sizes[dtype], "discarded": 0, "disturbed": False},
                note=large or unavailable(name),
            )
            for name, dtype in names
        ]

    def contender(row: Row) -> CpuStep:
        return CpuStep(row, caches.get(row.details["dtype"]), build)

    yield from by_threads(problem, threads, rows_of, contender, Turns(repeat, tries=MOST_TRIES, longest=LONGEST))
    caches.clear()
    gc.collect()  # before the next ones


def build(name: str, dtype: str, caches: Caches, threads: int) -> Bound:
    """The contender ``name`` over these caches."""
    p = caches.problem
    if name == "read":
        return plain_read(caches, threads)
    if name in TORCH:
        grouped = name == "torch-gqa"
        query = p.queries.astype(caches.dtype).reshape((1, p.Hq, 1, p.D) if grouped else (1, p.Hkv, p.G, p.D))
        keys, values = ([array[:, :, : p.S] for array in arrays] for arrays in (caches.keys, caches.values))
        return of_torch(query, keys, values, threads, scale=p.scale, enable_gqa=grouped)
    if name == "gqa":
        model = group_query_attention(p, dtype, 1, p.C)
    elif name == "standard":
        model = standard(p)
    else:
        model = _ours(name, dtype, p)
    return ort_step(session(model, name, threads), dtype, caches, _between_codings(caches) if name in CODED else None)


def between_codings(S: int) -> int:
    """The keys of that step, S or fewer."""
    return S if S % GROUP else S - GROUP // 2


def _between_codings(caches: Caches) -> dict[str, Any]:
    """A step that fills no group, which one of 64 does, and S might do every time: half a group before it, then."""
    at = between_codings(caches.problem.S) - 1
    rows = {"key": caches.keys[0][:, :, at : at + 1], "value": caches.values[0][:, :, at : at + 1]}
    new = {name: caches.loaded(array).astype(caches.kind) for name, array in rows.items()}
    return {**new, "past_length": np.array([at])}


def _ours(name: str, dtype: str, p: Problem) -> Any:
    sizes = {"B": 1, "Hq": p.Hq, "Hkv": p.Hkv, "L": 1, "C": p.C, "D": p.D}
    kind: dict[str, Any] = {"dtype": dtype, "sizes": sizes, "scale": p.scale}
    if name.endswith("dense"):
        return operator_model("CachedAttention", **kind, window=0)
    # dense_below 0: the step under test is taken at every length.
    chosen: dict[str, Any] = {"top_k": p.top_k, "local_window": p.window, "reallocate": 0, "dense_below": 0}
    chosen |= {"rank": p.rank, "component_score": 0}
    if name in CODED:
        sizes |= {"3Hkv": 3 * p.Hkv, "HkvD": p.Hkv * p.D, **coded_axes(p.C)}
        return operator_model("SparQCodedAttention", **kind, **chosen)
    return operator_model("SparQAttention", **kind, **chosen, lanes=p.lanes)


def text_of(rows: Sequence[Row], names: dict[str, str]) -> str:
    """Markdown: milliseconds."""
    return tables(rows, names, "caches", lambda case: length(case.S), _cell)


def _cell(row: Row, _: Sequence[Row]) -> str:
    if row.note or row.time is None:
        return row.note or ""
    mark = " \\*" if row.details["disturbed"] else ""
    return f"{row.time.median / 1e3:.2f} ({row.time.least / 1e3:.2f}){mark}"
