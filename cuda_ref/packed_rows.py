"""Keys or values in few bits on torch tensors: docs/spec/quantised.md."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from mlx_sparse.methods.packed_parts import PackedParts


class PackedRows(PackedParts):
    """`PackedParts` of torch. It stands where a tensor of keys or values does.

    Indexing reads rows: it returns them as numbers, in ``dtype``. Decode steps read the parts as they are, where these
    are slices of buffers of one capacity.
    """

    @property
    def device(self) -> torch.device:
        place: torch.device = self.codes.device
        return place

    def __getitem__(self, at: Any) -> torch.Tensor:
        """The rows at ``at``, which takes all components: computed in float32, rounded once (quantised.1)."""
        words = self.codes if self.codes.stride(3) == 1 else self.codes.contiguous()
        codes, scales, biases = (part[at] for part in (words.view(torch.uint8), self.scales, self.biases))
        bit = torch.arange(self.shape[3], device=self.device) * self.bits
        octets = functional.pad(codes, (0, 1)).to(torch.int32)  # a code lies in one or two
        code = (octets[..., bit // 8] | octets[..., bit // 8 + 1] << 8) >> bit.to(torch.int32) % 8 & 2**self.bits - 1
        code = code.unflatten(-1, (-1, self.group_size)).float()
        rows: torch.Tensor = code * scales.float()[..., None] + biases.float()[..., None]
        return rows.flatten(-2).to(self.dtype)


Rows = torch.Tensor | PackedRows


def in_step(packed: PackedRows) -> PackedRows:
    """The same, so that a row has one number in codes, scales and biases, by which kernels find it; caches have it so.

    Parts that do not lie alike are copied.
    """
    apart = [
        [stride / part.shape[3] for n, stride in zip(part.shape[:3], part.stride(), strict=False) if n > 1]
        for part in packed.parts
    ]
    side_by_side = all(part.stride(3) == 1 or part.shape[3] == 1 for part in packed.parts)
    if side_by_side and apart[0] == apart[1] == apart[2] and all(rows.is_integer() for rows in apart[0]):
        return packed
    return packed.kept([part.contiguous() for part in packed.parts], packed.bits)
