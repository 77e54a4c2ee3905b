"""Take snapshots of caches and of the random state, to remove draft tokens that are rejected or not yielded yet."""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from ...model_info import leaves

ROWS = (KVCache, QuantizedKVCache)


class Undo:
    """Snapshot of the caches of a model.

    KV caches need only their length. Caches for sliding windows or linear attention overwrite old contents. Therefore
    the snapshot keeps references to the arrays of these caches, and the next write to such a cache makes a copy.
    """

    def __init__(self, caches: list[object]) -> None:
        found = leaves(caches)
        self._rows: list[tuple[Any, int]] = [(cache, cache.offset) for cache in found if isinstance(cache, ROWS)]
        self._others = [(cache, _references(vars(cache))) for cache in found if not isinstance(cache, ROWS)]

    def restore(self) -> None:
        """Restore the contents from the time of the snapshot.

        Removed rows stay in the buffer of a KV cache, and a negative `trim` adds them again.
        """
        for cache, offset in self._rows:
            cache.trim(cache.offset - offset)
        for cache, attributes in self._others:
            vars(cache).update(_references(attributes))


class Checked:
    """Tokens that a check wrote to the caches. The constructor removes the tokens, and `keep` adds them one by one.

    Args:
        before: snapshot from the time before the check.
        caches: the caches after the check.
        inputs: tokens that the check wrote.
        kept: number of tokens that `keep` may add.
        model: the model, which runs again where a cache cannot add single tokens (linear attention).
    """

    def __init__(self, before: Undo, caches: list[Any], inputs: mx.array, kept: int, model: nn.Module) -> None:
        self._before, self._caches, self._inputs, self._kept, self._model = before, caches, inputs, kept, model
        found, written = leaves(caches), slice(-len(inputs), None)
        windows: list[Any] = [cache for cache in found if isinstance(cache, RotatingKVCache)]
        self._rows: list[Any] = [cache for cache in found if isinstance(cache, ROWS)]
        self._windows = [(cache, cache.keys[..., written, :], cache.values[..., written, :]) for cache in windows]
        self._after = Undo(caches) if len(self._rows) + len(self._windows) < len(found) else None
        before.restore()

    def keep(self, count: int) -> None:
        """Keep the first ``count`` tokens. The values of ``count`` must be 1, 2, 3 and so on."""
        if self._after is None:
            for cache in self._rows:
                cache.trim(-1)  # the row is still in the buffer
            for cache, keys, values in self._windows:
                cache.update_and_fetch(keys[..., count - 1 : count, :], values[..., count - 1 : count, :])
        elif count == len(self._inputs):
            self._after.restore()
        else:
            self._before.restore()
            self._run(count)
        if count == self._kept or self._windows:
            # Start the evaluation now, because another thread may continue but cannot evaluate these arrays.
            mx.async_eval([cache.state for cache in self._caches])  # type: ignore[no-untyped-call]

    def _run(self, count: int) -> None:
        """Run the model on the first ``count`` tokens. MLX computes only the states that a caller uses."""
        # Only the last run may write to the caches, because later writes would depend on the results of earlier runs.
        caches = self._caches if count == self._kept else _copies(self._caches)
        self._model(self._inputs[None, :count], cache=caches)
        if caches is not self._caches:
            for cache in self._rows:
                cache.trim(-count)
            for cache, used in zip(leaves(self._caches), leaves(caches), strict=True):
                if cache not in self._rows:
                    vars(cache).update(vars(used))


def _references(value: Any) -> Any:
    """Return a copy of ``value`` that shares array memory. In-place writes to the original do not change the copy."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, dict):
        return {name: _references(part) for name, part in value.items()}
    return type(value)(map(_references, value)) if isinstance(value, list | tuple) else value


def _copies(caches: Any) -> Any:
    """Return copies of ``caches`` that share array memory."""
    if isinstance(caches, (list, tuple)):
        return type(caches)(map(_copies, caches))
    copied: Any = copy(caches)
    if hasattr(caches, "caches"):
        copied.caches = _copies(caches.caches)
    else:
        vars(copied).update(_references(vars(caches)))
    return copied


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
