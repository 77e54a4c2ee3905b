"""A model of when SampleAttention's prefill beats MLX's dense attention on Apple's chips. Nothing here is measured.

MLX's kernel is taken to reach a share of the arithmetic peak that others have published. Ours do the same work per
block in the same tiles, but how fast nobody has timed: ``efficiency`` is their speed per multiply-add over MLX's, and
results are given for a range of it. Packing is the way of the `ops` backend: gather the kept blocks, then MLX's kernel.
docs/results/roofline.md explains the assumptions and names their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launches import ITEM
from roofline_steps import CHIPS, CLOCK, LAUNCH, Chip

from mlx_sparse.common.block_layout import Layout
from mlx_sparse.kernels.blocks import tile_of
from mlx_sparse.methods import Sample
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.formats import table

STEEL = 0.85  # of the arithmetic peak that MLX's kernel reaches
ALUS = 128  # of a core, each a multiply-add per cycle
RESIDENT = 4  # threadgroups of a tile of rows that keep a core busy
SELECT_LAUNCHES = 74  # between scores and attention: tests/kernels/test_roofline.py counts the operations
EFFICIENCIES = (1.0, 0.75, 0.5, 0.25, 1 / 6)
STEP = 2048  # queries: how mlx-lm prefills
SHOWN = (8192, 32768, 131072)
DENSITIES = (0.1, 0.3)
SHAPE = Shape(32, 8, 128)


@dataclass(frozen=True)
class Step:
    """``L`` queries at the end of ``S`` keys in one layer."""

    shape: Shape
    L: int
    S: int
    config: Sample

    @property
    def layout(self) -> Layout:
        return self.config.layout(self.L, self.S)

    @property
    def dense_work(self) -> float:
        """Multiply-adds of dense attention."""
        return 2 * self.shape.Hq * self.shape.D * self.L * (self.S - (self.L - 1) / 2)

    @property
    def sample_work(self) -> float:
        """Multiply-adds of scoring the sample; the rows' sums are a thousandth of that."""
        return self.shape.Hq * self.shape.D * self.L * self.layout.sampled_share * self.S


def rate(chip: Chip) -> float:
    """Multiply-adds per second of MLX's kernel."""
    return chip.cores * ALUS * CLOCK * STEEL


def dense(chip: Chip, step: Step) -> float:
    """Seconds of MLX's dense attention; a launch does not count."""
    return step.dense_work / rate(chip)


def _choosing(chip: Chip, step: Step, efficiency: float) -> float:
    return step.sample_work / rate(chip) / efficiency + SELECT_LAUNCHES * LAUNCH[1] * 1e-6


def own(chip: Chip, step: Step, density: float, efficiency: float) -> float:
    """Seconds of SampleAttention with our kernels."""
    return _choosing(chip, step, efficiency) + density * step.dense_work / rate(chip) / efficiency


def packed(chip: Chip, step: Step, density: float, efficiency: float) -> float:
    """Seconds of SampleAttention that packs the kept blocks; our kernel only scores the sample."""
    return _choosing(chip, step, efficiency) + density * step.dense_work / rate(chip) * packing(chip, step, density)


def packing(chip: Chip, step: Step, density: float) -> float:
    """Time of attention over packed blocks over that of MLX's kernel for the same multiply-adds.

    Keys and values of each kept block are read, written, and read again by the kernel. Only lists of equal length can
    share a launch, which has to fill the cores.
    """
    layout, shape = step.layout, step.shape
    pairs = density * shape.Hq * layout.causal_pairs
    moved = 3 * pairs * 2 * layout.block_size * shape.D * ITEM / chip.bandwidth
    lengths = max(1.0, density * layout.key_blocks)
    tiles = shape.Hq * layout.row_blocks / lengths * layout.block_size / tile_of(shape.D, ITEM)[0]
    filled = min(1.0, tiles / (RESIDENT * chip.cores))
    return 1 / filled + moved / (density * dense(chip, step))


def break_even(way: Callable[..., float], chip: Chip, step: Step, efficiency: float) -> float:
    """The density up to which ``way``, `own` or `packed`, is no slower than dense; 0 where it always is."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if way(chip, step, middle, efficiency) <= dense(chip, step) else (low, middle)
    return low


def rows(config: Sample) -> list[dict[str, Any]]:
    """For each chip and step: break-even densities, and where packing is the better way."""
    found = []
    for chip in CHIPS:
        for L, S in [*((STEP, S) for S in SHOWN), *((S, S) for S in SHOWN[:2])]:
            step = Step(SHAPE, L, S, config)
            found.append(
                {
                    "chip": chip.name,
                    "shape": str(SHAPE),
                    "L": L,
                    "S": S,
                    "dense_ms": 1e3 * dense(chip, step),
                    "sampled": step.sample_work / step.dense_work,
                    "own_break_even": {f"{e:.2f}": break_even(own, chip, step, e) for e in EFFICIENCIES},
                    "packed_break_even": {f"{e:.2f}": break_even(packed, chip, step, e) for e in EFFICIENCIES},
                    "own_better_from": {str(d): 1 / packing(chip, step, d) for d in DENSITIES},
                }
            )
    return found


def text(rows: Sequence[dict[str, Any]], config: Sample) -> str:
    """The rows for people."""
    names = [f"{e:.2f}" for e in EFFICIENCIES]
    steps = list(dict.fromkeys((row["L"], row["S"]) for row in rows))
    worst = [
        [
            f"{L:,}",
            f"{S:,}",
            *(f"{min(row['own_break_even'][e] for row in rows if (row['L'], row['S']) == (L, S)):.3f}" for e in names),
        ]
        for L, S in steps
    ]
    ways = [
        [
            row["chip"],
            f"{row['L']:,}",
            f"{row['S']:,}",
            f"{row['dense_ms']:.0f}",
            *(f"{row['packed_break_even'][e]:.3f}" for e in (names[0], names[3])),
            *(f"{efficiency:.2f}" for efficiency in row["own_better_from"].values()),
        ]
        for row in rows
    ]
    return "\n\n".join(
        [
            f"A model, not a measurement: one layer, {SHAPE}, {config}, float16, B = 1.",
            "Density up to which SampleAttention is no slower than dense, by what our kernels reach of the speed of "
            "MLX's per multiply-add; the least of all chips:",
            table(["L", "S", *names], worst),
            "Packing kept blocks for MLX's own kernel: the same density, with scores by our kernel at "
            f"{names[0]} and {names[3]} of that speed; and the efficiency from which our kernel attends faster than "
            f"packing, at densities {' and '.join(map(str, DENSITIES))}:",
            table(
                [
                    *("chip", "L", "S", "dense, ms"),
                    *(f"packed, {e}" for e in (names[0], names[3])),
                    *(f"ours from, {d}" for d in DENSITIES),
                ],
                ways,
            ),
        ]
    )
