"""Arrays that the library owns and that runtimes read and write in place."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime

HUGE = 2 << 20  # bytes of a huge page where there are such
LINE = 64  # bytes of a cache line, and of the widest vector
ONNX_BFLOAT16 = 16

Array = npt.NDArray[Any]


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Make a C-ordered array of zeros, aligned to vectors, on huge pages where the platform has them.

    Pages are taken when they are first written.

    Raises:
        MemoryError: it does not fit.
    """
    kind = np.dtype(dtype)
    size = prod(shape) * kind.itemsize
    try:
        if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            align, pages = LINE, mmap.mmap(-1, size + LINE)
        else:  # private: shared pages, which are the default of mmap, are seldom huge
            align, pages = HUGE, mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError, ValueError) as error:  # the last two: more than there are addresses
        raise MemoryError(str(error)) from None
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(kind).reshape(shape)


def ort_value(array: Array) -> onnxruntime.OrtValue:
    """Return a value of onnxruntime that shares the memory of the array; the array must outlive it."""
    if array.dtype == ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
