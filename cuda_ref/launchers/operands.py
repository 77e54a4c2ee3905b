"""Keys and values as the operators of torch take them, which know tensors and numbers only."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import rows
from ..packed_rows import PackedRows, Rows, in_step


def operands(keys: Rows, values: Rows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Two tensors, of packed rows their codes, and the arguments that say the rest of these."""
    if isinstance(keys, PackedRows) and isinstance(values, PackedRows):
        codes, *key_ranges = in_step(keys).parts
        value_codes, *value_ranges = in_step(values).parts
        names = ("key_scales", "key_biases", "value_scales", "value_biases")
        ranges = dict(zip(names, (*key_ranges, *value_ranges), strict=True))
        return codes, value_codes, {"row_bits": keys.bits, **ranges}
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    return rows(keys), rows(values), {}


def rows_of(keys: torch.Tensor, values: torch.Tensor, row_bits: int, *ranges: torch.Tensor | None) -> tuple[Rows, Rows]:
    """Keys and values from `operands`."""
    if row_bits == 16:
        return keys, values
    key_scales, key_biases, value_scales, value_biases = ranges
    return (
        PackedRows(keys, key_scales, key_biases, row_bits),
        PackedRows(values, value_scales, value_biases, row_bits),
    )
