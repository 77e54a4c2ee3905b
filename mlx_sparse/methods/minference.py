"""MInference, a baseline for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_block_size, check_int
from .base import Prefill
from .block_layout import MINFERENCE_ROWS, Layout


@dataclass(frozen=True)
class MInference(Prefill):
    """Vertical-slash attention with fixed budgets for prompts."""

    name: ClassVar[str] = "minference"
    source: ClassVar[str] = "MInference, arXiv 2407.02490"
    reads: ClassVar[str] = "as many as fixed budgets pay for (MInference, in whole blocks)"
    look: ClassVar[tuple[str, str]] = ("#882255", "s")

    block_size: int = 64
    vertical_tokens: int = 1000
    slash_tokens: int = 6096

    def __post_init__(self) -> None:
        check_int("vertical_tokens", self.vertical_tokens, 1)
        check_int("slash_tokens", self.slash_tokens, 1)
        check_block_size(self.block_size)

    def layout(self, L: int, S: int) -> Layout:
        return Layout(L, S, 1, self.block_size, rows=MINFERENCE_ROWS)
