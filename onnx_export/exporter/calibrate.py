"""From where on the native kernels of a method pay on this machine: ``export-onnx --dense-below auto``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import psutil  # type: ignore[import-untyped]
from onnx import helper

from mlx_sparse import crossing, measured
from mlx_sparse.checks import ConfigError
from mlx_sparse.crossing import Crossing, Pairs
from mlx_sparse.methods import Method, Step
from mlx_sparse.thresholds import LONGEST, MEASURED, MODELLED, Layer, Threshold, Thresholds, settings_text

from .. import build, compose
from ..domain import DEFAULT, DOMAIN, VERSION
from ..formal import Tensor
from ..runtime import memory, native
from .families import head_dim, window_of
from .methods.base import Decoding

SAMPLE, LEAST_RUNS = 0.02, 3  # seconds and runs of a sample: one run is soon over, and others disturb it
TILE = 1024  # random rows, which longer contexts repeat
NEVER = 1 << 31  # keys; more than any cache holds

Array = npt.NDArray[Any]


class Calibration(Thresholds):
    """What ``--dense-below auto`` asks of this machine.

    Args:
        decode: the method by the rule for files, which holds where nothing can be measured.
        lanes: keys per chunk of component-major keys.
        max_length: tokens that the file's caches hold; no longer context is timed.
        say: is told before and after a measurement.

    Raises:
        BackendUnavailable: there are no native kernels here.
        ConfigError: the caches are too short for a sparse step that could pay.
    """

    def __init__(
        self,
        decode: Decoding,
        *,
        lanes: int,
        max_length: int,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        native.library_path()
        least = self.worth_asking(decode.method)
        if max_length < least:
            raise ConfigError(
                f"--dense-below: expected a number for a file of fewer than {least} tokens, whose steps are not timed, "
                f"got auto and --max-length {max_length}."
            )
        super().__init__(say=say)
        self._decode, self._lanes, self.longest = decode, lanes, min(max_length, LONGEST)

    def found(self, layer: Layer) -> Threshold:
        """What is kept of this machine, or else is measured now, or else the rule for files."""
        config = self._decode.method
        return self.look_up(config, layer) or self.measure(config, layer) or self.modelled(config, layer)

    @staticmethod
    def worth_asking(config: Method) -> int:
        return 2 * config.attended  # who exports waits for it

    def kind(self, layer: Layer) -> str:
        return "cpu"

    def question(self, config: Method, layer: Layer) -> measured.Question:
        settings = settings_text(config, layer.step.G)
        said = {**layer.sizes, "method": config.name, "settings": settings, "lanes": self._lanes}
        chip = str(mx.device_info().get("device_name", ""))
        return measured.question(layer.backend, chip, ("onnxruntime",), **said, longest=self.longest)

    def free_memory(self, layer: Layer) -> int:
        return int(psutil.virtual_memory().available)

    def modelled(self, config: Method, layer: Layer) -> Threshold:
        return Threshold(int(self._decode.sparse_from or 0), MODELLED)

    def read(self, config: Method, layer: Layer, answer: Mapping[str, Any]) -> Threshold:
        found = Crossing.of(answer)
        keys = found.keys or max(found.up_to + 1, self.modelled(config, layer).value)
        return Threshold(max(keys, config.attended + 1), MEASURED)  # in experiments on short texts too

    def pairs(self, config: Method, layer: Layer, S: int, seconds: float) -> Pairs:
        """A step is a run of several layers, each with caches of its own; what one gives is the next one's query."""
        layers = self.layers(layer, S)
        dense, sparse = (_Step(self._decode, self._lanes, layer, S, layers, below) for below in (NEVER, 0))
        return crossing.in_turns(dense.seconds, sparse.seconds, seconds)


def layer_of(model: Any, dtype: str) -> Layer:
    """The sizes of the layers of mlx-lm's ``model`` that can decode sparsely."""
    layers = [layer for layer in model.layers if not window_of(layer, model)] or model.layers
    attention = layers[0].self_attn
    heads, itemsize = int(attention.n_kv_heads), helper.tensor_dtype_to_np_dtype(build.TYPES[dtype]).itemsize
    return Layer("ort", Step(heads, int(attention.n_heads) // heads, head_dim(attention), itemsize), dtype)


class _Step:
    """A decode step of several layers on the native kernels, each with caches of its own.

    Args:
        S: keys, the new one among them.
        dense_below: of the layers.

    Attributes:
        output: of the last layer.
    """

    def __init__(self, decode: Decoding, lanes: int, layer: Layer, S: int, layers: int, dense_below: int) -> None:
        step, operator = layer.step, compose.operator(decode.operator)
        capacity = -(-S // lanes) * lanes
        sizes = {"B": 1, "L": 1, "Hq": step.heads * step.G, "Hkv": step.heads, "C": capacity, "D": step.D}
        sizes |= {"3Hkv": 3 * step.heads, "HkvD": step.heads * step.D}
        fill = partial(_filled, sizes={**sizes, **decode.axes(capacity)}, dtype=layer.dtype, S=S, lanes=lanes)
        attributes = {**decode.attributes(lanes), "scale": step.D**-0.5, "dense_below": dense_below}
        states = {f"past_{name}": tensor for name, tensor in operator.states.items()}
        arrays = {tensor.name: fill(tensor) for tensor in operator.inputs if tensor.name not in states}
        self.output = np.zeros_like(arrays["query"])
        given = {"output": self.output}
        nodes, query = [], "query"
        for i in range(layers):
            arrays |= {f"{name}.{i}": fill(tensor) for name, tensor in states.items()}
            inputs = [f"{t.name}.{i}" if t.name in states else t.name for t in operator.inputs[1:]]
            outputs = [f"{t.name}.{i}" for t in operator.outputs[1:]]
            given |= {name: arrays[name.replace("present_", "past_")] for name in outputs}  # appended to in place
            result = "output" if i == layers - 1 else f"output.{i}"
            nodes.append(build.node(operator.name, [query, *inputs], [result, *outputs], **attributes))
            query = result
        self._layers, self._kept = layers, (arrays, given)  # onnxruntime borrows their memory
        self._session = _session(nodes, arrays, given)
        self._binding = self._session.io_binding()
        for name, array in arrays.items():
            self._binding.bind_ortvalue_input(name, memory.ort_value(array))
        for name, array in given.items():
            self._binding.bind_ortvalue_output(name, memory.ort_value(array))

    def seconds(self) -> float:
        """Take the step for a while; the seconds of a layer when nobody else disturbed it."""
        taken: list[float] = []
        while len(taken) < LEAST_RUNS or sum(taken) < SAMPLE:
            start = time.perf_counter()
            self._session.run_with_iobinding(self._binding)
            taken.append(time.perf_counter() - start)
        return min(taken) / self._layers


def _session(
    nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> onnxruntime.InferenceSession:
    """A model of ``nodes`` on the native kernels, whose threads do not spin after their work: others are timed then."""

    def info(arrays: Mapping[str, Array]) -> list[onnx.ValueInfoProto]:
        of = helper.np_dtype_to_tensor_dtype
        return [helper.make_tensor_value_info(name, of(array.dtype), array.shape) for name, array in arrays.items()]

    model = helper.make_model(
        helper.make_graph(nodes, "step", info(inputs), info(outputs)),
        ir_version=DEFAULT.ir,
        opset_imports=[helper.make_opsetid("", DEFAULT.opset), helper.make_opsetid(DOMAIN, VERSION)],
        functions=compose.functions([nodes[0].op_type]),
    )
    options = native.session_options()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _filled(tensor: Tensor, *, sizes: Mapping[str, int], dtype: str, S: int, lanes: int) -> Array:
    """An input of a step over ``S`` keys: random wherever the step reads."""
    shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.dims)
    made = memory.zeros(shape, helper.tensor_dtype_to_np_dtype(build.element(tensor.type, T=dtype)))
    if tensor.name == "past_length":
        made[:] = S - 1
    if tensor.name in ("left_padding", "past_length"):
        return made
    if not tensor.as_keys:
        made[:] = np.abs(np.random.default_rng(1).standard_normal(shape, np.float32))
        return made
    heads, _, D = made.shape[1:]
    by_component = made.reshape(heads, -1, D, lanes).swapaxes(2, 3)
    chunks = by_component if tensor.name == "past_key_t" else made.reshape(heads, -1, lanes, D)
    piece = min(TILE, lanes)
    rows = _rows(heads, piece, D, made.dtype)
    for key in range(0, S, piece):
        chunks[:, key // lanes, key % lanes : key % lanes + piece] = rows
    return made


@lru_cache(maxsize=1)
def _rows(heads: int, count: int, D: int, dtype: np.dtype[Any]) -> Array:
    made: Array = np.random.default_rng(1).standard_normal((heads, count, D), np.float32).astype(dtype)
    return made
