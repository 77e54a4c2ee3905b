"""Add the weights and nodes of linear layers, embeddings and norms to a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from onnx import TensorProto

from mlx_sparse.checks import ArtefactError, ConfigError

from .graph import MICROSOFT, Graph
from .quantized import Blocks, blocks

QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def numpy_of(array: mx.array) -> np.ndarray:
    """Convert an MLX array to NumPy and avoid a copy if possible. Bfloat16 becomes uint16 with the same bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=None)


def _check_finite(name: str, array: mx.array) -> None:
    if not mx.isfinite(array).all().item():
        raise ArtefactError(f"{name}: expected finite weights, got NaN or infinity.")


class Weights:
    """Builder of the linear layers, embeddings and norms of one model.

    Args:
        dtype: type of unquantized matrices; vectors are stored in float32.
        dequantize: True to dequantize matrices before they are stored.
        written: callback that receives the name of each mlx-lm parameter when the parameter is written.
    """

    def __init__(self, graph: Graph, dtype: str, *, dequantize: bool, written: Callable[[str], None]) -> None:
        self._graph = graph
        self._dtype = dtype
        self._dequantize = dequantize
        self._written = written
        self._summed: dict[tuple[str, int], str] = {}

    def vector(self, name: str, array: mx.array, shift: float = 0.0) -> str:
        """Add ``shift`` to a norm weight or a bias, store the sum as float32, and return its name."""
        self._written(name)
        _check_finite(name, array)
        return self._graph.weight(name, numpy_of(array.astype(mx.float32) + shift))

    def linear(self, name: str, module: nn.Module, x: str) -> str:
        """Add nodes that apply ``nn.Linear`` or ``nn.QuantizedLinear`` to x (..., K), and return the output's name."""
        if self._stays_quantized(module):
            halves, offsets = self._halves(name, module)
            planes = [(self._store(name, i, half.matmul()[0]), half.matmul()[1]) for i, half in enumerate(halves)]
            y = self._sum_of_products(x, planes, offsets)
        else:
            y = self._graph.op("MatMul", x, self._widened(self._matrix(name, module, transposed=True)))
        if module.get("bias") is not None:
            y = self._graph.op("Add", y, self.vector(f"{name}.bias", module.bias))
        return y

    def embedding(self, name: str, module: nn.Module, ids: str) -> tuple[str, Callable[[str], str]]:
        """Add an embedding of ``ids`` (B, L) and return the name of its float32 output (B, L, K).

        Also return a function that adds a tied output head, which multiplies by the same weight.
        """
        g = self._graph
        if not self._stays_quantized(module):
            stored = self._matrix(name, module)

            def multiply(x: str) -> str:
                row = g.op("Squeeze", x, g.constant([1]))
                return g.op("Unsqueeze", g.op("Gemm", row, self._widened(stored), transB=1), g.constant([1]))

            return self._widened(g.op("Gather", stored, ids)), multiply
        halves, offsets = self._halves(name, module)
        rows, planes = None, []
        for i, half in enumerate(halves):
            inputs, attributes = half.gather()
            data, scales, zeros = self._store(name, i, inputs)
            part = g.op("GatherBlockQuantized", data, ids, scales, zeros, domain=MICROSOFT, **attributes)
            rows = part if rows is None else g.op("Add", rows, part)
            inputs, attributes = half.matmul()
            planes.append((data, scales, inputs["zero_points"], attributes))
        assert rows is not None
        if offsets is not None:
            rows = g.op("Add", rows, g.op("Unsqueeze", g.op("Gather", offsets, ids), g.constant([-1])))

        def head(x: str) -> str:
            flat: list[tuple[Any, dict[str, Any]]] = []
            for i, (data, scales, zeros, attributes) in enumerate(planes):
                in_line = g.op("Reshape", scales, g.constant([-1]))
                flat.append(((data, in_line, g.weight(f"{name}.zero_points_of_rows.{i}", zeros)), attributes))
            return self._sum_of_products(x, flat, offsets)

        return g.op("Reshape", rows, g.constant([0, 0, -1])), head

    def _stays_quantized(self, module: nn.Module) -> bool:
        return isinstance(module, QUANTIZED) and not self._dequantize

    def _matrix(self, name: str, module: nn.Module, *, transposed: bool = False) -> str:
        """Store a matrix (N, K) or its transpose as an unquantized weight, and return the name of the weight."""
        weight = f"{name}.weight"
        if isinstance(module, QUANTIZED):
            weights, *ranges = self._parts(name, module)
            scales, biases = (each.astype(mx.float32) for each in ranges)
            array = mx.dequantize(weights, scales, biases, group_size=module.group_size, bits=module.bits)
        else:
            array = module.weight
            self._written(weight)
        cast = array.astype(getattr(mx, self._dtype))
        if not mx.isfinite(cast).all().item():
            _check_finite(weight, array)
            raise ConfigError(f"--dtype: expected a type with the range of {weight}, got {self._dtype}.")
        return self._graph.weight(weight, numpy_of(cast.T if transposed else cast), self._dtype)

    def _widened(self, value: str) -> str:
        return value if self._dtype == "float32" else self._graph.op("Cast", value, to=TensorProto.FLOAT)

    def _parts(self, name: str, module: nn.Module) -> list[mx.array]:
        for part in ("weight", "scales", "biases"):
            self._written(f"{name}.{part}")
        return [module.weight, module.scales, module.biases]

    def _halves(self, name: str, module: nn.Module) -> tuple[list[Blocks], str | None]:
        """Return a quantized matrix as one or two 4-bit weights, and the name of its offsets (N, blocks) or None."""
        arrays = map(numpy_of, self._parts(name, module))
        made = blocks(f"{name}.weight", *arrays, group_size=module.group_size, bits=module.bits)
        offsets = None if made.offsets is None else self._graph.weight(f"{name}.offsets", made.offsets)
        return [made] if made.bits == 4 else list(made.halves()), offsets

    def _store(self, name: str, plane: int, inputs: dict[str, np.ndarray]) -> list[str]:
        return [self._graph.weight(f"{name}.{part}.{plane}", array) for part, array in inputs.items()]

    def _sum_of_products(self, x: str, planes: list[tuple[Any, dict[str, Any]]], offsets: str | None) -> str:
        g = self._graph
        y = None
        for inputs, attributes in planes:
            # accuracy_level 0 computes in float32.
            part = g.op("MatMulNBits", x, *inputs, domain=MICROSOFT, accuracy_level=0, **attributes)
            y = part if y is None else g.op("Add", y, part)
        assert y is not None
        if offsets is not None:
            sums = self._sums(x, planes[0][1]["block_size"])
            y = g.op("Add", y, g.op("MatMul", sums, g.op("Transpose", offsets, perm=[1, 0])))
        return y

    def _sums(self, x: str, size: int) -> str:
        """Add nodes that sum x (B, L, K) over blocks of ``size`` elements. Layers with the same x share the nodes."""
        if (x, size) not in self._summed:
            g = self._graph
            grouped = g.op("Reshape", x, g.constant([0, 0, -1, size]))
            self._summed[x, size] = g.op("ReduceSum", grouped, g.constant([-1]), keepdims=0)
        return self._summed[x, size]
