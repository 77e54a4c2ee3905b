"""What Quest keeps beside a cache: the bounds of pages of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..methods import registry
from ..methods.quest import Quest
from .state import State

if TYPE_CHECKING:
    from .sparse_cache import SparseCache


class QuestState(State):
    """The bounds (quest.1) of the pages before the current one: elements of the keys, from which they can be rebuilt.

    Attributes:
        bounds: smallest and largest, each ``(B, Hkv, capacity, D)``; none before there is a page.
        page_size: what they are of.
        pages: how many of them hold.
    """

    def __init__(self) -> None:
        self.bounds: list[mx.array] = []
        self.page_size, self.pages = 1, 0

    @property
    def nbytes(self) -> int:
        return sum(bound.nbytes for bound in self.bounds)

    def rewind(self, length: int) -> None:
        self.pages = min(self.pages, length // self.page_size)

    def read(self, cache: SparseCache, config: Quest, G: int, *, whole: bool) -> dict[str, Any]:
        if config.page_size != self.page_size:
            self.bounds, self.page_size, self.pages = [], config.page_size, 0
        pages = (cache.length - 1) // self.page_size
        if pages > self.pages:
            self._extend(cache, pages)
        return dict(zip(("page_min", "page_max"), self.bounds, strict=True))

    def _extend(self, cache: SparseCache, pages: int) -> None:
        start = self.pages * self.page_size
        padding = None if cache.padding is None else cache.padding - start
        rows = cache.key_rows[..., start : pages * self.page_size, :]
        new = registry.load("page_bounds", "ops")(rows, padding, page_size=self.page_size)
        B, Hkv, capacity, D = cache.key_rows.shape
        grown = -(-capacity // self.page_size) - (self.bounds[0].shape[2] if self.bounds else 0)
        if not self.bounds:
            self.bounds = [mx.zeros((B, Hkv, grown, D), rows.dtype) for _ in new]
        elif self.bounds[0].shape[2] < pages:
            self.bounds = [mx.pad(bound, [(0, 0), (0, 0), (0, grown), (0, 0)]) for bound in self.bounds]
        for bound, added in zip(self.bounds, new, strict=True):
            bound[..., self.pages : pages, :] = added
        self.pages = pages
