"""A model of the time of one attention layer and decode step on Apple's chips. Nothing here is measured.

Lower end of a bracket: every byte that has to come from memory comes once, at the published bandwidth, and a launch
costs the least that was found published. Upper end: every threadgroup's bytes come at that bandwidth, or at what a core
can do where few threadgroups share the work, and a launch costs as much as a whole small kernel.
docs/results/roofline.md explains the assumptions and names their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any

from launches import ITEM, Launch, Network, dense_kernel, dense_launches, saap_launches, sparq_launches

from mlx_sparse.methods import ENOUGH_SAVED, NEVER, SAAP, Method, SparQ, Step
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.bench.mlx.saap import BUCKETS, ROUTERS, UNEVEN, hidden_of
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
SHOWN = {"sparq": (4096, 16384, 65536), "saap": (32_768, 131_072, 524_288)}
LENGTHS = tuple(range(256, 16385, 256)) + tuple(range(16384, 262145, 1024))

Bracket = tuple[float, float]  # microseconds, best and worst


def bracket(chip: Chip, launches: Sequence[Launch]) -> Bracket:
    """Of these launches."""
    lower = sum(LAUNCH[0] + 1e6 * launch.once / chip.bandwidth for launch in launches)
    upper = sum(LAUNCH[1] + 1e6 * _work(chip, launch) for launch in launches)
    return lower, upper


def _work(chip: Chip, launch: Launch) -> float:
    """Seconds of a launch at worst: as memory allows, or as its cores do."""
    turns = ceil(launch.groups / chip.cores)
    in_core = max(launch.cycles, launch.each / launch.groups / CORE_BYTES) / CLOCK
    return max(launch.each / chip.bandwidth, turns * in_core)


def dense(chip: Chip, shape: Shape, S: int) -> Bracket:
    """Of MLX's dense attention."""
    return bracket(chip, dense_launches(dense_kernel(chip.letter, shape, S), shape, S))


def sparq(chip: Chip, shape: Shape, S: int, config: SparQ) -> Bracket:
    """Of a SparQ step with all that the cache does for it."""
    lower, upper = bracket(chip, sparq_launches(shape, S, config))
    # The component-major keys are one more large array for MLX to count, and at worst ends a command buffer twice.
    boundaries = min(2.0, shape.Hkv * S * shape.D / BOUNDARY_ELEMENTS)
    return lower, upper + BOUNDARY * boundaries


def saap(chip: Chip, shape: Shape, S: int, config: SAAP, router: Network) -> Bracket:
    """Of a step of SAAP with all that the cache does for it."""
    share = min(UNEVEN * config.probes / router.buckets, 1.0)
    return bracket(chip, saap_launches(shape, S, config, router, share))


def wins_from(chip: Chip, shape: Shape, config: SparQ, *, surely: bool) -> int | None:
    """Keys from which on SparQ is faster: its worst against dense's best, or its best against dense's worst."""
    found: int | None = None
    for S in LENGTHS:
        ours, theirs = sparq(chip, shape, S, config), dense(chip, shape, S)
        wins = ours[1] < theirs[0] if surely else ours[0] < theirs[1]
        found = (found or S) if wins else None
    return found


def advised(letter: str, shape: Shape, config: Any, router: Network | None = None) -> int | None:
    """Keys from which ``dense_below=auto`` lets a step run sparsely on chips of this kind; None if it never does."""
    buckets, network = (router.buckets, router.weights(shape.D) * ITEM) if router else (0, 0)
    step = Step(shape.Hkv, shape.G, shape.D, ITEM, letter, buckets=buckets, network=network)
    first: int = config.shortest_context(step) if router else config.pays_from(step)
    return None if first >= NEVER else first


def router_of(shape: Shape, name: str) -> Network:
    """The query network of this name among `ROUTERS`."""
    return Network(BUCKETS, hidden_of(shape.D, name))


def sparq_rows(config: SparQ) -> list[dict[str, Any]]:
    """For each chip and shape: brackets of the time, and the contexts from which SparQ should win by either end.

    Raises:
        ConfigError: the rank is larger than a head dim.
    """
    config.check_head_dim(min(shape.D for shape in SHAPES))
    return [
        _row(
            config,
            chip,
            shape,
            lambda S, chip=chip, shape=shape: sparq(chip, shape, S, config),
            surely_from=wins_from(chip, shape, config, surely=True),
            perhaps_from=wins_from(chip, shape, config, surely=False),
            advised_from=advised(chip.letter, shape, config),
        )
        for chip, shape in product(CHIPS, SHAPES)
    ]


def saap_rows(config: SAAP) -> list[dict[str, Any]]:
    """For each chip, shape and network: brackets of the time."""
    return [
        _row(
            config,
            chip,
            shape,
            lambda S, chip=chip, shape=shape, name=name: saap(chip, shape, S, config, router_of(shape, name)),
            hidden=name,
            advised_from=advised(chip.letter, shape, config, router_of(shape, name)),
        )
        for chip, shape, name in product(CHIPS, SHAPES, ROUTERS)
    ]


def _row(config: Method, chip: Chip, shape: Shape, ours: Callable[..., Bracket], **facts: Any) -> dict[str, Any]:
    about = {"chip": chip.name, "letter": chip.letter, "bandwidth": chip.bandwidth, "shape": str(shape), **facts}
    times = {S: {"dense": dense(chip, shape, S), config.name: ours(S)} for S in SHOWN[config.name]}
    return about | {"microseconds": times}


def sparq_text(rows: Sequence[dict[str, Any]], config: SparQ) -> str:
    """The rows for people."""
    cell = {(row["shape"], row["chip"]): row for row in rows}
    shapes = dict.fromkeys(row["shape"] for row in rows)
    crossings = [[shape, *(_crossing(cell[shape, chip.name]) for chip in CHIPS)] for shape in shapes]
    saved = ", ".join(f"{ENOUGH_SAVED[letter] >> 20} MiB ({kind})" for letter, kind in KINDS.items())
    return "\n\n".join(
        [
            f"A model, not a measurement: one layer and decode step, {config}, float16, B = 1.",
            "Keys from which SparQ is faster, its worst against dense's best (its best against dense's worst):",
            table(["heads x KV heads x D", *(f"{c.name}, {c.bandwidth / 1e9:.0f} GB/s" for c in CHIPS)], crossings),
            f"Keys from which a step saves {saved}:",
            _advice(rows, ["shape"], "never"),
            *_times(rows, config, ["chip"]),
        ]
    )


def saap_text(rows: Sequence[dict[str, Any]], config: SAAP) -> str:
    """The rows for people."""
    return "\n\n".join(
        [
            f"A model, not a measurement: one layer and decode step, {config}, float16, B = 1, {BUCKETS:,} buckets; "
            f"those visited hold {UNEVEN} times their share of the keys.",
            "Keys from which a step is sparse with dense_below=auto (0: never):",
            _advice(rows, ["shape", "hidden"], "0"),
            *_times(rows, config, ["chip", "hidden"]),
        ]
    )


TITLES = {"shape": "heads x KV heads x D", "hidden": "hidden units"}


def _advice(rows: Sequence[dict[str, Any]], names: Sequence[str], never: str) -> str:
    """From how many keys on a step is sparse, for each kind of chip."""
    found: dict[tuple[str, ...], dict[str, int | None]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), {})[row["letter"]] = row["advised_from"]
    lines = [[*which, *(_keys(by_letter[letter], never) for letter in KINDS)] for which, by_letter in found.items()]
    return table([*(TITLES[name] for name in names), *KINDS.values()], lines)


def _times(rows: Sequence[dict[str, Any]], config: Method, names: Sequence[str]) -> list[str]:
    """Microseconds of the first shape."""
    lines = [
        [*(row[name] for name in names), f"{S:,}", *(f"{low:.0f} to {high:.0f}" for low, high in ends.values())]
        for row in rows
        if row["shape"] == str(SHAPES[0])
        for S, ends in row["microseconds"].items()
    ]
    head = [*(TITLES.get(name, name) for name in names), "keys", "dense", config.name]
    return [f"Microseconds for {SHAPES[0]}, best to worst:", table(head, lines)]


def _crossing(row: dict[str, Any]) -> str:
    return f"{_keys(row['surely_from'])} ({_keys(row['perhaps_from'])})"


def _keys(number: int | None, never: str = "never") -> str:
    return f"{number:,}" if number else never
