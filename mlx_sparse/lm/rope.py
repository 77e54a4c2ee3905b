"""Get the pre-RoPE queries and keys of a model. SAAP needs pre-RoPE keys to assign keys to buckets.

A model applies RoPE before it passes queries and keys to attention. `Recorder` stores the last calls of the model's
RoPE modules. It returns the exact input array for a recorded output array, and computes nothing. `inverse` computes
the inverse RoPE for rows that are scaled after RoPE, and for keys that were not recorded, as in a loaded prompt cache.
`find_sources` finds out whether `Recorder` or `inverse` works for each layer, and returns a `Source` per layer.
`visit_calls` reports the attention calls of a model that is not enabled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from ..cache.kv_cache import Mask
from ..core import reasons
from ..model_info import leaves, new_caches
from ..model_parts import without_pipeline
from . import seam
from .call import active
from .dense import DenseAttention

RECORDERS = "_mlx_sparse_recorders"
# Recorded calls per thread. A layer has one RoPE call for queries and one for keys, or more if it splits them.
RECORDED = 4


@dataclass(frozen=True, eq=False)
class Call:
    """Input, output and position offset of a recorded call of a RoPE module."""

    rope: nn.Module
    before: mx.array
    after: mx.array
    offset: int | mx.array


def ropes(model: nn.Module) -> list[nn.Module]:
    """Return the distinct RoPE modules of ``model``. A RoPE module is recognized by its class name."""
    found = {id(module): module for _, module in model.named_modules() if _is_rope(type(module))}
    return list(found.values())


def _is_rope(cls: type) -> bool:
    name = cls.__name__.lower()
    return ("rope" in name or "rotary" in name) and "attention" not in name  # phixtral has a class RoPEAttention


class Recorder:
    """Context manager that records the last RoPE calls of a model, separately for each thread.

    `input_of` returns the input of a recorded call. Call `clear` after each layer or forward pass, because recorded
    arrays stay in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ropes = ropes(model)
        self._own = threading.local()

    @property
    def calls(self) -> deque[Call]:
        """Last RoPE calls on this thread."""
        if not hasattr(self._own, "calls"):
            self._own.calls = deque(maxlen=RECORDED)
        calls: deque[Call] = self._own.calls
        return calls

    def __enter__(self) -> Recorder:
        for rope in self._ropes:
            if not hasattr(rope, RECORDERS):
                rope.__class__ = _recording(type(rope))
                # A normal assignment would add the list to the parameters of the nn.Module.
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

    def input_of(self, array: mx.array) -> mx.array | None:
        """Remove the recorded call that returned ``array``, and return its input, or None if there is no such call."""
        for call in self.calls:
            if call.after is array:
                self.calls.remove(call)
                return call.before
        return None

    def record_part(self, array: mx.array, part: mx.array, where: tuple[slice, ...]) -> None:
        """Record ``part = array[where]`` as an additional output, if ``array`` is a recorded output."""
        for call in list(self.calls):
            if call.after is array:
                self.calls.append(Call(call.rope, call.before[where], part, call.offset))

    def clear(self) -> None:
        """Remove all recorded calls of this thread."""
        self.calls.clear()


def _recording(cls: type) -> type:
    """Return a subclass of the RoPE class ``cls`` that records its calls."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        after = cls.__call__(self, *args, **kwargs)
        if args and isinstance(args[0], mx.array) and isinstance(after, mx.array):
            offset = args[1] if len(args) > 1 else kwargs.get("offset", 0)
            for recorder in getattr(self, RECORDERS):
                recorder.calls.append(Call(self, args[0], after, offset))
        return after

    own = {"__call__": call, "__reduce_ex__": seam.reduce_as(cls, RECORDERS), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def rotate(rope: nn.Module, rows: mx.array, offset: int | mx.array) -> mx.array:
    """Apply ``rope`` to ``rows (B, H, n, D)``, starting at position ``offset``. Do not record the call."""
    cls = type(rope).__mro__[1] if hasattr(rope, RECORDERS) else type(rope)
    rotated: mx.array = cls.__call__(rope, rows, offset=offset)
    return rotated


def inverse(rope: nn.Module, rotated: mx.array, offset: int | mx.array) -> mx.array:
    """Return the inverse RoPE of ``rotated (B, H, n, D)``.

    RoPE is a linear map R that scales each component and rotates pairs of equal scale, so ``R^-1 = g^-2 R^T``. The
    gradient of R gives R^T. The gain g is R applied to ones at position 0. The result is computed in float32 and
    converted to the type of ``rotated``.

    Args:
        offset: position of the first row: an int, or an array ``(B,)`` with one position per sequence.
    """
    rows = rotated.astype(mx.float32)
    _, (transposed,) = mx.vjp(lambda x: rotate(rope, x, offset), [mx.zeros_like(rows)], [rows])
    gain = rotate(rope, mx.ones((1, 1, 1, rotated.shape[-1])), 0)
    return (transposed / (gain * gain)).astype(rotated.dtype)


def irreversible(rope: nn.Module, D: int) -> str | None:
    """Return the reason why `inverse` is wrong for ``rope`` and head dim ``D``, or None if `inverse` is correct."""
    rows = mx.cos(mx.arange(66 * D, dtype=mx.float32)).reshape(1, 1, 66, D)
    far = 1 << 22  # longer than every model's context, and exact in float32
    few, many = rotate(rope, rows[:, :, :2], far), rotate(rope, rows, far)[:, :, :2]
    if not _close(few, many, 1e-2):
        return reasons.ROPE_BY_LENGTH
    return None if _close(inverse(rope, rotate(rope, rows, 5), 5), rows, 1e-3) else reasons.ROPE_NOT_INVERTIBLE


def _close(a: mx.array, b: mx.array, tolerance: float) -> bool:
    """Return True if no element differs by more than ``tolerance`` times the largest absolute value of ``b``."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return bool(mx.abs(a - b).max() <= tolerance * mx.abs(b).max())


@dataclass(frozen=True, eq=False)
class Source:
    """Source of one layer's pre-RoPE queries and keys.

    Attributes:
        rope: RoPE module of the layer; None if the layer has no RoPE.
        irreversible: reason why `inverse_rope` is not possible; None if `inverse_rope` is possible.
    """

    rope: nn.Module | None = None
    irreversible: str | None = None

    def pre_rope(self, recorder: Recorder, rows: mx.array, offset: int | mx.array) -> mx.array | None:
        """Return the pre-RoPE ``rows (B, H, n, D)`` from ``recorder`` or `inverse`, or None if both are impossible."""
        if self.rope is None:
            return rows
        recorded = recorder.input_of(rows)
        if recorded is not None or self.irreversible is not None:
            return recorded
        return inverse(self.rope, rows, offset)

    def inverse_rope(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        """Return the inverse RoPE of rows that were not recorded. Do not call this if ``irreversible`` is set."""
        return rows if self.rope is None else inverse(self.rope, rows, offset)


def find_source(recorder: Recorder, arrays: tuple[mx.array, ...], position: int, rotations: int) -> Source | str:
    """Return the `Source` of a layer's pre-RoPE queries and keys, or the reason why the layer has none.

    Args:
        recorder: `Recorder` that contains the layer's RoPE calls.
        arrays: the queries that the layer passes to attention, and the new keys that it writes to the cache.
        position: position of the first row of both arrays; at least 1, because RoPE changes nothing at position 0.
        rotations: number of calls to `mx.fast.rope` in the layer, inside and outside of RoPE modules.
    """
    if rotations == 0 and not recorder.calls:
        return Source()
    if not recorder.calls:
        return reasons.ROPE_NOT_A_MODULE
    rope, D = recorder.calls[-1].rope, arrays[0].shape[-1]
    if recorder.calls[-1].before.shape[-1] != D:  # RoPE for a part of the components, as in DeepSeek V2
        return reasons.CHANGED_AFTER_ROPE
    reason = irreversible(rope, D)
    for array in arrays:
        if any(call.after is array and call.rope is rope for call in recorder.calls):
            continue
        if reason is not None or not any(_only_scaled(call, array, position) for call in recorder.calls):
            return reasons.CHANGED_AFTER_ROPE
    if reason is None and any(not _is_position(call.offset, position) for call in recorder.calls):
        reason = reasons.ROPE_NOT_INVERTIBLE
    return Source(rope, reason)


def _is_position(offset: int | mx.array, position: int) -> bool:
    return bool(mx.all(mx.array(offset) == position).item())


def _only_scaled(call: Call, array: mx.array, position: int) -> bool:
    """Return True if ``array`` equals the output of ``call`` with each row multiplied by a positive factor."""
    if call.before.shape != array.shape:
        return False
    rows, expected = inverse(call.rope, array, position).astype(mx.float32), call.before.astype(mx.float32)
    length = (expected * expected).sum(axis=-1, keepdims=True)
    factor = (rows * expected).sum(axis=-1, keepdims=True) / length
    rounding = float(mx.finfo(min(array.dtype, call.before.dtype, key=lambda dtype: dtype.size)).eps)
    return float(factor.min()) > 0 and _close(factor * expected, rows, 8 * rounding)


@dataclass(frozen=True, eq=False)
class Seen:
    """Attention call of a model that is not enabled, as `visit_calls` reports the call.

    Attributes:
        layer: index of the layer's cache among the model's caches; -1 if the model does not list the cache.
        queries: ``(B, Hq, L, D)`` queries after RoPE.
        keys: ``(B, Hkv, L, D)`` post-RoPE keys that the layer wrote to the cache; None if it wrote no keys.
        scale: scale of the attention scores.
        position: index in the cache of the first row that the layer wrote.
        rotations: number of calls to `mx.fast.rope` since the last attention call.
    """

    layer: int
    queries: mx.array
    keys: mx.array | None
    scale: float
    position: int
    rotations: int


Visit = Callable[[Seen], None]
Dense = DenseAttention | None


class _Observer:
    """Listener that reports each attention call to ``visit``. ``dense`` or mlx-lm runs the attention."""

    def __init__(self, caches: list[object], visit: Visit, rotations: list[int], dense: Dense) -> None:
        self.caches = caches
        self.visit = visit
        self.dense = dense
        self.rotations = rotations
        self.written: dict[int, tuple[mx.array, int]] = {}

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: object, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        layer = next((index for index, leaf in enumerate(self.caches) if leaf is cache), -1)
        rows, position = self.written.pop(id(cache), (None, 0))
        self.visit(Seen(layer, queries, rows, scale, position, self.rotations[0]))
        self.rotations[0] = 0  # after the visit, which may rotate too
        return self.dense.attend_natively(queries, keys, values, None, scale, mask, sinks) if self.dense else None

    @contextmanager
    def recording_writes(self) -> Iterator[None]:
        """Store in ``written`` the rows that the model writes to each cache inside the ``with`` block."""

        def recording(cache: Any) -> Callable[..., object]:
            write = type(cache).update_and_fetch

            def update_and_fetch(keys: mx.array, values: mx.array) -> object:
                self.written[id(cache)] = (keys, cache.offset)
                return write(cache, keys, values)

            return update_and_fetch

        watched = [cache for cache in self.caches if hasattr(cache, "update_and_fetch")]
        for cache in watched:
            cache.update_and_fetch = recording(cache)
        try:
            yield
        finally:
            for cache in watched:
                del cache.update_and_fetch


def visit_calls(
    model: nn.Module, tokens: mx.array, caches: list[object], visit: Visit, recorder: Recorder, dense: Dense = None
) -> mx.array:
    """Run ``model`` on ``tokens``, call ``visit`` before each attention call, and return the logits.

    Args:
        model: a model loaded by mlx-lm that is not enabled.
        caches: result of `new_caches`.
        visit: function that receives each attention call.
        recorder: active recorder for the model. It is cleared after each visit.
        dense: dense attention on native kernels; None for mlx-lm's attention.
    """

    def visit_and_forget(seen: Seen) -> None:
        visit(seen)
        recorder.clear()

    places = seam.bind(model)
    try:
        with _counting_rotations() as rotations:
            observer = _Observer(leaves(caches), visit_and_forget, rotations, dense)
            token = active.set(observer)
            try:
                with observer.recording_writes():
                    logits: mx.array = model(tokens, cache=caches)
            finally:
                active.reset(token)
    finally:
        seam.unbind(places)
        recorder.clear()
    return logits


def find_sources(model: nn.Module, visit: Visit | None = None) -> dict[int, Source | str]:
    """Return a dict from the index of a layer's cache to the layer's `Source`, or to the reason why there is none.

    The model runs on two tokens, because RoPE changes nothing at position 0. MLX evaluates the arrays of a layer only
    if the layer changes queries or keys after RoPE.

    Args:
        visit: function that receives each attention call, as in `visit_calls`.
    """
    caches = new_caches(model)
    sources: dict[int, Source | str] = {}

    def find(seen: Seen) -> None:
        if visit is not None:
            visit(seen)
        if seen.keys is not None and seen.position > 0:
            found = find_source(recorder, (seen.queries, seen.keys), seen.position, seen.rotations)
            sources.setdefault(seen.layer, found)

    # Run a pipeline stage without the other ranks, which do not call this function. The input does not matter.
    with Recorder(model) as recorder, without_pipeline(model):
        for position in range(2):
            visit_calls(model, mx.array([[position]], mx.int32), caches, find, recorder)
    return sources


# Lock while `mx.fast.rope` is replaced.
_counting = threading.RLock()


@contextmanager
def _counting_rotations() -> Iterator[list[int]]:
    """Yield a list whose only element counts the calls to `mx.fast.rope` on this thread.

    All RoPE implementations in mlx-lm call this function.
    """
    with _counting:
        original, count, thread = mx.fast.rope, [0], threading.get_ident()

        def rope(*args: Any, **kwargs: Any) -> mx.array:
            count[0] += threading.get_ident() == thread
            return original(*args, **kwargs)

        mx.fast.rope = rope
        try:
            yield count
        finally:
            mx.fast.rope = original
