"""Keys or values in few bits, for arrays of any library: docs/spec/quantised.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

BITS = (2, 3, 4, 5, 6, 8)  # of a component
GROUP_SIZES = (32, 64, 128)  # components that share a scale and a bias


@dataclass(frozen=True, eq=False)
class PackedParts:
    """Rows ``(B, Hkv, S, D)`` in few bits, by `mx.quantize`: each group of a row has a scale and a bias (quantised.1).

    Attributes:
        codes: uint32 ``(B, Hkv, S, D * bits / 32)``, lowest bits first.
        scales: ``(B, Hkv, S, D / group_size)`` in ``dtype``.
        biases: ``(B, Hkv, S, D / group_size)`` in ``dtype``.
        bits: of a component.
    """

    codes: Any
    scales: Any
    biases: Any
    bits: int

    @classmethod
    def kept(cls, parts: Sequence[Any], bits: int) -> Self:
        """Of what `mx.quantize` returned."""
        codes, scales, biases = parts
        return cls(codes, scales, biases, bits)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, Hkv, S, words = self.codes.shape
        return B, Hkv, S, words * 32 // self.bits

    @property
    def dtype(self) -> Any:
        return self.scales.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element of ``dtype``."""
        return int(self.scales.itemsize)

    @property
    def group_size(self) -> int:
        """Components that share a scale and a bias."""
        return int(self.shape[3] // self.scales.shape[3])

    @property
    def row_bytes(self) -> int:
        """Of a key or value."""
        return int(self.codes.shape[3] * 4 + self.scales.shape[3] * 2 * self.itemsize)

    def first(self, S: int) -> Self:
        """The first ``S`` rows of each sequence, packed as they are."""
        return self.kept([part[:, :, :S] for part in self.parts], self.bits)

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """Codes, scales and biases."""
        return self.codes, self.scales, self.biases


def first_rows(rows: Any, n: int) -> Any:
    """The first ``n`` rows of each sequence of ``rows (B, Hkv, S, D)``, packed or not."""
    return rows.first(n) if isinstance(rows, PackedParts) else rows[:, :, :n]
