"""Decode steps in the order of their importance, and how much memory a case takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from mlx_sparse.common import stats
from mlx_sparse.tools.bench.core import Case

K = 1024
ROTATIONS = 3  # so many times what an L2 cache holds is read before a step sees the same keys and values again
MOST_COPIES = 256  # of a case that is too small for that
REFERENCE_ELEMENTS = 1 << 27  # of keys that the reference takes up at a time, in float64
REFERENCE_BYTES = 4 * 8 * REFERENCE_ELEMENTS


@dataclass(frozen=True)
class StepCase(Case, ABC):
    """One decode step."""

    @property
    @abstractmethod
    def least(self) -> int:
        """The fewest bytes that a contender reads."""

    @abstractmethod
    def memory(self, copies: int) -> int:
        """Bytes of everything alive at once with so many sets of caches."""

    def copies(self, l2: int) -> int:
        """Sets of caches, so that an L2 cache of ``l2`` bytes holds nothing of what a step reads when it starts."""
        return min(max(1, math.ceil(ROTATIONS * l2 / self.least)), MOST_COPIES)

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense attention's step (sparq.11)."""
        return self.rows * self.item * stats.dense_elements(self.S, self.D)


@dataclass(frozen=True)
class Part:
    """One launch of ours, and the bytes it moves."""

    name: str
    bytes: int
