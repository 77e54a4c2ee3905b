"""What is measured of SparQ: settings, cases, bars, and the bytes that its launches move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mlx_sparse.common import stats
from mlx_sparse.tools.bench.core import Shape

from ..launchers.select import block_size
from .sizes import REFERENCE_BYTES, K, Part, StepCase

# Ratios that SparQ with rank 32 and 128 keys is held to on an H200, against the fastest dense contender of the same
# run, by shape, batch and number of keys.
PAPER_SETTING = (32, 128)
BARS = {
    Shape(32, 8, 128): {
        1: {32 * K: 1.3, 64 * K: 2.0, 128 * K: 3.0, 256 * K: 4.0, 512 * K: 5.0},
        8: {16 * K: 2.8, 64 * K: 4.5, 128 * K: 5.0},
        64: {16 * K: 5.0, 128 * K: 5.5},
    },
    Shape(32, 32, 128): {64: {4 * K: 4.5}},
}
# Table 4 of the SparQ paper: B = 64, 32 heads, D = 128, S = 4096, rank 32, 128 keys.
PAPER = (Shape(32, 32, 128), 64, 4 * K)
PAPER_A100, PAPER_THEORY = 3.02, 6.4


@dataclass(frozen=True)
class Setting:
    """SparQ's rank and number of keys."""

    rank: int
    top_k: int

    @property
    def window(self) -> int:
        """Last keys among them, as by default."""
        return self.top_k // 4

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON."""
        return {"rank": self.rank, "top_k": self.top_k}

    def __str__(self) -> str:
        return f"r={self.rank}, k={self.top_k}"


def eighth(S: int, D: int) -> Setting:
    """The setting of a compression ratio of 1/8, as the paper's authors divide it: half for components, half for keys.

    Dense moves ``2 S D`` elements. ``rank = D / 8`` moves an eighth of half of them; ``top_k = S / 16`` keys and values
    move the same, and 128 at least: what the authors' needle-in-a-haystack runs do (rank D/c, 0.5/c of the keys).
    """
    return Setting(max(1, D // 8), max(128, S // 16))


@dataclass(frozen=True)
class SparQCase(StepCase):
    """One decode step, and SparQ's settings."""

    settings: tuple[Setting, ...]

    @property
    def bar(self) -> float | None:
        """The ratio that SparQ is held to; None if to none."""
        return BARS.get(self.shape, {}).get(self.B, {}).get(self.S)

    @property
    def papers(self) -> bool:
        """Whether it is the case of the paper's Table 4."""
        return (self.shape, self.B, self.S) == PAPER

    @property
    def least(self) -> int:
        """SparQ's: a few components of each key, and its chosen rows."""
        return min(self.rows * (self.S * s.rank + 2 * s.top_k * self.D) * self.item for s in self.settings)

    def memory(self, copies: int) -> int:
        """Bytes of everything alive at once: caches, what contenders put aside, and what the reference takes.

        Our kernels put float32 logits aside. The plain SparQ of torch puts aside the components that it gathers, logits
        in the type of the keys, and three float32 arrays of their shape. Graphs share what they put aside.
        """
        logits = 4 * self.rows * self.G * self.S
        gathered = self.keys * max(s.rank for s in self.settings) // self.D
        return 3 * copies * self.keys + len(self.settings) * copies * logits + gathered + 4 * logits + REFERENCE_BYTES


def plan(
    lengths: Sequence[int], batches: Sequence[int], shapes: Sequence[Shape], dtype: str, setting: Setting
) -> list[SparQCase]:
    """Every case, those with a bar first, and among both the smaller ones first."""
    found = []
    for shape, B, S in product(shapes, batches, lengths):
        case = SparQCase(dtype, shape, B, S, tuple(dict.fromkeys((setting, eighth(S, shape.D)))))
        # A setting of as many keys as there are is dense attention.
        found.append(replace(case, settings=tuple(s for s in case.settings if s.top_k < S)))
    return sorted(found, key=lambda case: (not case.papers, case.bar is None, case.keys))


def sparq_bytes(case: SparQCase, setting: Setting) -> int:
    """Bytes of a step with SparQ (sparq.12)."""
    return case.rows * case.item * stats.sparq_elements(case.S, case.D, rank=setting.rank, top_k=setting.top_k)


def sparq_parts(case: SparQCase, setting: Setting) -> list[Part]:
    """The three launches of `sparq_decode`.

    Left out as small: what the programs of a launch hand to the one that merges, but for the candidates of the choice.
    """
    logits = 4 * case.G * case.S
    block = block_size(case.S, setting.top_k)
    tiles = -(-case.S // block)
    candidates = 8 * tiles * min(setting.top_k, block) if tiles > 1 else 0
    chosen = 4 * setting.top_k
    return [
        Part("scores", case.rows * (case.S * setting.rank * case.item + logits)),
        Part("select", case.rows * (logits + 2 * candidates + chosen)),
        Part("attend", case.rows * (2 * setting.top_k * case.D * case.item + chosen)),
    ]
