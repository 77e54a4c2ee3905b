"""Quest in a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_sparse.methods.quest import Quest

from .base import KEYS, PROMPT, Decoding


@dataclass(frozen=True)
class QuestDecoding(Decoding):
    """Decoding by Quest."""

    operator: ClassVar[str] = "QuestAttention"
    timed: ClassVar[bool] = True
    method: Quest

    @classmethod
    def settled(cls, config: Quest, model: Any, *, branches: bool, packed: bool = False) -> QuestDecoding:
        """Sparse from where `mlx_sparse.enable` is on array operations, which bodies resemble."""
        below = config.shortest_context() if branches else config.attended + 1
        return cls(dataclasses.replace(config, dense_below=below))

    def attributes(self, lanes: int) -> dict[str, float]:
        method = self.method
        return {"page_size": method.page_size, "top_k": method.top_k, "dense_below": int(method.dense_below)}

    def axes(self, capacity: int) -> dict[str, int]:
        return {"pages": -(-capacity // self.method.page_size)}

    def shortened(self, *, static: bool) -> QuestDecoding:
        """Pages get shorter with it: a page of as few keys as are attended leaves nothing to choose."""
        top_k = PROMPT if static else min(self.method.top_k, KEYS)
        page_size = min(self.method.page_size, max(top_k // 2, 1))
        return QuestDecoding(dataclasses.replace(self.method, page_size=page_size, top_k=top_k, dense_below=0))
