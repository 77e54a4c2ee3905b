"""Define the public functions for MLX arrays. See `mlx_sparse.api.functions` for the arguments and results."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

from ..checks import MAX_BUCKETS, ConfigError, ShapeError, Sizes, check_shape
from ..core import native_call, registry
from ..core.packed_rows import PackedRows, Rows
from .functions import Functions


class MLX:
    """Implementation of the protocol `mlx_sparse.api.checked_call.Library` for MLX arrays."""

    xp: ModuleType = mx

    def check_array(
        self, name: str, array: mx.array, like: object = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        if integers and not mx.issubdtype(array.dtype, mx.integer):
            raise ShapeError(f"{name}: expected integers, got {array.dtype}.")

    def resolve(self, backend: str, function: str, sizes: Sizes, *arrays: Rows, bias: mx.array | None = None) -> str:
        if bias is not None and not mx.issubdtype(bias.dtype, mx.floating):
            raise ShapeError(f"bias: expected floating-point numbers, got {bias.dtype}.")
        packed = [array for array in arrays if isinstance(array, PackedRows)]
        bits = max((rows.bits for rows in packed), default=None)
        name = registry.resolve(backend, function, D=sizes.D, G=sizes.G, bits=bits, Dv=sizes.Dv)
        more = () if bias is None else (bias,)
        if name == "cpu" and (reason := native_call.unsupported(*arrays, *more)) is not None:
            registry.require(backend, function, reason)
            return "ops"
        return name

    def padding(self, left_padding: mx.array | None, sizes: Sizes, like: mx.array) -> mx.array | None:
        if left_padding is None:
            return None
        first = mx.array(left_padding)
        check_shape("left_padding", first, (sizes.B,))
        self.check_array("left_padding", first, integers=True)
        return mx.clip(first, 0, sizes.S)

    def ones(self, shape: tuple[int, ...], like: mx.array) -> mx.array:
        return mx.ones(shape)

    def visit(self, bucket_ids: mx.array, visited: mx.array) -> dict[str, object]:
        largest = int(visited.max()) if visited.size else -1
        if largest >= MAX_BUCKETS:
            raise ConfigError(f"visited: expected buckets of at most {MAX_BUCKETS - 1}, got {largest}.")
        # Any negative number is an empty slot. Converted to int32, a negative int64 could wrap to a valid bucket.
        ascending = mx.sort(mx.where(visited < 0, -1, visited.astype(mx.int32)), axis=-1)
        again = mx.pad(ascending[..., 1:] == ascending[..., :-1], [(0, 0), (0, 0), (1, 0)])[..., : visited.shape[2]]
        if bucket_ids.itemsize == 1:
            bucket_ids = bucket_ids.astype(mx.int16)  # int8 cannot represent the number of buckets
        return {"bucket_ids": bucket_ids, "visited": mx.where(again, -1, ascending), "buckets": max(largest + 1, 0)}


_functions = Functions(MLX())


def __getattr__(name: str) -> Any:
    return _functions.public(name)
