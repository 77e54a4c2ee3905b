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

ABI = 1  # mlx_sparse_abi() of native/c_api.cc
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
        *_fields("B Hq Hkv L capacity length D", ""),
        *[("query_type", ctypes.c_int32), ("type", ctypes.c_int32), ("scale", ctypes.c_float)],
        *_fields("", "queries keys values left_padding out lse"),
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


_CALL, _SIZE = ctypes.POINTER(Attention), ctypes.c_int64
ARGUMENTS: dict[str, list[Any]] = {
    "dense": [_CALL, _SIZE],
    "sparq": [_CALL, ctypes.POINTER(SparQ)],
    "indices": [_CALL, Buffer, Buffer, _SIZE],
    "blocks": [_CALL, Buffer, _SIZE, _SIZE],
    "sample": [_CALL, ctypes.c_float, ctypes.c_float, _SIZE, _SIZE, Buffer],
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


def ready(*arrays: mx.array | None) -> list[Any]:
    """Evaluate the arrays and return them. Arrays that are not contiguous are copied.

    Raises:
        BackendUnavailable: a function such as `mx.grad` traces one of the arrays.
    """
    given = [array for array in arrays if array is not None]
    if given and traced(*given):
        raise BackendUnavailable("backend: expected ops inside mx.compile, mx.vmap and mx.grad, got cpu.")
    mx.eval(*given)
    return [array if array is None or _contiguous(array) else _copied(array) for array in arrays]


def _contiguous(array: mx.array) -> bool:
    with memoryview(array) as view:  # type: ignore[arg-type]
        return view.c_contiguous


def _copied(array: mx.array) -> mx.array:
    array = mx.contiguous(array)
    mx.eval(array)
    return array


def buffer(array: mx.array | np.ndarray[Any, Any] | None) -> Buffer:
    """Return the memory of an array from `ready` or of a NumPy array, or no memory. The caller keeps the array."""
    if array is None or array.size == 0:
        return Buffer(None, 0)
    with memoryview(array) as view:  # type: ignore[arg-type]
        return Buffer(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)


def attend(
    function: str,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *arguments: Any,
    scale: float,
    length: int | None,
    left_padding: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Call a function of c_api.h that attends.

    Args:
        queries: ``(B, Hq, L, D)`` at positions ``length - L`` to ``length - 1``.
        keys, values: ``(B, Hkv, capacity, D)``. The first ``length`` rows are in use; None means all rows.
        arguments: the further arguments of the function.

    Returns:
        ``out (B, Hq, L, D)`` in the dtype of ``queries``, and float32 ``lse (B, Hq, L)``.
    """
    call = begin(queries, keys, values, scale, length, left_padding)
    out = np.empty(queries.shape, TYPES[queries.dtype][1])
    lse = np.empty(queries.shape[:3], np.float32)
    call.out, call.lse = buffer(out), buffer(lse)
    run(function, ctypes.byref(call), *arguments)
    return result(out, queries.dtype), mx.array(lse)


def begin(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    length: int | None,
    left_padding: mx.array | None = None,
) -> Attention:
    """Evaluate the arrays and return the arguments of a call without results. See `attend`.

    Args:
        left_padding: int ``(B,)``, first valid key of each sequence; None if no key is padding.
    """
    if keys.dtype != values.dtype:
        dtype = mx.result_type(keys, values)
        keys, values = keys.astype(dtype), values.astype(dtype)
    padding = None if left_padding is None else left_padding.astype(mx.int32)
    arrays = ready(queries, keys, values, padding)
    (B, Hq, L, D), (_, Hkv, capacity, _) = queries.shape, keys.shape
    types = TYPES[queries.dtype][0], TYPES[keys.dtype][0]
    length = capacity if length is None else length
    call = Attention(B, Hq, Hkv, L, capacity, length, D, *types, scale, *map(buffer, arrays))
    call.arrays = arrays  # which must exist during the call
    return call


def run(function: str, *arguments: Any) -> None:
    """Call ``mlx_sparse_NAME`` of c_api.h.

    Raises:
        RuntimeError: the sizes of the buffers differ from the arguments, or there is not enough memory.
    """
    message = _functions()[function](*arguments)
    if message is not None:
        raise RuntimeError(f"native {function}: {message.decode()}")


def result(array: np.ndarray[Any, Any], dtype: mx.Dtype) -> mx.array:
    """Return a copy of ``array`` as an MLX array; uint16 bits become bfloat16."""
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


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
