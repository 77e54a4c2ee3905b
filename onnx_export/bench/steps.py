"""Decode steps of SparQ and of others, every contender and type of caches in turns."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from mlx_sparse.checks import ConfigError, check_local_window, check_rank
from mlx_sparse.methods import SparQ
from mlx_sparse.tools.bench.core import Row, Turns, measure, too_large
from mlx_sparse.tools.bench.run import Plan, Request
from mlx_sparse.tools.bench.thresholds import Bar, bar_table, length, ratio
from mlx_sparse.tools.environment import machine, memory
from mlx_sparse.tools.formats import table

from .caches import Caches, Problem
from .contenders import CONTENDERS, HALF, NAMES, Bound, CpuStep, build, unavailable

MOST_TRIES = 3  # samples for each that is wanted; what is still disturbed then is kept, and said
LONGEST = 3.0  # seconds of samples after which a contender leaves, if it has enough
LARGEST_SHARE = 0.8  # of the memory of the machine
Build = Callable[[str, str, Caches, int], Bound]
K = 1024
HELD_TO = 2  # threads
HELD_IN = "float16"
FLOATS = ("float32", "float16", "bfloat16")


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Every bar at the lengths that were measured, with two threads."""
    held = [row for row in rows if row.details.get("threads") == HELD_TO]
    times = {(row.name, row.details["dtype"], row.case.S): row.median for row in held}
    lengths = sorted({row.case.S for row in held})

    def time(S: int, *contenders: tuple[str, str]) -> float | None:
        known = [t for name in contenders if (t := times.get((*name, S))) is not None]
        return min(known) if known else None

    ours, dense = ("native-sparq", HELD_IN), ("native-dense", HELD_IN)
    gqa = ("gqa", "float32")
    torch = [(name, dtype) for name in ("torch-gqa", "torch-rows") for dtype in FLOATS]
    foreign = [gqa, ("gqa", "float16"), ("standard", "float32"), *torch]
    wanted: list[tuple[str, dict[int, float], Callable[[int], float | None]]] = [
        (
            "native SparQ over native dense",
            {4 * K: 2.3, 16 * K: 4.0, 64 * K: 5.2, 128 * K: 5.5},
            lambda S: ratio(time(S, dense), time(S, ours)),
        ),
        (
            "bandwidth of native dense over the plain read",
            dict.fromkeys((16 * K, 64 * K, 128 * K), 0.65),
            lambda S: ratio(time(S, ("read", HELD_IN)), time(S, dense)),
        ),
        (
            "native dense over torch's best view of any type",
            dict.fromkeys((4 * K, 16 * K, 64 * K, 128 * K), 1.0),
            lambda S: ratio(time(S, *torch), time(S, dense)),
        ),
        (
            "native SparQ over ORT GroupQueryAttention float32",
            {4 * K: 8.0, 16 * K: 25.0, 64 * K: 40.0, 128 * K: 40.0},
            lambda S: ratio(time(S, gqa), time(S, ours)),
        ),
        (
            "SparQ's function body over the best float dense that is not ours",
            {64 * K: 2.5},
            lambda S: ratio(time(S, *foreign), time(S, ("body-sparq", "float32"), ("body-sparq", "float16"))),
        ),
    ]
    return [Bar(what, S, least[S], find(S)) for what, least, find in wanted for S in lengths if S in least]


def plan(request: Request, config: SparQ) -> Plan:
    """Decode steps with SparQ and without.

    Raises:
        ConfigError: the rank does not fit the shape, or a length is none that SparQ chooses from.
    """
    (shape,), window = request.shapes, check_local_window(config.local_window, config.top_k)
    check_rank(config.rank, shape.D)
    if short := [S for S in request.lengths if config.top_k >= S]:
        raise ConfigError(
            f"--lengths: expected more than the {config.top_k} keys that SparQ attends to, got {short[0]}."
        )
    head = (
        f"{where()}\n\nOne decode step in milliseconds, median (minimum): {shape.Hq} query heads, {shape.Hkv} "
        f"KV heads, D = {shape.D}; SparQ with rank {config.rank} and top_k {config.top_k} of which {window} are the "
        "last keys."
    )
    names = [(name, dtype) for name, dtypes in CONTENDERS.items() for dtype in dtypes]

    def text(rows: Sequence[Row]) -> str:
        title = f"### Bars ({HELD_TO} threads, medians; ours with {HELD_IN} caches)"
        held = [f"{title}\n\n{bar_table(found)}"] if (found := bars(rows)) else []
        return "\n\n".join([head, tables(rows), *held])

    return Plan(
        machine(),
        [Problem(shape, S, config.rank, config.top_k, window) for S in request.lengths],
        lambda problem, _: measured(problem, names, request.threads, request.repeat, build),
        text,
        lambda rows: [bar.as_dict() for bar in bars(rows)],
    )


def measured(
    problem: Problem, names: Sequence[tuple[str, str]], threads: Iterable[int], repeat: int, build: Build
) -> Iterator[Row]:
    """Rows of contenders and types of caches, for each number of threads.

    Args:
        build: makes a contender over caches.
    """
    types = dict.fromkeys(dtype for _, dtype in names)
    large = too_large(problem.memory(types), memory(), LARGEST_SHARE)
    component_major = any(name.endswith("sparq") for name, _ in names)
    caches = (
        {}
        if large
        else {dtype: Caches(problem, dtype, component_major=component_major and dtype in HALF) for dtype in types}
    )
    for n in threads:
        rows = []
        for name, dtype in names:
            size = 2 * problem.bytes(dtype) * problem.S // problem.C
            details = {"dtype": dtype, "threads": n, "bytes": size, "discarded": 0, "disturbed": False}
            rows.append(Row(problem, name, details=details, note=large or unavailable(name)))
        if large:
            yield from rows
            continue
        contenders = (
            CpuStep(row, caches[dtype], partial(build, name, dtype, caches[dtype], n))
            for row, (name, dtype) in zip(rows, names, strict=True)
        )
        yield from measure(problem, contenders, Turns(repeat, tries=MOST_TRIES, longest=LONGEST))
        gc.collect()  # sessions and their threads
    caches.clear()
    gc.collect()  # before the next ones


def where() -> str:
    """What the benchmark runs on, in a line."""
    versions = [f"onnxruntime {version('onnxruntime')}"]
    if importlib.util.find_spec("torch"):
        versions.append(f"torch {version('torch')}")
    lines = (line for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name"))
    cpu = next((line.split(":")[1].strip() for line in lines), platform.processor())
    pages = _text("/sys/kernel/mm/transparent_hugepage/enabled").strip()
    return f"{', '.join(versions)}; {cpu}, {os.cpu_count()} processors; huge pages: {pages or 'unknown'}."


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a table for each number of threads."""
    blocks = []
    named = [row for row in rows if row.name]
    for threads in dict.fromkeys(row.details["threads"] for row in named):
        chosen = [row for row in named if row.details["threads"] == threads]
        blocks.append(f"### {threads} thread{'s' * (threads > 1)}\n\n{_table(chosen)}")
    if any(row.details.get("disturbed") for row in rows):
        blocks.append("\\* Disturbed: too few samples ran without waiting for a processor, so these are all of them.")
    blocks += [f"* {row.case}: {row.note}" for row in rows if not row.name]
    return "\n\n".join(blocks)


def _table(rows: Sequence[Row]) -> str:
    lengths = list(dict.fromkeys(row.case.S for row in rows))
    lines = []
    for name, dtype in dict.fromkeys((row.name, row.details["dtype"]) for row in rows):
        found = {row.case.S: row for row in rows if (row.name, row.details["dtype"]) == (name, dtype)}
        lines.append([NAMES[name], dtype, *(_cell(found[S]) if S in found else "" for S in lengths)])
    return table(["", "caches", *map(length, lengths)], lines)


def _cell(row: Row) -> str:
    if row.note or row.time is None:
        return row.note or ""
    mark = " \\*" if row.details["disturbed"] else ""
    return f"{row.time.median / 1e3:.2f} ({row.time.least / 1e3:.2f}){mark}"
