"""A finished file on stock ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper

from mlx_sparse.checks import ConfigError

from ...runtime.memory import ort_value, zeros
from ...runtime.native import session_options

Array = npt.NDArray[Any]


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    try:
        return zeros(shape, dtype)
    except (OSError, MemoryError, OverflowError, ValueError):  # what mmap and NumPy say of sizes beyond them
        raise ConfigError(
            f"--max-length: expected caches that fit into memory, got some of shape {shape}. Give a smaller number."
        ) from None


class File:
    """A file on stock ONNX Runtime with caches that it appends to in place."""

    def __init__(self, path: Path) -> None:
        options = session_options("off")
        options.log_severity_level = 4  # errors come as exceptions
        # Weights of half precision are widened one at a time where they are used, not all of them once and for all.
        options.enable_cpu_mem_arena = False
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
        )
        self._inputs = onnx.load(path, load_external_data=False).graph.input

    def start(self, rows: int) -> None:
        """Begin again, with so many rows."""
        self._binding = self._session.io_binding()
        self._memory = []
        for tensor in self._inputs:
            kind, sizes = tensor.type.tensor_type.elem_type, [d.dim_value for d in tensor.type.tensor_type.shape.dim]
            if tensor.name == "attention_mask":
                self._total = sizes[1]
            elif tensor.name.startswith("past_"):
                array = _zeros((rows, *sizes[1:]), helper.tensor_dtype_to_np_dtype(kind))
                value = ort_value(array)
                self._memory.append(array)  # which the value borrows
                self._binding.bind_ortvalue_input(tensor.name, value)
                present = tensor.name.replace("past_key_values", "present").replace("past_", "present_")
                self._binding.bind_ortvalue_output(present, value)
        self._length = 0

    def __call__(self, tokens: Array) -> Array:
        """Logits (rows, vocabulary) after new tokens (rows, L)."""
        self._length += tokens.shape[1]
        mask = np.zeros((len(tokens), self._total or self._length), np.int64)
        mask[:, : self._length] = 1
        self._binding.bind_cpu_input("input_ids", np.ascontiguousarray(tokens))
        self._binding.bind_cpu_input("attention_mask", mask)
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding)
        logits: Array = self._binding.get_outputs()[-1].numpy()[:, 0]  # bound last
        return logits
