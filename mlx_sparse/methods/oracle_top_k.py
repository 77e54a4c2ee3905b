"""The exact top-k, a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import check_int, check_local_window
from . import stats
from .base import Method


@dataclass(frozen=True)
class OracleTopK(Method):
    """The ``top_k`` keys of the exact scores: a bound on SparQ, not a saving."""

    name: ClassVar[str] = "oracle_top_k"
    source: ClassVar[str] = "the bound in the SparQ paper"
    reads: ClassVar[str] = "every key; attends the best `top_k`. A bound, not a saving"
    look: ClassVar[tuple[str, str]] = ("#009E73", "^")
    grows: ClassVar[str] = "top_k"

    top_k: int = 128
    local_window: int | None = None

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)
        check_local_window(self.local_window, self.top_k)

    @property
    def attended(self) -> int:
        return self.top_k

    def parameters(self, G: int = 1) -> dict[str, Any]:
        return {"top_k": self.top_k, "local_window": check_local_window(self.local_window, self.top_k)}

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return stats.oracle_top_k_elements(S, D, top_k=self.attended)
