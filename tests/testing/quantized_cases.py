"""Define test cases with a quantized KV cache, and adapters for the backends that support it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import cases
from adapters import Mlx
from cases import CASES, Array, Case

from mlx_sparse.core.registry import WHOLE_BUFFERS

# Bits per component and components per group.
FORMS = [(8, 64), (4, 32), (4, 128), (6, 64), (2, 32), (4, 64)]


class PackedCase(cases.PackedCase):
    """A case with quantized keys and values; `inputs` returns the dequantized rows."""

    def packed(self) -> list[Any]:
        from mlx_arrays import to_mlx

        from mlx_sparse import PackedRows

        form = {"bits": self.bits, "group_size": self.group_size}
        return [PackedRows.of(to_mlx(rows, self.dtype), **form) for rows in super().inputs()[1:]]

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        from mlx_arrays import unpacked

        keys, values = map(unpacked, self.packed())
        return super().inputs()[0], keys, values


class PackedMlx(Mlx):
    """Adapter that runs the MLX backends on quantized keys and values."""

    def arrays(self, case: Any) -> list[Any]:
        """Return queries, quantized keys and quantized values. Padded keys and values have NaN as scales and biases."""
        import mlx.core as mx

        queries, rows = self.array(case.inputs()[0], case.dtype), case.packed()
        if case.padding is None:
            return [queries, *rows]
        unused = mx.arange(case.S)[:, None] < mx.array(case.padding)[:, None, None, None]
        spoiled = ([mx.where(unused, mx.array(mx.nan, part.dtype), part) for part in r.parts[1:]] for r in rows)
        return [queries, *(type(r)(r.codes, *parts, r.bits) for r, parts in zip(rows, spoiled, strict=True))]

    def cached(self, rows: Any) -> Any:
        spare = rows.shape[2] % 5 if self.name in WHOLE_BUFFERS else 0
        if spare == 0:
            return rows
        import mlx.core as mx

        room = [(0, 0), (0, 0), (0, spare), (0, 0)]
        codes = mx.pad(rows.codes, room, constant_values=0xFFFFFFFF)
        stale = (mx.pad(part, room, constant_values=mx.nan) for part in (rows.scales, rows.biases))
        return type(rows)(codes, *stale, rows.bits)

    def columns(self, keys: Any) -> Any:
        """Return None, because quantized keys are scored without a component-major copy."""


def adapter(backend: Any) -> Any:
    """Return the adapter that runs a backend on quantized keys and values."""
    return PackedMlx(backend.name)


def packed_cases() -> list[PackedCase]:
    """Combine each test case with up to two quantization formats whose groups fit its head dim."""
    found = []
    for n, case in enumerate(case for case in CASES if type(case) is Case):
        fitting = [form for form in FORMS if case.D % form[1] == 0]
        given = {field.name: getattr(case, field.name) for field in fields(Case)}
        pair = {fitting[(n + i) % len(fitting)] for i in range(2)} if fitting else set()
        found += [PackedCase(**given, bits=bits, group_size=group) for bits, group in sorted(pair)]
    return found
