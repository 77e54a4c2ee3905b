"""From launchers to kernels: the one place that starts a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..availability import interpreted
from ..packed_rows import PackedRows, Rows


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Attributes:
        kernel: a function of `kernels`.
        grid: programs along the three axes.
        arguments: tensors and numbers by name.
        constants: compile-time arguments by name.
        options: ``num_warps`` and ``num_stages``.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def run(self) -> None:
        device = next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))
        # Triton launches on the current device, which need not be the one of the tensors.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def row_arguments(name: str, rows: Rows) -> dict[str, Any]:
    """``rows`` as the arguments of a kernel that calls them ``name``, "key" or "value"; packed ones are `in_step`."""
    first, scales, biases = rows.parts if isinstance(rows, PackedRows) else (rows, None, None)
    unit = first.shape[3] if isinstance(rows, PackedRows) else 1
    strides = {f"stride_{name[0]}{axis}": stride // unit for axis, stride in zip("bhn", first.stride(), strict=False)}
    return {f"{name}s": first, f"{name}_scales": scales, f"{name}_biases": biases, **strides}


def packing(rows: Rows) -> tuple[int, int]:
    """Bits of a component and components of a group, for kernels; 0 of rows that are not packed."""
    return (rows.bits, rows.group_size) if isinstance(rows, PackedRows) else (0, 0)


def upcast(dtype: torch.dtype) -> bool:
    """Whether kernels must widen what they load: Triton's interpreter cannot compute with bfloat16."""
    return interpreted() and dtype == torch.bfloat16


def result_like(queries: torch.Tensor) -> torch.Tensor:
    """Room for the result of a kernel; float32 where the interpreter would not round to bfloat16 but cut."""
    return torch.empty(
        queries.shape, dtype=torch.float32 if upcast(queries.dtype) else queries.dtype, device=queries.device
    )


def power_of_2(number: int, least: int = 1) -> int:
    """The smallest power of 2 that is neither less than ``number`` nor than ``least``."""
    return max(least, 1 << (number - 1).bit_length())
