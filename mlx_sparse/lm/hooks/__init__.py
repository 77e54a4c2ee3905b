"""Define base classes for the hooks that some decode methods run around attention calls."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx
from mlx import nn

from ...api.call_report import Counts
from ...cache.kv_cache import Mask
from ...cache.sparse_cache import SparseCache, Step
from ...core import registry
from ...core.base import Method


class CallHooks:
    """Hooks that a decode method needs in one forward pass. All hooks run on one thread.

    Attributes:
        config: the decode method; None if only prefill is sparse.
        caches: the caches of all layers.
        counts: tally of the forward pass.
    """

    counts: Counts

    def __init__(self, config: Method | None, caches: list[object]) -> None:
        self.config: Any = config
        self.caches = caches

    def refusal(self, cache: object) -> str | None:
        """Return the reason why all decode steps over this cache are dense, or None if the steps can be sparse."""
        return None

    def keys_written(self, cache: SparseCache) -> None:
        """Process the new keys that a layer has written to ``cache``."""

    def step_reason(self, cache: SparseCache) -> str | None:
        """Return the reason why the current decode step of a layer is dense, or None."""
        return None

    def sizes(self, cache: SparseCache) -> dict[str, int]:
        """Return the fields of `methods.Step` that the shapes of queries and keys do not determine."""
        return {}

    def step_bytes(self, cache: SparseCache, position: int, G: int, backend: str) -> int:
        """Return the bytes that a decode step at ``position`` moves, excluding the keys that the device counts."""
        return cache.step_bytes(self.config, position, G, backend)

    def bind(self, cache: SparseCache, G: int, backend: str, served: list[int]) -> Step:
        """Return a function that runs decode steps of a layer in this and in later forward passes.

        Args:
            served: indices of the sequences whose sparse results are used.
        """
        return cache.bind(self.config, G, backend)

    def single_sequence(
        self, cache: SparseCache, sequence: int, one: SparseCache, first: int, queries: mx.array, part: mx.array
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that gives the cache ``one`` the auxiliary state of a sequence during a decode step.

        Args:
            cache: cache of the batch.
            sequence: index of the sequence in the batch.
            one: cache with the rows of this sequence only.
            first: index of the sequence's first row in ``cache``.
            queries: ``(B, Hq, L, D)`` queries of the batch.
            part: ``(1, Hq, 1, D)`` query of the decode step, a slice of ``queries``.
        """
        return contextlib.nullcontext()

    def observe(
        self, queries: mx.array, keys: mx.array, cache: SparseCache, scale: float, mask: Mask, sinks: mx.array | None
    ) -> None:
        """Process a dense attention call of a layer that is not dense in all calls."""

    def submit(self) -> None:
        """Start evaluating pending arrays at the end of a forward pass."""

    def end(self) -> None:
        """Clean up after the forward pass, even if it raised an exception."""


class ModelHooks:
    """Hooks that a decode method needs for one model, shared by all forward passes.

    Args:
        config: the decode method; None if only prefill is sparse.
        model: the model, which is not enabled yet.

    Raises:
        ConfigError, ArtefactError: the method cannot run on the model.

    Attributes:
        call_hooks: class of the hooks for one forward pass.
        statistics: empty statistics for a new report; None if the hooks add no statistics of their own.
    """

    call_hooks: type[CallHooks] = CallHooks
    statistics: Any = None

    def __init__(self, config: Method | None, model: nn.Module) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any) -> None:
        """Check the parameters of the method before a model is loaded.

        Raises:
            ConfigError, ArtefactError: the method cannot run on any model.
        """

    def open(self) -> None:
        """Attach the hooks to the model. `enable` calls this method."""

    def close(self) -> None:
        """Detach the hooks from the model. `disable` calls this method."""

    def of_call(self, caches: list[object]) -> CallHooks:
        """Return the hooks for a forward pass with ``caches``."""
        return self.call_hooks(self.config, caches)


def hooks_of(config: Method | None) -> type[ModelHooks]:
    """Return the hooks class for a method, or `ModelHooks` if the method needs no hooks."""
    found: type[ModelHooks] | None = None if config is None else registry.load_class(config.name, "hooks")
    return found or ModelHooks
