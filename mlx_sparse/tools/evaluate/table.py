"""Format the results of an evaluation as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from .. import terminal
from .results import Row
from .tasks import TASKS

MAX_CELL = 400  # largest number of characters in a cell
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Table:
    """A table of strings."""

    caption: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        return f"{self.caption}\n\n{terminal.table(self.header, self.rows, keys=2)}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return at most two tables of each task.

    The first table is for decode steps after the prompt. The second table is for tokens inside a sparse prompt. A table
    that has no rows is omitted.
    """
    found = []
    captions = {False: "decode steps after the prompt", True: "tokens inside a sparse prompt"}
    for task, prefill in product(dict.fromkeys(row.task for row in rows), captions):
        chosen = [row for row in rows if row.task == task and row.prefill == prefill]
        if chosen:
            cells = list(map(_cells, chosen))
            columns = dict.fromkeys(name for row in sorted(cells, key=len, reverse=True) for name in row)
            header = [name for name in columns if any(row.get(name) for row in cells)]
            lines = [[_clean(row.get(name, "")) for name in header] for row in cells]
            found.append(Table(f"{task}: {captions[prefill]}", header, lines))
    return found


def _clean(text: str) -> str:
    """Return ``text`` as one line without unprintable characters. Replace the middle of a long text by an ellipsis."""
    line = "".join(letter if letter.isprintable() else REPLACEMENT for letter in text)
    half = (MAX_CELL - 1) // 2
    return line if len(line) <= MAX_CELL else f"{line[:half]}…{line[-half:]}"


def plus_minus(value: float, error: float, digits: int, *, signed: bool = False) -> str:
    """Format a mean and its standard error. If the standard error is NaN, format only the mean."""
    text = f"{round(value, digits) + 0.0:{'+' if signed else ''}.{digits}f}"  # + 0.0: no minus sign before 0
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def _cells(row: Row) -> dict[str, str]:
    mean, delta, error = row.mean, row.delta, row.error
    cells = {
        "method": row.method,
        "context": f"{row.context:,}",
        "settings": row.attn if row.attn != row.method else "",
    }
    cells |= {"budget": row.budget or "", "n": f"{row.examples:,}"}
    if not row.prefill:
        cells["bytes by formula"] = "" if row.formula is None else f"{row.formula:.3f}"
        cells["bytes counted"] = "" if row.of_prompt else f"{row.compression:.3f}"
    cells["selectivity"] = "" if row.selectivity is None else f"{row.selectivity:.3f}"
    if row.density:
        cells |= {"density": f"{fmean(row.density):.3f}", "sampled": f"{row.sampled:.3f}"}
        cells["density by layer"] = f"{min(row.density):.2f} to {max(row.density):.2f}"
    cells |= {
        name: f"{value:.3f}" for name, value in zip(("least recall", "1 %", "mean recall"), row.recall, strict=False)
    }
    for name, field, digits in (("bits per byte", "bits", 4), ("accuracy", "accuracy", 3)):
        cells[name] = f"{getattr(mean, field):.{digits}f}"
        change = plus_minus(getattr(delta, field), getattr(error, field), digits, signed=True)
        cells[f"Δ {name}"] = "" if row.served == "dense" else change
    if row.task in TASKS and row.task != "bits_per_byte" and not row.prefill:
        cells["all right"], cells["matched"] = f"{mean.exact:.3f}", plus_minus(mean.matched, row.mean_error.matched, 0)
    cells["accuracy by depth"] = ", ".join(f"{depth} {right:.2f}" for depth, right in row.depths.items())
    cells["agreement"] = plus_minus(mean.agreement, error.agreement, 3)
    return cells | {"KL": plus_minus(mean.kl, error.kl, 4), "calls": _calls(row)}


def _calls(row: Row) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(row.dense_reasons.items()))
    return {
        "dense": "the baseline",
        "fell back": f"ran densely: {reasons or 'no call was sparse'}",
        "partly": f"{row.sparse_share:.0%} sparse; dense: {reasons}",
    }.get(row.served, f"{row.sparse_calls:,} sparse")
