"""Queries and keys before RoPE, as SAAP's index wants them, from models that were not made to show them.

A model hands attention queries and keys after RoPE. `Recorder` remembers the last calls of the model's own rope
modules, so that what went into one is known by the identity of what came out: exact and free. `inverse` turns rotated
rows back, for keys that nobody recorded (a prompt cache from a file) and for rows that are scaled after RoPE. `Source`
selects one of them for a layer, and `find_sources` finds it. `observe` watches a model that is not enabled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..methods import reasons
from ..model_info import leaves
from ..model_parts import by_itself
from . import seam

RECORDERS = "_mlx_sparse_recorders"
# A layer calls its rope twice, for queries and keys; some split them.
REMEMBERED = 4


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a rope module."""

    rope: Any
    before: mx.array
    after: mx.array
    offset: Any


def ropes(model: Any) -> list[Any]:
    """The rope modules of ``model``, each once: by the names that mlx-lm's classes have."""
    found = {id(module): module for _, module in model.named_modules() if _is_rope(type(module))}
    return list(found.values())


def _is_rope(cls: type) -> bool:
    name = cls.__name__.lower()
    return ("rope" in name or "rotary" in name) and "attention" not in name  # as phixtral's RoPEAttention is


class Recorder:
    """While active, as a context manager, remembers the last calls of a model's rope modules, each thread its own.

    Its owner takes what a layer needs with `before` and calls `clear` when the layer or the call of the model is over:
    what stays remembered stays in memory.
    """

    def __init__(self, model: Any) -> None:
        self._ropes = ropes(model)
        self._own = threading.local()

    @property
    def calls(self) -> deque[Call]:
        """The last calls that this thread has made."""
        if not hasattr(self._own, "calls"):
            self._own.calls = deque(maxlen=REMEMBERED)
        calls: deque[Call] = self._own.calls
        return calls

    def __enter__(self) -> Recorder:
        for rope in self._ropes:
            if not hasattr(rope, RECORDERS):
                rope.__class__ = _recording(type(rope))
                # Not through nn.Module, which files lists among the parameters.
                object.__setattr__(rope, RECORDERS, [])
            getattr(rope, RECORDERS).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        for rope in self._ropes:
            recorders = getattr(rope, RECORDERS)
            recorders.remove(self)
            if not recorders:
                object.__delattr__(rope, RECORDERS)
                rope.__class__ = type(rope).__mro__[1]
        self.clear()

    def before(self, array: mx.array) -> mx.array | None:
        """What went into the call that returned ``array``, this very object, and forget that call; None if none did."""
        for call in self.calls:
            if call.after is array:
                self.calls.remove(call)
                return call.before
        return None

    def clear(self) -> None:
        """Forget all calls of this thread."""
        self.calls.clear()


def _recording(cls: type) -> type:
    """A subclass of a rope's class that tells the recorders of each call."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        after = cls.__call__(self, *args, **kwargs)
        if args and isinstance(args[0], mx.array) and isinstance(after, mx.array):
            offset = args[1] if len(args) > 1 else kwargs.get("offset", 0)
            for recorder in getattr(self, RECORDERS):
                recorder.calls.append(Call(self, args[0], after, offset))
        return after

    own = {"__call__": call, "__reduce_ex__": seam.reduce_as(cls, RECORDERS), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def rotate(rope: Any, rows: mx.array, offset: int | mx.array) -> mx.array:
    """``rope`` of ``rows (B, H, n, D)``, the first of them at position ``offset``; not recorded."""
    cls = type(rope).__mro__[1] if hasattr(rope, RECORDERS) else type(rope)
    rotated: mx.array = cls.__call__(rope, rows, offset=offset)
    return rotated


def inverse(rope: Any, rotated: mx.array, offset: int | mx.array) -> mx.array:
    """The rows that ``rope`` turned into ``rotated (B, H, n, D)``, the first of them at position ``offset``.

    A rope R scales each component and rotates pairs of equal scale, so ``R^-1 = g^-2 R^T``, where R^T is its gradient
    and g what it makes of ones at position 0. ``offset`` may be one position per row of the batch. In float32, then
    rounded to the type of ``rotated``.
    """
    rows = rotated.astype(mx.float32)
    _, (turned,) = mx.vjp(lambda x: rotate(rope, x, offset), [mx.zeros_like(rows)], [rows])
    gain = rotate(rope, mx.ones((1, 1, 1, rotated.shape[-1])), 0)
    return (turned / (gain * gain)).astype(rotated.dtype)


def irreversible(rope: Any, D: int) -> str | None:
    """Why `inverse` is wrong for ``rope`` and rows of ``D`` components; None where it is right."""
    rows = mx.cos(mx.arange(66 * D, dtype=mx.float32)).reshape(1, 1, 66, D)
    far = 1 << 22  # beyond what any model calls its context, below what float32 counts
    few, many = rotate(rope, rows[:, :, :2], far), rotate(rope, rows, far)[:, :, :2]
    if not _close(few, many, 1e-2):
        return reasons.ROPE_BY_LENGTH
    return None if _close(inverse(rope, rotate(rope, rows, 5), 5), rows, 1e-3) else reasons.ROPE_NOT_INVERTIBLE


def _close(a: mx.array, b: mx.array, share: float) -> bool:
    """Whether the arrays differ by at most this share of the largest number."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    near: Any = (mx.abs(a - b).max() <= share * mx.abs(b).max()).item()
    return bool(near)


@dataclass(frozen=True, eq=False)
class Source:
    """How to have the queries and keys of one layer before RoPE.

    Attributes:
        rope: the layer's rope; None where it calls none, and its tensors are what they were before it.
        irreversible: why keys that were not recorded cannot be had; None where they can.
    """

    rope: Any = None
    irreversible: str | None = None

    def before(self, recorder: Recorder, rows: mx.array, offset: int | mx.array) -> mx.array | None:
        """The rows before RoPE of ``rows (B, H, n, D)``, the first at position ``offset``; None if they are unknown."""
        if self.rope is None:
            return rows
        recorded = recorder.before(rows)
        if recorded is not None or self.irreversible is not None:
            return recorded
        return inverse(self.rope, rows, offset)

    def turned_back(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        """`before` of rows that nobody recorded; not where they are ``irreversible``."""
        return rows if self.rope is None else inverse(self.rope, rows, offset)


def find_source(recorder: Recorder, arrays: tuple[mx.array, ...], position: int, rotations: int) -> Source | str:
    """How to have the layer's tensors before RoPE, or why they cannot be had.

    Args:
        recorder: with the calls of this layer.
        arrays: the queries and the new keys, as the layer hands them to attention and to the cache.
        position: the position of their first row; more than 0, where rotated rows look as before.
        rotations: how often the layer called `mx.fast.rope`, in a module or not.
    """
    if rotations == 0 and not recorder.calls:
        return Source()
    if not recorder.calls:
        return reasons.ROPE_NOT_A_MODULE
    rope, D = recorder.calls[-1].rope, arrays[0].shape[-1]
    reason = irreversible(rope, D)
    for array in arrays:
        if any(call.after is array and call.rope is rope for call in recorder.calls):
            continue
        if reason is not None or not any(_only_scaled(call, array, position) for call in recorder.calls):
            return reasons.CHANGED_AFTER_ROPE
    if reason is None and any(not _is_position(call.offset, position) for call in recorder.calls):
        reason = reasons.ROPE_NOT_INVERTIBLE
    return Source(rope, reason)


def _is_position(offset: Any, position: int) -> bool:
    return bool(mx.all(mx.array(offset) == position).item())


def _only_scaled(call: Call, array: mx.array, position: int) -> bool:
    """Whether ``array`` is what ``call`` returned but for a factor per row: then `inverse` gives rows so scaled."""
    if call.before.shape != array.shape:
        return False
    rows, expected = inverse(call.rope, array, position).astype(mx.float32), call.before.astype(mx.float32)
    length = (expected * expected).sum(axis=-1, keepdims=True)
    factor = (rows * expected).sum(axis=-1, keepdims=True) / length
    rounding = float(mx.finfo(min(array.dtype, call.before.dtype, key=lambda dtype: dtype.size)).eps)
    return float(factor.min()) > 0 and _close(factor * expected, rows, 8 * rounding)


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call.

    Attributes:
        layer: the position of its cache among those of the model; -1 without one of them.
        queries: ``(B, Hq, L, D)`` after RoPE.
        keys: ``(B, Hkv, L, D)`` after RoPE, the rows that the layer wrote; None if it wrote none.
        scale: of the scores.
        position: where the cache put the first of the rows.
        rotations: calls of `mx.fast.rope` since the last attention call.
    """

    layer: int
    queries: mx.array
    keys: mx.array | None
    scale: float
    position: int
    rotations: int


class _Observer:
    """Takes the place of a plan at the seam and lets every call pass."""

    def __init__(self, caches: list[Any], visit: Callable[[Seen], None], rotations: list[int]) -> None:
        self.caches = caches
        self.visit = visit
        self.rotations = rotations
        self.written: dict[int, tuple[mx.array, int]] = {}

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> None:
        layer = next((index for index, leaf in enumerate(self.caches) if leaf is cache), -1)
        rows, position = self.written.pop(id(cache), (None, 0))
        self.visit(Seen(layer, queries, rows, scale, position, self.rotations[0]))
        self.rotations[0] = 0  # after the visit, which may rotate too

    @contextmanager
    def reading_writes(self) -> Iterator[None]:
        """Note the rows that the caches are given."""

        def noting(cache: Any) -> Callable[..., Any]:
            write = type(cache).update_and_fetch

            def update_and_fetch(keys: Any, values: Any) -> Any:
                self.written[id(cache)] = (keys, cache.offset)
                return write(cache, keys, values)

            return update_and_fetch

        watched = [cache for cache in self.caches if hasattr(cache, "update_and_fetch")]
        for cache in watched:
            cache.update_and_fetch = noting(cache)
        try:
            yield
        finally:
            for cache in watched:
                del cache.update_and_fetch


def observe(model: Any, tokens: mx.array, caches: Any, visit: Callable[[Seen], None], recorder: Recorder) -> mx.array:
    """Call ``model`` on ``tokens`` and ``visit`` at each attention call, before it is computed; return the logits.

    Args:
        model: loaded by mlx-lm and not enabled.
        caches: what ``make_prompt_cache(model)`` made.
        recorder: active; forgets a layer's calls after its visit.
    """

    def visit_and_forget(seen: Seen) -> None:
        visit(seen)
        recorder.clear()

    names = seam.bind(model)
    try:
        with _counting_rotations() as rotations:
            observer = _Observer(leaves(caches), visit_and_forget, rotations)
            token = seam.active.set(observer)
            try:
                with observer.reading_writes():
                    logits: mx.array = model(tokens, cache=caches)
            finally:
                seam.active.reset(token)
    finally:
        seam.unbind(names)
        recorder.clear()
    return logits


def find_sources(model: Any, visit: Callable[[Seen], None] | None = None) -> dict[int, Source | str]:
    """How to have queries and keys before RoPE, or why they cannot be had, by the position of a layer's cache.

    Two calls of one token, the second at position 1, where rotated rows look otherwise than before. Nothing of the
    model is evaluated unless a layer changes its rows after RoPE. ``visit`` is asked as in `observe`.
    """
    caches = make_prompt_cache(model)
    sources: dict[int, Source | str] = {}

    def find(seen: Seen) -> None:
        if visit is not None:
            visit(seen)
        if seen.keys is not None and seen.position > 0:
            found = find_source(recorder, (seen.queries, seen.keys), seen.position, seen.rotations)
            sources.setdefault(seen.layer, found)

    # What a stage of a pipeline is given does not matter here, and the other ranks may be elsewhere.
    with Recorder(model) as recorder, by_itself(model):
        for position in range(2):
            observe(model, mx.array([[position]], mx.int32), caches, find, recorder)
    return sources


# Held by who has replaced `mx.fast.rope`.
_counting = threading.RLock()


@contextmanager
def _counting_rotations() -> Iterator[list[int]]:
    """Count this thread's calls of `mx.fast.rope` in the one number of the list.

    Every rotation in mlx-lm comes to that function. Models that other threads call meanwhile are not counted.
    """
    with _counting:
        original, count, thread = mx.fast.rope, [0], threading.get_ident()

        def rope(*args: Any, **kwargs: Any) -> Any:
            count[0] += threading.get_ident() == thread
            return original(*args, **kwargs)

        mx.fast.rope = rope
        try:
            yield count
        finally:
            mx.fast.rope = original
