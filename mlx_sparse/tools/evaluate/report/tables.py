"""Tables of the report: every row of a task, with what it read and how it ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

from markupsafe import Markup

from ..results import Row
from ..table import plus_minus
from .speed import Speed
from .style import BITS, MASS, clean

if TYPE_CHECKING:
    from ..selection import SelectionRow


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        rows: each a class, which may be empty, and its cells: text, or markup that is escaped already.
        caption: above it.
        runs: commands that its figures are from, and where they ran.
    """

    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    caption: str = ""
    runs: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Measure:
    """A figure of `Outcome`: its name in a header, its digits, and whether dense attention is what it compares with."""

    field: str
    header: str
    digits: int
    compares: bool = False


ACCURACY, EXACT = Measure("accuracy", "accuracy", 3), Measure("exact", "all right", 3)
MATCHED, BITS_PER_BYTE = Measure("matched", "characters matched", 1), Measure("bits", "bits per byte", 4)
COMPARED = [Measure("agreement", "agreement", 3, compares=True), Measure("kl", "KL, nats", 4, compares=True)]
MEASURES = {
    BITS: [BITS_PER_BYTE, ACCURACY, *COMPARED],
    MASS: [BITS_PER_BYTE, ACCURACY, *COMPARED],
    "repetition": [ACCURACY, MATCHED, BITS_PER_BYTE, *COMPARED],
}
LONGEST = 400  # characters of a cell
OTHERS = [ACCURACY, EXACT, *COMPARED]
Column = tuple[str, Callable[[Row], str]]


def tables(rows: Sequence[Row], task: str) -> list[Table]:
    """The tables of ``task``: the steps after a prompt, and prompts."""
    found = []
    for prompt, caption in ((False, "Steps after the prompt"), (True, "Tokens inside a sparse prompt")):
        chosen = [row for row in rows if row.task == task and row.prefill == prompt]
        if chosen:
            columns = [*_about(chosen), *(_prompt(chosen) if prompt else _steps(chosen)), *_measured(task)]
            columns.append(("calls", ran))
            cells = [(row.served.replace(" ", "-"), [of(row) for _, of in columns]) for row in chosen]
            found.append(Table([name for name, _ in columns], cells, caption))
    return found


def ran(row: Row) -> str:
    """How many calls were sparse, and why the others were not."""
    reasons = clean(", ".join(f"{reason} ({n:,})" for reason, n in sorted(row.dense_reasons.items())), LONGEST)
    if row.served == "dense":
        return "the baseline"
    if row.served == "fell back":
        return f"fell back to dense: {reasons or 'no call was sparse'}"
    if row.served == "partly":
        calls = row.sparse_calls + row.dense_calls
        return f"partly sparse: {row.sparse_calls:,} of {calls:,} calls; dense: {reasons}"
    return f"sparse: {row.sparse_calls:,} calls"


def _about(rows: Sequence[Row]) -> list[Column]:
    columns: list[Column] = [("method", _method), ("prompt tokens", lambda row: f"{row.context:,}")]
    if any(row.budget for row in rows):
        columns.insert(1, ("budget", lambda row: row.budget or ""))
    return [*columns, ("n", lambda row: f"{row.examples:,}")]


def _method(row: Row) -> str:
    """The method as it was asked for, marked where it did not run so, and with the settings that ran below."""
    text = Markup("<code>{}</code>").format(clean(row.method, LONGEST))
    if row.served == "fell back":
        text += Markup("<strong> ran densely</strong>")
    if row.served == "partly":
        text += Markup("<strong> {:.0%} sparse</strong>").format(row.sparse_share)
    if row.attn != row.method:
        text += Markup("<br><small><code>{}</code></small>").format(clean(row.attn, LONGEST))
    return text


def _steps(rows: Sequence[Row]) -> list[Column]:
    """What a step read; density too where a method ran the prompt, selectivity where there are buckets."""
    columns: list[Column] = [
        ("bytes by formula", lambda row: "" if row.formula is None else f"{row.formula:.3f}"),
        ("bytes counted", lambda row: "" if row.of_prompt else f"{row.compression:.3f}"),
    ]
    if any(row.selectivity is not None for row in rows):
        columns.append(("selectivity", lambda row: "" if row.selectivity is None else f"{row.selectivity:.3f}"))
    if any(row.density for row in rows):
        columns += _density()
    return columns


def _density() -> list[Column]:
    def layers(row: Row) -> list[float]:
        return [mean(heads) for heads in row.density if heads] or [1.0]

    return [
        ("density", lambda row: f"{mean(layers(row)):.3f}"),
        ("by layer", lambda row: f"{min(layers(row)):.2f} to {max(layers(row)):.2f}" if row.density else ""),
    ]


def _prompt(rows: Sequence[Row]) -> list[Column]:
    columns: list[Column] = [*_density(), ("rows sampled", lambda row: f"{row.sampled:.3f}" if row.density else "")]
    if any(row.mass for row in rows):
        columns += [(name, partial(_mass, at=at)) for at, name in enumerate(("mass: least", "1 %", "mean"))]
    return columns


def _mass(row: Row, at: int) -> str:
    return f"{row.mass[at]:.3f}" if row.mass else ""


def _measured(task: str) -> list[Column]:
    columns: list[Column] = []
    for measure in MEASURES.get(task, OTHERS):
        columns.append((measure.header, partial(_value, of=measure)))
        if not measure.compares:
            columns.append(("Δ", partial(_delta, of=measure)))
    return columns


def _value(row: Row, of: Measure) -> str:
    if of.compares and row.served == "dense":
        return ""
    return plus_minus(getattr(row.mean, of.field), getattr(row.mean_error, of.field), of.digits)


def _delta(row: Row, of: Measure) -> str:
    if row.served == "dense":
        return ""
    return plus_minus(getattr(row.delta, of.field), getattr(row.error, of.field), of.digits, signed=True)


def agreement_table(rows: Sequence[SelectionRow]) -> Table:
    """SparQ's choice of keys by component score and rank."""
    header = ["component score", "rank", "tokens", "n", "agreement", "worst layer", "attention captured"]
    cells = []
    for row in rows:
        found = [row.component_score, f"{row.rank} of {row.head_dim}", f"{row.context:,}", f"{row.examples:,}"]
        found += [plus_minus(row.agreement, row.agreement_error, 3), f"{row.worst:.3f} (layer {row.worst_layer})"]
        found += [plus_minus(row.mass, row.mass_error, 3), f"{row.exact_mass:.3f}"]
        cells.append(("", [*found, plus_minus(row.alpha_gap, row.alpha_gap_error, 3)]))
    return Table([*header, "by the exact choice", "error of its estimate"], cells)


def speed_table(rows: Sequence[Speed]) -> Table:
    """Times of a benchmark; a wrong result has a reason in their place."""
    header = ["method", "backend", "type", "heads x KV heads x dim", "batch", "keys", "dense, µs", "method, µs"]
    cells = []
    for row in rows:
        found = [row.method, row.backend, row.dtype, row.shape, f"{row.batch:,}", f"{row.S:,}"]
        found += ["" if time is None else f"{time:,.1f}" for time in (row.dense_us, row.sparse_us)]
        found.append("" if row.ratio is None else f"{row.ratio:.2f}")
        moved, plain = row.bytes_formula, row.bytes_plain
        found.append(f"{moved / plain:.3f}" if moved and plain else "")
        cells.append(("failed" if row.failed else "", [*found, row.note or ""]))
    runs = list(dict.fromkeys((row.run.command, row.run.where) for row in rows))
    return Table([*header, "dense / method", "bytes of K and V", "note"], cells, runs=runs)
