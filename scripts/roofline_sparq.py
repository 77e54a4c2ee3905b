"""A model of the time of one attention layer and decode step on Apple's chips. Nothing here is measured.

Lower end of a bracket: every byte that has to come from memory comes once, at the published bandwidth, and a launch
costs the least that was found published. Upper end: every threadgroup's bytes come at that bandwidth, or at what a core
can do where few threadgroups share the work, and a launch costs as much as a whole small kernel.
docs/results/roofline.md explains the assumptions and names their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from launches import ITEM, Launch, dense_kernel, dense_launches, sparq_launches

from mlx_sparse.checks import check_rank
from mlx_sparse.methods import ENOUGH_SAVED, NEVER, SparQ, Step
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.formats import table

LAUNCH = (1.3, 5.2)  # microseconds
CLOCK = 1.278e9  # Hz, of the M1, for all
CORE_BYTES = 16  # per cycle: half of what a core is said to get from the L2 cache, for scattered rows
BOUNDARY = 20.0  # microseconds between two command buffers
BOUNDARY_ELEMENTS = 40 << 20  # of distinct arrays, after which MLX starts another; more on larger chips

KINDS = {"g": "base and Pro chips", "s": "Max", "d": "Ultra"}


@dataclass(frozen=True)
class Chip:
    """A chip as Apple publishes it, with the smallest number of GPU cores sold at that bandwidth.

    Attributes:
        letter: how MLX tells its kind: g (base), s (Max), d (Ultra).
        bandwidth: bytes per second.
    """

    name: str
    letter: str
    bandwidth: float
    cores: int


CHIPS = (
    Chip("M1", "g", 68e9, 7),
    Chip("M5", "g", 153e9, 8),
    Chip("M3 Max, 30 cores", "s", 300e9, 30),
    Chip("M3 Max, 40 cores", "s", 400e9, 40),
    Chip("M4 Max, 32 cores", "s", 410e9, 32),
    Chip("M4 Max, 40 cores", "s", 546e9, 40),
    Chip("M2 Ultra", "d", 800e9, 60),
)
SHAPES = (Shape(32, 8, 128), Shape(32, 32, 128), Shape(9, 3, 64), Shape(8, 1, 256), Shape(16, 2, 128))
SHOWN = (4096, 16384, 65536)
LENGTHS = tuple(range(256, 16385, 256)) + tuple(range(16384, 262145, 1024))


def bracket(chip: Chip, launches: Sequence[Launch]) -> tuple[float, float]:
    """Microseconds, best and worst."""
    lower = sum(LAUNCH[0] + 1e6 * launch.once / chip.bandwidth for launch in launches)
    upper = sum(LAUNCH[1] + 1e6 * _work(chip, launch) for launch in launches)
    return lower, upper


def _work(chip: Chip, launch: Launch) -> float:
    """Seconds of a launch at worst: as memory allows, or as its cores do."""
    turns = ceil(launch.groups / chip.cores)
    in_core = max(launch.cycles, launch.each / launch.groups / CORE_BYTES) / CLOCK
    return max(launch.each / chip.bandwidth, turns * in_core)


def dense(chip: Chip, shape: Shape, S: int) -> tuple[float, float]:
    """Bracket of MLX's dense attention."""
    return bracket(chip, dense_launches(dense_kernel(chip.letter, shape, S), shape, S))


def sparq(chip: Chip, shape: Shape, S: int, config: SparQ) -> tuple[float, float]:
    """Bracket of a SparQ step with all that the cache does for it."""
    lower, upper = bracket(chip, sparq_launches(shape, S, config))
    # The component-major keys are one more large array for MLX to count, and at worst ends a command buffer twice.
    boundaries = min(2.0, shape.Hkv * S * shape.D / BOUNDARY_ELEMENTS)
    return lower, upper + BOUNDARY * boundaries


def wins_from(chip: Chip, shape: Shape, config: SparQ, *, surely: bool) -> int | None:
    """Keys from which on SparQ is faster: its worst against dense's best, or its best against dense's worst."""
    found: int | None = None
    for S in LENGTHS:
        ours, theirs = sparq(chip, shape, S, config), dense(chip, shape, S)
        wins = ours[1] < theirs[0] if surely else ours[0] < theirs[1]
        found = (found or S) if wins else None
    return found


def advised(letter: str, shape: Shape, config: SparQ) -> int | None:
    """Keys from which ``dense_below=auto`` lets a step run sparsely on chips of this kind; None if it never does."""
    first = config.pays_from(Step(shape.Hkv, shape.G, shape.D, ITEM, letter))
    return None if first >= NEVER else first


def rows(config: SparQ) -> list[dict[str, Any]]:
    """For each chip and shape: brackets of the time, and the contexts from which SparQ should win by either end.

    Raises:
        ConfigError: the rank is larger than a head dim.
    """
    check_rank(config.rank, min(shape.D for shape in SHAPES))
    return [
        {
            "chip": chip.name,
            "letter": chip.letter,
            "bandwidth": chip.bandwidth,
            "shape": str(shape),
            "surely_from": wins_from(chip, shape, config, surely=True),
            "perhaps_from": wins_from(chip, shape, config, surely=False),
            "advised_from": advised(chip.letter, shape, config),
            "microseconds": {
                S: {"dense": dense(chip, shape, S), "sparq": sparq(chip, shape, S, config)} for S in SHOWN
            },
        }
        for chip in CHIPS
        for shape in SHAPES
    ]


def text(rows: Sequence[dict[str, Any]], config: SparQ) -> str:
    """The rows for people."""
    cell = {(row["shape"], row["chip"]): row for row in rows}
    kind = {(row["shape"], row["letter"]): row["advised_from"] for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    crossings = [[shape, *(_crossing(cell[shape, chip.name]) for chip in CHIPS)] for shape in shapes]
    advice = [[shape, *(_keys(kind[shape, letter]) for letter in KINDS)] for shape in shapes]
    times = [
        [
            chip.name,
            f"{S:,}",
            *(span(cell[shapes[0], chip.name]["microseconds"][S][name]) for name in ("dense", "sparq")),
        ]
        for chip in CHIPS
        for S in SHOWN
    ]
    return "\n\n".join(
        [
            f"A model, not a measurement: one layer and decode step, {config}, float16, B = 1.",
            "Keys from which SparQ is faster, its worst against dense's best (its best against dense's worst):",
            table(["heads x KV heads x D", *(f"{c.name}, {c.bandwidth / 1e9:.0f} GB/s" for c in CHIPS)], crossings),
            "Keys from which a step saves "
            + ", ".join(f"{ENOUGH_SAVED[letter] >> 20} MiB ({kind})" for letter, kind in KINDS.items())
            + ":",
            table(["heads x KV heads x D", *KINDS.values()], advice),
            f"Microseconds for {shapes[0]}, best to worst:",
            table(["chip", "keys", "dense", "sparq"], times),
        ]
    )


def _crossing(row: dict[str, Any]) -> str:
    return f"{_keys(row['surely_from'])} ({_keys(row['perhaps_from'])})"


def _keys(number: int | None) -> str:
    return f"{number:,}" if number else "never"


def span(ends: tuple[float, float]) -> str:
    """A bracket for people."""
    return f"{ends[0]:.0f} to {ends[1]:.0f}"
