"""Convert between NumPy and MLX arrays."""

import mlx.core as mx
import numpy as np
from cases import Array

from mlx_sparse.core.packed_rows import PackedRows

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def to_mlx(array: Array, dtype: str) -> mx.array:
    return mx.array(array).astype(DTYPES[dtype])


def to_numpy(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32))


def whole(array: Array, capacity: int, dtype: str) -> mx.array:
    """Return a cache buffer ``(B, Hkv, capacity, D)`` that begins with ``array``; unused rows are NaN."""
    unused = np.full((*array.shape[:2], capacity - array.shape[2], array.shape[3]), np.nan, np.float32)
    return to_mlx(np.concatenate([array, unused], axis=2), dtype)


def unpacked(rows: PackedRows) -> Array:
    """Dequantize rows bit by bit. This independently implements equation (quantized.1) of docs/spec/quantized.md."""
    bits, (B, Hkv, S, D) = rows.bits, rows.shape
    stream = np.unpackbits(np.array(rows.codes).view(np.uint8), axis=-1, bitorder="little").reshape(B, Hkv, S, D, bits)
    codes = (stream * (1 << np.arange(bits))).sum(axis=-1).astype(np.float32)
    scale, bias = (np.repeat(to_numpy(part), rows.group_size, axis=-1) for part in (rows.scales, rows.biases))
    return to_numpy(mx.array(scale * codes + bias).astype(rows.dtype))
