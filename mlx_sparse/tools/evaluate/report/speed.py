"""Time of attention against the number of keys, from rows of ``mlx-sparse bench -o jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, WHOLE = "a decode step", "a prompt at once"
MICRO, MILLI = (1.0, "microseconds"), (1e-3, "milliseconds")


@dataclass(frozen=True)
class Run:
    """When and on what a benchmark ran."""

    command: str
    date: str
    machine: dict[str, Any]

    @property
    def where(self) -> str:
        """The date and the machine, in words."""
        return f"{self.date}, {self.machine.get('chip') or ''}"


@dataclass(frozen=True)
class Speed:
    """What a report shows of a row of ``mlx-sparse bench -o jsonl``: times in microseconds, with their quartiles.

    Attributes:
        shape: query heads, KV heads and head dim, such as "32x8x128".
        S: keys.
        ratio: time of dense attention over the method's.
        step: tokens of a prompt that are processed at a time; None for a decode step.
        failed: the result was wrong, so that there are no times.
    """

    method: str
    backend: str
    dtype: str
    shape: str
    batch: int
    S: int
    run: Run
    failed: bool
    note: str | None
    ratio: float | None
    bytes_formula: int | None
    bytes_plain: int | None
    dense_us: float | None = None
    dense_us_low: float | None = None
    dense_us_high: float | None = None
    sparse_us: float | None = None
    sparse_us_low: float | None = None
    sparse_us_high: float | None = None
    plain_read_us: float | None = None
    plain_read_us_low: float | None = None
    plain_read_us_high: float | None = None
    step: int | None = None


@style.styled()
def draw_speed(rows: Sequence[Speed]) -> Figure | None:
    """Medians of dense attention and of each method, a panel for each shape, type, batch and size of a prompt's pieces.

    Where the result was wrong there are no times; it is named below. None if there are no times at all.
    """
    right = [row for row in rows if timed(row)]
    if not right:
        return None
    panels: dict[tuple[str, str, int, str], list[Speed]] = {}
    for row in right:
        for what in _calls(row, right):
            panels.setdefault((row.shape, row.dtype, row.batch, what), []).append(row)
    shown = list(panels.items())[: style.MOST_PANELS]
    sheet = style.Sheet("Time of attention against the number of keys", len(shown), style.PANEL)
    lines = dict.fromkeys(map(line_of, right))
    looks = style.looks(lines)
    if len(lines) > len(looks):
        sheet.note(f"{len(looks)} of {len(lines):,} methods are drawn; the table has all.")
    for ax, ((shape, dtype, batch, what), of) in zip(sheet.axes, shown, strict=True):
        _draw_times(ax, of, looks, sheet, *(MICRO if what == STEP else MILLI))
        heads, kv_heads, D = shape.split("x")
        ax.set_title(f"{what}\n{heads} query and {kv_heads} KV heads of {D}, {dtype}, batch {batch}", fontsize=8)
    sheet.note("Medians; dense attention and the methods took turns in one run. Bars: the middle half of the times.")
    for row in rows:
        if row.failed:
            sheet.note(f"Not drawn, for its result was wrong: {line_of(row)}, {row.shape}, {row.S:,} keys")
    return sheet.finish()


def timed(row: Speed) -> bool:
    """Whether a row has the times of both sides, which it has not where the method's result was wrong."""
    return not row.failed and row.sparse_us is not None and row.dense_us is not None


def line_of(row: Speed) -> str:
    """The method, and what ran it."""
    return f"{row.method} on {row.backend}"


def _calls(row: Speed, rows: Sequence[Speed]) -> list[str]:
    """What was timed: a prompt no longer than the pieces of others is one at once, and one in such pieces."""
    step = row.step
    if step is None:
        return [STEP]
    pieces = any(other.step == step < other.S for other in rows)
    return [WHOLE] * (step >= row.S) + [f"a prompt, {step:,} tokens at a time"] * pieces


def _draw_times(
    ax: Axes, rows: Sequence[Speed], looks: Mapping[str, dict[str, Any]], sheet: style.Sheet, scale: float, unit: str
) -> None:
    def draw(rows: Sequence[Speed], side: str, label: str, look: Mapping[str, Any]) -> Any:
        """Medians with quartiles, where the rows have them."""
        ends = [[getattr(row, f"{side}_{end}") or getattr(row, side) for row in rows] for end in ("low", "high")]
        bars = [[abs(getattr(row, side) - other) * scale for row, other in zip(rows, end, strict=True)] for end in ends]
        places, medians = [row.S for row in rows], [getattr(row, side) * scale for row in rows]
        return ax.errorbar(places, medians, bars, capsize=2, elinewidth=1, label=label, **look)

    lengths = sorted({row.S for row in rows})
    # Each row has a dense time of its own run: the fastest is what a method has to beat.
    fastest = [min((row for row in rows if row.S == S), key=lambda row: row.dense_us or 0.0) for S in lengths]
    dense = {"color": style.DENSE, "linestyle": "--", "marker": "."}
    sheet.enter("dense attention", draw(fastest, "dense_us", "dense", dense))
    reads = [row for row in fastest if row.plain_read_us is not None and row.step is None]
    if reads:
        plain = {"color": style.OTHER, "linestyle": ":"}
        sheet.enter("reading K and V once, no arithmetic", draw(reads, "plain_read_us", "read", plain))
    for line in dict.fromkeys(filter(looks.__contains__, map(line_of, rows))):
        of = sorted((row for row in rows if line_of(row) == line), key=lambda row: row.S)
        sheet.enter(line, draw(of, "sparse_us", line, looks[line]))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(lengths, [f"{S // 1024}k" if S % 1024 == 0 else f"{S:,}" for S in lengths])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.2g}")
    ax.minorticks_off()
    ax.set_xlabel("keys in the cache" if unit == MICRO[1] else "tokens of the prompt")
    ax.set_ylabel(f"{unit} per layer")
