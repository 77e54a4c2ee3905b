"""Define Quest's auxiliary cache state, the elementwise minimum and maximum of each page of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ...cache.state import Read, State
from .config import Quest
from .ops import page_bounds

if TYPE_CHECKING:
    from ...cache.sparse_cache import SparseCache


class QuestState(State):
    """Elementwise bounds (quest.1) of the keys in each page. The page that contains the newest key has no bounds.

    The bounds can be rebuilt from the keys.

    Attributes:
        bounds: two arrays ``(B, Hkv, pages, D)``, the minimum and the maximum of each page's keys. Page p of a
            sequence begins p * ``page_size`` rows after its first valid key. Before the first step the list is empty.
        page_size: number of keys in a page.
        rows: number of cache rows that have been processed; all full pages in these rows have bounds.
    """

    def __init__(self) -> None:
        self.bounds: list[mx.array] = []
        self.page_size, self.rows = 1, 0

    @property
    def nbytes(self) -> int:
        return sum(bound.nbytes for bound in self.bounds)

    def rewind(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def bind(self, cache: SparseCache, config: Quest, G: int, *, whole: bool) -> Read:
        if config.page_size != self.page_size:
            self.bounds, self.page_size, self.rows = [], config.page_size, 0
        first_rows = cache.first_rows()

        def read(cache: SparseCache, S: int) -> dict[str, object]:
            self._make_room(cache)
            before = S - 1  # every step attends to the current page, which needs no bounds
            for sequence, first in enumerate(first_rows):
                known, full = ((max(rows - first, 0)) // self.page_size for rows in (self.rows, before))
                if full > known:
                    self._add(cache, sequence, first, known, full)
            self.rows = before
            return dict(zip(("page_min", "page_max"), self.bounds, strict=True))

        return read

    def _make_room(self, cache: SparseCache) -> None:
        B, Hkv, capacity, D = cache.key_rows.shape
        pages = -(-capacity // self.page_size)
        if not self.bounds:
            self.bounds = [mx.zeros((B, Hkv, pages, D), cache.key_rows.dtype) for _ in range(2)]
        missing = pages - self.bounds[0].shape[2]
        if missing > 0:
            self.bounds = [mx.pad(bound, [(0, 0), (0, 0), (0, missing), (0, 0)]) for bound in self.bounds]

    def _add(self, cache: SparseCache, sequence: int, first: int, known: int, full: int) -> None:
        """Compute the bounds of pages ``[known, full)`` of ``sequence``, whose first valid row is ``first``."""
        keys = cache.key_rows if len(self.bounds[0]) == 1 else cache.key_rows[sequence : sequence + 1]
        rows = keys[..., first + known * self.page_size : first + full * self.page_size, :]
        for bound, new in zip(self.bounds, page_bounds(rows, None, page_size=self.page_size), strict=True):
            bound[sequence : sequence + 1, :, known:full] = new
