"""Search for the crossover length of sparse attention by bisection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

MIN_SPEEDUP = 1.05  # dense over sparse time at which sparse attention wins; above 1 because of noise
PRECISION = 1.1  # the search ends if the shortest win is at most this factor above the longest loss
TIMINGS = 4  # maximum number of timings of a length, if it is unclear which side is faster
CONFIDENCE = 0.9  # confidence level of the interval around the median ratio of a length

Pairs = Sequence[tuple[float, float]]  # seconds of a dense and a sparse step that ran one after the other


class Point(NamedTuple):
    """Median ``ratio`` of dense to sparse time at ``S`` keys, and its confidence interval from ``low`` to ``high``."""

    S: int
    low: float
    ratio: float
    high: float

    @classmethod
    def of(cls, S: int, pairs: Pairs) -> Point:
        """Compute the median ratio of ``pairs`` and its distribution-free confidence interval at level `CONFIDENCE`.

        The number of ratios below the true median has a binomial distribution with probability 1/2. Therefore, two
        sorted ratios at the same distance from both ends bound the median. More pairs give a narrower interval.
        """
        ratios = sorted(dense / sparse for dense, sparse in pairs)
        n, rank, tail = len(ratios), 0, 0.0
        while rank < (n - 1) // 2 and 2 * (tail := tail + math.comb(n, rank) / 2**n) <= 1 - CONFIDENCE:
            rank += 1
        rank = max(rank - 1, 0)
        return cls(S, ratios[rank], median(ratios), ratios[n - 1 - rank])


def crossover(points: Sequence[Point]) -> tuple[int | None, int | None]:
    """Return the shortest length in keys at which sparse attention may win, and the shortest at which it clearly wins.

    Sparse attention may win if the confidence interval of the ratio ends at `MIN_SPEEDUP` or above. It clearly wins if
    the interval begins at `MIN_SPEEDUP` or above. All longer measured lengths must meet the same condition. If no
    length qualifies, the result is None.
    """

    def shortest(wins: Callable[[Point], bool]) -> int | None:
        slower = max((point.S for point in points if not wins(point)), default=0)
        return next((point.S for point in points if point.S > slower), None)

    return shortest(lambda point: point.high >= MIN_SPEEDUP), shortest(lambda point: point.low >= MIN_SPEEDUP)


def find(measure: Callable[[int], Pairs], *, shortest: int, longest: int, first: int, seconds: float) -> list[Point]:
    """Find the crossover length of decode steps by bisection, and return a `Point` for each timed length.

    The search ends when the crossover length is known to within 10 %, or before a length that would exceed ``seconds``.
    It starts at ``first``, doubles or halves the length until sparse attention has won once and lost once, and then
    bisects. A length is timed again, up to `TIMINGS` times, while its confidence interval contains `MIN_SPEEDUP`.
    """
    end = time.monotonic() + seconds
    points: dict[int, Point] = {}
    won, lost = math.inf, 0  # the shortest length that won so far, and the longest that lost
    S = min(max(first, shortest), longest)
    while True:
        before, last = time.monotonic(), S
        pairs: list[tuple[float, float]] = []
        for timing in range(TIMINGS):
            pairs += measure(S)
            point = points[S] = Point.of(S, pairs)
            # The place of the arrays in memory changes the ratio, so a length needs two timings to win.
            won_twice = timing > 0 and point.low >= MIN_SPEEDUP
            if won_twice or point.high < MIN_SPEEDUP or time.monotonic() > end:
                break
        if point.low >= MIN_SPEEDUP:
            won = S
        else:
            lost = S
        if won == math.inf:
            S = min(2 * lost, longest)
        elif not lost:
            S = max(int(won) // 2, shortest)
        elif won > PRECISION * lost:
            S = round(math.sqrt(won * lost))
        now = time.monotonic()
        if S in points or now + (now - before) * S / last > end:
            return [points[S] for S in sorted(points)]
