"""A row of MLX: a method against the fastest dense attention and a plain read of the same turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core import MICRO, Case, Row, Spread

SIDES = ("dense_us", "sparse_us", "plain_read_us")
FOUND = ("dense", "ratio", "dense_of_read", "sparse_of_read", "dense_ways_us")  # None without times


def method_row(case: Case, method: str, backend: str, details: Mapping[str, Any], note: str | None = None) -> Row:
    """A row of a method's case without times yet.

    Args:
        details: ``bytes_formula`` by the method's formula, ``bytes_plain`` of keys and values, and what else there is.
    """
    said = {"method": method, "backend": backend, "bytes_formula": None, "bytes_plain": None, **details}
    return Row(case, method, None, said | dict.fromkeys(FOUND), dict.fromkeys(SIDES), note=note)


def compare(
    row: Row, dense: Mapping[str, Sequence[float]], sparse: Sequence[float], read: Sequence[float], steps: int = 1
) -> None:
    """Put the seconds of ``steps`` steps into a row, of every way to attend densely, of the method and of a read."""
    unit, ways = MICRO * steps, {name: Spread.of(samples, MICRO * steps) for name, samples in dense.items()}
    by = min(ways, key=lambda name: ways[name].median)
    ours, look = Spread.of(sparse, unit), Spread.of(read, unit)
    row.turns, row.spreads = len(sparse), {"dense_us": ways[by], "sparse_us": ours, "plain_read_us": look}
    row.details |= {"dense": by, "ratio": ways[by].median / ours.median}
    row.details["dense_ways_us"] = {name: way.median for name, way in ways.items()}
    plain = row.details["bytes_plain"]
    for name, spread, moved in (("dense", ways[by], plain), ("sparse", ours, row.details["bytes_formula"])):
        if moved and plain:  # bytes per second as a share of those of a plain read
            row.details[f"{name}_of_read"] = moved / plain * look.median / spread.median
