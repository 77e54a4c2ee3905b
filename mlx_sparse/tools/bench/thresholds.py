"""What a benchmark is held to: ratios within one run, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import table


@dataclass(frozen=True)
class Bar:
    """What a ratio has to be; ``found`` is None where something it needs is missing."""

    what: str
    S: int
    wanted: float
    found: float | None

    @property
    def met(self) -> str:
        """Whether it is, as a table says it."""
        return "not measured" if self.found is None else "yes" if self.found >= self.wanted else "NO"

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for programs."""
        return {
            "kind": "bar",
            "bar": self.what,
            "S": self.S,
            "wanted": self.wanted,
            "found": self.found,
            "met": self.met,
        }


def bar_table(bars: Sequence[Bar]) -> str:
    """Markdown."""
    found = [
        (bar.what, length(bar.S), f"{bar.wanted:g}", "" if bar.found is None else f"{bar.found:.2f}", bar.met)
        for bar in bars
    ]
    return table(("bar", "S", "wanted", "found", "met"), found)


def length(S: int) -> str:
    """A number of keys as it is typed: 128k."""
    return f"{S // 1024}k" if S % 1024 == 0 else str(S)


def ratio(slow: float | None, fast: float | None) -> float | None:
    """How many times as fast; None if one of both is not known."""
    return slow / fast if slow and fast else None
