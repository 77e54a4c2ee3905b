"""Take snapshots of caches and of the random state, to remove rejected draft tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ...model_info import leaves

ROWS = (KVCache, QuantizedKVCache)


class Undo:
    """Snapshot of the caches of a model.

    `restore` trims KV caches. Caches for sliding windows or linear attention overwrite old contents. Therefore the
    snapshot keeps references to the arrays of these caches, and the next write to such a cache makes a copy.
    """

    def __init__(self, caches: list[Any]) -> None:
        found = leaves(caches)
        self._rows: list[tuple[Any, int]] = [(cache, cache.offset) for cache in found if isinstance(cache, ROWS)]
        self._others = [(cache, _references(vars(cache))) for cache in found if not isinstance(cache, ROWS)]

    @property
    def keeps_tokens(self) -> bool:
        """True if all caches can be trimmed. Only then does `restore` support ``kept`` above 0."""
        return not self._others

    def restore(self, kept: int = 0) -> None:
        """Keep the first ``kept`` tokens that were added after the snapshot, and remove all later tokens."""
        for cache, offset in self._rows:
            cache.trim(max(cache.offset - offset - kept, 0))
        for cache, attributes in self._others:
            vars(cache).update(_references(attributes))


def _references(value: Any) -> Any:
    """Return a copy of ``value`` that shares array memory. In-place writes to the original do not change the copy."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, dict):
        return {name: _references(part) for name, part in value.items()}
    return type(value)(map(_references, value)) if isinstance(value, list | tuple) else value


class Random:
    """Snapshot of MLX's random state.

    Args:
        drawn: True if sampling draws random numbers. If False, all methods do nothing.
    """

    def __init__(self, drawn: bool) -> None:
        self._drawn = drawn
        self.noted: list[mx.array] = []
        self._start = self._now() if drawn else None

    def _now(self) -> mx.array:
        key: mx.array = mx.random.state[0]  # type: ignore[index]
        return key[...]

    def restore(self) -> None:
        """Restore the random state from the time of the snapshot."""
        self._set(self._start)

    def note(self) -> None:
        """Store the current random state for `resume`."""
        if self._drawn:
            self.noted.append(self._now())

    def resume(self, index: int) -> None:
        """Restore the random state that call number ``index`` of `note` stored. Calls are counted from 0."""
        self._set(self.noted[index] if self._drawn else None)

    def _set(self, key: mx.array | None) -> None:
        if key is not None:
            high, low = np.array(key).tolist()
            mx.random.seed(high << 32 | low)  # a key has the two 32-bit halves of its seed
