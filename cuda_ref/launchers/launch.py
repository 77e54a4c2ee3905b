"""Launch Triton kernels, and prepare tensors for a launch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import interpreted


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, arguments and options. `run` launches the kernel.

    Attributes:
        constants: dict from parameter name to compile-time argument.
        options: dict with ``num_warps`` and ``num_stages``.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, object]
    constants: Mapping[str, object]
    options: Mapping[str, int]

    def run(self) -> None:
        device = next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))
        # Triton launches on the current device, which may differ from the device of the tensors.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def rows(array: torch.Tensor) -> torch.Tensor:
    """Return ``array`` with last stride 1. An array with this stride, such as a cache slice, is not copied."""
    return array if array.stride(-1) == 1 else array.contiguous()


def contiguous(array: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``array`` as a contiguous tensor, or None if ``array`` is None."""
    return None if array is None else array.contiguous()


def strides(letter: str, array: torch.Tensor, axes: str = "bhn") -> dict[str, int]:
    """Return the strides of ``array`` in a dict. Its keys are kernel arguments, such as stride_kb for letter "k"."""
    return {f"stride_{letter}{axis}": stride for axis, stride in zip(axes, array.stride(), strict=False)}


def upcast(dtype: torch.dtype) -> bool:
    """Return True if ``dtype`` is bfloat16 and Triton's interpreter, which cannot compute in bfloat16, is enabled."""
    return interpreted() and dtype == torch.bfloat16


def result_like(queries: torch.Tensor) -> torch.Tensor:
    """Allocate the attention output for ``queries``, in float32 if the interpreter would truncate it to bfloat16."""
    return torch.empty(
        queries.shape, dtype=torch.float32 if upcast(queries.dtype) else queries.dtype, device=queries.device
    )


def power_of_2(number: int, least: int = 1) -> int:
    """Return the smallest power of 2 that is at least ``number`` and at least ``least``."""
    return max(least, 1 << (number - 1).bit_length())


def fake_attention(queries: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty ``out`` and ``lse``. torch.compile uses this fake implementation of the attention operators."""
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    return out, queries.new_empty(queries.shape[:3], dtype=torch.float32)
