"""What one run of a method on one example found, and rows of a table made of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, stdev
from typing import Any

from .journal import fields, number

DECODE_HEADER = [
    *["task", "method", "n", "bytes", "selectivity"],
    *["bits/byte", "Δ", "accuracy", "Δ", "agreement", "KL"],
]
PREFILL_HEADER = [
    *["task", "method", "n", "density", "of layers", "sampled", "mass: min", "1 %", "mean"],
    *["bits/byte", "Δ", "accuracy", "Δ", "agreement", "KL"],
]
OUTCOMES = ((0, math.inf), (0, 1), (0, 1), (-1, math.inf))  # what its figures may be; KL is 0 but for rounding


@dataclass(frozen=True)
class Outcome:
    """One example under one method.

    Attributes:
        bits: negative log2-likelihood of the target per byte of its text.
        accuracy: share of target tokens that were the most likely ones.
        agreement: share of positions where the most likely token is dense attention's.
        kl: mean Kullback-Leibler divergence from dense attention's distribution, nats.
    """

    bits: float
    accuracy: float
    agreement: float
    kl: float


@dataclass(frozen=True)
class Trial:
    """An outcome, and what the method's attention calls did.

    Attributes:
        outcome: how well it predicted.
        method: the method as text, every automatic choice resolved.
        sparse_calls, dense_calls: attention calls.
        sparse_bytes, dense_bytes: bytes of K and V moved by the sparse calls, and by dense attention in their place.
        selectivity: (saap.12) share of the keys outside the exact part that were attended; None but for SAAP.
        density: of a prompt, by served layer and query head: share of the causal block pairs attended.
        sampled: share of a prompt's rows that were scored to choose the blocks.
        mass: retained mass over all layers, heads and rows of a prompt: least, 1st percentile, mean; empty if it was
            not measured.
    """

    outcome: Outcome
    method: str = "dense"
    sparse_calls: int = 0
    dense_calls: int = 0
    sparse_bytes: int = 0
    dense_bytes: int = 0
    selectivity: float | None = None
    density: list[list[float]] = field(default_factory=list)
    sampled: float = 0.0
    mass: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, data: Any) -> Trial:
        """What `as_dict` made.

        Raises:
            ValueError, TypeError: it did not.
        """
        found = dict(zip(cls.__annotations__, fields(data, *cls.__annotations__), strict=True))
        figures = fields(found.pop("outcome"), *Outcome.__annotations__)
        outcome = Outcome(*(number(value, low, high) for value, (low, high) in zip(figures, OUTCOMES, strict=True)))
        for name in ("sparse_calls", "dense_calls", "sparse_bytes", "dense_bytes"):
            found[name] = int(number(found[name], 0))
        if found["selectivity"] is not None:
            number(found["selectivity"], 0, 1)
        density = [[number(head, 0, 1) for head in layer] for layer in found.pop("density")]
        if len({len(layer) for layer in density}) > 1 or not isinstance(found["method"], str):
            raise ValueError(data)
        mass = [number(value, 0, 2) for value in found.pop("mass")]
        if len(mass) not in (0, 3):
            raise ValueError(data)
        return cls(outcome, **found | {"density": density, "mass": mass, "sampled": number(found["sampled"], 0, 1)})


@dataclass(frozen=True)
class Row:
    """A task under one method: means over the examples, and standard errors of the paired differences to dense.

    Attributes:
        prefill: whether the prompt itself was run through the method and scored, not steps after it.
        selectivity, density, sampled, mass: as in `Trial`, means over the examples; of ``mass`` the first is the least
            of them.
    """

    task: str
    method: str
    examples: int
    mean: Outcome
    delta: Outcome
    error: Outcome
    compression: float
    sparse_calls: int
    dense_calls: int
    prefill: bool = False
    selectivity: float | None = None
    density: list[list[float]] = field(default_factory=list)
    sampled: float = 0.0
    mass: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def rows_of(task: str, trials: Mapping[str, Sequence[Trial]], *, prefill: bool = False) -> list[Row]:
    """One row for each method; ``trials["dense"]`` are the same examples under dense attention."""
    return [_row(task, found, trials["dense"], prefill) for found in trials.values()]


def _row(task: str, trials: Sequence[Trial], dense: Sequence[Trial], prefill: bool) -> Row:
    means, deltas, errors = {}, {}, {}
    for name in Outcome.__annotations__:
        values, reference = ([getattr(trial.outcome, name) for trial in of] for of in (trials, dense))
        differences = [a - b for a, b in zip(values, reference, strict=True)]
        means[name], deltas[name] = mean(values), mean(differences)
        errors[name] = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    moved, full = (sum(getattr(trial, name) for trial in trials) for name in ("sparse_bytes", "dense_bytes"))
    layers = [trial.density for trial in trials]
    masses = [trial.mass for trial in trials if trial.mass]
    selectivities = [trial.selectivity for trial in trials if trial.selectivity is not None]
    return Row(
        task,
        trials[0].method,
        len(trials),
        Outcome(**means),
        Outcome(**deltas),
        Outcome(**errors),
        moved / full if full else 1.0,
        sum(trial.sparse_calls for trial in trials),
        sum(trial.dense_calls for trial in trials),
        prefill,
        mean(selectivities) if selectivities else None,
        [[mean(heads) for heads in zip(*of, strict=True)] for of in zip(*layers, strict=True)],
        mean(trial.sampled for trial in trials),
        [min(m[0] for m in masses), *(mean(m[i] for m in masses) for i in (1, 2))] if masses else [],
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown: a table of the steps after a prompt, one of prompts, or both."""
    parts = []
    for prefill, header in ((False, DECODE_HEADER), (True, PREFILL_HEADER)):
        chosen = [row for row in rows if row.prefill == prefill]
        if chosen:
            lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
            parts.append("\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in chosen)]))
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    mean, delta, error = row.mean, row.delta, row.error
    cells = [row.task, f"`{row.method}`", str(row.examples)]
    cells += _prompt_cells(row) if row.prefill else _step_cells(row)
    cells += [f"{mean.bits:.4f}", f"{delta.bits:+.4f}{_error(error.bits, 4)}"]
    cells += [f"{mean.accuracy:.3f}", f"{delta.accuracy:+.3f}{_error(error.accuracy, 3)}"]
    return [*cells, f"{mean.agreement:.3f}{_error(error.agreement, 3)}", f"{mean.kl:.4f}{_error(error.kl, 4)}"]


def _error(error: float, digits: int) -> str:
    """A standard error where several examples give one."""
    return "" if math.isnan(error) else f" ± {error:.{digits}f}"


def _step_cells(row: Row) -> list[str]:
    return [f"{row.compression:.3f}", "" if row.selectivity is None else f"{row.selectivity:.3f}"]


def _prompt_cells(row: Row) -> list[str]:
    layers = [mean(heads) for heads in row.density]
    density = [f"{mean(layers):.3f}", f"{min(layers):.2f} to {max(layers):.2f}"] if layers else ["1.000", ""]
    mass = [f"{value:.3f}" for value in row.mass] or [""] * 3
    return [*density, f"{row.sampled:.3f}", *mass]
