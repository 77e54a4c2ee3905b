"""``mlx-sparse bench --onnx``: time of one decode step on the CPU, every contender in turns in one run."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlx_sparse.checks import ConfigError, check_rank

from . import report
from .caches import DTYPES, Caches, Problem
from .contenders import CONTENDERS, HALF, Contender, build, unavailable

PAUSE = 0.003  # seconds between two contenders: pools that spin for a moment after their work do so here
# How long our threads may wait for a processor: a share of the sample's time, or some seconds. Beyond both, others
# disturbed it.
MOST_DELAY, LEAST_DELAY = 0.06, 5e-5
MOST_TRIES = 3  # samples for each that is wanted; what is still disturbed then is kept, and said
ENOUGH, BUDGET = 3, 3.0  # samples with which a contender leaves that has taken this many seconds
LARGEST_SHARE = 0.8  # of the memory of the machine


@dataclass
class Row:
    """One contender in one case.

    Attributes:
        times: milliseconds of the undisturbed samples, or of all of them if ``disturbed``.
        discarded: samples that were disturbed.
        note: why there are no times.
        failed: the result was wrong.
    """

    contender: str
    dtype: str
    S: int
    threads: int
    gigabytes: float = 0.0  # of K and V
    times: list[float] = field(default_factory=list)
    discarded: int = 0
    disturbed: bool = False
    note: str | None = None
    failed: bool = False

    @property
    def median(self) -> float | None:
        return median(self.times) if self.times else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = vars(self) | {
            "samples": len(self.times),
            "median_ms": self.median,
            "min_ms": min(self.times, default=None),
        }
        del row["times"]
        if self.median:
            row["gigabytes_per_second"] = 1e3 * self.gigabytes / self.median
        return row


def run(
    lengths: Sequence[int],
    threads: Sequence[int],
    shape: tuple[int, int, int],
    rank: int,
    top_k: int,
    window: int,
    repeat: int,
) -> tuple[list[dict[str, Any]], str, bool]:
    """Measure; return rows for programs, Markdown for people, and whether all results were right.

    Raises:
        ConfigError: ``rank`` does not fit the shape.
    """
    from tqdm import tqdm

    check_rank(rank, shape[2])
    rows: list[Row] = []
    with tqdm(total=len(lengths) * len(threads), unit="case", disable=None) as progress:
        for S in lengths:
            if top_k >= S:
                raise ConfigError(f"--lengths: expected more than the {top_k} keys that SparQ attends to, got {S}.")
            for found in _length(Problem(*shape, S, rank, top_k, window), threads, repeat):
                rows += found
                progress.update()
    bars = report.bars(rows)
    text = f"{_where(shape, rank, top_k, window)}\n\n{report.text(rows, bars)}"
    return [row.as_dict() for row in rows] + [bar.as_dict() for bar in bars], text, not any(r.failed for r in rows)


def _length(problem: Problem, threads: Sequence[int], repeat: int) -> Iterator[list[Row]]:
    """Rows of one number of keys, for each number of threads."""
    needed, there = problem.memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = [(name, dtype) for name, dtypes in CONTENDERS.items() for dtype in dtypes]
    if needed > LARGEST_SHARE * there:
        note = f"needs {needed / 1e9:.0f} GB of this machine's {there / 1e9:.0f} GB"
        yield from ([Row(*name, problem.S, n, note=note) for name in names] for n in threads)
        return
    caches = {dtype: Caches(problem, dtype, component_major=dtype in HALF) for dtype in DTYPES}
    for n in threads:
        rows, entered = [], []
        for name, dtype in names:
            size = 2 * problem.bytes(dtype) * problem.S / problem.C / 1e9
            row = Row(name, dtype, problem.S, n, size, note=unavailable(name))
            rows.append(row)
            if row.note is None:
                contender = build(name, dtype, caches[dtype], n)
                row.note = check(contender, caches[dtype])
                row.failed = row.note is not None
                if not row.failed:
                    entered.append((row, contender))
        measure(entered, repeat)
        del entered
        gc.collect()  # sessions and their threads
        yield rows
    del caches
    gc.collect()  # before the next ones


def check(contender: Contender, caches: Caches) -> str | None:
    """What is wrong with the contender's result; None if nothing is."""
    expected, allowed = caches.plant()
    contender.bind(0)
    contender.run()
    out = None if contender.output is None else contender.output().astype(np.float64)
    caches.restore()
    if out is None:
        return None
    error = float(np.abs(out - expected).max())
    return None if error <= allowed else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"


def measure(entered: Sequence[tuple[Row, Contender]], repeat: int) -> None:
    """Fill in the times of every row, in turns, until each has ``repeat`` undisturbed ones or was tried enough.

    A turn is two steps on two sets of caches, the second of them timed: as in a model, its threads are awake.
    """
    disturbed: dict[int, list[float]] = {id(row): [] for row, _ in entered}
    for turn in range(MOST_TRIES * repeat):
        for row, contender in entered:
            taken = row.times + disturbed[id(row)]
            if len(row.times) >= repeat or (len(taken) >= ENOUGH and sum(taken) >= 1e3 * BUDGET):
                continue
            time.sleep(PAUSE)
            contender.bind(2 * turn)
            contender.run()
            contender.bind(2 * turn + 1)
            seconds, delay = sample(contender.run)
            into = row.times if delay <= max(MOST_DELAY * seconds, LEAST_DELAY) else disturbed[id(row)]
            into.append(1e3 * seconds)
    for row, _ in entered:
        row.discarded = len(disturbed[id(row)])
        if len(row.times) < ENOUGH:
            row.times, row.disturbed = row.times + disturbed[id(row)], row.discarded > 0


def sample(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a step, and seconds that threads of ours that could run had to wait for a processor meanwhile."""
    before = _waited()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return seconds, _waited() - before


def _waited() -> float:
    """Run-queue delay of all our threads so far, in seconds; 0 where the system does not say."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_bytes().split()[1])
        except (OSError, IndexError):  # a thread that ended meanwhile
            continue
    return total / 1e9


def machine() -> str:
    """What the benchmark ran on."""
    versions = [f"onnxruntime {version('onnxruntime')}"]
    if importlib.util.find_spec("torch"):
        versions.append(f"torch {version('torch')}")
    cpu = next(
        (line.split(":")[1].strip() for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    pages = _text("/sys/kernel/mm/transparent_hugepage/enabled").strip()
    return f"{', '.join(versions)}; {cpu}, {os.cpu_count()} processors; huge pages: {pages or 'unknown'}."


def _where(shape: tuple[int, int, int], rank: int, top_k: int, window: int) -> str:
    return (
        f"{machine()}\n\n"
        f"One decode step in milliseconds, median (minimum): {shape[0]} query heads, {shape[1]} KV heads, "
        f"D = {shape[2]}; SparQ with rank {rank} and top_k {top_k} of which {window} are the last keys."
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
