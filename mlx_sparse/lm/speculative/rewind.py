"""Restore the caches of a model and the random state after drafts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ...model_info import leaves

ROWS = (KVCache, QuantizedKVCache)


class Undo:
    """A snapshot of the caches of a model.

    KV caches are trimmed. Sliding windows and the states of linear layers overwrite their rows, so the snapshot keeps
    their arrays, which costs a copy of a window or a state.
    """

    def __init__(self, caches: list[Any]) -> None:
        found = leaves(caches)
        self._rows: list[tuple[Any, int]] = [(cache, cache.offset) for cache in found if isinstance(cache, ROWS)]
        self._others = [(cache, _references(vars(cache))) for cache in found if not isinstance(cache, ROWS)]

    @property
    def keeps_tokens(self) -> bool:
        """True if `restore` can keep some of the tokens since the snapshot."""
        return not self._others

    def restore(self, kept: int = 0) -> None:
        """Remove the tokens since the snapshot, except the first ``kept``."""
        for cache, offset in self._rows:
            cache.trim(max(cache.offset - offset - kept, 0))
        for cache, held in self._others:
            vars(cache).update(_references(held))


def _references(value: Any) -> Any:
    """Return new references to the same arrays: assigning to rows of an array changes every other name of it."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, dict):
        return {name: _references(part) for name, part in value.items()}
    return type(value)(map(_references, value)) if isinstance(value, list | tuple) else value


class Random:
    """A snapshot of MLX's random state.

    Args:
        drawn: True if samplers draw random numbers.
    """

    def __init__(self, drawn: bool) -> None:
        self._drawn = drawn
        self.noted: list[mx.array] = []
        self._start = self._now() if drawn else None

    def _now(self) -> mx.array:
        key: mx.array = mx.random.state[0]  # type: ignore[index]
        return key[...]

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        self._set(self._start)

    def note(self) -> None:
        """Store the current state for `resume`."""
        if self._drawn:
            self.noted.append(self._now())

    def resume(self, index: int) -> None:
        """Set the random state to the stored state ``index``."""
        self._set(self.noted[index] if self._drawn else None)

    def _set(self, key: mx.array | None) -> None:
        if key is not None:
            high, low = np.array(key).tolist()
            mx.random.seed(high << 32 | low)  # a key is its seed in two halves
