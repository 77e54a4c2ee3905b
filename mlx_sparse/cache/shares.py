"""Which positions of a sequence a rank holds, where several machines share its keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..methods.scoring_keys import GROUP

# Consecutive positions of one rank: whole groups of coded keys, pages, and blocks of SampleAttention; few enough that
# every piece of a prompt is shared out evenly.
BLOCK = 2 * GROUP


@dataclass(frozen=True)
class Shares:
    """Positions go round in blocks: ``position // BLOCK % size`` is the rank that holds it, whatever the length.

    So a trim, a further turn or a file needs no keys to change hands.

    Attributes:
        rank: this one, of ``size``.
    """

    rank: int
    size: int

    def before(self, position: int) -> int:
        """How many of the positions before this one the rank holds."""
        rounds, rest = divmod(position, BLOCK * self.size)
        return rounds * BLOCK + min(max(rest - self.rank * BLOCK, 0), BLOCK)

    def holds(self, position: int) -> bool:
        """Whether the rank holds this position."""
        return position // BLOCK % self.size == self.rank

    def own(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The positions in ``[start, stop)`` that the rank holds, ascending."""
        return self.positions(self.before(start), self.before(stop))

    def positions(self, first: int, last: int) -> npt.NDArray[Any]:
        """The positions of its rows ``[first, last)``."""
        rows = np.arange(first, last, dtype=np.int32)
        return (rows // BLOCK * self.size + self.rank) * BLOCK + rows % BLOCK

    def span(self, length: int) -> slice:
        """Its part of ``length`` things that all ranks have, such as the queries of a piece of a prompt."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)
