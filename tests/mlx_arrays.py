"""NumPy's arrays to MLX's types and back."""

import mlx.core as mx
import numpy as np
from cases import Array

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def to_mlx(array: Array, dtype: str) -> mx.array:
    return mx.array(array).astype(DTYPES[dtype])


def to_numpy(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32))
