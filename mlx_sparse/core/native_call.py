"""Call the native kernels on the memory of MLX arrays (mlx_sparse/native/c_api.h).

Arrays are evaluated and passed as pointers, without a copy if they are contiguous. Results are new arrays.
"""

from __future__ import annotations

import ctypes
import io
import threading
from functools import cache, partial
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from .. import native
from ..checks import BackendUnavailable

ABI = 3  # mlx_sparse_abi() of native/c_api.cc
# For each type its number in c_api.h, and a type of NumPy of the same size.
TYPES = {mx.float32: (0, np.float32), mx.float16: (1, np.float16), mx.bfloat16: (2, np.uint16)}


class Buffer(ctypes.Structure):
    """Pointer to contiguous memory and its size in bytes."""

    _fields_: ClassVar = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


def _fields(sizes: str, buffers: str) -> list[tuple[str, Any]]:
    return [*((name, ctypes.c_int64) for name in sizes.split()), *((name, Buffer) for name in buffers.split())]


class Attention(ctypes.Structure):
    """``SparseAttention`` of c_api.h."""

    _fields_: ClassVar[Any] = [
        *_fields("B Hq Hkv L capacity length D Dv", ""),
        *((name, ctypes.c_int32) for name in ("query_type", "type", "bias_type")),
        ("scale", ctypes.c_float),
        *_fields("", "queries keys values left_padding bias out lse"),
    ]


class SparQ(ctypes.Structure):
    """``SparseSparQ`` of c_api.h."""

    _fields_: ClassVar = _fields(
        "rank top_k local_window columns groups", "keys_t codes lo step center component_weight value_mean recall"
    )


class Buckets(ctypes.Structure):
    """``SparseBuckets`` of c_api.h."""

    _fields_: ClassVar = _fields(
        "B Hkv n buckets listed capacity length sink_tokens",
        "visited offsets key_ids covered left_padding indices counts",
    )


class Lists(ctypes.Structure):
    """``SparseLists`` of c_api.h."""

    _fields_: ClassVar = _fields("N block_size", "indices counts")


_CALL, _SIZE = ctypes.POINTER(Attention), ctypes.c_int64
ARGUMENTS: dict[str, list[Any]] = {
    "dense": [_CALL, _SIZE],
    "sparq": [_CALL, ctypes.POINTER(SparQ)],
    "indices": [_CALL, ctypes.POINTER(Lists)],
    "blocks": [_CALL, ctypes.POINTER(Lists)],
    "sample": [_CALL, ctypes.POINTER(Lists), ctypes.c_float, ctypes.c_float, _SIZE],
    "buckets": [ctypes.POINTER(Buckets)],
}


class _Probes(threading.local):
    """Number of times that the Python code of `_probe` has run in this thread."""

    count = 0


_probes = _Probes()


@partial(mx.compile, shapeless=True)
def _probe(*arrays: mx.array) -> mx.array:
    _probes.count += 1
    return arrays[0]


def traced(*arrays: mx.array) -> bool:
    """Return True if `mx.compile`, `mx.vmap`, `mx.grad` or a similar function traces one of the arrays.

    A compiled function runs its Python code if it traces an argument. Without tracing, it runs this code only for new
    types and numbers of axes, or after `mx.disable_compile`.
    """
    before = _probes.count
    _probe(*arrays)
    return _probes.count > before and any(map(_keeps_graph, arrays))


def _keeps_graph(array: mx.array) -> bool:
    """Return True if results of ``array`` cannot be evaluated, or keep their inputs when they are evaluated."""
    first, graph = array.flatten()[:1] + 0, io.StringIO()
    try:
        mx.eval(first)
    except ValueError:
        return True
    mx.export_to_dot(graph, first)
    return "label" in graph.getvalue()


def unsupported(*arrays: Any) -> str | None:
    """Return the reason why native kernels cannot run on the arrays, or None."""
    for array in arrays:
        if array.dtype not in TYPES:
            return f"its kernels take float32, float16 and bfloat16, not {str(array.dtype).removeprefix('mlx.core.')}"
    return "it does not run inside mx.compile, mx.vmap or mx.grad" if traced(*arrays) else None


def fill(call: Any, **arrays: mx.array | np.ndarray[Any, Any] | None) -> None:
    """Evaluate arrays and set the buffers of ``call`` with the same names to their memory.

    An array that is not contiguous is copied. ``call`` keeps all arrays. None is no buffer.

    Raises:
        BackendUnavailable: a function such as `mx.grad` traces one of the arrays.
    """
    read = [array for array in arrays.values() if isinstance(array, mx.array)]
    if read and traced(*read):
        raise BackendUnavailable("backend: expected ops inside mx.compile, mx.vmap and mx.grad, got cpu.")
    mx.eval(read)
    for name, given in arrays.items():
        if given is None or given.size == 0:
            continue
        view = memoryview(given)  # type: ignore[arg-type]
        if not view.c_contiguous:
            arrays[name] = mx.contiguous(given)  # type: ignore[arg-type]
            view = memoryview(arrays[name])  # type: ignore[arg-type]
        setattr(call, name, Buffer(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes))
    call.arrays = arrays


def attend(
    function: str,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *arguments: Any,
    scale: float,
    length: int | None,
    left_padding: mx.array | None = None,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Call a function of c_api.h that attends.

    Args:
        queries: ``(B, Hq, L, D)`` at positions ``length - L`` to ``length - 1``.
        keys, values: ``(B, Hkv, capacity, D)`` and ``(B, Hkv, capacity, Dv)``. The first ``length`` rows are in use;
            None means all rows.
        arguments: the further arguments of the function.
        left_padding: int ``(B,)``, first valid key of each sequence; None if no key is padding.
        bias: ``(B, Hq, 1, length)``, added to the logits of one query (sparq.25), or None.

    Returns:
        ``out (B, Hq, L, Dv)`` in the dtype of ``queries``, and float32 ``lse (B, Hq, L)``.
    """
    if keys.dtype != values.dtype:
        dtype = mx.result_type(keys, values)
        keys, values = keys.astype(dtype), values.astype(dtype)
    out = np.empty((*queries.shape[:3], values.shape[3]), TYPES[queries.dtype][1])
    lse = np.empty(queries.shape[:3], np.float32)
    padding = None if left_padding is None else left_padding.astype(mx.int32)
    call = sizes(queries, keys, scale, length)
    call.Dv = values.shape[3]
    call.bias_type = 0 if bias is None else TYPES[bias.dtype][0]
    fill(call, queries=queries, keys=keys, values=values, left_padding=padding, bias=bias, out=out, lse=lse)
    run(function, call, *arguments)
    # Bits of bfloat16 are uint16.
    return mx.array(out).view(queries.dtype) if queries.dtype == mx.bfloat16 else mx.array(out), mx.array(lse)


def sizes(queries: mx.array, keys: mx.array, scale: float, length: int | None) -> Attention:
    """Return the arguments of a call without buffers. See `attend`."""
    (B, Hq, L, D), (_, Hkv, capacity, _) = queries.shape, keys.shape
    types = TYPES[queries.dtype][0], TYPES[keys.dtype][0]
    return Attention(B, Hq, Hkv, L, capacity, capacity if length is None else length, D, D, *types, scale=scale)


def run(function: str, *arguments: Any) -> None:
    """Call ``mlx_sparse_NAME`` of c_api.h.

    Raises:
        RuntimeError: the sizes of the buffers differ from the arguments, or there is not enough memory.
    """
    message = _functions()[function](*arguments)
    if message is not None:
        raise RuntimeError(f"native {function}: {message.decode()}")


class _Functions(dict[str, Any]):
    """Functions of the library by name, which return a message or None."""

    def __missing__(self, name: str) -> Any:
        function = native.library()[f"mlx_sparse_{name}"]
        function.restype, function.argtypes = ctypes.c_char_p, ARGUMENTS[name]
        return self.setdefault(name, function)  # only now, because other threads may call it at once


@cache
def _functions() -> _Functions:
    if (abi := native.library().mlx_sparse_abi()) != ABI:
        raise BackendUnavailable(f"backend: expected a native library with interface {ABI}, got {abi}.")
    return _Functions()
