"""Replace the attention function that mlx-lm's models call."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from contextvars import ContextVar
from typing import Any, Protocol

import mlx.core as mx
import mlx_lm
from mlx_lm import utils
from mlx_lm.models import base
from mlx_lm.models import cache as caches

from ..cache import kv_cache
from ..checks import BackendUnavailable

NAME = "scaled_dot_product_attention"
SUPPORTED = "mlx-lm 0.32 (0.31.3 on Python 3.10)"
PARAMETERS = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]

original = base.scaled_dot_product_attention
prepare = caches.BatchKVCache.prepare
merge = inspect.getattr_static(caches.KVCache, "merge")


class Listener(Protocol):
    """Object that receives a model's attention calls: a `Call` of an enabled model, or an observer."""

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        """Return the attention output, or None to let mlx-lm run dense attention."""


# Listener of the forward pass that is running on this thread.
active: ContextVar[Listener | None] = ContextVar("active", default=None)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Call the active listener. Without a listener, or if it returns None, call mlx-lm's function."""
    listener = active.get()
    if listener is not None:
        out = listener.attend(queries, keys, values, cache, scale, mask, sinks)
        if out is not None:
            return out
    dense: mx.array = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return dense


def prepare_and_store_ends(cache: Any, *, lengths: list[int] | None = None, **padding: Any) -> None:
    """Call mlx-lm's `BatchKVCache.prepare`, and store the end row of each prompt in ``cache.prompt_ends``."""
    prepare(cache, lengths=lengths, **padding)  # type: ignore[no-untyped-call]
    cache.prompt_ends = None if lengths is None else [cache.size() + length for length in lengths]


_bound: Counter[str] = Counter()


def bind(model: Any) -> list[str]:
    """Replace the attention function in the modules of ``model``, and return the names of these modules.

    Each model file has its own reference to mlx-lm's function, so every module must be changed. `KVCache.merge` and
    `BatchKVCache.prepare` are replaced too, because mlx-lm calls both before it calls the model.
    """
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    ours = scaled_dot_product_attention
    names = {name for name in names if getattr(sys.modules.get(name), NAME, None) in (original, ours)}
    for name in names:
        _bound[name] += 1
        setattr(sys.modules[name], NAME, ours)
    if names:
        caches.BatchKVCache.prepare = prepare_and_store_ends  # type: ignore[method-assign, assignment]
        caches.KVCache.merge = staticmethod(kv_cache.merge)  # type: ignore[method-assign]
    return sorted(names)


def unbind(names: list[str]) -> None:
    """Undo one call to `bind`. Restore mlx-lm's functions once all calls are undone."""
    for name in names:
        _bound[name] -= 1
        if _bound[name] == 0:
            setattr(sys.modules[name], NAME, original)
    if not _bound.total():
        caches.BatchKVCache.prepare = prepare  # type: ignore[method-assign]
        caches.KVCache.merge = merge  # type: ignore[method-assign]


def changed_interfaces() -> list[str]:
    """Return one line of text per changed interface of the installed mlx-lm; empty for a supported version."""
    problems = []
    if list(inspect.signature(original).parameters) != PARAMETERS:
        problems.append("mlx_lm.models.base.scaled_dot_product_attention has other parameters")
    if not callable(getattr(utils, "load_model", None)):
        problems.append("mlx_lm.utils.load_model is missing")
    for cls, members in (
        (caches.KVCache, ("update_and_fetch", "state", "trim", "make_mask", "nbytes", "merge")),
        (caches.QuantizedKVCache, ("update_and_fetch", "state", "trim", "make_mask", "nbytes")),
        (caches.BatchKVCache, ("update_and_fetch", "state", "prepare", "finalize", "filter", "extend", "make_mask")),
    ):
        problems += [f"{cls.__name__}.{member} is missing" for member in members if not hasattr(cls, member)]
    if not problems:
        cache = caches.KVCache()
        rows = mx.zeros((1, 1, 1, 1))
        cache.update_and_fetch(rows, rows)
        if [getattr(entry, "ndim", None) for entry in cache.state[:2]] != [4, 4] or cache.offset != 1:
            problems.append("KVCache no longer stores keys, values and an offset")
        packed: Any = caches.QuantizedKVCache(group_size=32, bits=8)
        packed.update_and_fetch(*(mx.zeros((1, 1, 1, 32)) for _ in range(2)))
        if [part.shape[3] for part in packed.keys] != [8, 1, 1] or (packed.bits, packed.offset) != (8, 1):
            problems.append("QuantizedKVCache no longer stores codes, scales and biases")
    return problems


def require() -> None:
    """Raise `BackendUnavailable` if mlx-lm's interfaces have changed, because attention could silently be dense."""
    problems = changed_interfaces()
    if problems:
        version = getattr(mlx_lm, "__version__", "unknown")
        raise BackendUnavailable(
            f"mlx-lm: expected the interfaces of {SUPPORTED}, got version {version} where {'; '.join(problems)}. "
            f"Install {SUPPORTED}."
        )


def reduce_as(cls: type, attribute: str) -> Any:
    """Return a ``__reduce_ex__`` that copies and pickles objects as instances of ``cls`` without ``attribute``."""

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = cls.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        make, (_, *args), state, *items = reduced
        return make, (cls, *args), {key: value for key, value in state.items() if key != attribute}, *items

    return reduce
