"""Keys or values as mlx-lm's quantised caches keep them: docs/spec/quantised.md."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..methods.packed_parts import PackedParts


class PackedRows(PackedParts):
    """`PackedParts` of MLX. It stands where an array of keys or values does.

    Indexing reads rows: it returns them as numbers, in ``dtype``.
    """

    @classmethod
    def of(cls, rows: mx.array, *, bits: int, group_size: int = 64) -> PackedRows:
        """Pack ``rows (B, Hkv, S, D)``; D is a multiple of ``group_size``, which is 32, 64 or 128."""
        return cls.kept(mx.quantize(rows, group_size=group_size, bits=bits), bits)

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


Rows = mx.array | PackedRows
