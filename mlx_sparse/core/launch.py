"""Compile and launch the kernels in metal/. Only this module calls `mx.fast.metal_kernel`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from importlib.resources import files
from itertools import chain
from typing import Any

import mlx.core as mx

from .packed_rows import PackedRows, Rows

LANES = 32  # threads per SIMD group
LAUNCH_CACHE_SIZE = 64  # size of each cache of launches; a decode step needs one launch per kernel and layer shape
Outputs = Sequence[tuple[tuple[int, ...], mx.Dtype]]  # shape and type of each output

RowFormat = tuple[int, int] | None  # bits and group size of quantized rows; None for rows that are not quantized

INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def text(name: str) -> str:
    """Return the source text of the file ``name`` in metal/."""
    return files("mlx_sparse.metal").joinpath(name).read_text(encoding="utf-8")


@cache
def flattened(name: str) -> str:
    """Return the text of header ``name`` with each include expanded once, because MLX compiles a single source."""
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
    """Metal kernel whose body is metal/BODY.metal. The body uses the templates in ``header``.

    The comment at the top of metal/BODY.metal describes the inputs, the outputs, the grid and the bytes moved.
    """

    body: str
    header: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    packed: bool = False  # the variant for a quantized KV cache; see `of_rows`

    @property
    def name(self) -> str:
        return f"{self.body}_packed" if self.packed else self.body

    def of_rows(self, row_format: RowFormat) -> Kernel:
        """Return the variant of the kernel that reads keys and values in ``row_format`` with ROWS of metal/rows.h."""
        return self if row_format is None else self._of_packed_rows

    @cached_property
    def _of_packed_rows(self) -> Kernel:
        names = (packed_parts(name) if name in ("keys", "values") else (name,) for name in self.inputs)
        return replace(self, inputs=tuple(chain.from_iterable(names)), packed=True)

    @cached_property
    def compiled(self) -> Any:
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            header=("#define PACKED_ROWS\n" if self.packed else "") + flattened(self.header),
            source=text(f"{self.body}.metal"),
        )

    def __call__(
        self,
        inputs: Mapping[str, mx.array],
        outputs: Outputs,
        *,
        template: Mapping[str, object],
        groups: tuple[int, int, int],
        threads: int,
    ) -> list[mx.array]:
        """Launch ``groups`` threadgroups of size ``threads``. ``outputs`` lists the shape and type of each output."""
        launch = Launch(self, outputs, template=template, groups=groups, threads=threads)
        return launch(*(inputs[name] for name in self.inputs))


class Launch:
    """Kernel whose launch arguments are bound, so that a call needs only the input arrays.

    Building a launch takes host time in every layer. Callers therefore build a launch once for each combination of
    sizes and cache it with `lru_cache`.
    """

    def __init__(
        self,
        kernel: Kernel,
        outputs: Outputs,
        numbers: Sequence[mx.array] = (),
        *,
        template: Mapping[str, object],
        groups: tuple[int, int, int],
        threads: int,
    ) -> None:
        """Prepare a launch. ``numbers`` are the kernel's last inputs. See `Kernel.__call__` for the other arguments."""
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
        """Launch the kernel with ``arrays`` as its first inputs, followed by ``numbers``."""
        launched: list[mx.array] = self._run(inputs=[*arrays, *self.numbers])
        return launched


@lru_cache(maxsize=256)
def integer(value: int) -> mx.array:
    """Return ``value`` as a cached 0-d int32 array. MLX does not recompile a kernel if only array inputs change."""
    return mx.array(value, mx.int32)


@lru_cache(maxsize=16)
def real(value: float) -> mx.array:
    """Return ``value`` as a cached 0-d float32 array."""
    return mx.array(value, mx.float32)


def of_one_type(*arrays: mx.array) -> list[mx.array]:
    """Convert the arrays to their common type, because kernels that use matrix units stage rows of one type."""
    dtype = mx.result_type(*arrays)
    return [array if array.dtype == dtype else array.astype(dtype) for array in arrays]


def parts_of(rows: Rows) -> tuple[tuple[mx.array, ...], RowFormat]:
    """Return the arrays that store ``rows`` and the `RowFormat`, which is None if ``rows`` are not quantized."""
    return (rows.parts, (rows.bits, rows.group_size)) if isinstance(rows, PackedRows) else ((rows,), None)


def packed_parts(rows: str) -> tuple[str, str, str]:
    """Return the names of the inputs that store the quantized ``rows``, in the order of `parts_of`."""
    return rows, f"{rows}_scales", f"{rows}_biases"


def row_template(row_format: RowFormat) -> dict[str, int]:
    """Return the template parameters for quantized rows, or an empty dict if ``row_format`` is None."""
    return {} if row_format is None else {"ROW_BITS": row_format[0], "ROW_GROUP": row_format[1]}


def padding_or_zeros(left_padding: mx.array | None, B: int) -> mx.array:
    """Return ``left_padding (B,)`` as int32, or an array of zeros if ``left_padding`` is None."""
    return repeated(B, 0) if left_padding is None else left_padding.astype(mx.int32)


@cache
def unread() -> mx.array:
    """Return one float32 zero, in place of an input that a kernel does not read."""
    return mx.array([0.0], mx.float32)


@lru_cache(maxsize=256)
def repeated(B: int, number: int) -> mx.array:
    """Return ``number`` for each of ``B`` sequences as a cached int32 array ``(B,)``."""
    return mx.array([number] * B, mx.int32)
