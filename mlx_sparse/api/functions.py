"""Define the public functions for any array library.

The shapes are ``queries (B, Hq, L, D)``, ``keys (B, Hkv, S, D)`` and ``values (B, Hkv, S, Dv)``. `oracle`, `ops` and
`cpu` support values whose head dim Dv is not D. Keys and values include the current tokens. Query ``i`` is at position
``S - L + i``. The int array ``left_padding (B,)`` contains the index of the first valid key of each sequence.

The attention functions return ``out (B, Hq, L, Dv)`` in the dtype of ``queries``, and a `Stats` if ``return_stats`` is
set. ``return_stats="recall"`` adds the attention recall, which costs one dense pass over the keys. Decode methods use
dense attention if they would attend to every key. They also use dense attention if ``L > 1``.

All functions raise `ShapeError` if the shapes of the arrays are incompatible, and `ConfigError` if a parameter is out
of range. They raise `BackendUnavailable` if the backend cannot run on this machine.
"""

import inspect
from collections.abc import Callable
from typing import Any

from ..core.registry import backends_of
from .checked_call import Array, Call, Library
from .decode_functions import DecodeFunctions
from .prefill_functions import PrefillFunctions
from .saap_functions import SaapFunctions


class Functions(DecodeFunctions[Array], PrefillFunctions[Array], SaapFunctions[Array]):
    """Public attention functions for the array library that is passed to the constructor."""

    def __init__(self, library: Library[Array]) -> None:
        self._library = library

    def public(self, name: str) -> Callable[..., Any]:
        """Return the public function ``name``. The functions of the baselines are built from their classes.

        Raises:
            AttributeError: there is no such function.
        """
        from ..methods import METHODS  # `mlx_sparse.cuda_ref` needs no classes of methods

        method = METHODS.get(name.removesuffix("_attention"))
        if name.startswith("_") or (method is None and not hasattr(self, name)):
            raise AttributeError(f"module 'mlx_sparse' has no function {name!r}")
        found: Callable[..., Any] = getattr(self, name) if hasattr(self, name) else self._of_method(method)
        return found

    def _of_method(self, method: Any) -> Callable[..., Any]:
        """Build the attention function of a method class. The settings of the method become keyword arguments."""
        prefill = method.stage == "prefill"

        def attention(
            queries: "Array",
            keys: "Array",
            values: "Array",
            *,
            scale: float | None = None,
            backend: str = "auto",
            return_stats: bool | str = False,
            **settings: Any,
        ) -> Any:
            padding = None if prefill else settings.pop("left_padding", None)
            call = Call(self._library, method.name, (queries, keys, values), scale, padding, backend, return_stats)
            if unknown := settings.keys() - set(method.setting_names()):
                name = attention.__name__
                raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
            config, L, S = method(**(defaults | settings)), call.sizes.L, call.sizes.S
            if prefill:
                layout = config.layout(L, S)
                dense = config.dense_reason(L, S) is not None
                return call.dense(layout) if dense else call.prefill(layout, **config.parameters())
            return call.decode(lambda S, D, top_k: config.elements(S, D), config.attended, **config.parameters())

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = inspect.signature(method).parameters
        defaults = dict(method.function_defaults)
        settings = [
            own[name].replace(kind=keyword, default=defaults.get(name, own[name].default))
            for name in method.setting_names()
        ]
        if not prefill:
            settings.append(inspect.Parameter("left_padding", keyword, default=None, annotation="Array | None"))
        fixed = list(inspect.signature(attention).parameters.values())
        signature = inspect.Signature([*fixed[:3], *settings, *fixed[3:-1]])
        attention.__signature__ = signature  # type: ignore[attr-defined]
        attention.__name__ = attention.__qualname__ = f"{method.name}_attention"
        attention.__doc__ = method.__doc__
        return attention


def public_functions(*backends: str) -> list[str]:
    """Return the names of the public functions that at least one of ``backends`` implements."""
    names = [name for name in dir(Functions) if not name.startswith("_")]
    return [name for name in names if set(backends_of(name.removesuffix("_attention"))) & set(backends)]
