"""Rows as Markdown tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from .. import formats
from .results import Row

ENDS = ["bits/byte", "Δ", "accuracy", "Δ", "matched", "agreement", "KL"]
DECODE_HEADER = ["task", "context", "method", "budget", "n", "bytes by formula", "counted", "selectivity", "density"]
PREFILL_HEADER = [
    "task",
    "context",
    "method",
    "n",
    "density",
    "of layers",
    "sampled",
    "mass: min",
    "1 %",
    "mean",
    *ENDS,
]


def table(rows: Sequence[Row]) -> str:
    """Markdown: a table of the steps after a prompt, one of prompts, or both."""
    parts = []
    for prefill, header in ((False, [*DECODE_HEADER, *ENDS]), (True, PREFILL_HEADER)):
        chosen = [row for row in rows if row.prefill == prefill]
        if chosen:
            parts.append(formats.table(header, map(_cells, chosen)))
    notes = [note for row in rows if (note := remark(row))]
    return "\n\n".join([*parts, *notes])


def remark(row: Row) -> str | None:
    """One sentence about a row that is not all that its name says; None if it is."""
    if row.served not in ("partly", "fell back"):
        return None
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(row.dense_reasons.items()))
    share = "no call was" if row.served == "fell back" else f"{row.sparse_share:.0%} of the calls were"
    return f"`{row.method}`, {row.task}, {row.context:,} tokens: {share} sparse; dense: {reasons}."


def _cells(row: Row) -> list[str]:
    mean, delta, error = row.mean, row.delta, row.error
    cells = [row.task, f"{row.context:,}", f"`{row.attn}`" + _mark(row)]
    cells += _prompt_cells(row) if row.prefill else _step_cells(row)
    cells += [f"{mean.bits:.4f}", plus_minus(delta.bits, error.bits, 4, signed=True)]
    cells += [f"{mean.accuracy:.3f}", plus_minus(delta.accuracy, error.accuracy, 3, signed=True)]
    cells.append(plus_minus(mean.matched, row.mean_error.matched, 0))
    return [*cells, plus_minus(mean.agreement, error.agreement, 3), plus_minus(mean.kl, error.kl, 4)]


def _mark(row: Row) -> str:
    return {"partly": f" (sparse: {row.sparse_share:.0%})", "fell back": " (ran densely)"}.get(row.served, "")


def plus_minus(value: float, error: float, digits: int, *, signed: bool = False) -> str:
    """A mean, and its standard error where several examples give one."""
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def _step_cells(row: Row) -> list[str]:
    formula = "" if row.formula is None else f"{row.formula:.3f}"
    selectivity = "" if row.selectivity is None else f"{row.selectivity:.3f}"
    counted = "" if row.of_prompt else f"{row.compression:.3f}"
    density = f"{mean(map(mean, row.density)):.3f}" if row.density else ""
    return [row.budget or "", str(row.examples), formula, counted, selectivity, density]


def _prompt_cells(row: Row) -> list[str]:
    layers = [mean(heads) for heads in row.density]
    density = [f"{mean(layers):.3f}", f"{min(layers):.2f} to {max(layers):.2f}"] if layers else ["1.000", ""]
    mass = [f"{value:.3f}" for value in row.mass] or [""] * 3
    return [str(row.examples), *density, f"{row.sampled:.3f}", *mass]
