"""On what the benchmarks of CPUs ran, and their tables."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from mlx_sparse.tools.bench.core import Case, Contender, Row, Turns, measure
from mlx_sparse.tools.formats import table


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


def by_threads(
    case: Case,
    threads: Iterable[int],
    rows_of: Callable[[int], list[Row]],
    contender: Callable[[Row], Contender],
    turns: Turns,
) -> Iterator[Row]:
    """Rows of all contenders, for one number of threads after the other."""
    for n in threads:
        yield from measure(case, map(contender, rows_of(n)), turns)
        gc.collect()  # sessions and their threads


def tables(
    rows: Sequence[Row],
    names: Mapping[str, str],
    kind: str,
    column: Callable[[Case], str],
    cell: Callable[[Row, Sequence[Row]], str],
) -> str:
    """Markdown: a table for each number of threads, with a line for each contender and a column for each case.

    Args:
        names: of the contenders, for people; ``kind`` of type they have stands beside them.
        cell: what is said of a row, among those of its table.
    """
    blocks, named = [], [row for row in rows if row.name]
    for threads in dict.fromkeys(row.details["threads"] for row in named):
        chosen = [row for row in named if row.details["threads"] == threads]
        cases = list(dict.fromkeys(row.case for row in chosen))
        per_case = [[row for row in chosen if row.case == case] for case in cases]
        lines = [
            [names[first.name], first.details["dtype"], *(cell(row, chosen) for row in (first, *others))]
            for first, *others in zip(*per_case, strict=True)
        ]
        text = table(["", kind, *map(column, cases)], lines)
        blocks.append(f"### {threads} thread{'s' * (threads > 1)}\n\n{text}")
    if any(row.details.get("disturbed") for row in rows):
        blocks.append("\\* Disturbed: too few samples ran without waiting for a processor, so these are all of them.")
    return "\n\n".join([*blocks, *(f"* {row.case}: {row.note}" for row in rows if not row.name)])
