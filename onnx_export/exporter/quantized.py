"""Convert MLX's affine-quantized weights to inputs of ONNX Runtime's MatMulNBits and GatherBlockQuantized operators.

MLX stores ``w = scale * code + bias`` for groups along the last axis. The two operators compute
``w = scale * (code - zero)`` and allow negative scales. ``zero`` is an integer in the range of the codes. The two
formulas are equal if ``-bias / scale`` is an integer in this range. `mlx.core.quantize` makes this quotient an integer,
but then rounds scale and bias to float16 or bfloat16. After rounding, the quotient differs from an integer by some
hundredths. Ignoring this difference would change the logits as much as rounding the weights does. The exporter
therefore stores the difference as offsets, which the graph adds.

All arrays are NumPy arrays. Bfloat16 numbers have the dtype ``ml_dtypes.bfloat16``, or uint16 with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_sparse.checks import ArtefactError

BITS = (4, 8)  # number of bits per weight that the operators support
ULP = 2.0**-23  # relative distance of adjacent float32 numbers
REMEDY = "Export with --dtype float32, which dequantizes the weights."
REMAKE = "Run mlx_lm.convert --dequantize on the model and export the result."


@dataclass(frozen=True, eq=False)
class Blocks:
    """A weight of N rows and K columns, quantized in groups of ``block_size`` elements along K.

    Attributes:
        codes: packed codes, uint8 (N, K / block_size, block_size * bits / 8). The low half of a byte is the first of
            two 4-bit codes.
        scales: float32 (N, K / block_size). float32 represents the scales of every storage type exactly.
        zeros: zero points, uint8 (N, K / block_size), not packed.
        offsets: ``bias + scale * zero`` of each block, float32 (N, K / block_size); None if all offsets are within the
            rounding error of float32.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    offsets: np.ndarray | None
    bits: int
    block_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, K) of the dequantized weight."""
        return self.scales.shape[0], self.scales.shape[1] * self.block_size

    def matmul(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return inputs (``B``, ``scales`` and ``zero_points``) and attributes of MatMulNBits as two dicts.

        If `offsets` is not None, the caller adds ``S @ offsets.T`` to the output, where ``S`` is the input summed over
        each block.
        """
        N, K = self.shape
        zeros = self.zeros
        if self.bits == 4:
            zeros = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))  # every row starts at a byte
            zeros = zeros[:, ::2] | zeros[:, 1::2] << 4
        inputs = {"B": self.codes, "scales": self.scales.ravel(), "zero_points": zeros.ravel()}
        return inputs, {"K": K, "N": N, "bits": self.bits, "block_size": self.block_size}

    def gather(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return inputs (``data``, ``scales`` and ``zero_points``) and attributes of GatherBlockQuantized as two dicts.

        ``data`` equals ``B`` of `matmul`, so a tied embedding is stored once. The last axes of the output are (blocks,
        block_size). The caller adds the gathered rows of `offsets` if `offsets` is not None, and then merges the axes.
        """
        attributes = {"gather_axis": 0, "quantize_axis": 2, "bits": self.bits, "block_size": self.block_size}
        return {"data": self.codes, "scales": self.scales[..., None], "zero_points": self.zeros[..., None]}, attributes

    def halves(self) -> tuple[Blocks, Blocks]:
        """Split an 8-bit weight into two 4-bit weights, for the high and the low half of each byte.

        The sum of the two weights is exactly the 8-bit weight. With an 8-bit weight, ONNX Runtime 1.31 is 30 times
        slower than with two 4-bit weights, or rounds the input to 8 bits.
        """

        def half(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Blocks:
            pairs = codes.reshape(*scales.shape, -1, 2)
            return Blocks(pairs[..., 0] | pairs[..., 1] << 4, scales, zeros, None, 4, self.block_size)

        high = half(self.codes >> 4, self.scales * np.float32(16), self.zeros >> 4)
        return high, half(self.codes & 15, self.scales, self.zeros & 15)


def blocks(
    name: str, weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, *, group_size: int, bits: int
) -> Blocks:
    """Convert an MLX weight that is quantized with 4 or 8 bits in "affine" mode.

    ``biases`` are the quantization biases, not the bias of the linear layer.
    """
    _check_finite(name, scales, biases, bits)
    step, bias = _float32(scales), _float32(biases)
    codes = np.ascontiguousarray(weight).view(np.uint8).reshape(*step.shape, group_size * bits // 8)
    flat = step == 0
    if flat.any():  # scale 0: all weights of the group equal the bias, so use code 1 and the bias as scale
        codes = np.where(flat[..., None], np.uint8({4: 0x11, 8: 1}[bits]), codes)
        step, bias = np.where(flat, bias, step), np.where(flat, np.float32(0), bias)
    # A group of zeros keeps scale 0, and any zero point is correct.
    zeros = np.clip(np.rint(-bias / np.where(step == 0, 1.0, step.astype(np.float64))), 0, 2**bits - 1)
    moved = step.astype(np.float64) * zeros
    left = bias + moved
    exact = (np.abs(left) <= ULP * np.abs(moved)).all()
    return Blocks(codes, step, zeros.astype(np.uint8), None if exact else left.astype(np.float32), bits, group_size)


def _float32(array: np.ndarray) -> np.ndarray:
    """Convert float32, float16 or bfloat16 (as bits in uint16) to float32 without rounding."""
    if array.dtype.name in ("uint16", "bfloat16"):
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _check_finite(name: str, scales: np.ndarray, biases: np.ndarray, bits: int) -> None:
    """Raise `ArtefactError` if scales or biases are not finite, or the largest weight overflows float32."""
    reach = np.abs(_float32(scales)) * np.float64(2**bits - 1) + np.abs(_float32(biases))
    if not np.max(reach) <= np.finfo(np.float32).max:
        raise ArtefactError(f"{name}: expected finite weights, got scales or biases that are NaN or too large.")
