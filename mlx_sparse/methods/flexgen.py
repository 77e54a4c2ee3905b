"""FlexGen, a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_int
from . import stats
from .base import Method


@dataclass(frozen=True)
class FlexGen(Method):
    """Exact softmax over all keys, values of the ``top_k`` largest weights, no renormalisation."""

    name: ClassVar[str] = "flexgen"
    source: ClassVar[str] = "FlexGen, arXiv 2303.06865"
    reads: ClassVar[str] = "every key, the values of the `top_k` largest weights"
    look: ClassVar[tuple[str, str]] = ("#CC79A7", "v")
    grows: ClassVar[str] = "top_k"

    top_k: int = 128

    def __post_init__(self) -> None:
        check_int("top_k", self.top_k, 1)

    @property
    def attended(self) -> int:
        return self.top_k

    def serves_sinks(self, G: int) -> bool:
        return False

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        return stats.flexgen_elements(S, D, top_k=self.attended)

    def rows(self, S: int) -> int:
        return S + min(self.attended, S)
