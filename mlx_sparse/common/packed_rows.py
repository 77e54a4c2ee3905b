"""Keys or values as mlx-lm's quantised caches keep them: docs/spec/quantised.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows ``(B, Hkv, S, D)`` in few bits, by `mx.quantize`: each group of a row has a scale and a bias (quantised.1).

    It stands where an array of keys or values does. Indexing reads rows: it returns them as numbers, in ``dtype``.

    Attributes:
        codes: uint32 ``(B, Hkv, S, D * bits / 32)``, lowest bits first.
        scales, biases: ``(B, Hkv, S, D / group_size)`` in ``dtype``.
        bits: of a component.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    @classmethod
    def of(cls, rows: mx.array, *, bits: int, group_size: int = 64) -> PackedRows:
        """Pack ``rows (B, Hkv, S, D)``; D is a multiple of ``group_size``, which is 32, 64 or 128."""
        return cls.kept(mx.quantize(rows, group_size=group_size, bits=bits), bits)

    @classmethod
    def kept(cls, parts: Sequence[mx.array], bits: int) -> PackedRows:
        """Of what `mx.quantize` returned."""
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
        """Bytes of an element of ``dtype``."""
        return self.dtype.size

    @property
    def group_size(self) -> int:
        """Components that share a scale and a bias."""
        return self.shape[3] // self.scales.shape[3]

    @property
    def row_bytes(self) -> int:
        """Of a key or value."""
        return self.codes.shape[3] * 4 + self.scales.shape[3] * 2 * self.scales.itemsize

    def first(self, S: int) -> PackedRows:
        """The first ``S`` rows of each sequence, packed as they are."""
        return PackedRows.kept([part[:, :, :S] for part in self.parts], self.bits)

    def after(self, done: mx.array) -> PackedRows:
        """The same, to be read once ``done`` is there."""
        return PackedRows(mx.depends(self.codes, done), self.scales, self.biases, self.bits)

    def __getitem__(self, at: Any) -> mx.array:
        """The rows at ``at``, which takes all components: computed in float32, rounded once (quantised.1)."""
        codes, scales, biases = (part[at] for part in self.parts)
        if codes.size == 0:  # `mx.dequantize` takes no empty array
            return mx.zeros((*codes.shape[:-1], self.shape[3]), self.dtype)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        rows = mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)
        return rows.astype(self.dtype)

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """Codes, scales and biases."""
        return self.codes, self.scales, self.biases


Rows = mx.array | PackedRows
