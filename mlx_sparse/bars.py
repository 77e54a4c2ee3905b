"""What a benchmark is held to: ratios within one run, and how they are printed. Every backend's benchmark uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """What a ratio has to be; ``found`` is None where something it needs is missing."""

    what: str
    S: int
    wanted: float
    found: float | None

    @property
    def met(self) -> str:
        return "not measured" if self.found is None else "yes" if self.found >= self.wanted else "NO"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"bar": self.what, "S": self.S, "wanted": self.wanted, "found": self.found, "met": self.met}


def table(bars: Sequence[Bar]) -> str:
    """Markdown."""
    lines = ["| bar | S | wanted | found | met |", "|---|---|---|---|---|"]
    for bar in bars:
        found = "" if bar.found is None else f"{bar.found:.2f}"
        lines.append(f"| {bar.what} | {length(bar.S)} | {bar.wanted:g} | {found} | {bar.met} |")
    return "\n".join(lines)


def length(S: int) -> str:
    """A number of keys as it is typed: 128k."""
    return f"{S // 1024}k" if S % 1024 == 0 else str(S)
