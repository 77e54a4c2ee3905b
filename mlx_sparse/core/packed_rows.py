"""Define quantized keys and values in the format of mlx-lm's quantized KV caches (docs/spec/quantized.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)  # bits per component


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Keys or values ``(B, Hkv, S, D)`` quantized by `mx.quantize` (quantized.1).

    Functions accept a `PackedRows` in place of an array of keys or values. Indexing returns dequantized rows.

    Attributes:
        codes: uint32 ``(B, Hkv, S, D * bits / 32)``, lowest bits first.
        scales: ``(B, Hkv, S, D / group_size)`` in ``dtype``.
        biases: ``(B, Hkv, S, D / group_size)`` in ``dtype``.
        bits: number of bits per component.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    @classmethod
    def of(cls, rows: mx.array, *, bits: int, group_size: int = 64) -> PackedRows:
        """Quantize ``rows (B, Hkv, S, D)``. ``group_size`` must be 32, 64 or 128, and a divisor of D."""
        return cls.from_parts(mx.quantize(rows, group_size=group_size, bits=bits), bits)

    @classmethod
    def from_parts(cls, parts: Sequence[mx.array], bits: int) -> PackedRows:
        """Build a `PackedRows` from the codes, scales and biases that `mx.quantize` returns."""
        codes, scales, biases = parts
        return cls(codes, scales, biases, bits)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, Hkv, S, words = self.codes.shape
        return B, Hkv, S, words * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        return self.scales.dtype

    @property
    def itemsize(self) -> int:
        """Size of one element of ``dtype`` in bytes."""
        return self.scales.itemsize

    @property
    def group_size(self) -> int:
        """Number of components that share a scale and a bias."""
        return self.shape[3] // self.scales.shape[3]

    @property
    def row_bytes(self) -> int:
        """Bytes of one key (or value) row of one head."""
        return self.codes.shape[3] * 4 + self.scales.shape[3] * 2 * self.itemsize

    def first(self, S: int, heads: slice = slice(None)) -> PackedRows:
        """Return the first ``S`` rows of each sequence and of each head in ``heads``."""
        return self.from_parts([part[:, heads, :S] for part in self.parts], self.bits)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """The codes, scales and biases, as `mx.quantize` returns them."""
        return self.codes, self.scales, self.biases

    def after(self, done: mx.array) -> PackedRows:
        """Return the rows with a dependency on ``done``, so that MLX computes ``done`` before it reads the rows."""
        return PackedRows(mx.depends(self.codes, done), self.scales, self.biases, self.bits)

    def __getitem__(self, at: object) -> mx.array:
        """Dequantize the rows at index ``at`` in float32, and return them in ``dtype`` (quantized.1)."""
        codes, scales, biases = (part[at] for part in self.parts)
        if codes.size == 0:  # `mx.dequantize` rejects empty arrays
            return mx.zeros((*codes.shape[:-1], self.shape[3]), self.dtype)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        rows = mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)
        return rows.astype(self.dtype)


Rows = mx.array | PackedRows
