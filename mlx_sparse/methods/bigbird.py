"""BigBird, a baseline for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_block_size, check_int, check_share
from .base import Prefill


@dataclass(frozen=True)
class BigBird(Prefill):
    """A window, the first keys and random blocks for prompts; window and first keys are shares of the context."""

    name: ClassVar[str] = "bigbird"
    source: ClassVar[str] = "BigBird, arXiv 2007.14062"
    reads: ClassVar[str] = "a window, the first keys and random blocks"
    look: ClassVar[tuple[str, str]] = ("#999933", "v")

    block_size: int = 64
    window: float = 0.08
    global_share: float = 0.08
    random_blocks: int = 1

    def __post_init__(self) -> None:
        check_share("window", self.window)
        check_share("global_share", self.global_share)
        check_int("random_blocks", self.random_blocks, 0)
        check_block_size(self.block_size)
