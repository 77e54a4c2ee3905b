"""Check every variant's result, time the correct variants alternately, and build a row for each sparse variant."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from ...checks import SparseAttentionError
from ...core.base import Method
from ..formats import Printer, table

MICRO = 1e-6
MAX_NOTE = 240  # characters of a note
MIN_TURNS = 3  # minimum number of timed turns, even after the end of the time budget
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """Number of query heads, number of KV heads and head dim of one attention layer."""

    Hq: int
    Hkv: int
    D: int

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    def __str__(self) -> str:
        return f"{self.Hq}x{self.Hkv}x{self.D}"


@dataclass(frozen=True)
class Case:
    """Sizes of one benchmark case: ``B`` sequences of ``S`` keys in one layer.

    Attributes:
        step: number of tokens in a prefill chunk; None for a decode step.
    """

    dtype: str
    shape: Shape
    B: int
    S: int
    step: int | None = None

    @property
    def rows(self) -> int:
        """Number of KV heads in all sequences of the batch, ``B * Hkv``."""
        return self.B * self.shape.Hkv

    @property
    def item(self) -> int:
        """Size of one element in bytes."""
        return ITEM_SIZES[self.dtype]

    @property
    def keys(self) -> int:
        """Size of all keys in bytes. The values have the same size."""
        return self.rows * self.S * self.shape.D * self.item

    def as_dict(self) -> dict[str, object]:
        found = {"dtype": self.dtype, "shape": str(self.shape), "batch": self.B, "S": self.S}
        return found if self.step is None else found | {"step": self.step}

    def __str__(self) -> str:
        chunk = "" if self.step is None else f", chunks of {self.step:,}"
        return f"{self.shape}, {self.dtype}, batch {self.B}, S = {self.S:,}{chunk}"


@dataclass(frozen=True)
class Request:
    """Checked options of ``mlx-sparse bench step`` or ``mlx-sparse bench prefill``.

    Attributes:
        stage: "step" or "prefill".
        methods, backends, cases: each method is timed on each backend and each case.
        budget: time budget in seconds.
        kv_bits: bits per element of quantized KV caches. In addition to the plain cache, MLX times each method with a
            cache of each size in ``kv_bits``.
    """

    stage: str
    methods: Sequence[Method]
    backends: Sequence[str]
    cases: Sequence[Case]
    repeat: int
    budget: float
    kv_bits: Sequence[int] = ()
    threads: int = 1


@dataclass(frozen=True)
class Spread:
    """First quartile, median and third quartile of samples."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float], unit: float = 1.0) -> Spread:
        """Return the quartiles of ``samples``. Each quartile is divided by ``unit``."""
        some = samples if len(samples) > 1 else [*samples, *samples]
        return cls(*(value / unit for value in quantiles(some, method="inclusive")))

    def text(self, digits: int = 1, factor: float = 1.0) -> str:
        """Format the median and both quartiles. Each value is multiplied by ``factor``."""
        low, middle, high = (f"{factor * value:,.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{middle} ({low} to {high})"


ENDS = {"": "median", "_low": "low", "_high": "high"}  # suffix of a JSON field: attribute of `Spread`
SIDES = ("dense_us", "sparse_us", "plain_read_us", "ratio")


@dataclass
class Row:
    """The result of one variant on one case.

    Attributes:
        method: the ``--attn`` text of the method. A note on the whole case has "", and a failed baseline has "dense".
        details: additional fields, such as the number of bytes that the method moves.
        spreads: dict from the name of a time, speed or ratio to its spread; the value is None before the measurement.
        note: a remark, or the reason why there are no times.
        failed: True if the result is wrong or this package raised an error.
    """

    case: Any
    method: str
    backend: str = ""
    details: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(("bytes_formula", "bytes_plain", "dense")))
    spreads: dict[str, Spread | None] = field(default_factory=lambda: dict.fromkeys(SIDES))
    turns: int = 0
    note: str | None = None
    failed: bool = False

    def as_dict(self) -> dict[str, object]:
        found = {"kind": "row", **self.case.as_dict(), "method": self.method, "backend": self.backend, **self.details}
        for name, spread in self.spreads.items():
            found |= {f"{name}{end}": getattr(spread, of, None) for end, of in ENDS.items()}
        return found | {"turns": self.turns, "note": self.note, "failed": self.failed}

    def __str__(self) -> str:
        known = [f"{name} {spread.text(2)}" for name, spread in self.spreads.items() if spread]
        return ": ".join(filter(None, (f"{self.method} {self.backend}".strip(), "; ".join(known), self.note)))


class Variant(ABC):
    """An implementation of attention that is timed on a case.

    Attributes:
        role: "sparse", "dense" or "read". Dense attention is the baseline. "read" only reads all keys and values.
        row: the result. A baseline's row is printed only if the baseline cannot be timed.
        ours: True if an error counts as a failure of this package; False if it counts as a missing library feature.
        upkeep: seconds per step, on average, for periodic work that the timed step does not include.
    """

    role = "sparse"
    ours = True
    upkeep = 0.0

    def __init__(self, case: Any, method: str, backend: str = "", **details: object) -> None:
        """Create the row. For a baseline, ``method`` is "dense" and ``details["dense"]`` is the baseline's name."""
        self.case = case
        self.row = Row(case, method, backend)
        self.row.details |= {"layers": 1} | details

    def prepare(self) -> None:  # noqa: B027 most variants need no preparation
        """Build the inputs of a step before the timing starts."""

    @abstractmethod
    def check(self) -> str | None:
        """Check the result. Return a description of the error, or None if the result is correct."""

    @abstractmethod
    def run(self, turn: int) -> float:
        """Run one step and return its time in seconds."""


def measure(
    case: Any, variants: Iterable[Variant], repeat: int, warm_up: int = 0, until: float = float("inf")
) -> list[Row]:
    """Check every variant, time the correct variants alternately, and return the rows to print.

    If the iterator ``variants`` raises an error, add a row that contains the error. Time only the variants that were
    yielded before the error.
    """
    every: list[Variant] = []
    rows: list[Row] = []
    try:
        every.extend(variants)
    except Exception as error:
        rows.append(Row(case, "", note=reason(error), failed=not expected(error)))
    ready = [variant for variant in every if prepare_and_check(variant)]
    sparse = [variant for variant in ready if variant.role == "sparse"]
    samples = take_turns(ready, repeat, warm_up, until) if sparse else {}
    for variant in sparse:
        compare(variant, samples)
    return [variant.row for variant in every if variant.role == "sparse" or variant.row.note] + rows


def prepare_and_check(variant: Variant) -> bool:
    """Return True if the variant runs and its result is correct. Otherwise, store the reason in the variant's row."""
    row = variant.row
    if row.note is None:
        try:
            variant.prepare()
            row.note = variant.check()
            row.failed = row.note is not None
        # After any error of a library, continue with the other variants.
        except Exception as error:
            row.note, row.failed = reason(error), variant.ours and not expected(error)
    return row.note is None


def take_turns(
    variants: Sequence[Variant], repeat: int, warm_up: int = 0, until: float = float("inf")
) -> dict[Variant, list[float]]:
    """Run every variant once per turn, and return a dict from each variant to its times in seconds.

    The times of the first ``warm_up`` turns are omitted. ``until`` is a time on the clock `time.monotonic`. After
    ``until``, stop as soon as `MIN_TURNS` turns are timed.
    """
    samples: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for turn in range(warm_up + repeat):
        for variant, seconds in samples.items():
            seconds.append(variant.run(turn))
        if time.monotonic() > until and turn + 1 >= warm_up + MIN_TURNS:
            break
    return {variant: seconds[warm_up:] for variant, seconds in samples.items()}


def compare(variant: Variant, samples: Mapping[Variant, Sequence[float]]) -> None:
    """Store in ``variant.row`` the times of a variant and its speed-ups over the fastest baseline.

    A speed-up is the baseline's time divided by the variant's time in the same turn. A variant is compared only with
    baselines that have no backend or the backend of the variant.
    """
    row, unit = variant.row, MICRO * variant.row.details["layers"]
    ours = [seconds + variant.upkeep for seconds in samples[variant]]
    row.turns, row.spreads["sparse_us"] = len(ours), Spread.of(ours, unit)
    found = {other: times for other, times in samples.items() if other.row.backend in ("", row.backend)}
    implementations = {other: times for other, times in found.items() if other.role == "dense"}
    row.details["dense_ways_us"] = {
        other.row.details["dense"]: median(times) / unit for other, times in implementations.items()
    }
    if implementations:
        best = min(implementations, key=lambda other: median(implementations[other]))
        row.details["dense"] = best.row.details["dense"]
        row.spreads["dense_us"] = Spread.of(implementations[best], unit)
        row.spreads["ratio"] = Spread.of([dense / own for dense, own in zip(implementations[best], ours, strict=True)])
    for other, times in found.items():
        if other.role == "read":
            row.spreads["plain_read_us"] = Spread.of(times, unit)


def expected(error: Exception) -> bool:
    """Return True if ``error`` means that the case is too large or that the method does not support the case."""
    return isinstance(error, (MemoryError, SparseAttentionError)) or type(error).__name__ == "OutOfMemoryError"


def reason(error: Exception) -> str:
    """Return the first line of an error message, cut to at most `MAX_NOTE` characters."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= MAX_NOTE else text[: MAX_NOTE - 3] + "..."


def check_memory(needed: float, available: float, share: float) -> None:
    """Raise `MemoryError` if a case needs more than ``share`` of the ``available`` bytes."""
    if needed > share * available:
        raise MemoryError(f"needs {needed / 1e9:.0f} GB of {available / 1e9:.0f} GB of memory")


def collect(found: Iterable[Row], printer: Printer) -> list[Row]:
    """Print each row as soon as it is measured, and return all rows."""
    rows = []
    for row in found:
        rows.append(row)
        printer.line(row.as_dict())
        if not printer.at_once:
            log(f"  {row}")
    return rows


def log(text: str) -> None:
    """Print a progress message to standard error."""
    print(text, file=sys.stderr, flush=True)


HEADER = ("method", "backend", "type", "heads", "batch", "keys", "dense", "fastest dense", "sparse", "speed-up", "note")


def text(rows: Sequence[Row]) -> str:
    """Return ``rows`` as a Markdown table. All rows must be for decode steps, or all rows must be for prefill."""
    prefill = any(row.case.step is not None for row in rows)
    unit, factor = ("ms", 1e-3) if prefill else ("µs", 1.0)
    lines = []
    for row in rows:
        case, found, about = row.case, row.details, row.note or ""
        dense, sparse = (s.text(1, factor) if (s := row.spreads[name]) else "" for name in ("dense_us", "sparse_us"))
        ratio = row.spreads["ratio"]
        if row.turns and prefill:
            about = f"chunks of {case.step:,}, density {found['density']:.2f}"
        elif row.turns and found["bytes_formula"]:
            about = f"{found['bytes_formula'] / found['bytes_plain']:.3f} of the bytes"
        kind = f"{found['kv_bits']} bits" if found.get("kv_bits") else case.dtype
        cells = [row.method, row.backend, kind, case.shape, case.B, f"{case.S:,}", dense, found.get("dense") or ""]
        lines.append([*cells, sparse, ratio.text(2) if ratio else "", about])
    work = "The attention of a prefill" if prefill else "A decode step"
    title = f"{work} in one layer in {unit}: median (first to third quartile). A speed-up compares times of one turn."
    return f"{title}\n\n{table(HEADER, lines)}"
