"""Ways to attend with one call, bound to arrays: models on onnxruntime, torch, and a plain read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.numpy_helper import from_array

from mlx_sparse.tools.bench.core import Case

from ..build import TYPES
from ..domain import DEFAULT
from ..runtime import memory, native
from .caches import Caches, Problem

Array = npt.NDArray[Any]
Infos = Mapping[str, tuple[int, Sequence[int]]]  # element type and shape by name

HALF = ("float32", "float16")


class Bound:
    """One way to attend, bound to its arrays.

    Attributes:
        run: attend.
        bind: make the next call use set ``i`` of the caches.
        output: what it gave, (Hq, D) or for a prompt (Hq, S, D); None for a plain read.
        kept: arrays whose memory the runtime borrows.
    """

    def __init__(
        self,
        run: Callable[[], object],
        bind: Callable[[int], None] = lambda i: None,
        output: Callable[[], Array] | None = None,
        kept: object = None,
    ) -> None:
        self.run, self.bind, self.output, self.kept = run, bind, output, kept


def unavailable(name: str) -> str | None:
    """Why a contender cannot run here, None if it can."""
    if name.startswith("native") and (reason := native.unavailable()):
        return "not built" if reason.startswith(native.NOT_BUILT) else reason
    return torch_missing() if name.startswith("torch") else None


def torch_missing() -> str | None:
    """Why torch cannot be compared with, None if it can."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read by its first import: no pool here spins
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not installed"
    return None


def session(model: onnx.ModelProto, name: str, threads: int) -> onnxruntime.InferenceSession:
    """A contender's model, with the native kernels if its name says so.

    Several sessions of one process are timed in turns: no pool spins when its work is done.
    """
    options = native.session_options("auto" if name.startswith("native") else "off")
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Infos, outputs: Infos, constants: Mapping[str, Array] | None = None
) -> onnx.ModelProto:
    """A model of these nodes."""
    taken, given = ([make_tensor_value_info(n, t, s) for n, (t, s) in side.items()] for side in (inputs, outputs))
    kept = [from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    opsets = [make_opsetid("", DEFAULT.opset), make_opsetid("com.microsoft", 1)]
    return make_model(make_graph(nodes, "step", taken, given, kept), ir_version=DEFAULT.ir, opset_imports=opsets)


def group_query_attention(case: Case, dtype: str, L: int, capacity: int) -> onnx.ModelProto:
    """onnxruntime's GroupQueryAttention of ``L`` tokens, which appends to its caches as ours does."""
    quantised = dtype == "int8"
    kind = TYPES["float32" if quantised else dtype]
    stored, integer = onnx.TensorProto.INT8 if quantised else kind, onnx.TensorProto.INT32
    query, key = (kind, (1, L, case.Hq * case.D)), (kind, (1, L, case.Hkv * case.D))
    cache = (stored, (1, case.Hkv, capacity, case.D))
    inputs: dict[str, Any] = {"query": query, "key": key, "value": key, "past_key": cache, "past_value": cache}
    inputs |= {"seqlens_k": (integer, (1,)), "total_sequence_length": (integer, ())}
    names = [*inputs]
    extra: dict[str, Any] = {}
    if quantised:
        inputs["scale"] = (onnx.TensorProto.FLOAT, (1,))
        names += ["", "", "", "", "", "scale", "scale"]
        extra = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    outputs = {"output": query, "present_key": cache, "present_value": cache}
    extra |= {"num_heads": case.Hq, "kv_num_heads": case.Hkv, "scale": case.scale, "domain": "com.microsoft"}
    return model_of([make_node("GroupQueryAttention", names, [*outputs], **extra)], inputs, outputs)


def standard(p: Problem) -> onnx.ModelProto:
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
    return model_of(nodes, inputs, {"output": rows}, constants)


def ort_step(
    running: onnxruntime.InferenceSession,
    dtype: str,
    caches: Caches,
    inputs: Mapping[str, Array | list[Array]] | None = None,
) -> Bound:
    """A decode step on onnxruntime, its caches bound in place; what is no cache is an input by name.

    Args:
        inputs: further ones, one array or a set of them that are taken in turns.
    """
    binding, p, more = running.io_binding(), caches.problem, inputs or {}
    stored = {"past_key": caches.keys, "past_key_t": caches.keys_t, "past_value": caches.values}
    stored["past_key_codes"] = caches.codes
    stored |= {name: sets for name, sets in more.items() if isinstance(sets, list)}
    kind = caches.kind
    shapes = {info.name: info.shape for info in running.get_inputs()}
    row = caches.keys[0][:, :, p.S - 1 : p.S], caches.values[0][:, :, p.S - 1 : p.S]
    given = {
        "query": p.queries.astype(kind),
        "key": caches.loaded(row[0]).astype(kind),
        "value": caches.loaded(row[1]).astype(kind),
        "past_sums": np.zeros(shapes.get("past_sums", ()), np.float32),
        "past_summary": caches.summary,
        "past_length": np.array([p.S - 1]),
        "left_padding": np.array([0]),
        "seqlens_k": np.array([p.S - 1], np.int32),
        "total_sequence_length": np.array(p.S, np.int32),
        "length": np.array([p.S]),
        "scale": np.array([caches.step], np.float32),
        **{name: array for name, array in more.items() if not isinstance(array, list)},
    }
    outputs = {info.name: info.shape for info in running.get_outputs()}
    in_place = {past: now for past in shapes if (now := past.replace("past", "present")) in outputs}
    sets = {past: [memory.ort_value(array) for array in stored[past]] for past in stored if past in shapes}

    def place(past: str, value: onnxruntime.OrtValue) -> None:
        binding.bind_ortvalue_input(past, value)
        if past in in_place:
            binding.bind_ortvalue_output(in_place[past], value)

    arrays = {past: np.ascontiguousarray(given[past].reshape(shapes[past])) for past in shapes if past not in stored}
    for past, array in arrays.items():
        place(past, memory.ort_value(array))
    out = np.zeros((p.Hq, p.D), kind)
    binding.bind_ortvalue_output("output", memory.ort_value(out.reshape(outputs["output"])))

    def bind(i: int) -> None:
        for past, values in sets.items():
            place(past, values[i % len(values)])

    return Bound(lambda: running.run_with_iobinding(binding), bind, lambda: out, arrays)


def of_torch(query: Array, keys: Sequence[Array], values: Sequence[Array], threads: int, **options: Any) -> Bound:
    """torch's attention of ``query`` over one of several sets."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def tensor(array: Array) -> torch.Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    q, sets = tensor(query), [(tensor(k), tensor(v)) for k, v in zip(keys, values, strict=True)]
    state: dict[str, Any] = {"set": 0}

    def bind(i: int) -> None:
        state["set"] = i % len(sets)

    def run() -> None:
        with torch.inference_mode():
            state["out"] = scaled_dot_product_attention(q, *sets[state["set"]], **options)

    torch.set_num_threads(threads)
    return Bound(run, bind, lambda: np.asarray(state["out"].float().numpy()[0]))


def plain_read(caches: Caches, threads: int) -> Bound:
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

    return Bound(run, bind)
