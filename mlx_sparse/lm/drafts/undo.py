"""Taking back what was written to the caches of a model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ...model_info import leaves

ROWS = (KVCache, QuantizedKVCache)


class Undo:
    """The caches of a model as they are when this is made.

    Caches of keys forget their last rows. Sliding windows and the states of linear layers have overwritten what they
    would go back to: of those, what they held is kept, which costs a copy of a window or a state.
    """

    def __init__(self, caches: list[Any]) -> None:
        found = leaves(caches)
        self._rows: list[tuple[Any, int]] = [(cache, cache.offset) for cache in found if isinstance(cache, ROWS)]
        self._others = [(cache, _held(vars(cache))) for cache in found if not isinstance(cache, ROWS)]

    @property
    def trims(self) -> bool:
        """Whether `back` can keep some of the tokens since then."""
        return not self._others

    def back(self, kept: int = 0) -> None:
        """Forget the tokens since then, but for the first ``kept``."""
        for cache, offset in self._rows:
            cache.trim(max(cache.offset - offset - kept, 0))
        for cache, held in self._others:
            vars(cache).update(_held(held))


def _held(value: Any) -> Any:
    """The same arrays by other names: assigning to rows of one changes it for whoever has that name."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, dict):
        return {name: _held(part) for name, part in value.items()}
    return type(value)(map(_held, value)) if isinstance(value, list | tuple) else value
