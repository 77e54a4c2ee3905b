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
NOT_LOSSLESS = "no setting keeps the accuracy of dense attention; accuracy first is the most accurate setting."
SPEED_FIRST_SHARE = 0.9  # share of dense attention's accuracy that the speed-first setting keeps

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

    @property
    def lossless(self) -> bool:
        return self.accuracy_first.accuracy >= self.dense.accuracy


def select(dense: Measured, measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Return the accuracy-first and the speed-first setting.

    The accuracy-first setting has the least work of all settings that are as accurate as dense attention. If no
    setting is that accurate, the most accurate setting is selected. The speed-first setting has the least work of all
    settings that keep `SPEED_FIRST_SHARE` of dense attention's accuracy. If no setting keeps that share, both settings
    are the same. Settings are ranked by work, because times are reproducible only on an idle machine.
    """

    def cheapest(candidates: Sequence[Measured]) -> Measured:
        return min(candidates, key=lambda found: found.work)  # of equal settings, the first

    lossless = [found for found in measured if found.accuracy >= dense.accuracy]
    best = max(found.accuracy for found in measured)
    accurate = cheapest(lossless or [found for found in measured if found.accuracy == best])
    enough = [found for found in measured if found.accuracy >= SPEED_FIRST_SHARE * dense.accuracy]
    return accurate, cheapest(enough) if enough else accurate


def by_method(tuned: Sequence[Tuned]) -> dict[str, list[Tuned]]:
    """Group the results of all ranges by the method's name."""
    found: dict[str, list[Tuned]] = {}
    for one in tuned:
        found.setdefault(one.method, []).append(one)
    return found


def recommendation(tuned: Sequence[Tuned], prefer: str) -> str:
    """Return a sentence that recommends the method whose preferred settings need the least work, or dense attention."""
    share = 1.0 if prefer == "accuracy" else SPEED_FIRST_SHARE
    goal = f"{share:.0%} of the accuracy of dense attention"
    work = {
        name: mean(one.preferred(prefer).work for one in ranges)
        for name, ranges in by_method(tuned).items()
        if all(one.preferred(prefer).accuracy >= share * one.dense.accuracy for one in ranges)
    }
    if not work:
        return f"Keep prefill dense: no method keeps {goal} at every length."
    best = min(work, key=lambda name: work[name])
    return f"Use --attn {best} with this file: it keeps {goal}, with {work[best]:.0%} of the work."


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
            other_name = "speed" if prefer == "accuracy" else "accuracy"
            other = found.preferred(other_name)
            lines += [
                "",
                f"# Tuned at {', '.join(f'{length:,}' for length in found.lengths)} keys.",
                f"# dense: {_summary(found.dense)}",
                f"# this: {_summary(found.preferred(prefer))}",
                f"# {other_name} first: {_summary(other)} with {setting(other)}",
                *([] if found.lossless else [f"# Here {NOT_LOSSLESS}"]),
            ]
            if name == "sample":
                values = {key: getattr(config, key) for key in ("alpha_column", "alpha_slash", "chunks")}
                lines += ["[[sample.ranges]]", f"up_to = {found.up_to}"]
                lines += [f"{key} = {value}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _summary(row: Measured) -> str:
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
        f"a: accuracy first. s: speed first, at least {SPEED_FIRST_SHARE:.0%} of dense attention's accuracy.",
        *(f"{one.method}, below {one.up_to:,} keys: {NOT_LOSSLESS}" for one in tuned if not one.lossless),
        recommendation(tuned, prefer),
    ]
    return f"{terminal.table(header, rows, 2)}\n\n{terminal.fill(*lines)}"


def as_dict(tuned: Sequence[Tuned], prefer: str, model: str) -> dict[str, object]:
    """Return all measurements, the selected settings and the recommendation as a dict for JSON."""
    ranges = [
        {name: getattr(found, name) for name in ("method", "up_to", "lengths", "lossless")}
        | {name: getattr(found, name).as_dict() for name in ("dense", "accuracy_first", "speed_first")}
        | {"measured": [row.as_dict() for row in found.measured]}
        for found in tuned
    ]
    return {"model": model, "recommendation": recommendation(tuned, prefer), "ranges": ranges}
