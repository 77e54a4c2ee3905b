"""What the benchmark compares: every contender attends with one token to the same keys and values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.numpy_helper import from_array

from mlx_sparse.tools.bench.core import Contender, Row, Sample

from ..build import TYPES, operator_model
from ..domain import DEFAULT
from ..runtime import memory, native
from .caches import Caches, Problem

Array = npt.NDArray[Any]

NAMES = {  # in the order of the table
    "read": "plain read of K and V",
    "gqa": "ORT GroupQueryAttention, shared buffers",
    "standard": "ORT standard operators, group as rows",
    "torch-gqa": "torch SDPA, enable_gqa",
    "torch-rows": "torch SDPA, group as rows",
    "body-dense": "our CachedAttention, function body",
    "body-sparq": "our SparQAttention, function body",
    "native-dense": "our CachedAttention, native",
    "native-sparq": "our SparQAttention, native",
    # saap.py
    "body-saap": "our SaapAttention, function body",
    "native-saap": "our SaapAttention, native",
    "native-saap-kmeans": "the same, routed by centroids",
}
TORCH, BODIES, KERNELS = ("torch-gqa", "torch-rows"), ("body-dense", "body-sparq"), ("native-dense", "native-sparq")
HALF = ("float32", "float16")
PAUSE = 0.003  # seconds between two contenders: pools that spin for a moment after their work do so here
# How long our threads may wait for a processor: a share of the sample's time, or some seconds. Beyond both, others
# disturbed it.
MOST_DELAY, LEAST_DELAY = 0.06, 5e-5
CONTENDERS: dict[str, tuple[str, ...]] = {
    "read": HALF,
    "gqa": (*HALF, "int8"),
    "standard": ("float32",),
    **dict.fromkeys(TORCH, (*HALF, "bfloat16")),
    **dict.fromkeys((*BODIES, *KERNELS), HALF),
}


class Bound:
    """One way to attend, bound to sets of caches.

    Attributes:
        bind: make the next step use set ``i``.
        run: take the step.
        output: what it gave, (Hq, D); None for a plain read.
    """

    def __init__(self, bind: Callable[[int], None], run: Callable[[], object]) -> None:
        self.bind, self.run = bind, run
        self.output: Callable[[], Array] | None = None


class CpuStep(Contender):
    """A decode step on the CPU: of two steps on two sets of caches the second. As in a model, its threads are awake.

    Args:
        make: binds it.
    """

    def __init__(self, row: Row, caches: Caches, make: Callable[[], Bound]) -> None:
        super().__init__(row)
        self._caches, self._make = caches, make

    def prepare(self) -> None:
        self._bound = self._make()

    def check(self) -> str | None:
        expected, allowed = self._caches.plant()
        self._bound.bind(0)
        self._bound.run()
        out = None if self._bound.output is None else self._bound.output().astype(np.float64)
        self._caches.restore()
        if out is None:
            return None
        error = float(np.abs(out - expected).max())
        return None if error <= allowed else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"

    def step(self, turn: int) -> Sample:
        time.sleep(PAUSE)
        self._bound.bind(2 * turn)
        self._bound.run()
        self._bound.bind(2 * turn + 1)
        before, start = _waited(), time.perf_counter()
        self._bound.run()
        seconds = time.perf_counter() - start
        return Sample(seconds, _waited() - before > max(MOST_DELAY * seconds, LEAST_DELAY))


def _waited() -> float:
    """Seconds that threads of ours that could run had to wait for a processor so far; 0 where the system is silent."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_bytes().split()[1])
        except (OSError, IndexError):  # a thread that ended meanwhile
            continue
    return total / 1e9


def unavailable(name: str) -> str | None:
    """Why a contender cannot run here, None if it can."""
    if name.startswith("native") and (reason := native.unavailable()):
        return "not built" if reason == native.NOT_BUILT else reason
    return torch_missing() if name in TORCH else None


def torch_missing() -> str | None:
    """Why torch cannot be compared with, None if it can."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by its first import: no pool here spins
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not installed"
    return None


def build(name: str, dtype: str, caches: Caches, threads: int) -> Bound:
    """The contender ``name`` over these caches."""
    if name == "read":
        return _read(caches, threads)
    if name in TORCH:
        return _torch(name, caches, threads)
    if name in (*BODIES, *KERNELS):
        return ours(name, dtype, caches, threads)
    model = _gqa(caches.problem, dtype) if name == "gqa" else _standard(caches.problem)
    return Ort(dtype, model, caches, options(threads))


def options(threads: int, mode: str = "off") -> onnxruntime.SessionOptions:
    """Options that let several sessions of one process be timed in turns: no pool spins when its work is done."""
    made = native.session_options(mode)
    made.intra_op_num_threads = threads
    made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return made


class Ort(Bound):
    """A model on onnxruntime, its caches bound in place; what is no cache is an input by name.

    Args:
        inputs: further ones, one array or a set of them that are taken in turns.
    """

    def __init__(
        self,
        dtype: str,
        model: onnx.ModelProto,
        caches: Caches,
        options: onnxruntime.SessionOptions,
        inputs: Mapping[str, Array | list[Array]] | None = None,
    ) -> None:
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self._binding = self._session.io_binding()
        more = inputs or {}
        stored = {"past_key": caches.keys, "past_key_t": caches.keys_t, "past_value": caches.values}
        stored |= {name: sets for name, sets in more.items() if isinstance(sets, list)}
        p = caches.problem
        kind = np.dtype(np.float32) if dtype == "int8" else caches.dtype
        row = caches.keys[0][:, :, p.S - 1 : p.S], caches.values[0][:, :, p.S - 1 : p.S]
        given = {
            "query": p.queries.astype(kind),
            "key": row[0].astype(kind) * kind.type(caches.step),
            "value": row[1].astype(kind) * kind.type(caches.step),
            "past_sums": np.zeros((1, p.Hkv, 3, p.D), np.float32),
            "past_length": np.array([p.S - 1]),
            "left_padding": np.array([0]),
            "seqlens_k": np.array([p.S - 1], np.int32),
            "total_sequence_length": np.array(p.S, np.int32),
            "length": np.array([p.S]),
            "scale": np.array([caches.step], np.float32),
            **{name: array for name, array in more.items() if not isinstance(array, list)},
        }
        shapes = {info.name: info.shape for info in self._session.get_inputs()}
        outputs = [info.name for info in self._session.get_outputs()]
        self._caches = {past: [memory.ort_value(a) for a in stored[past]] for past in stored if past in shapes}
        self._in_place = {past: now for past in shapes if (now := past.replace("past", "present")) in outputs}
        self._arrays = []  # OrtValues share their memory
        for past, shape in shapes.items():
            if past not in stored:
                self._arrays.append(np.ascontiguousarray(given[past].reshape(shape)))
                value = memory.ort_value(self._arrays[-1])
                self._binding.bind_ortvalue_input(past, value)
                if past in self._in_place:
                    self._binding.bind_ortvalue_output(self._in_place[past], value)
        self._out = np.zeros((p.Hq, p.D), kind)
        shape = next(info.shape for info in self._session.get_outputs() if info.name == "output")
        self._binding.bind_ortvalue_output("output", memory.ort_value(self._out.reshape(shape)))
        super().__init__(self._bind, self._run)
        self.output = lambda: self._out

    def _bind(self, i: int) -> None:
        for past, values in self._caches.items():
            value = values[i % len(values)]
            self._binding.bind_ortvalue_input(past, value)
            if past in self._in_place:
                self._binding.bind_ortvalue_output(self._in_place[past], value)

    def _run(self) -> None:
        self._session.run_with_iobinding(self._binding)


def ours(name: str, dtype: str, caches: Caches, threads: int) -> Bound:
    """A session of our operator for a decode step, bound to the caches."""
    p = caches.problem
    attributes: dict[str, Any] = {"scale": p.scale}
    if name.endswith("sparq"):
        operator = "SparQAttention"
        attributes |= {"rank": p.rank, "top_k": p.top_k, "local_window": p.window, "lanes": p.lanes}
        # dense_below 0: the step under test is taken at every length.
        attributes |= {"reallocate": 0, "group_reduce": 0, "component_score": 0, "dense_below": 0}
    else:
        operator = "CachedAttention"
        attributes["window"] = 0
    sizes = {"B": 1, "Hq": p.Hq, "Hkv": p.Hkv, "L": 1, "C": p.C, "D": p.D}
    model = operator_model(operator, dtype=dtype, sizes=sizes, **attributes)
    return Ort(dtype, model, caches, options(threads, "auto" if name in KERNELS else "off"))


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[int]]],
    outputs: Mapping[str, tuple[int, Sequence[int]]],
    constants: Mapping[str, Array],
) -> onnx.ModelProto:
    taken, given = ([make_tensor_value_info(n, t, s) for n, (t, s) in side.items()] for side in (inputs, outputs))
    graph = make_graph(nodes, "step", taken, given, [from_array(np.asarray(a), n) for n, a in constants.items()])
    opsets = [make_opsetid("", DEFAULT.opset), make_opsetid("com.microsoft", 1)]
    return make_model(graph, ir_version=DEFAULT.ir, opset_imports=opsets)


def _gqa(p: Problem, dtype: str) -> onnx.ModelProto:
    """GroupQueryAttention appends to its caches, as ours does."""
    quantised = dtype == "int8"
    kind = TYPES["float32" if quantised else dtype]
    stored, integer = onnx.TensorProto.INT8 if quantised else kind, onnx.TensorProto.INT32
    cache = (stored, (1, p.Hkv, p.C, p.D))
    inputs = {
        "query": (kind, (1, 1, p.Hq * p.D)),
        "key": (kind, (1, 1, p.Hkv * p.D)),
        "value": (kind, (1, 1, p.Hkv * p.D)),
        "past_key": cache,
        "past_value": cache,
        "seqlens_k": (integer, (1,)),
        "total_sequence_length": (integer, ()),
    }
    names = [*inputs]
    extra: dict[str, Any] = {}
    if quantised:
        inputs["scale"] = (onnx.TensorProto.FLOAT, (1,))
        names += ["", "", "", "", "", "scale", "scale"]
        extra = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    outputs = {"output": (kind, (1, 1, p.Hq * p.D)), "present_key": cache, "present_value": cache}
    sizes: dict[str, Any] = {"num_heads": p.Hq, "kv_num_heads": p.Hkv, "scale": p.scale, "domain": "com.microsoft"}
    return _model([make_node("GroupQueryAttention", names, [*outputs], **sizes, **extra)], inputs, outputs, {})


def _standard(p: Problem) -> onnx.ModelProto:
    """Dense attention in float32: the queries of a group are rows of one product. onnxruntime fuses the Transpose."""
    nodes = [
        make_node("Mul", ["query", "factor"], ["q"]),
        make_node("Transpose", ["past_key"], ["k_t"], perm=[0, 1, 3, 2]),
        make_node("MatMul", ["q", "k_t"], ["logits"]),
        make_node("Less", ["positions", "length"], ["written"]),
        make_node("Where", ["written", "logits", "lowest"], ["masked"]),
        make_node("Softmax", ["masked"], ["weights"], axis=-1),
        make_node("MatMul", ["weights", "past_value"], ["output"]),
    ]
    kind = TYPES["float32"]
    cache, rows = (kind, (1, p.Hkv, p.C, p.D)), (kind, (1, p.Hkv, p.G, p.D))
    inputs = {"query": rows, "past_key": cache, "past_value": cache, "length": (onnx.TensorProto.INT64, (1,))}
    lowest = np.float32(np.finfo(np.float32).min)
    constants: dict[str, Any] = {"factor": np.float32(p.scale), "positions": np.arange(p.C), "lowest": lowest}
    return _model(nodes, inputs, {"output": rows}, constants)


def _torch(name: str, caches: Caches, threads: int) -> Bound:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    p = caches.problem
    grouped = name == "torch-gqa"

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    query = tensor(p.queries.astype(caches.dtype).reshape((1, p.Hq, 1, p.D) if grouped else (1, p.Hkv, p.G, p.D)))
    keys, values = ([tensor(array)[:, :, : p.S] for array in arrays] for arrays in (caches.keys, caches.values))
    state: dict[str, Any] = {}

    def bind(i: int) -> None:
        state["set"] = i % len(keys)

    def run() -> None:
        i = state["set"]
        with torch.inference_mode():
            state["out"] = scaled_dot_product_attention(query, keys[i], values[i], scale=p.scale, enable_gqa=grouped)

    torch.set_num_threads(threads)
    made = Bound(bind, run)
    made.output = lambda: state["out"].float().numpy().reshape(p.Hq, p.D)
    return made


def _read(caches: Caches, threads: int) -> Bound:
    """Look at every byte of K and V: the largest of their 32-bit words, a part for each thread."""
    pool = ThreadPoolExecutor(threads)
    pairs = list(zip(caches.keys, caches.values, strict=True))
    parts = [[np.array_split(array.reshape(-1).view(np.int32), threads) for array in pair] for pair in pairs]
    state = {"set": 0}

    def bind(i: int) -> None:
        state["set"] = i % len(parts)

    def look(thread: int) -> list[Any]:
        return [split[thread].max() for split in parts[state["set"]]]

    def run() -> None:
        others = [pool.submit(look, thread) for thread in range(1, threads)]
        look(0)
        for other in others:
            other.result()

    return Bound(bind, run)
