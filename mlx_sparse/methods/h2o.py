"""H2O, a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import check_int, check_local_window
from . import stats
from .base import Method


@dataclass(frozen=True)
class H2O(Method):
    """Heavy hitters: the ``top_k`` keys with the largest attention so far; the rest is evicted for good.

    A method to compare with: what prompts attend to is computed a second time, and evicted keys stay in memory.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    reads: ClassVar[str] = (
        "the last keys and those that received most attention so far (H2O); the rest is evicted for good. "
        "To compare with: it has to count what dense prompts attend to"
    )
    look: ClassVar[tuple[str, str]] = ("#D55E00", "s")
    grows: ClassVar[str] = "top_k"
    observes_prompts: ClassVar[bool] = True

    top_k: int = 128
    local_window: int | None = None

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)

    @property
    def attended(self) -> int:
        return self.top_k

    def serves_sinks(self, G: int) -> bool:
        return False

    def parameters(self, G: int = 1) -> dict[str, Any]:
        return {"top_k": self.top_k, "local_window": check_local_window(self.local_window, self.top_k)}

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return stats.h2o_elements(S, D, top_k=self.attended)
