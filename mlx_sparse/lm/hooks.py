"""Hooks for the work of a decode method besides attention; `methods.table.HOOKS` lists the methods that have some."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx

from ..api.call_report import Counting
from ..cache.sparse_cache import DecodeStep, SparseCache
from ..methods import Method, registry


class CallHooks:
    """Hooks of a decode method in one forward pass of a model, on the thread that runs it.

    Attributes:
        config: the method; None if only prefill is sparse.
        caches: the caches of the call, by layer.
    """

    def __init__(self, config: Method | None, caches: list[Any]) -> None:
        self.config: Any = config
        self.caches = caches

    def refusal(self, cache: Any) -> str | None:
        """Return the reason why the layer of ``cache`` stays dense at every decode step, or None."""
        return None

    def keys_written(self, cache: SparseCache) -> None:
        """Process the keys that a layer has just written to ``cache``."""

    def step_reason(self, cache: SparseCache) -> str | None:
        """Return the reason why this decode step of a layer is dense, or None."""
        return None

    def sizes(self, cache: SparseCache) -> dict[str, int]:
        """Return the fields of `methods.Step` that do not follow from the shapes of queries and keys."""
        return {}

    def formula_bytes(self, cache: SparseCache, position: int) -> int:
        """Return the bytes that a decode step at ``position`` moves by formula, without counts on the device."""
        return cache.step_bytes(self.config, position)

    def step(
        self, queries: mx.array, cache: SparseCache, step: DecodeStep, served: list[int], scale: float
    ) -> tuple[mx.array, mx.array]:
        """Attend one decode step of a layer after `keys_written`, as `SparseCache.take_step` does.

        Args:
            served: sequences of the batch whose results are used.
        """
        return cache.take_step(queries, step, scale)

    def single_sequence(
        self, cache: SparseCache, sequence: int, one: SparseCache, first: int, queries: mx.array, part: mx.array
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``one`` has the state of a sequence of ``cache``, for one decode step.

        Args:
            first: first row of the sequence.
            queries: queries of the batch.
            part: the last of these queries of the sequence.
        """
        return contextlib.nullcontext()

    def observe(
        self, queries: mx.array, keys: mx.array, cache: SparseCache, scale: float, mask: Any, sinks: mx.array | None
    ) -> None:
        """Process a dense attention call of a layer that can decode sparsely."""

    def submit(self) -> Counting | None:
        """Start to compute arrays that nothing else evaluates, after a successful call; return counts on the device."""
        return None

    def end(self) -> None:
        """Clean up after the call, also after an exception."""


class ModelHooks:
    """Hooks of a decode method on an enabled model, for all its calls.

    Args:
        config: the method; None if only prefill is sparse.
        model: the model, before it is enabled.

    Raises:
        ConfigError, ArtefactError: the method cannot run on the model.

    Attributes:
        figures: zero counts, if `CallHooks.submit` returns counts; else None.
    """

    call_hooks: type[CallHooks] = CallHooks
    figures: Any = None

    def __init__(self, config: Method | None, model: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any) -> None:
        """Check the method before a model is loaded.

        Raises:
            ConfigError, ArtefactError: the method cannot run on any model.
        """

    def open(self) -> None:
        """Start to hook into the model, when it is enabled."""

    def close(self) -> None:
        """Undo `open`, when the model is disabled."""

    def of_call(self, caches: list[Any]) -> CallHooks:
        """Return the hooks of a forward pass with these caches."""
        return self.call_hooks(self.config, caches)


def hooks_of(config: Method | None) -> type[ModelHooks]:
    """Return the hooks of a method; the base class if the method has none."""
    found: type[ModelHooks] | None = None if config is None else registry.load_hooks(config.name)
    return found or ModelHooks
