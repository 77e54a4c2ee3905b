"""The public functions on MLX arrays: `mlx_sparse.common.functions`, which says what they take and return."""

from typing import Any

from ..common.functions import Functions
from ..methods import METHODS
from .mlx import MLX

_functions = Functions(MLX())


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not hasattr(_functions, name) and (method := METHODS.get(name.removesuffix("_attention"))):
        return _functions.of_method(method)  # a baseline, whose arguments are its settings
    return getattr(_functions, name)
