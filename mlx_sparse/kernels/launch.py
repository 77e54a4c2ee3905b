"""Build launches from the files of metal/. Only this module calls `mx.fast.metal_kernel`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from importlib.resources import files
from typing import Any

import mlx.core as mx

from ..ops.packed_rows import PackedRows, Rows

LANES = 32
KEPT = 64  # cached launches of a kind: one per layer size, as all layers of a step have one length
Outputs = Sequence[tuple[tuple[int, ...], mx.Dtype]]  # shapes and types

INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def text(name: str) -> str:
    """Return the text of a file in metal/."""
    return files("mlx_sparse.metal").joinpath(name).read_text(encoding="utf-8")


@cache
def flattened(name: str) -> str:
    """Return a header of metal/ after the headers that it includes, each once. MLX compiles a single text."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in parts:
            source = text(name)
            for included in INCLUDE.findall(source):
                add(included)
            parts[name] = f'#line 1 "{name}"\n' + INCLUDE.sub("\n", source).replace("#pragma once", "")

    add(name)
    return "\n".join(parts.values())


@dataclass(frozen=True)
class Kernel:
    """One kernel: the body metal/NAME.metal and the templates of a header.

    The comment at the top of the body describes the inputs, the outputs, the grid and the bytes that it moves.
    """

    name: str
    header: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def compiled(self) -> Any:
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            header=flattened(self.header),
            source=text(f"{self.name}.metal"),
        )

    def __call__(
        self,
        inputs: Mapping[str, mx.array],
        outputs: Outputs,
        *,
        template: Mapping[str, Any],
        groups: tuple[int, int, int],
        threads: int,
    ) -> list[mx.array]:
        """Launch ``groups`` threadgroups of ``threads`` threads; ``outputs`` lists shapes and types."""
        launch = Launch(self, outputs, template=template, groups=groups, threads=threads)
        return launch(*(inputs[name] for name in self.inputs))


class Launch:
    """A kernel with everything except its input arrays.

    Building a launch costs host time in every layer. Everything that depends on sizes only is therefore built once and
    cached by the sizes, in a `lru_cache`.
    """

    def __init__(
        self,
        kernel: Kernel,
        outputs: Outputs,
        numbers: Sequence[mx.array] = (),
        *,
        template: Mapping[str, Any],
        groups: tuple[int, int, int],
        threads: int,
    ) -> None:
        """Prepare the launch. The arguments are those of `Kernel.__call__`; ``numbers`` are the last kernel inputs."""
        self.kernel, self.numbers, self.template = kernel, tuple(numbers), template
        self._run = partial(
            kernel.compiled,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            template=list(template.items()),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
        )

    def __call__(self, *arrays: mx.array) -> list[mx.array]:
        """Launch the kernel with its first inputs, in order; the numbers follow them."""
        launched: list[mx.array] = self._run(inputs=[*arrays, *self.numbers])
        return launched


@lru_cache(maxsize=256)
def integer(value: int) -> mx.array:
    """Return a 0-d int32, shared by all layers of a step. A new value does not recompile a kernel."""
    return mx.array(value, mx.int32)


@lru_cache(maxsize=16)
def real(value: float) -> mx.array:
    """Return a 0-d float32."""
    return mx.array(value, mx.float32)


def of_one_type(*arrays: mx.array) -> list[mx.array]:
    """Convert the arrays to their common type: the kernels for matrix units stage rows in one type."""
    dtype = mx.result_type(*arrays)
    return [array if array.dtype == dtype else array.astype(dtype) for array in arrays]


Form = tuple[int, int] | None  # bits and group size of quantized rows; None for other rows


def parts_of(rows: Rows) -> tuple[tuple[mx.array, ...], Form]:
    """Return the arrays of keys or values that a kernel reads, and their form."""
    return (rows.parts, (rows.bits, rows.group_size)) if isinstance(rows, PackedRows) else ((rows,), None)


def row_template(form: Form) -> dict[str, int]:
    """Return the template parameters of a kernel for quantized rows; none for other rows."""
    return {} if form is None else {"ROW_BITS": form[0], "ROW_GROUP": form[1]}


def padding_or_zeros(left_padding: mx.array | None, B: int) -> mx.array:
    """Return the first valid key of each sequence as int32 ``(B,)``."""
    return _zeros(B) if left_padding is None else left_padding.astype(mx.int32)


@lru_cache(maxsize=16)
def _zeros(B: int) -> mx.array:
    return mx.array([0] * B, mx.int32)
