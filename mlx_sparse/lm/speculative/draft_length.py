"""Select how many tokens to draft before the next check, by the times and acceptance of this run."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from ..chunks import QUERIES

MOST = QUERIES - 1  # drafts for one check
TIMED_FIRST, TIMED_EVERY = 4, 8  # checks that are timed, which costs waiting for the device once more
DENSE_EVERY = 128  # tokens after which a dense step is timed anew, as contexts grow
PAUSE, LONGEST_PAUSE = 64, 1024  # tokens without drafts where they do not pay
MEMORY = 64  # drafts examined that the rate of acceptance goes by


class Turn(NamedTuple):
    """The next tokens to draft, or none, and whether to time them."""

    drafts: int
    timed: bool


class DraftLength:
    """The draft length with most tokens per second; no drafts if dense steps give more.

    If a draft is accepted with probability ``a``, ``n`` drafts and a check give ``1 + a + ... + a ** n`` tokens. They
    take ``n`` sparse steps and one dense call of ``n + 1`` queries, whose time is modelled as that of a dense step plus
    a constant for each further query.

    Args:
        fixed: draft length; None to select it.
        most: largest draft length that is selected.
    """

    def __init__(self, fixed: int | None = None, most: int = MOST) -> None:
        self.fixed, self.most = fixed, most
        self.pauses = 0
        self._dense: deque[float] = deque(maxlen=5)
        self._draft: deque[float] = deque(maxlen=5)
        self._checks: deque[tuple[int, float]] = deque(maxlen=8)
        self._examined = self._accepted = 0.0
        self._rounds = 0
        self._since_dense = DENSE_EVERY
        self._left, self._pause = 0, PAUSE

    def turn(self, most: int) -> Turn:
        """Return the next draft length, at most ``most``."""
        if most < 1 or self._left > 0:
            return Turn(0, timed=False)
        timed = 0 < self._rounds <= TIMED_FIRST or self._rounds % TIMED_EVERY == TIMED_EVERY - 1
        if self.fixed is not None:
            return Turn(min(self.fixed, most), timed)
        if len(self._dense) < 2 or self._since_dense >= DENSE_EVERY:
            return Turn(0, timed=True)
        return Turn(min(self._best(), most), timed)

    def note_step(self, seconds: float | None) -> None:
        """Count a dense step without drafts; ``seconds`` is None if it was not timed."""
        self._left = max(self._left - 1, 0)
        self._since_dense += 1
        if seconds is not None:
            self._dense.append(seconds)
            self._since_dense = 0 if len(self._dense) > 1 else DENSE_EVERY

    def note_check(self, drafts: int, accepted: int, seconds: tuple[float, float] | None) -> None:
        """Count a check of drafts, with the seconds of drafting and of checking; None if they were not timed."""
        if self._rounds == 0:  # a try after a pause is measured anew
            self._checks.clear()
            self._draft.clear()
        examined = min(accepted + 1, drafts)
        kept = max(1 - examined / MEMORY, 0)
        self._examined = self._examined * kept + examined
        self._accepted = self._accepted * kept + accepted
        self._rounds += 1
        self._since_dense += accepted + 1
        if seconds is not None:
            self._draft.append(seconds[0] / drafts)
            self._checks.append((drafts, seconds[1]))
        if self.fixed is None and len(self._checks) >= 2:
            if self.rate(self._best()) > self.rate(0):
                if self._rounds > TIMED_FIRST:  # more than a lucky try
                    self._pause = PAUSE
            else:
                self.pauses += 1
                self._rounds = 0
                self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
                self._since_dense = DENSE_EVERY

    @property
    def acceptance(self) -> float:
        """Probability that a draft is accepted; 1 before the first check."""
        return (self._accepted + 1) / (self._examined + 1)

    def rate(self, drafts: int) -> float:
        """Return tokens per second with so many drafts per check."""
        dense = max(median(self._dense), 1e-9)  # a clock may stand still
        if not drafts:
            return 1 / dense
        slope = sum(n * (seconds - dense) for n, seconds in self._checks) / sum(n * n for n, _ in self._checks)
        seconds = drafts * median(self._draft) + dense + max(slope, 0) * drafts
        return sum(self.acceptance**i for i in range(drafts + 1)) / seconds

    def _best(self) -> int:
        if len(self._checks) < 2:
            return min(2 + 2 * len(self._checks), self.most)  # two lengths, to see what a query costs
        return max(range(1, self.most + 1), key=self.rate)
