"""Tables of the benchmark, and the bars it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlx_sparse.bars import Bar, length, table

from .contenders import NAMES

if TYPE_CHECKING:
    from .run import Row

K = 1024
HELD_TO = 2  # threads
HELD_IN = "float16"
FLOATS = ("float32", "float16", "bfloat16")


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Every bar at the lengths that were measured, with two threads."""
    times = {(r.contender, r.dtype, r.S): r.median for r in rows if r.threads == HELD_TO}
    lengths = sorted({r.S for r in rows if r.threads == HELD_TO})

    def time(S: int, *contenders: tuple[str, str]) -> float | None:
        known = [t for name in contenders if (t := times.get((*name, S))) is not None]
        return min(known) if known else None

    def ratio(slow: float | None, fast: float | None) -> float | None:
        return slow / fast if slow and fast else None

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


def text(rows: Sequence[Row], bars: Sequence[Bar]) -> str:
    """Markdown: a table for each number of threads, then the bars."""
    blocks = []
    for threads in dict.fromkeys(row.threads for row in rows):
        chosen = [row for row in rows if row.threads == threads]
        blocks.append(f"### {threads} thread{'s' * (threads > 1)}\n\n{_table(chosen)}")
    if any(row.disturbed for row in rows):
        blocks.append("\\* Disturbed: too few samples ran without waiting for a processor, so these are all of them.")
    if bars:
        title = f"### Bars ({HELD_TO} threads, medians; ours with {HELD_IN} caches)"
        blocks.append("\n\n".join([title, table(bars)]))
    return "\n\n".join(blocks)


def _table(rows: Sequence[Row]) -> str:
    lengths = list(dict.fromkeys(row.S for row in rows))
    lines = ["| | caches | " + " | ".join(map(length, lengths)) + " |", "|---" * (len(lengths) + 2) + "|"]
    for name, dtype in dict.fromkeys((row.contender, row.dtype) for row in rows):
        found = {row.S: row for row in rows if (row.contender, row.dtype) == (name, dtype)}
        cells = [NAMES[name], dtype, *(_cell(found[S]) for S in lengths)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row.note or row.median is None:
        return row.note or ""
    mark = " \\*" if row.disturbed else ""
    return f"{row.median:.2f} ({min(row.times):.2f}){mark}"
