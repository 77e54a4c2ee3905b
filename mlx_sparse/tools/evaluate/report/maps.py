"""Heat maps: where in a prompt a method finds what it looks for, and how much of a prompt each head attends."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from ..results import Depth, Row
from . import style
from .style import count, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = 2.5, 2.3  # of a panel, inches
MOST_PANELS, MOST_DEPTHS, MOST_CONTEXTS = 24, 12, 12
LONGEST = 31  # characters of a panel's title
DARK = 0.55  # values above are written in black


@style.styled()
def draw_needle(rows: Sequence[Row]) -> Figure | None:
    """Accuracy by depth of the answer and length of the prompt, a panel for each task, method and budget.

    As figure A4 of the SparQ paper. What ran densely at a length has no cell there.
    """
    rows = [row for row in rows if row.depths]
    contexts = sorted({row.context for row in rows})[:MOST_CONTEXTS]
    rows = [row for row in rows if row.context in contexts]
    panels: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.task, row.method, row.budget), []).append(row)
    panels = {key: of for key, of in panels.items() if any(row.served != "fell back" for row in of)}
    if not panels:
        return None
    shown = list(panels.items())[:MOST_PANELS]
    tasks = list(dict.fromkeys(task for (task, _, _), _ in shown))
    sheet = style.Sheet(" / ".join(map(title, tasks)), len(shown), SIZE, across=4)
    for ax, ((task, method, budget), of) in zip(sheet.axes, shown, strict=True):
        image = _draw_depths(ax, of, contexts)
        name = style.clean(method, LONGEST) + (f" at {budget}" if budget else "")
        ax.set_title(name if len(tasks) == 1 else f"{name}\n{task}", fontsize=8)
        if any(row.served == "partly" for row in of):
            sheet.note(f"{method}{f' at {budget}' if budget else ''}: some of the calls ran densely.")
    sheet.above.colorbar(image, ax=sheet.axes, label="accuracy: share of tokens right", shrink=0.8)
    sheet.note(f"Each cell: {count(depth.examples for row in rows for depth in row.depths)} examples.")
    _note_rest(sheet, len(shown), len(panels))
    return sheet.finish()


@style.styled()
def draw_density(rows: Sequence[Row]) -> Figure | None:
    """Share of the causal block pairs of a prompt that each layer and head attended, a panel for each row."""
    panels = [row for row in rows if row.density]
    if not panels:
        return None
    shown = panels[:MOST_PANELS]
    sheet = style.Sheet("Density: what each head attends of a sparse prompt", len(shown), SIZE, across=4)
    for ax, row in zip(sheet.axes, shown, strict=True):
        most = max(map(len, row.density))  # layers may have different numbers of heads
        cells = [[*heads, *[nan] * (most - len(heads))] for heads in row.density]
        image = ax.imshow(cells, vmin=0, vmax=1, aspect="auto", interpolation="none", cmap="viridis")
        ax.set_title(f"{style.clean(row.method, LONGEST)}\n{row.task}, {row.context:,} tokens", fontsize=8)
        ax.set_xlabel("query head")
        ax.set_ylabel("layer")
        ax.locator_params(integer=True)
        _plain(ax)
    sheet.above.colorbar(image, ax=sheet.axes, label="share of the causal block pairs attended", shrink=0.8)
    sheet.note("Mean over the examples. Layers and heads are counted from 0, layers among those that can be sparse.")
    _note_rest(sheet, len(shown), len(panels))
    return sheet.finish()


def _draw_depths(ax: Axes, rows: Sequence[Row], contexts: Sequence[int]) -> Any:
    """One cell for each depth and context; contexts without a sparse run stay empty, and say so."""
    cells = {row.context: _binned(row.depths) for row in rows if row.served != "fell back"}
    depths = sorted({depth for found in cells.values() for depth in found}) or [0.0]
    values = [[cells.get(context, {}).get(depth, float("nan")) for context in contexts] for depth in depths]
    image = ax.imshow(values, vmin=0, vmax=1, aspect="auto", interpolation="none", cmap="viridis")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if not isnan(value):
                ax.text(x, y, f"{value:.2f}", ha="center", va="center", color="k" if value > DARK else "w", fontsize=6)
    for row in rows:
        if row.served == "fell back":
            x, middle = contexts.index(row.context), (len(depths) - 1) / 2
            ax.text(x, middle, "ran densely", rotation=90, ha="center", va="center", color="0.3", fontsize=7)
    ax.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    ax.set_xlabel("tokens of the prompt")
    ax.set_ylabel("depth of the answer")
    _plain(ax)
    return image


def _binned(depths: Sequence[Depth]) -> dict[float, float]:
    """Accuracy by depth; of neighbours together where there are many depths."""
    if len(depths) <= MOST_DEPTHS:
        return {depth.depth: depth.accuracy for depth in depths}
    bins: dict[float, list[Depth]] = {}
    for depth in depths:
        bins.setdefault((min(int(depth.depth * 10), 9) + 0.5) / 10, []).append(depth)
    return {
        middle: sum(depth.accuracy * depth.examples for depth in found) / sum(depth.examples for depth in found)
        for middle, found in bins.items()
    }


def _plain(ax: Axes) -> None:
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)


def _note_rest(sheet: style.Sheet, shown: int, there: int) -> None:
    if there > shown:
        sheet.note(f"The first {shown} of {there} are drawn; the tables have all.")
