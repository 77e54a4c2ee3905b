"""The public functions on torch tensors: `mlx_sparse.api.functions`, which says what they take and return.

Slices of larger buffers are taken as they are; ``keys_t`` is fast as a slice of a buffer whose last axis is a multiple
of 16. `mlx_sparse.cuda_ref.api.parts` has what only this backend shows.
"""

from typing import Any

from mlx_sparse.api.functions import Functions

from . import parts as parts  # with the kernels: that Triton is missing is to show when a function is imported
from .library import Torch

_functions = Functions(Torch())


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_functions, name)
