"""Plot the quality of methods against the bytes that the methods read, as in figure 1 of the SparQ paper."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

from ...methods import METHODS
from .results import Row
from .table import clean
from .tasks import RECALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS, MAX_LINES, MAX_NAME = 12, 40, 80  # limits: panels, methods, characters of a name
COLUMNS, PANEL = 3, (3.8, 3.0)  # panels side by side, and their size in inches
SMALLEST = 2.0**-12  # smallest share in a picture
DASHES = ("-", "--", ":", "-.")  # line styles of variants of one method
RC = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "mlx-sparse",  # makes ids reproducible
    "text.parse_math": False,  # a name may contain dollars
}
FIELDS = {"bits_per_byte": ("bits", "bits per byte (lower is better)"), RECALL: ("recall", "mean attention recall")}
OTHERS = ("accuracy", "accuracy: share of correct tokens")


@contextmanager
def styled() -> Iterator[None]:
    """Apply the settings `RC` and ignore the user's matplotlibrc (context manager and decorator)."""
    from matplotlib import style

    with style.context(RC, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


@styled()
def draw(rows: Sequence[Row]) -> Figure | None:
    """Plot the rows of one task. Return None if no row has sparse calls.

    Each context length has its own panel. A line connects the points of one method, and each point has its own budget.
    A hollow point means that some calls were dense. An error bar shows one standard error of the paired difference
    between the method and dense attention.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[bool, bool, int], list[Row]] = {}
    for row in rows:
        if row.served in ("sparse", "partly") and (row.task != RECALL or row.recall):
            panels.setdefault((row.of_prompt, row.prefill, row.context), []).append(row)
    shown = sorted(panels.items())[:MAX_PANELS]
    if not shown:
        return None
    styles = _styles([row.method for _, of in shown for row in of])
    down, across = math.ceil(len(shown) / COLUMNS), min(len(shown), COLUMNS)
    figure = Figure(figsize=(PANEL[0] * across, PANEL[1] * down + 0.16 * len(styles)), layout="constrained")
    for i, ((of_prompt, prefill, context), of) in enumerate(shown, 1):
        ax = figure.add_subplot(down, across, i)
        dense = next((r for r in rows if r.served == "dense" and (r.context, r.prefill) == (context, prefill)), None)
        _draw_panel(ax, of, dense, styles)
        ax.set_title(f"{context:,} tokens, n = {of[0].examples}")
        ax.set_xlabel(f"{'block pairs attended' if of_prompt else 'bytes read'}, share of dense attention's")
        if of_prompt:
            ax.set_xlim(0, 1.03)
        else:
            ax.set_xscale("log", base=2)
            low = min(-4, math.floor(math.log2(min(map(share, of)))))
            ax.set_xticks([2.0**tick for tick in range(low, 1)], [f"1/{2**-tick}" for tick in range(low, 0)] + ["1"])
            ax.minorticks_off()
    entries = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([*entries.values()], [*entries], loc="outside lower left")
    return figure


def svg(figure: Figure) -> str:
    """Return the figure as SVG text. The same figure always gives the same text."""
    file = io.StringIO()
    with styled():
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    return file.getvalue()


def share(row: Row) -> float:
    """Return the share of dense attention's bytes that the method of ``row`` reads. The minimum is `SMALLEST`.

    If the method is sparse only in the prefill, return the mean density instead: the share of the causal block pairs
    that the method attends to, averaged over layers.
    """
    return max(mean(row.density) if row.of_prompt and row.density else row.compression, SMALLEST)


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a dict from each method to its color, marker and line style. The color is the same in every plot."""
    found: dict[str, dict[str, Any]] = {}
    kinds: list[str] = []
    for method in list(dict.fromkeys(methods))[:MAX_LINES]:
        kind = method.rpartition("+")[2].partition(":")[0].partition(" ")[0]
        color, marker = METHODS[kind].plot_style if kind in METHODS else ("#666666", "X")
        found[method] = {"color": color, "marker": marker, "linestyle": DASHES[kinds.count(kind) % len(DASHES)]}
        kinds.append(kind)
    return found


def _draw_panel(ax: Axes, rows: Sequence[Row], dense: Row | None, styles: dict[str, dict[str, Any]]) -> None:
    field, label = FIELDS.get(rows[0].task, OTHERS)
    ax.set_ylabel(label)
    if dense is not None and field != "recall":
        ax.axhline(getattr(dense.mean, field), color="black", linestyle="--", linewidth=1, label="dense attention")
    for method, look in styles.items():
        of = sorted((row for row in rows if row.method == method), key=share)
        across = [share(row) for row in of]
        up = [row.recall[-1] if field == "recall" else getattr(row.mean, field) for row in of]
        errors = [0.0 if field == "recall" else abs(getattr(row.error, field)) for row in of]
        bars = [0.0 if math.isnan(error) else error for error in errors]
        if of:
            ax.errorbar(across, up, bars, capsize=2, elinewidth=1, label=clean(method, MAX_NAME), **look)
        for row, x, y in zip(of, across, up, strict=True):
            if row.served == "partly":
                ax.plot([x], [y], **look, mfc="white", zorder=5)
