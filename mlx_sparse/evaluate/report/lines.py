"""Lines: the choice of keys against rank, and time against the number of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import style
from .words import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..selection import SelectionRow

SIZE = 3.6, 2.8  # of a panel, inches
MOST_PANELS = 12
SCORES = {"query": ("#0072B2", "o"), "query_key": ("#D55E00", "s")}  # colour and marker of a component score
BENCH = Mapping[str, Any]


@style.styled
def draw_agreement(rows: Sequence[SelectionRow]) -> Figure | None:
    """SparQ's choice of keys against rank, by component score, as figure E2 of the paper; a line of panels per context.

    Agreement with the exact choice and its worst layer; attention on the chosen keys beside that on the exact choice;
    how far the estimate of it is off.
    """
    contexts = sorted({(row.context, row.top_k) for row in rows})[: MOST_PANELS // 3]
    if not contexts:
        return None
    sheet = style.Sheet("SparQ's choice of keys against the exact one", 3 * len(contexts), SIZE)
    for line, (context, top_k) in enumerate(contexts):
        of = sorted((row for row in rows if (row.context, row.top_k) == (context, top_k)), key=lambda row: row.rank)
        of_choice, of_mass, of_estimate = sheet.axes[3 * line : 3 * line + 3]
        for score in dict.fromkeys(row.component_score for row in of):
            chosen = [row for row in of if row.component_score == score]
            _against_rank(of_choice, chosen, "agreement", sheet, f"component_score={score}")
            _against_rank(of_mass, chosen, "mass", sheet, f"component_score={score}")
            _against_rank(of_estimate, chosen, "alpha_gap", sheet, f"component_score={score}")
            look = SCORES.get(score, (style.OTHER, "X"))
            ranks = [row.rank for row in chosen]
            (worst,) = of_choice.plot(ranks, [row.worst for row in chosen], ":", color=look[0], label=f"{score}, worst")
            sheet.enter(f"its worst layer, {score}", worst)
        best = of_mass.axhline(of[0].exact_mass, color=style.DENSE, linestyle="--", linewidth=1, label="exact choice")
        sheet.enter("exact choice", best)
        of_choice.set_title(f"{context:,} tokens, top {top_k:,} keys, {count(row.examples for row in of)} texts")
        of_mass.set_title("what the choice captures")
        of_estimate.set_title("how far its own estimate of that is off")
        of_choice.set_ylabel("share of the exact choice's keys")
        of_mass.set_ylabel("attention on the chosen keys, share")
        of_estimate.set_ylabel("difference to the share, without sign")
        for ax in (of_choice, of_mass, of_estimate):
            ax.set_xscale("log", base=2)
            ranks = sorted({row.rank for row in of})
            ax.set_xticks(ranks, [str(rank) for rank in ranks])
            ax.minorticks_off()
            ax.set_xlabel(f"rank: components of {of[0].head_dim}")
    sheet.note("Bars: ± one standard error over the texts.")
    return sheet.finish()


def _against_rank(ax: Axes, rows: Sequence[SelectionRow], name: str, sheet: style.Sheet, label: str) -> None:
    colour, marker = SCORES.get(rows[0].component_score, (style.OTHER, "X"))
    errors = [getattr(row, f"{name}_error") for row in rows]
    bars = [0.0 if math.isnan(error) else error for error in errors]
    values = [getattr(row, name) for row in rows]
    line = ax.errorbar(
        *([row.rank for row in rows], values, bars), color=colour, marker=marker, capsize=2, elinewidth=1, label=label
    )
    sheet.enter(label, line)


@style.styled
def draw_speed(rows: Sequence[BENCH]) -> Figure | None:
    """Medians of dense attention and of each method, a panel for each shape, type and batch, and size of a
    prompt's pieces; None without a time.

    Rows are those of ``mlx-sparse bench -o jsonl``. Where the result was wrong there are no times; it is named below.
    """
    panels: dict[tuple[str, str, int, int | None], list[BENCH]] = {}
    for row in filter(timed, rows):
        panels.setdefault((row["shape"], row["dtype"], row["batch"], row.get("step")), []).append(row)
    if not panels:
        return None
    shown = list(panels.items())[:MOST_PANELS]
    sheet = style.Sheet("Time of attention against the number of keys", len(shown), SIZE)
    looks = style.looks(line_of(row) for _, of in shown for row in of)
    lines = {line_of(row) for row in rows if timed(row)}
    if len(lines) > len(looks):
        sheet.note(f"{len(looks)} of {len(lines):,} methods are drawn; the table has all.")
    for ax, ((shape, dtype, batch, step), of) in zip(sheet.axes, shown, strict=True):
        _draw_times(ax, of, looks, sheet)
        heads, kv_heads, D = shape.split("x")
        what = "a decode step" if step is None else f"a prompt, {step:,} tokens at a time"
        ax.set_title(f"{what}\n{heads} query and {kv_heads} KV heads of {D}, {dtype}, batch {batch}", fontsize=8)
    sheet.note(
        "Medians of dense attention and of the method, which took turns in one run. Bars: first to third quartile."
    )
    for row in rows:
        if row["failed"]:
            sheet.note(f"Not drawn, for its result was wrong: {line_of(row)}, {row['shape']}, {row['S']:,} keys")
    return sheet.finish()


def timed(row: BENCH) -> bool:
    return not row["failed"] and row["sparse_us"] is not None and row["dense_us"] is not None


def line_of(row: BENCH) -> str:
    """The method, and what ran it."""
    return f"{row['method']} on {row['backend']}"


def _draw_times(ax: Axes, rows: Sequence[BENCH], looks: Mapping[str, dict[str, Any]], sheet: style.Sheet) -> None:
    lengths = sorted({row["S"] for row in rows})
    # Each row has a dense time of its own run: the fastest is what a method has to beat.
    fastest = [min((row for row in rows if row["S"] == S), key=lambda row: float(row["dense_us"])) for S in lengths]
    dense = {"color": style.DENSE, "linestyle": "--", "marker": "."}
    sheet.enter("dense attention", _draw_side(ax, fastest, "dense_us", "dense", dense))
    reads = [row for row in fastest if row.get("plain_read_us") is not None]
    if reads:
        plain = {"color": style.OTHER, "linestyle": ":"}
        sheet.enter("reading K and V once, no arithmetic", _draw_side(ax, reads, "plain_read_us", "read", plain))
    for line in dict.fromkeys(filter(looks.__contains__, map(line_of, rows))):
        of = sorted((row for row in rows if line_of(row) == line), key=lambda row: int(row["S"]))
        sheet.enter(line, _draw_side(ax, of, "sparse_us", line, looks[line]))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(lengths, [f"{S // 1024}k" if S % 1024 == 0 else f"{S:,}" for S in lengths])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.2g}")
    ax.minorticks_off()
    ax.set_xlabel("keys in the cache")
    ax.set_ylabel("microseconds per layer")


def _draw_side(ax: Axes, rows: Sequence[BENCH], side: str, label: str, look: Mapping[str, Any]) -> Any:
    """Medians with quartiles, where the rows have them."""
    medians = [row[side] for row in rows]
    low, high = ([abs(row[side] - (row.get(f"{side}_{end}") or row[side])) for row in rows] for end in ("low", "high"))
    return ax.errorbar([row["S"] for row in rows], medians, (low, high), capsize=2, elinewidth=1, label=label, **look)
