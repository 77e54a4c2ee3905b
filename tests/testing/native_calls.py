"""Call the C interface of the native kernels (mlx_sparse/native/c_api.h) on NumPy arrays, without MLX's memory."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tier
from cases import Array, round_to
from hypothesis import HealthCheck, settings

from mlx_sparse.core import native_call
from mlx_sparse.core.native_call import Attention, fill

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
        bias: ``(B, Hq, 1, length)`` numbers that are added to the logits, and their type; None for no bias.
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: int | None = None,
        padding: Any = None,
        types: tuple[str, str] = ("f32", "f32"),
        bias: tuple[Array, str] | None = None,
    ) -> None:
        (B, Hq, L, D), (_, Hkv, capacity, _), Dv = q.shape, k.shape, v.shape[3]
        sizes = B, Hq, Hkv, L, capacity, capacity if length is None else length, D, Dv
        self.given = Attention(*sizes, *(TYPES[name] for name in types), scale=D**-0.5)
        self.out, self.lse = stored(np.full((B, Hq, L, Dv), np.nan), types[0]), np.full((B, Hq, L), np.nan, np.float32)
        rows = {"queries": stored(q, types[0]), "keys": stored(k, types[1]), "values": stored(v, types[1])}
        padding = None if padding is None else np.array(padding, np.int32)
        if bias is not None:
            self.given.bias_type, rows["bias"] = TYPES[bias[1]], stored(*bias)
        fill(self.given, **rows, left_padding=padding, out=self.out, lse=self.lse)

    def run(self, function: str, *arguments: Any) -> tuple[Array, Array]:
        """Call ``mlx_sparse_FUNCTION`` and return the output in float32 and the log-sum-exp."""
        native_call.run(function, self.given, *arguments)
        return numbers(self.out), self.lse


def structure(kind: Any, **fields: Any) -> Any:
    """Build a structure of `native_call`. Fields that are not given, or None, are 0 or no memory."""
    sizes = {name: each for name, each in fields.items() if isinstance(each, int)}
    made = kind(**sizes)
    fill(made, **{name: each for name, each in fields.items() if name not in sizes})
    return made
