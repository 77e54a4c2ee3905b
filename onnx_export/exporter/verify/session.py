"""A finished file on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime

from mlx_sparse.checks import ConfigError

from ...runtime.memory import zeros
from ...runtime.runner import Array, Runner


class File(Runner):
    """A file with room for as many tokens as its caches hold.

    Raises:
        ConfigError: the caches do not fit into memory.
        ArtefactError: the file does not load or run.
    """

    def __init__(self, path: Path, rows: int, native: str) -> None:
        super().__init__(path, native=native, batch=rows)
        self.max_length = self._capacity

    def _open(self, options: onnxruntime.SessionOptions, **how: Any) -> onnxruntime.InferenceSession:
        # Weights of half precision are widened one at a time where they are used, not all of them once and for all.
        options.enable_cpu_mem_arena = False
        return super()._open(options, disabled_optimizers=["ConstantFolding"], **how)

    def _zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        try:
            return zeros(shape, dtype)
        except MemoryError:
            raise ConfigError(
                f"--max-length: expected caches that fit into memory, got some of shape {shape}. Give a smaller number."
            ) from None
