"""What a method does around a model and its calls besides attending: nothing, unless `methods.table.HOOKS` has more."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..api.call_report import Counting
from ..cache.sparse_cache import DecodeStep, SparseCache
from ..methods import Method, registry


class CallHooks:
    """A decode method in one call of a model, on the thread that makes it.

    Attributes:
        config: the method; None where prompts alone are sparse.
        caches: of the call, by layer.
    """

    def __init__(self, config: Method | None, caches: list[Any]) -> None:
        self.config: Any = config
        self.caches = caches

    def refusal(self, cache: Any) -> str | None:
        """Why the layer of ``cache`` stays dense at every step; None if it need not."""
        return None

    def keys_written(self, cache: SparseCache) -> None:
        """A layer that decodes has written keys."""

    def step_reason(self, cache: SparseCache) -> str | None:
        """Return the reason why this step of a layer attends densely, or None."""
        return None

    def sizes(self, cache: SparseCache) -> dict[str, int]:
        """What `methods.Step` is told besides the sizes of queries and keys."""
        return {}

    def formula_bytes(self, cache: SparseCache, position: int) -> int:
        """Return the bytes that a step at ``position`` moves by formula, on each machine, as far as the host knows."""
        return cache.step_bytes(self.config, position)

    def step(
        self, queries: mx.array, cache: SparseCache, step: DecodeStep, served: list[int], scale: float
    ) -> tuple[mx.array, mx.array]:
        """Take one decode step of a layer, whose keys have been taken in, as `SparseCache.take_step` does.

        Args:
            served: the sequences whose results are used.
        """
        return cache.take_step(queries, step, scale)

    def observe(
        self, queries: mx.array, keys: mx.array, cache: SparseCache, scale: float, mask: Any, sinks: mx.array | None
    ) -> None:
        """A layer that could decode sparsely attends densely."""

    def submit(self) -> Counting | None:
        """The call succeeds: start computing what nothing else asks for; return what the device is counting."""
        return None

    def end(self) -> None:
        """The call is over, well or not."""


class ModelHooks:
    """A decode method on an enabled model, the same for all its calls.

    Args:
        config: the method; None where prompts alone are sparse.
        model: not enabled yet.

    Raises:
        ConfigError, ArtefactError: the method cannot run on the model.

    Attributes:
        figures: counts of no step yet, where `CallHooks.submit` returns any.
    """

    call_hooks: type[CallHooks] = CallHooks
    figures: Any = None

    def __init__(self, config: Method | None, model: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise what can be known to be wrong with the method before any model is loaded.

        Raises:
            ConfigError, ArtefactError: something is.
        """

    def open(self) -> None:
        """The model is enabled from now on."""

    def close(self) -> None:
        """The model is enabled no more."""

    def of_call(self, caches: list[Any]) -> CallHooks:
        """A call of the model starts with these caches."""
        return self.call_hooks(self.config, caches)


def hooks_of(config: Method | None) -> type[ModelHooks]:
    """The hooks of a method; those that do nothing where it has none of its own."""
    found: type[ModelHooks] | None = None if config is None else registry.load_hooks(config.name)
    return found or ModelHooks
