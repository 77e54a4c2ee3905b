"""NumPy's arrays to MLX's types and back."""

import mlx.core as mx
import numpy as np
from cases import Array

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def to_mlx(array: Array, dtype: str) -> mx.array:
    return mx.array(array).astype(DTYPES[dtype])


def to_numpy(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32))


def whole(array: Array, capacity: int, dtype: str) -> mx.array:
    """A cache buffer ``(B, Hkv, capacity, D)`` whose first rows are ``array``; the others hold NaN."""
    unused = np.full((*array.shape[:2], capacity - array.shape[2], array.shape[3]), np.nan, np.float32)
    return to_mlx(np.concatenate([array, unused], axis=2), dtype)
