"""Define the public functions for NumPy arrays. See `mlx_sparse.api.functions` for the arguments and results.

The only backend is the float64 reference in `mlx_sparse.oracle`, which does not check its arguments.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..checks import BackendUnavailable, ConfigError, ShapeError, Sizes, check_shape
from .functions import Functions

Array = np.ndarray


class NumPy:
    """Implementation of the protocol `mlx_sparse.api.checked_call.Library` for NumPy arrays."""

    xp: ModuleType = np

    def check_array(
        self, name: str, array: Array, like: object = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        if not hasattr(array, "shape"):
            raise ConfigError(f"{name}: expected a NumPy array, got {type(array).__name__}.")
        if integers and np.asarray(array).dtype.kind not in "iu":
            raise ShapeError(f"{name}: expected integers, got {array.dtype}.")

    def resolve(self, backend: str, function: str, sizes: Sizes, *arrays: Array, bias: Array | None = None) -> str:
        if bias is not None and np.asarray(bias).dtype.kind != "f":
            raise ShapeError(f"bias: expected floating-point numbers, got {bias.dtype}.")
        if backend not in ("auto", "oracle"):
            raise BackendUnavailable(f"backend: expected auto or oracle for mlx_sparse.oracle, got {backend}.")
        return "oracle"

    def padding(self, left_padding: Array | None, sizes: Sizes, like: Array) -> Array | None:
        if left_padding is None:
            return None
        first = np.asarray(left_padding)
        check_shape("left_padding", first, (sizes.B,))
        self.check_array("left_padding", first, integers=True)
        return first.clip(0, sizes.S)

    def ones(self, shape: tuple[int, ...], like: Array) -> Array:
        return np.ones(shape)

    def visit(self, bucket_ids: Array, visited: Array) -> dict[str, object]:
        return {"bucket_ids": bucket_ids, "visited": visited}


_functions = Functions(NumPy())


def __getattr__(name: str) -> Any:
    return _functions.public(name)
