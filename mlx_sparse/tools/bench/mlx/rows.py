"""A row of MLX: a method against the fastest dense attention and a plain read of the same turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...environment import memory
from ..core import MICRO, Case, Contender, Row, Sample, Spread, Turns, enter, take_turns, too_large

Step = Callable[[int], Sample]

SIDES = ("dense_us", "sparse_us", "plain_read_us")
FOUND = ("dense", "ratio", "dense_of_read", "sparse_of_read", "dense_ways_us")  # None without times
LARGEST_SHARE = 0.6  # of the memory of the machine


def method_row(case: Case, method: str, backend: str, details: Mapping[str, Any], note: str | None = None) -> Row:
    """A row of a method's case without times yet.

    Args:
        details: ``bytes_formula`` by the method's formula, ``bytes_plain`` of keys and values, and what else there is.
    """
    said = {"method": method, "backend": backend, "bytes_formula": None, "bytes_plain": None, **details}
    return Row(case, method, None, said | dict.fromkeys(FOUND), dict.fromkeys(SIDES), note=note)


class MethodContender(Contender):
    """A method on a backend.

    Attributes:
        upkeep: seconds per step of what steps leave for once in a while.
    """

    upkeep = 0.0

    def finish(self, dense: Mapping[str, Step], look: Step) -> None:
        """Say what is known after the turns; `compare` comes next."""


def measure(
    contenders: Sequence[MethodContender],
    needed: float,
    sides: Callable[[], tuple[Mapping[str, Step], Step]],
    turns: Turns,
    steps: int = 1,
) -> list[Row]:
    """Check the result of every contender, then time those that are right in turns: a row for each.

    Args:
        needed: bytes of everything alive at once.
        sides: gives every way to attend densely, and a plain read.
        steps: that are taken at once.
    """
    large = too_large(needed, memory(), LARGEST_SHARE)
    for one in contenders:
        one.row.note = one.row.note or large
    if entered := [one for one in contenders if enter(one)]:
        dense, look = sides()
        ours = {f"method {i}": one.step for i, one in enumerate(entered)}
        taken = take_turns({**dense, "read": look, **ours}, turns)
        seconds = {name: found.seconds for name, found in taken.items()}
        for name, one in zip(ours, entered, strict=True):
            one.finish(dense, look)
            sparse = [sample + one.upkeep for sample in seconds[name]]
            compare(one.row, {way: seconds[way] for way in dense}, sparse, seconds["read"], steps)
    return [one.row for one in contenders]


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
