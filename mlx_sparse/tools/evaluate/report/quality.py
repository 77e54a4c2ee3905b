"""Quality against compression: one panel for each context, as in figure 1 of the SparQ paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..results import Row
from . import style
from .style import BITS, MASS, count, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST = 2.0**-12  # share that is drawn
STEPS, PROMPT = "steps", "prompt"
ACROSS = {
    STEPS: "bytes read per step, share of dense attention's",
    PROMPT: "block pairs attended, share of the prompt's",
}
UP = {
    "accuracy": "accuracy: share of tokens right",
    "bits": "bits per byte (less is better)",
    "mass": "retained mass: share of attention",
}
SPAN = {"accuracy": 0.1, "bits": 0.05, "mass": 0.1}  # the least that an axis shows: less is not worth a picture
BARS = "Bars: ± one standard error of the difference to dense attention on the same examples."
BAND = "Band: ± one standard error of dense attention's own mean."
MASS_BARS = "Bars reach down to what 99 % of the queries keep."
HOLLOW = "Hollow: some of the calls ran densely."


@dataclass(frozen=True)
class Panel:
    """Rows that are drawn over one axis.

    Attributes:
        prompt: whether the axis is about the prompt, not about the steps after it.
        dense: the row of dense attention on the same examples.
    """

    context: int
    prompt: bool
    rows: list[Row]
    dense: Row | None


@style.styled()
def draw_quality(rows: Sequence[Row], task: str) -> Figure | None:
    """What methods keep of dense attention's quality in ``task``, over what they read; None if nothing ran sparsely.

    A line joins the budgets of one method. What ran densely is named below and not drawn; points are hollow where some
    calls ran densely.
    """
    rows = [row for row in rows if row.task == task]
    panels = _panels(rows)
    if not panels:
        return None
    sheet = style.Sheet(title(task), len(panels), style.PANEL)
    looks = style.looks(row.method for panel in panels for row in panel.rows)
    methods = {row.method for row in rows if drawn(row)}
    if len(methods) > len(looks):
        sheet.note(f"{len(looks)} of {len(methods):,} methods are drawn; the tables have all.")
    for ax, panel in zip(sheet.axes, panels, strict=True):
        _draw(ax, panel, measure(task), looks, sheet)
    for row in rows:
        if row.served == "fell back":
            sheet.note(f"Not drawn, for it ran densely at {row.context:,} tokens: {row.method}")
    return sheet.finish()


def drawn(row: Row) -> bool:
    """Whether ``row`` is a point: it ran sparsely, at least in part."""
    return row.served in ("sparse", "partly") and (row.task != MASS or bool(row.mass))


def share(row: Row) -> float:
    """What the method read, or attended, over what dense attention does."""
    if not row.of_prompt:
        return row.compression
    heads = [head for layer in row.density for head in layer]
    return sum(heads) / len(heads) if heads else 1.0


def measure(task: str) -> str:
    """What quality is in ``task``."""
    return {MASS: "mass", BITS: "bits"}.get(task, "accuracy")


def _panels(rows: Sequence[Row]) -> list[Panel]:
    dense = {(row.context, row.prefill): row for row in rows if row.served == "dense"}
    groups: dict[tuple[bool, int, bool], list[Row]] = {}
    for row in filter(drawn, rows):
        groups.setdefault((row.of_prompt, row.context, row.prefill), []).append(row)
    return [
        Panel(context, prompt, groups[prompt, context, prefill], dense.get((context, prefill)))
        for prompt, context, prefill in sorted(groups)
    ][: style.MOST_PANELS]


def _draw(ax: Axes, panel: Panel, of: str, looks: Mapping[str, dict[str, Any]], sheet: style.Sheet) -> None:
    if panel.dense is not None:
        _draw_level(ax, panel.dense, of, sheet)
    for method in dict.fromkeys(row.method for row in panel.rows if row.method in looks):
        rows = sorted((row for row in panel.rows if row.method == method), key=share)
        points = [(max(share(row), SMALLEST), *_value(row, of)) for row in rows]
        across, up, low, high = zip(*points, strict=True)
        line = ax.errorbar(across, up, yerr=(low, high), capsize=2, elinewidth=1, label=method, **looks[method])
        sheet.enter(method, line)
        sheet.note(MASS_BARS if of == "mass" else BARS)
        for row, (x, y, *_) in zip(rows, points, strict=True):
            if row.served == "partly":
                ax.plot([x], [y], **looks[method], mfc="white", zorder=5)
                sheet.note(HOLLOW)
    where = "sparse prompt of " if panel.prompt else ""
    ax.set_title(f"{where}{panel.context:,} tokens, {count(row.examples for row in panel.rows)}")
    ax.set_ylabel(UP[of])
    ax.set_xlabel(ACROSS[PROMPT if panel.prompt else STEPS])
    _limit(ax, of)
    _scale(ax, [share(row) for row in panel.rows], log=not panel.prompt)


def _draw_level(ax: Axes, dense: Row, of: str, sheet: style.Sheet) -> None:
    """Dense attention as a line across, with a band of its standard error."""
    value, error = (1.0, 0.0) if of == "mass" else (getattr(dense.mean, of), getattr(dense.mean_error, of))
    sheet.enter("dense attention", ax.axhline(value, color=style.DENSE, linestyle="--", linewidth=1, label="dense"))
    if error and not math.isnan(error):
        ax.axhspan(value - error, value + error, color=style.DENSE, alpha=0.1, linewidth=0)
        sheet.note(BAND)


def _value(row: Row, of: str) -> tuple[float, float, float]:
    """What is drawn of a row, and its bars down and up."""
    if of == "mass":
        _, low, mean = row.mass
        return mean, max(mean - low, 0.0), 0.0
    error = getattr(row.error, of)
    bar = 0.0 if math.isnan(error) else error
    return getattr(row.mean, of), bar, bar


def _limit(ax: Axes, of: str) -> None:
    """No share above 1, and no difference made large that is small."""
    low, high = ax.get_ylim()
    missing = max(SPAN[of] - (high - low), 0.0)
    low, high = low - missing / 2, high + missing / 2
    if of != "bits":
        high = min(high, 1.03)
    least = -0.03 * (high - low)  # nothing is below 0, but a point at 0 is to be seen whole
    ax.set_ylim(max(min(low, high - SPAN[of]), least), high)


def _scale(ax: Axes, shares: Sequence[float], *, log: bool) -> None:
    """Let the axis go from 1/16, or less where it is needed, to all; each tick is half of the next one."""
    if not log:
        ax.set_xlim(0, 1.03)
        return
    low = min(-4, math.floor(math.log2(max(min(shares), SMALLEST)) + 1e-9))
    high = max(0, math.ceil(math.log2(max(*shares, SMALLEST)) - 1e-9))
    ticks = range(low, high + 1)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2.0**tick for tick in ticks], [f"1/{2**-tick}" if tick < 0 else str(2**tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(2.0 ** (low - 0.3), 2.0 ** (high + 0.2))
