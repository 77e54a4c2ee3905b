"""Watching the attention calls of a model that is not enabled: what each layer hands to attention and to its cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..model_info import leaves
from ..model_parts import without_pipeline
from . import seam
from .rope import Recorder, Source, find_source


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
    with Recorder(model) as recorder, without_pipeline(model):
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
