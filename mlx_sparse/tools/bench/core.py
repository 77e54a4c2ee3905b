"""What every benchmark does: check each contender's result, time the right ones in turns, say it row by row."""

from __future__ import annotations

import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import quantiles
from typing import Any, NamedTuple, TypeVar

from ...checks import SparseAttentionError

Name = TypeVar("Name")

MICRO = 1e-6
ENOUGH = 3  # samples, if they are undisturbed ones
QUIET = 10.0  # seconds after which turns say how far they are
LONGEST_NOTE = 240  # characters
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Shape:
    """Heads and head dim of one attention layer."""

    Hq: int
    Hkv: int
    D: int

    @property
    def G(self) -> int:
        """Query heads per KV head."""
        return self.Hq // self.Hkv

    def __str__(self) -> str:
        return f"{self.Hq}x{self.Hkv}x{self.D}"


class Sized:
    """The sizes of what has a shape, by their letters."""

    shape: Shape

    @property
    def Hq(self) -> int:
        """Query heads."""
        return self.shape.Hq

    @property
    def Hkv(self) -> int:
        """KV heads."""
        return self.shape.Hkv

    @property
    def D(self) -> int:
        """Head dim."""
        return self.shape.D

    @property
    def G(self) -> int:
        """Query heads per KV head."""
        return self.shape.G

    @property
    def scale(self) -> float:
        """The factor of the logits: ``D ** -0.5``."""
        return float(self.D**-0.5)


@dataclass(frozen=True)
class Case(Sized):
    """What all contenders of the same turns share: ``B`` sequences of ``S`` keys in one layer."""

    dtype: str
    shape: Shape
    B: int
    S: int

    @property
    def rows(self) -> int:
        """KV heads of all sequences."""
        return self.B * self.Hkv

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]

    @property
    def keys(self) -> int:
        """Bytes of the keys; the values are as many."""
        return self.rows * self.S * self.D * self.item

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for programs."""
        return {"dtype": self.dtype, "shape": str(self.shape), "batch": self.B, "S": self.S}

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}, batch {self.B}, S = {self.S:,}"


def cases(dtypes: Iterable[str], shapes: Iterable[Shape], batches: Iterable[int], lengths: Iterable[int]) -> list[Case]:
    """Every combination."""
    return [Case(*sizes) for sizes in product(dtypes, shapes, batches, lengths)]


@dataclass(frozen=True)
class Spread:
    """First quartile, median, third quartile and the least of some samples."""

    low: float
    median: float
    high: float
    least: float

    @classmethod
    def of(cls, samples: Sequence[float], unit: float = 1.0) -> Spread:
        """The quartiles and the least of ``samples``, in units of ``unit``."""
        some = samples if len(samples) > 1 else [*samples, *samples]
        return cls(*(value / unit for value in (*quantiles(some, method="inclusive"), min(some))))

    def scaled(self, factor: float) -> Spread:
        """The same spread in other units: every number times ``factor``."""
        return Spread(*(factor * value for value in (self.low, self.median, self.high, self.least)))

    def __str__(self) -> str:
        low, middle, high = (f"{v:.1f}" if v < 100 else f"{v:.0f}" for v in (self.low, self.median, self.high))
        return f"{middle} ({low} to {high})"


ENDS = {"": "median", "_low": "low", "_high": "high", "_min": "least"}  # of a spread, as a row has them


@dataclass
class Row:
    """What is said of one contender in one case.

    Attributes:
        case: what it shares with others; None, or with a method `as_dict`.
        name: of the contender; "" stands for all of the case.
        setting: of its method, with a method `as_dict`; None for none.
        details: what else there is to say, such as the bytes it moves.
        spreads: times or speeds by name, each None until it is known.
        turns: how many were taken.
        note: why there are no times, or what else there is to say.
        failed: the result was wrong, or our code raised; then no spread is known.
    """

    case: Any
    name: str
    setting: Any = None
    details: dict[str, Any] = field(default_factory=dict)
    spreads: dict[str, Spread | None] = field(default_factory=lambda: {"us": None})
    turns: int = 0
    note: str | None = None
    failed: bool = False

    @property
    def time(self) -> Spread | None:
        """Microseconds of a step, for engines that time each contender alone."""
        return self.spreads.get("us")

    @property
    def median(self) -> float | None:
        """Microseconds of a step."""
        return self.time.median if self.time else None

    def take(self, seconds: Sequence[float]) -> None:
        """Say the times of the steps."""
        self.turns, self.spreads["us"] = len(seconds), Spread.of(seconds, MICRO)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for programs; what is not known is None."""
        made: dict[str, Any] = {"kind": "row"} | (self.case.as_dict() if self.case else {}) | {"contender": self.name}
        made |= (self.setting.as_dict() if self.setting else {}) | self.details
        for name, spread in self.spreads.items():
            made |= {f"{name}{end}": getattr(spread, of, None) for end, of in ENDS.items()}
        if self.median and "bytes" in self.details:
            made["gigabytes_per_second"] = self.details["bytes"] / self.median / 1e3
        return made | {"turns": self.turns, "note": self.note, "failed": self.failed}


class Sample(NamedTuple):
    """Seconds of a step, and whether other programs were in its way."""

    seconds: float
    disturbed: bool = False


class Contender(ABC):
    """One way to do the work of a case, by turns with others.

    Attributes:
        row: what is said of it.
        ours: what it raises is a failure; otherwise it is a library that cannot do it.
    """

    ours = True

    def __init__(self, row: Row) -> None:
        self.row = row

    @abstractmethod
    def prepare(self) -> None:
        """Make what a step needs; that is not timed."""

    @abstractmethod
    def check(self) -> str | None:
        """What is wrong with its result; None if nothing is."""

    @abstractmethod
    def step(self, turn: int) -> Sample:
        """Take the step."""


@dataclass(frozen=True)
class Turns:
    """How often each contender takes its step.

    Attributes:
        repeat: samples that are wanted, each undisturbed.
        warm_up: turns before them that do not count.
        tries: samples for each that is wanted, if they are disturbed.
        longest: seconds of samples after which a contender has enough with `ENOUGH`.
        until, least: when the clock is past ``until``, turns end, but ``least`` are taken.
    """

    repeat: int
    warm_up: int = 0
    tries: int = 1
    longest: float = math.inf
    until: float = math.inf
    least: int = 1


@dataclass
class Taken:
    """Samples of one contender in seconds, those that nothing disturbed and the others."""

    good: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """One more."""
        (self.disturbed if sample.disturbed else self.good).append(sample.seconds)

    def complete(self, turns: Turns) -> bool:
        """Whether no more are wanted."""
        every = self.good + self.disturbed
        return len(self.good) >= turns.repeat or (len(every) >= ENOUGH and sum(every) >= turns.longest)

    @property
    def all_are_needed(self) -> bool:
        """Whether there are too few of the first kind, so that disturbed ones have to count."""
        return len(self.good) < ENOUGH and len(self.disturbed) > 0

    @property
    def seconds(self) -> list[float]:
        """Those that count."""
        return self.good + self.disturbed if self.all_are_needed else self.good


def measure(case: Any, contenders: Iterable[Contender], turns: Turns) -> list[Row]:
    """Check every contender, then time those that are right: a row for each.

    What making one of them raises is said in a row for all of the case; those before it are timed.
    """
    rows, entered = [], []
    try:
        for contender in contenders:
            rows.append(contender.row)
            if enter(contender):
                entered.append(contender)
    except Exception as error:
        rows.append(Row(case, "", note=reason(error), failed=not _expected(error)))
    for contender, taken in take_turns({one: one.step for one in entered}, turns).items():
        contender.row.take(taken.seconds)
        if turns.tries > 1:
            contender.row.details |= {"discarded": len(taken.disturbed), "disturbed": taken.all_are_needed}
    return rows


def enter(contender: Contender) -> bool:
    """Prepare a contender and check its result; False, with the reason in its row, if it is not to be timed."""
    row = contender.row
    if row.note is not None:
        return False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            contender.prepare()
            row.note = contender.check()
            row.failed = row.note is not None
        # Whatever a library raises, the others can still be measured.
        except Exception as error:
            expected = _expected(error)
            row.note = reason(error, [] if expected else [str(warning.message) for warning in said])
            row.failed = contender.ours and not expected
    return row.note is None


def _expected(error: Exception) -> bool:
    """Whether it is nobody's failure: a case that is too large, or that a method refuses."""
    return isinstance(error, (MemoryError, SparseAttentionError)) or type(error).__name__ == "OutOfMemoryError"


def take_turns(steps: Mapping[Name, Callable[[int], Sample]], turns: Turns) -> dict[Name, Taken]:
    """Let every step be taken once in each turn, one after the other."""
    taken = {name: Taken() for name in steps}
    total, said = turns.warm_up + turns.tries * turns.repeat, time.monotonic()
    for turn in range(total):
        for name, step in steps.items():
            if not taken[name].complete(turns):
                sample = step(turn)
                if turn >= turns.warm_up:
                    taken[name].add(sample)
        now, counted = time.monotonic(), turn + 1 - turns.warm_up
        if (counted >= turns.least and now > turns.until) or all(one.complete(turns) for one in taken.values()):
            break
        if now > said + QUIET:
            say(f"  turn {turn + 1} of at most {total}")
            said = now
    return taken


def say(text: str) -> None:
    """Tell the user how far we are, on a terminal or off it."""
    print(text, file=sys.stderr, flush=True)


def reason(error: Exception, said: Sequence[str] = ()) -> str:
    """An error in one line, with what a library warned of before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    more = [text.split("(Triggered internally")[0].strip() for text in said]
    text = " ".join(dict.fromkeys([lines[0], *more]))
    return text if len(text) <= LONGEST_NOTE else text[: LONGEST_NOTE - 3] + "..."


def too_large(needed: float, there: float, share: float) -> str | None:
    """Why ``needed`` bytes are more than a ``share`` of those that are ``there``; None if they are not."""
    return None if needed <= share * there else f"needs {needed / 1e9:.0f} GB of the {there / 1e9:.0f} GB there are"
