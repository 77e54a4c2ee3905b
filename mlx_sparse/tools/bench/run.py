"""What a command asks for, what an engine plans for it, and the loop over the cases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checks import ConfigError
from ...methods import Method
from ..formats import Printer
from .core import Row, Shape, say


@dataclass(frozen=True)
class Request:
    """What the options of ``mlx-sparse bench`` say, read and checked; what was not given has the engine's default.

    Attributes:
        engine, stage: such as mlx and step.
        attn: as typed; ``methods`` are what it says.
        steps: queries per call of a prompt; None for all at once.
        kv_bits: of quantised caches, over which steps are timed besides.
    """

    engine: str
    stage: str
    attn: str
    methods: Sequence[Method]
    lengths: Sequence[int]
    shapes: Sequence[Shape]
    batches: Sequence[int]
    dtypes: Sequence[str]
    repeat: int
    backends: Sequence[str]
    threads: Sequence[int]
    steps: Sequence[int | None]
    densities: Sequence[float]
    kv_bits: Sequence[int] = ()

    def one_method(self, allowed: Mapping[str, Sequence[str]]) -> Method:
        """The method, for an engine that has few of them.

        Args:
            allowed: methods, and which of their parameters may be set.

        Raises:
            ConfigError: there are several, or it is another or has other parameters.
        """
        (config, *others), of = self.methods, f"with --engine {self.engine}, got {self.attn}."
        if others or config.name not in allowed:
            raise ConfigError(f"--attn: expected {' or '.join(allowed)} {of}")
        names = allowed[config.name]
        if config != type(config)(**{name: getattr(config, name) for name in names}):
            what = f"{', '.join(names[:-1])} and {names[-1]} alone" if names else "no parameters"
            raise ConfigError(f"--attn: expected {what} {of}")
        return config


def _nothing(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return []


@dataclass(frozen=True)
class Plan:
    """What an engine does for a request.

    Attributes:
        machine: what it runs on.
        cases: in the order of their importance.
        measure: gives the rows of a case, whose turns end when the clock is past a time.
        text: Markdown of all rows.
        lines: what programs are told of all rows besides them.
        needed: whether it is a failure that nothing could be measured.
        ahead: between how many of the cases that are left the time that is left is divided, at most.
    """

    machine: Mapping[str, Any]
    cases: Sequence[Any]
    measure: Callable[[Any, float], Iterable[Row]]
    text: Callable[[Sequence[Row]], str]
    lines: Callable[[Sequence[Row]], Iterable[Mapping[str, Any]]] = _nothing
    needed: bool = False
    ahead: float = math.inf


def run(plan: Plan, printer: Printer, budget: float = math.inf) -> bool:
    """Measure every case within ``budget`` seconds, and print rows when they are known; whether all was right."""
    end, rows = time.monotonic() + budget, list[Row]()
    for number, case in enumerate(plan.cases):
        say(f"[{number + 1}/{len(plan.cases)}] {case}")
        left, now = end - time.monotonic(), time.monotonic()
        found: Iterable[Row] = [Row(case, "", note=f"left out: the {budget:g} s were over")]
        if left > 0:
            found = plan.measure(case, now + left / min(plan.ahead, len(plan.cases) - number))
        for row in found:
            rows.append(row)
            printer.line(row.as_dict())
            if not printer.at_once:
                say(f"  {_brief(row)}")
    for line in plan.lines(rows):
        printer.line(line)
    right = not any(row.failed for row in rows)
    if plan.needed:
        right = right and any(row.turns for row in rows)
    printer.end(plan.text(rows), right)
    return right


def _brief(row: Row) -> str:
    """A row in a line, for who waits."""
    known = [f"{name.replace('_', ' ')} {spread}" for name, spread in row.spreads.items() if spread is not None]
    which = [row.setting, *(row.details.get(name) for name in ("dtype", "backend", "kernels"))]
    name = ", ".join([row.name, *(str(part) for part in which if part)])
    return ": ".join(filter(None, (name, "; ".join(known), row.note)))
