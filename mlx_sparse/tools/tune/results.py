"""Results of ``mlx-sparse tune``: the selected settings, the recommended method, and their texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ...core.base import Prefill
from .. import terminal
from ..evaluate.tasks import PASSAGES, Maker, Passage

FIRST_LINE = "# Written by mlx-sparse tune"
GOALS = {"accuracy": 1.0, "speed": 0.9}  # share of dense attention's accuracy that the preferred settings keep

RETRIEVAL: Mapping[str, Maker[Passage]] = {task: PASSAGES[task] for task in ("needle", "copying")}


@dataclass(frozen=True)
class Trial:
    """Result of the prefill of one passage with one setting.

    Attributes:
        right, scored: number of correctly predicted tokens and number of scored tokens.
        density: share of the causal block pairs that were attended to, averaged over layers and heads.
        sampled: share of the query rows that were sampled to select key blocks.
    """

    right: int
    scored: int
    density: float
    sampled: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Results of one setting over all passages of a range.

    Attributes:
        config: the method that was run; None for dense attention.
        tasks: dict from each task to the share of scored tokens that were predicted correctly.
        density, sampled: as in `Trial`, averaged over all trials.
        seconds: time in seconds of the fastest prefill at each length, averaged over the lengths.
    """

    config: Prefill | None
    tasks: dict[str, float]
    density: float
    sampled: float
    seconds: float

    @property
    def accuracy(self) -> float:
        return mean(self.tasks.values())

    @property
    def work(self) -> float:
        """Number of multiply-adds, divided by the number in dense attention.

        A sampled row counts half, because it is multiplied only with keys and not with values.
        """
        return self.density + self.sampled / 2

    def as_dict(self) -> dict[str, object]:
        found = {name: value for name, value in vars(self).items() if name != "config"}
        return {"method": str(self.config or "dense"), **found, "accuracy": self.accuracy, "work": self.work}


@dataclass(frozen=True)
class Tuned:
    """Two settings of one method for contexts of fewer than ``up_to`` keys, and the measurements at all ``lengths``."""

    up_to: int
    lengths: tuple[int, ...]
    dense: Measured
    measured: list[Measured]
    accuracy_first: Measured
    speed_first: Measured

    @property
    def method(self) -> str:
        assert self.accuracy_first.config is not None
        return self.accuracy_first.config.name

    def preferred(self, prefer: str) -> Measured:
        return self.accuracy_first if prefer == "accuracy" else self.speed_first


def select(dense: Measured, measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Return the accuracy-first and the speed-first setting.

    Each has the least work of all settings that reach its goal (`GOALS`). If no setting reaches the goal, the most
    accurate setting is selected. Settings are ranked by work, because times are reproducible only on an idle machine.
    """
    most = max(found.accuracy for found in measured)
    accurate, fast = (
        min((row for row in measured if row.accuracy >= min(goal * dense.accuracy, most)), key=lambda row: row.work)
        for goal in GOALS.values()
    )
    return accurate, fast


def by_method(tuned: Sequence[Tuned]) -> dict[str, list[Tuned]]:
    """Group the results of all ranges by the method's name."""
    found: dict[str, list[Tuned]] = {}
    for one in tuned:
        found.setdefault(one.method, []).append(one)
    return found


def best(tuned: Sequence[Tuned], prefer: str, goal: float) -> list[Tuned]:
    """Return the results of the method that needs the least work and is faster than dense attention.

    The list is empty if no method is faster and keeps the share ``goal`` of dense attention's accuracy at every length.
    """

    def work(ranges: list[Tuned]) -> float:
        return mean(one.preferred(prefer).work for one in ranges)

    passing = [
        ranges
        for ranges in by_method(tuned).values()
        if all(one.preferred(prefer).accuracy >= goal * one.dense.accuracy for one in ranges)
        and work(ranges) < 1  # if no call was sparse, any difference in time is noise
        and mean(one.preferred(prefer).seconds - one.dense.seconds for one in ranges) < 0
    ]
    return min(passing, key=work, default=[])


def recommendation(tuned: Sequence[Tuned], prefer: str) -> str:
    """Return a sentence that recommends a method or dense attention."""
    goal = f"{GOALS[prefer]:.0%} of the accuracy of dense attention"
    if not (ranges := best(tuned, prefer, GOALS[prefer])):
        return f"Keep prefill dense: no method is faster and keeps {goal} at every length."
    work = mean(one.preferred(prefer).work for one in ranges)
    return f"Use --attn {ranges[0].method} with this file: it keeps {goal}, with {work:.0%} of the work."


def toml(tuned: Sequence[Tuned], prefer: str, model: str) -> str:
    """Return TOML text for ``--attn-config``, with the preferred settings of each method.

    The measurements are comments in the text. ``prefer`` is "accuracy" or "speed".
    """
    # JSON text has no line breaks, so the name cannot end the comment.
    lines = [f"{FIRST_LINE} for {json.dumps(model)}: {prefer} first.", f"# {recommendation(tuned, prefer)}"]
    for name, ranges in by_method(tuned).items():
        configs: list[Any] = [found.preferred(prefer).config for found in ranges]
        lines += ["", f"[{name}]"]
        lines += [f"block_size = {configs[0].block_size}"] if name == "sample" else []
        lines += [f"share = {max(config.share for config in configs)}"] if name == "gather" else []
        for found, config in zip(ranges, configs, strict=True):
            lines += [
                "",
                f"# Tuned at {', '.join(f'{length:,}' for length in found.lengths)} keys.",
                f"# dense: {summary(found.dense)}",
                f"# this: {summary(found.preferred(prefer))}",
            ]
            if name == "sample":
                values = {key: getattr(config, key) for key in ("alpha_column", "alpha_slash", "chunks")}
                lines += ["[[sample.ranges]]", f"up_to = {found.up_to}"]
                lines += [f"{key} = {value}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def summary(row: Measured) -> str:
    """Return the accuracy, the shares and the time as text."""
    shares = f"accuracy {row.accuracy:.3f}, density {row.density:.3f}, sampled {row.sampled:.3f}"
    return f"{shares}, {row.seconds:.2f} s per prompt"


def setting(row: Measured) -> str:
    """Return the tuned parameters of a method in a few characters."""
    config: Any = row.config
    if config is None:
        return "dense"
    values = (config.alpha_column, config.alpha_slash, config.chunks) if config.name == "sample" else (config.share,)
    return f"{config.name} {':'.join(f'{value:g}' for value in values)}"


def table(tuned: Sequence[Tuned], prefer: str) -> str:
    """Return all measurements, the selected settings (a: accuracy first, s: speed first) and the recommendation."""
    rows = []
    for found in tuned:
        for row in (found.dense, *found.measured):
            chosen = "a" * (row is found.accuracy_first) + "s" * (row is found.speed_first)
            shares = [*row.tasks.values(), row.density, row.sampled, row.work]
            cells = [f"{found.up_to:,}", setting(row), *(f"{value:.3f}" for value in shares)]
            rows.append([*cells, f"{row.seconds:.2f}", chosen])
    header = ["below", "setting", *RETRIEVAL, "density", "sampled", "work", "s", ""]
    lines = [
        "work = density + sampled / 2: multiply-adds relative to dense attention. Settings are ranked by work.",
        "a: accuracy first; if no setting keeps the accuracy of dense attention, the most accurate setting.",
        f"s: speed first, at least {GOALS['speed']:.0%} of dense attention's accuracy.",
        recommendation(tuned, prefer),
    ]
    return f"{terminal.table(header, rows, 2)}\n\n{terminal.fill(*lines)}"


def as_dict(tuned: Sequence[Tuned], prefer: str, model: str) -> dict[str, object]:
    """Return all measurements, the selected settings and the recommendation as a dict for JSON."""
    ranges = [
        {name: getattr(found, name) for name in ("method", "up_to", "lengths")}
        | {name: getattr(found, name).as_dict() for name in ("dense", "accuracy_first", "speed_first")}
        | {"measured": [row.as_dict() for row in found.measured]}
        for found in tuned
    ]
    return {"model": model, "recommendation": recommendation(tuned, prefer), "ranges": ranges}
