"""From how many keys on sparse attention is faster than dense: a search over lengths that are timed, for any engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any

WORTH = 1.03  # dense over sparse: by less it is not called faster, so that noise makes no default slower than dense
WITHIN = 1.1  # how far apart the last length that lost and the first that won may be at the end
SPREAD = 0.3  # of the middle half of the ratios, relative to their median: with more the machine is too noisy
MOST = 1 << 32  # keys; what is read from a file is below
PAIRS = (5, 15)  # steps of each kind at a length, at least and at most

Pairs = Sequence[tuple[float, float]]  # seconds of a dense and of a sparse step, taken one after the other


class Noisy(Exception):
    """Times of the same thing differ too much to compare them."""


@dataclass(frozen=True)
class Point:
    """What was timed at one length.

    Attributes:
        S: keys.
        dense, sparse: median microseconds of a step.
        low, ratio, high: quartiles of dense over sparse, pair by pair.
    """

    S: int
    dense: float
    sparse: float
    low: float
    ratio: float
    high: float

    @classmethod
    def of(cls, S: int, pairs: Pairs) -> Point:
        """Of at least two pairs."""
        dense, sparse = (quantiles(side, method="inclusive")[1] * 1e6 for side in zip(*pairs, strict=True))
        low, ratio, high = quantiles([ours / theirs for ours, theirs in pairs], method="inclusive")
        return cls(S, dense, sparse, low, ratio, high)

    @property
    def wins(self) -> bool:
        """Whether sparse is faster."""
        return self.ratio >= WORTH

    @property
    def unclear(self) -> bool:
        """Whether the ratios scatter, and across the line."""
        return self.high - self.low > SPREAD * self.ratio and self.low < WORTH <= self.high


@dataclass(frozen=True)
class Crossing:
    """The answer of `find`.

    Attributes:
        keys: from so many on sparse is faster; None if it was not at any length.
        up_to: the longest context that was timed.
        points: all that were timed, in the order of their lengths.
    """

    keys: int | None
    up_to: int
    points: tuple[Point, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"points": [asdict(point) for point in self.points]}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Crossing:
        """What `as_dict` made, from a file that anybody may have written.

        Raises:
            ValueError: it made something else.
        """
        up_to, points = found.get("up_to"), found.get("points")
        keys = found.get("keys")
        for number in (up_to, up_to if keys is None else keys):
            if type(number) is not int or not 0 < number < MOST:  # a bool is no number of keys
                raise ValueError("keys and up_to are numbers of keys")
        if not isinstance(points, list) or len(points) > 1000:
            raise ValueError("points is a list")
        names = Point.__dataclass_fields__.keys()
        for point in points:
            numbers: list[Any] = list(point.values()) if isinstance(point, dict) and point.keys() == names else [None]
            if not all(type(n) in (int, float) and math.isfinite(n) and n > 0 for n in numbers):
                raise ValueError("a point has times and ratios")
        assert isinstance(up_to, int)
        return cls(keys, up_to, tuple(Point(**point) for point in points))


def find(
    measure: Callable[[int], Pairs],
    *,
    shortest: int,
    longest: int,
    first: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Crossing:
    """Time steps at a few lengths until the crossing is known within a tenth, or the time is over.

    Lengths are doubled or halved from ``first`` on until one wins and one loses, and then the gap between them is
    halved. The answer is a length that won; so it stays on the safe side when the time runs out.

    Args:
        measure: the times of dense and sparse steps over so many keys, in turns.
        shortest, longest: the lengths to look at.
        first: where to begin.
        seconds: no length is begun that would take longer, by the time that the one before it took.
        clock: tells seconds.

    Raises:
        Noisy: steps took too different times, when asked twice.
    """
    end = clock() + seconds
    points: dict[int, Point] = {}
    won: int | None = None  # the shortest length so far, and the longest of those that lost
    lost: int | None = None
    S = min(max(first, shortest), longest)
    while True:
        before, last = clock(), S
        point = Point.of(S, measure(S))
        if point.unclear:
            point = Point.of(S, measure(S))
            if point.unclear:
                raise Noisy(f"times at {S:,} keys vary from {point.low:.2f} to {point.high:.2f} times")
        points[S] = point
        if point.wins:
            won = S
        else:
            lost = S
        S = _next(won, lost, shortest, longest)
        now = clock()
        if S in points or now + (now - before) * S / last > end:
            break
    known = tuple(points[S] for S in sorted(points))
    return Crossing(won, max(points), known)


def _next(won: int | None, lost: int | None, shortest: int, longest: int) -> int:
    """The length to look at, or one that has been looked at if there is none."""
    if won is None:
        assert lost is not None
        return min(2 * lost, longest)
    if lost is None:
        return max(won // 2, shortest)
    return won if won <= WITHIN * lost else round(math.sqrt(won * lost))


def in_turns(dense: Callable[[], float], sparse: Callable[[], float], seconds: float) -> Pairs:
    """The times of two kinds of steps, one after the other; neither is always first.

    Args:
        dense, sparse: take a step, and tell its seconds.
        seconds: more than the fewest steps are taken for so long at most.
    """
    steps = (dense, sparse)
    for step in steps:  # what is compiled, copied or touched for the first time
        step()
        step()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < PAIRS[0] or (len(pairs) < PAIRS[1] and time.perf_counter() < end):
        first = len(pairs) % 2
        took = {which: steps[which]() for which in (first, 1 - first)}
        pairs.append((took[0], took[1]))
    return pairs
