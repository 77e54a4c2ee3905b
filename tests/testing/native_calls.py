"""Call the C interface of the native kernels (mlx_sparse/native/c_api.h) on NumPy arrays, without MLX's memory."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import tier
from cases import Array, round_to
from hypothesis import HealthCheck, settings

from mlx_sparse.core import native_call
from mlx_sparse.core.native_call import Attention, buffer

TYPES = {"f32": 0, "f16": 1, "bf16": 2}
fuzz = settings(
    max_examples=int(os.environ.get("MLX_SPARSE_FUZZ", "100" if tier.every else "40")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


def stored(array: Array, dtype: str) -> Array:
    """Convert an array to the memory that the library reads for ``dtype``."""
    rounded = np.ascontiguousarray(round_to(array, dtype))
    if dtype == "bf16":
        return (rounded.view(np.uint32) >> 16).astype(np.uint16)
    return rounded.astype(np.float16) if dtype == "f16" else rounded


def numbers(memory: Array) -> Array:
    """Convert the memory of `stored` to float32."""
    return (memory.astype(np.uint32) << 16).view(np.float32) if memory.dtype == np.uint16 else memory.astype(np.float32)


class Call:
    """Arguments of a function that attends, and its results, which begin as NaN.

    Args:
        length: number of rows of ``k`` and ``v`` that are in use; None means all.
        types: types of the queries, and of the keys and values.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: int | None = None,
        padding: Any = None,
        types: tuple[str, str] = ("f32", "f32"),
    ) -> None:
        (B, Hq, L, D), (_, Hkv, capacity, _) = q.shape, k.shape
        padding = None if padding is None else np.array(padding, np.int32)
        self.memory = [stored(q, types[0]), stored(k, types[1]), stored(v, types[1]), padding]
        self.written, self.lse = stored(np.full(q.shape, np.nan), types[0]), np.full((B, Hq, L), np.nan, np.float32)
        sizes = B, Hq, Hkv, L, capacity, capacity if length is None else length, D
        arrays = *self.memory, self.written, self.lse
        self.given = Attention(*sizes, *(TYPES[name] for name in types), D**-0.5, *map(buffer, arrays))

    def run(self, function: str, *arguments: Any) -> tuple[Array, Array]:
        """Call ``mlx_sparse_FUNCTION``. Pass NumPy arrays as buffers. Return the output in float32 and the lse."""
        given = [buffer(each) if isinstance(each, np.ndarray) else each for each in arguments]
        native_call.run(function, ctypes.byref(self.given), *given)
        return numbers(self.written), self.lse


def structure(kind: Any, **fields: Any) -> Any:
    """Build a structure of `native_call`. Fields that are not given are 0 or no memory."""
    fields = {name: each for name, each in fields.items() if each is not None}
    made = kind(**{name: buffer(each) if isinstance(each, np.ndarray) else each for name, each in fields.items()})
    made.arrays = fields  # which must exist during the call
    return made
