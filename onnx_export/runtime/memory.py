"""Allocate arrays that ONNX Runtime reads and writes in place."""

from __future__ import annotations

import mmap
from math import prod

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime

HUGE = 2 << 20  # bytes of a huge page
LINE = 64  # bytes of a cache line and of the widest vector
ONNX_BFLOAT16 = 16

Array = np.ndarray


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Allocate a C-ordered array of zeros, aligned for vector loads.

    Large arrays use huge pages if the platform supports huge pages. The operating system allocates each page when the
    page is first written.

    Raises:
        MemoryError: the array does not fit into memory.
    """
    kind = np.dtype(dtype)
    size = prod(shape) * kind.itemsize
    try:
        if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            align, pages = LINE, mmap.mmap(-1, size + LINE)
        else:  # private, because shared pages, the default of mmap, are rarely huge
            align, pages = HUGE, mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError, ValueError) as error:  # the last two for sizes beyond the address space
        raise MemoryError(str(error)) from None
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(kind).reshape(shape)


def ort_value(array: Array) -> onnxruntime.OrtValue:
    """Return an onnxruntime value that shares the memory of ``array``. The array must outlive the returned value."""
    if array.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
