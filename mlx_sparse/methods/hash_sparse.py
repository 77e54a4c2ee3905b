"""Hash-sparse attention, a baseline for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import ConfigError, check_int
from .base import Prefill


@dataclass(frozen=True)
class HashSparse(Prefill):
    """Every query attends the keys before it that have its hash (docs/spec/sample.md, "Baselines").

    Attributes:
        buckets: hash values C, even: half as many random directions, each with two ends.
    """

    name: ClassVar[str] = "hash_sparse"
    source: ClassVar[str] = "Sparse Flash Attention, arXiv 2306.01160"
    reads: ClassVar[str] = "the keys with the query's hash. To compare with: no faster than dense attention here"
    look: ClassVar[tuple[str, str]] = ("#44AA99", "P")

    buckets: int = 16

    def __post_init__(self) -> None:
        check_int("buckets", self.buckets, 2)
        if self.buckets % 2:
            raise ConfigError(f"buckets: expected an even number, got {self.buckets}.")
