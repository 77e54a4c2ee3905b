"""Define the parameters of Quest, and estimate its transfers and crossover length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...core.base import Method, Step
from ...core.cost import ENOUGH_SAVED
from ...core.decide import NEVER


@dataclass(frozen=True)
class Quest(Method):
    """Attend to the pages of keys with the largest upper bounds on their scores (docs/spec/quest.md).

    Attributes:
        page_size: number of consecutive keys per page, at least 1.
        top_k: number of attended keys per KV head, rounded up to whole pages. The current page is included. The
            default is the budget at which Quest matches dense attention on LongBench in the paper.
        dense_below: context length in keys below which attention stays dense. "auto" is the length that was measured
            on this machine. Before a measurement, "auto" is ``4 * top_k`` on the `ops` backend. There, reading a
            gathered row takes 2.5 times as long as reading a row in dense attention (docs/results/speed.md). On `cpu`,
            "auto" is never sparse before a measurement, because array operations select the pages. On a GPU backend,
            "auto" is the length at which a step saves `ENOUGH_SAVED` bytes. If ``top_k`` is below the default,
            as in experiments on short texts, every step that can be sparse is sparse.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest, arXiv 2406.10774"
    reads: ClassVar[str] = (
        "the smallest and largest components of each page of 16 keys, then the `top_k` keys and values of the pages "
        "with the largest bounds ([Quest](docs/spec/quest.md))"
    )
    plot_style: ClassVar[tuple[str, str]] = ("#F0E442", "P")
    budget_setting: ClassVar[str] = "top_k"
    limits: ClassVar[Mapping[str, int]] = {"page_size": 1, "top_k": 1}

    page_size: int = 16
    top_k: int = 1024
    dense_below: str | int = "auto"

    @property
    def attended(self) -> int:
        return -(-self.top_k // self.page_size) * self.page_size

    @property
    def unit(self) -> int:
        return self.page_size

    @property
    def experiment(self) -> bool:
        return self.top_k < Quest.top_k

    def modeled_context(self, step: Step | None) -> int:
        if step and step.device == "cpu":
            return NEVER
        if not step or step.device not in ENOUGH_SAVED:
            return 4 * self.attended
        # A sparse step skips rows, but it reads the page bounds (quest.6), and writes and reads the page scores.
        row = 2 * step.itemsize * step.D
        saved = row - (row + 8) / self.page_size
        if saved <= 0:
            return NEVER
        return self.attended + 1 + math.ceil((ENOUGH_SAVED[step.device] / step.heads + row * self.attended) / saved)

    def step_bytes(self, S: int, D: int, *, itemsize: int, row_bytes: int, G: int, backend: str) -> int:
        moved = super().step_bytes(S, D, itemsize=itemsize, row_bytes=row_bytes, G=G, backend=backend)
        return moved + 2 * 4 * -(-S // self.page_size)  # one float32 score per page is written and read

    def elements(self, S: int, D: int, buckets: int = 0) -> int:
        """Return ``2 P D + 2 k D + 2 D`` (quest.6).

        A step reads two bounds of P pages and k = ``attended`` keys and values, and writes one key and one value.
        """
        return 2 * -(-S // self.page_size) * D + 2 * min(self.attended, S) * D + 2 * D
