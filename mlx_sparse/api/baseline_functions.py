"""Public functions of methods that are no more than their settings: what the papers compare with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .checked_call import Call, Library

Array = Any  # of the library that the functions are for


class BaselineFunctions:
    """Functions made from the classes of `mlx_sparse.methods`."""

    _library: Library

    def of_method(self, method: Any) -> Callable[..., Any]:
        """The public function of a method that has none written out: its arguments are the fields of its class."""
        prompts = method.stage == "prefill"

        def attention(
            queries: Array,
            keys: Array,
            values: Array,
            *,
            scale: float | None = None,
            backend: str = "auto",
            return_stats: bool | str = False,
            **settings: Any,
        ) -> Any:
            padding = None if prompts else settings.pop("left_padding", None)
            call = Call(
                self._library,
                method.name,
                (queries, keys, values),
                scale=scale,
                left_padding=padding,
                backend=backend,
                return_stats=return_stats,
            )
            config = method(**settings)
            if prompts:
                return call.prefill(config.layout(call.sizes.L, call.sizes.S), **config.parameters())
            return call.decode(lambda S, D, top_k: config.elements(S, D), config.attended, **config.parameters())

        signature = inspect.signature(attention)
        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [given.replace(kind=keyword) for given in inspect.signature(method).parameters.values()]
        if not prompts:
            own.append(inspect.Parameter("left_padding", keyword, default=None, annotation="Array | None"))
        fixed = list(signature.parameters.values())
        parameters = [*fixed[:3], *own, *fixed[3:-1]]
        attention.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        attention.__name__ = attention.__qualname__ = f"{method.name}_attention"
        attention.__doc__ = method.__doc__
        return attention
