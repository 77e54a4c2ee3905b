"""What came of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class DraftFigures:
    """Tokens that were drafted and checked.

    Attributes:
        checks: dense calls that checked drafts. Each gave one token more than it accepted.
        alone: tokens of dense steps without drafts.
        examined, accepted: drafts by position: those before which all were accepted, and those accepted themselves.
        draft_seconds, check_seconds: of the ``timed`` checks among them.
        alone_seconds: of the ``timed_alone`` steps without drafts.
        pauses: how many times drafts did not pay and were left out for a while.
    """

    checks: int = 0
    alone: int = 0
    examined: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    drafted: int = 0
    draft_seconds: float = 0.0
    check_seconds: float = 0.0
    timed: int = 0
    alone_seconds: float = 0.0
    timed_alone: int = 0
    pauses: int = 0

    def __add__(self, more: DraftFigures) -> DraftFigures:
        def added(one: Any, other: Any) -> Any:
            if isinstance(one, tuple):
                return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
            return one + other

        return DraftFigures(*(added(a, b) for a, b in zip(vars(self).values(), vars(more).values(), strict=True)))

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.alone + self.checks + sum(self.accepted)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**vars(self), "tokens": self.tokens}

    def lines(self) -> list[str]:
        """What the report says."""
        found = []
        if self.checks:
            taken = sum(self.accepted)
            by_position = ", ".join(f"{a / e:.0%}" for a, e in zip(self.accepted, self.examined, strict=True) if e)
            found.append(
                f"  drafts: {taken:,} of {self.drafted:,} accepted ({by_position} by position), "
                f"{(self.checks + taken) / self.checks:.1f} tokens for each of {self.checks:,} checks"
            )
        if self.alone:
            pauses = f"; drafts did not pay and paused {self.pauses:,} times" if self.pauses else ""
            found.append(f"  without drafts: {self.alone:,} tokens{pauses}")
        if self.timed:
            parts = {
                "drafts": self.draft_seconds * self.checks / self.timed,
                "checks": self.check_seconds * self.checks / self.timed,
                "steps without drafts": self.alone_seconds * self.alone / max(self.timed_alone, 1),
            }
            whole = sum(parts.values())
            shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items() if seconds)
            found.append(f"  time: {shares} (of {self.timed:,} checks that were timed)")
        return found
