"""Select the draft length, the number of draft tokens per check, from measured times and the acceptance rate."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from ..dense import QUERIES

MAX_DRAFTS = QUERIES - 1  # largest number of drafts for one check
TIMED_FIRST, TIMED_EVERY = 4, 8  # checks 2 to 5 and then every 8th are timed; timing waits for the device once more
DENSE_EVERY = 128  # tokens between timed dense steps, which get slower as the context grows
PAUSE, LONGEST_PAUSE = 64, 1024  # tokens without drafts after drafting was slower than dense steps
MEMORY = 64  # time constant of the acceptance rate, in examined drafts


class DraftPlan(NamedTuple):
    """Number of tokens to draft for the next check. ``timed`` is True if drafting and checking must be timed."""

    drafts: int
    timed: bool


class DraftLength:
    """Select the draft length with the most tokens per second, or 0 if dense steps are faster.

    If a draft token is accepted with probability ``a``, a check of ``n`` draft tokens yields ``1 + a + ... + a ** n``
    tokens on average. The cost is ``n`` sparse steps and one dense call with ``n + 1`` queries. The estimated time of
    the dense call is the time of a dense step plus a constant for each further query.

    Args:
        fixed: fixed draft length; None to select by speed.
        most: largest draft length that may be selected.
    """

    def __init__(self, fixed: int | None = None, most: int = MAX_DRAFTS) -> None:
        self.fixed, self.most = fixed, most
        self.pauses = 0
        self._dense: deque[float] = deque(maxlen=5)
        self._draft: deque[float] = deque(maxlen=5)
        self._checks: deque[tuple[int, float]] = deque(maxlen=8)
        self._examined = self._accepted = 0.0
        self._rounds = 0
        self._since_dense = DENSE_EVERY
        self._left, self._pause = 0, PAUSE

    def next_draft(self, most: int) -> DraftPlan:
        """Return a plan for the next check with at most ``most`` draft tokens. 0 draft tokens mean a dense step."""
        if most < 1 or self._left > 0:
            return DraftPlan(0, timed=False)
        timed = 0 < self._rounds <= TIMED_FIRST or self._rounds % TIMED_EVERY == TIMED_EVERY - 1
        if self.fixed is not None:
            return DraftPlan(min(self.fixed, most), timed)
        if len(self._dense) < 2 or self._since_dense >= DENSE_EVERY:
            return DraftPlan(0, timed=True)
        return DraftPlan(min(self._best(), most), timed)

    def note_step(self, seconds: float | None) -> None:
        """Record a dense decode step. ``seconds`` is the time of the step; None if the step was not timed."""
        self._left = max(self._left - 1, 0)
        self._since_dense += 1
        if seconds is not None:
            self._dense.append(seconds)
            self._since_dense = 0 if len(self._dense) > 1 else DENSE_EVERY

    def note_check(self, drafts: int, accepted: int, seconds: tuple[float, float] | None) -> None:
        """Record a check.

        Args:
            drafts: number of draft tokens.
            accepted: number of accepted draft tokens.
            seconds: time of drafting and time of checking; None if the check was not timed.
        """
        if self._rounds == 0:  # discard old times at the first check after a pause
            self._checks.clear()
            self._draft.clear()
        examined = min(accepted + 1, drafts)
        decay = max(1 - examined / MEMORY, 0)
        self._examined = self._examined * decay + examined
        self._accepted = self._accepted * decay + accepted
        self._rounds += 1
        self._since_dense += accepted + 1
        if seconds is not None:
            self._draft.append(seconds[0] / drafts)
            self._checks.append((drafts, seconds[1]))
        if self.fixed is None and len(self._checks) >= 2:
            if self.rate(self._best()) > self.rate(0):
                if self._rounds > TIMED_FIRST:  # a few fast checks are not enough to reset the pause
                    self._pause = PAUSE
            else:
                self.pauses += 1
                self._rounds = 0
                self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
                self._since_dense = DENSE_EVERY

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft token is accepted; 1 before the first check."""
        return (self._accepted + 1) / (self._examined + 1)

    def rate(self, drafts: int) -> float:
        """Return the estimated number of tokens per second for the draft length ``drafts``."""
        dense = max(median(self._dense), 1e-9)  # a coarse clock may measure 0
        if not drafts:
            return 1 / dense
        slope = sum(n * (seconds - dense) for n, seconds in self._checks) / sum(n * n for n, _ in self._checks)
        seconds = drafts * median(self._draft) + dense + max(slope, 0) * drafts
        return sum(self.acceptance**i for i in range(drafts + 1)) / seconds

    def _best(self) -> int:
        if len(self._checks) < 2:
            return min(2 + 2 * len(self._checks), self.most)  # two different lengths, to estimate the time per query
        return max(range(1, self.most + 1), key=self.rate)
