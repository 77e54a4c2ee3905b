"""SparQ's choice of keys against its rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import style
from .style import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..selection import SelectionRow

SCORES = {"query": ("#0072B2", "o"), "query_key": ("#D55E00", "s")}  # colour and marker of a component score


@style.styled()
def draw_agreement(rows: Sequence[SelectionRow]) -> Figure | None:
    """SparQ's choice of keys against rank, by component score, as figure E2 of the paper; a line of panels per context.

    Agreement with the exact choice and its worst layer; attention on the chosen keys beside that on the exact choice;
    how far the estimate of it is off.
    """
    contexts = sorted({(row.context, row.top_k) for row in rows})[: style.MOST_PANELS // 3]
    if not contexts:
        return None
    sheet = style.Sheet("SparQ's choice of keys against the exact one", 3 * len(contexts), style.PANEL)
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
