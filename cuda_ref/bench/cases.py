"""What is measured: cases in the order of their importance, SparQ's settings, and how much memory a case takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

ITEM_SIZES = {"float16": 2, "bfloat16": 2}
K = 1024
ROTATIONS = 3  # so many times what an L2 cache holds is read before a step sees the same keys and values again
MOST_COPIES = 256  # of a case that is too small for that

# Ratios that SparQ with rank 32 and 128 keys is held to on an H200, against the fastest dense contender of the same
# run, by (Hq, Hkv, D), batch and number of keys.
PAPER_SETTING = (32, 128)
BARS = {
    (32, 8, 128): {
        1: {32 * K: 1.3, 64 * K: 2.0, 128 * K: 3.0, 256 * K: 4.0, 512 * K: 5.0},
        8: {16 * K: 2.8, 64 * K: 4.5, 128 * K: 5.0},
        64: {16 * K: 5.0, 128 * K: 5.5},
    },
    (32, 32, 128): {64: {4 * K: 4.5}},
}
# Table 4 of the SparQ paper: B = 64, 32 heads, D = 128, S = 4096, rank 32, 128 keys.
PAPER = {"B": 64, "Hq": 32, "Hkv": 32, "D": 128, "S": 4 * K}
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
        """For JSON."""
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
class Sizes(ABC):
    """Sizes and type of one decode step."""

    B: int
    Hq: int
    Hkv: int
    D: int
    S: int
    dtype: str

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZES[self.dtype]

    @property
    def scale(self) -> float:
        return float(self.D**-0.5)

    @property
    def rows(self) -> int:
        """KV heads of all sequences."""
        return self.B * self.Hkv

    @property
    def keys(self) -> int:
        """Bytes of the keys; the values, and the keys by component, are as many."""
        return self.rows * self.S * self.D * self.item

    def __str__(self) -> str:
        return f"B={self.B} {self.Hq}/{self.Hkv} heads D={self.D} S={self.S}"

    @property
    @abstractmethod
    def least(self) -> int:
        """The fewest bytes that a contender reads."""

    def copies(self, l2: int) -> int:
        """Sets of caches, so that an L2 cache of ``l2`` bytes holds nothing of what a step reads when it starts."""
        return min(max(1, math.ceil(ROTATIONS * l2 / self.least)), MOST_COPIES)


@dataclass(frozen=True)
class Case(Sizes):
    """One decode step, and SparQ's settings."""

    settings: tuple[Setting, ...]

    @property
    def bar(self) -> float | None:
        """The ratio that SparQ is held to; None if to none."""
        return BARS.get((self.Hq, self.Hkv, self.D), {}).get(self.B, {}).get(self.S)

    @property
    def papers(self) -> bool:
        """Whether it is the case of the paper's Table 4."""
        return all(getattr(self, name) == value for name, value in PAPER.items())

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


REFERENCE_ELEMENTS = 1 << 27  # of keys that the reference takes up at a time, in float64
REFERENCE_BYTES = 4 * 8 * REFERENCE_ELEMENTS


def plan(
    lengths: Sequence[int], batches: Sequence[int], shapes: Sequence[tuple[int, int, int]], dtype: str, setting: Setting
) -> list[Case]:
    """Every case, those with a bar first, and among both the smaller ones first."""
    cases = [
        Case(B, Hq, Hkv, D, S, dtype, tuple(dict.fromkeys((setting, eighth(S, D)))))
        for Hq, Hkv, D in shapes
        for B in batches
        for S in lengths
    ]
    # A setting of as many keys as there are is dense attention.
    cases = [replace(case, settings=tuple(s for s in case.settings if s.top_k < case.S)) for case in cases]
    return sorted(cases, key=lambda case: (not case.papers, case.bar is None, case.keys))
