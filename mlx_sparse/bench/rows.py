"""A row of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .dense import Shape
from .timing import Spread, best

MICRO = 1e-6


@dataclass(frozen=True)
class Times:
    """Microseconds of the two sides and of a plain read of the keys and values, all of one run.

    Attributes:
        by: which of the ways to attend densely was the fastest.
        ways: the median of each of them.
    """

    by: str
    dense: Spread
    sparse: Spread
    read: Spread
    ways: Mapping[str, float]

    @classmethod
    def of(
        cls, dense: Mapping[str, Sequence[float]], sparse: Sequence[float], read: Sequence[float], steps: int = 1
    ) -> Times:
        """From the seconds of ``steps`` steps."""
        by, unit = best(dense), MICRO * steps
        first, second, third = (Spread.of(samples, unit) for samples in (dense[by], sparse, read))
        return cls(by, first, second, third, {name: Spread.of(dense[name], unit).median for name in dense})

    @property
    def ratio(self) -> float:
        """Dense time over sparse time."""
        return self.dense.median / self.sparse.median


@dataclass(frozen=True)
class Row:
    """One method in one case.

    Attributes:
        backend: that ran it, or was to.
        details: what else there is to say of this kind of row.
        bytes_formula: by the method's formula.
        bytes_plain: of the keys and values.
        times: None with a ``note``.
        note: why there are none.
        failed: the result was wrong.
    """

    method: str
    backend: str
    dtype: str
    shape: Shape
    batch: int
    S: int
    details: Mapping[str, Any] = field(default_factory=dict)
    bytes_formula: int | None = None
    bytes_plain: int | None = None
    times: Times | None = None
    note: str | None = None
    failed: bool = False

    def without_times(self, note: str, *, failed: bool = False) -> Row:
        """This row with the reason why it has no times."""
        return replace(self, times=None, note=note, failed=failed)

    def as_dict(self) -> dict[str, Any]:
        """For programs. A row without times has None in their place."""
        row = {name: value for name, value in vars(self).items() if name not in ("details", "times")}
        row |= {"shape": str(self.shape), **self.details, "dense": None}
        sides = {"dense_us": "dense", "sparse_us": "sparse", "plain_read_us": "read"}
        for name, side in sides.items():
            spread = None if self.times is None else getattr(self.times, side)
            row |= {f"{name}{end}": getattr(spread, of, None) for end, of in ENDS.items()}
        row |= dict.fromkeys(("ratio", "dense_of_read", "sparse_of_read", "dense_ways_us"))
        if self.times is not None:
            row |= {"dense": self.times.by, "ratio": self.times.ratio, "dense_ways_us": self.times.ways}
            row |= {"dense_of_read": self.of_read(self.times.dense, self.bytes_plain)}
            row |= {"sparse_of_read": self.of_read(self.times.sparse, self.bytes_formula)}
        return row

    def of_read(self, spread: Spread, moved: int | None) -> float | None:
        """Bytes per second as a share of those of a plain read."""
        if self.times is None or not moved or not self.bytes_plain:
            return None
        return moved / self.bytes_plain * self.times.read.median / spread.median


ENDS = {"": "median", "_low": "low", "_high": "high"}  # of a spread, as a row has them
