"""Find the function that runs a method on a backend, or the reason why the backend cannot run on this machine."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from ..checks import BackendUnavailable, ConfigError, did_you_mean
from ..extras import not_installed
from .table import BACKENDS, FOREIGN, FUNCTIONS, HOOKS, STATES

# Registers and threadgroup memory limit the head dim and the query rows per KV head of the Metal kernels. A thread
# accumulates up to METAL_GROUP rows; `attend_rows`, the dense verification step, supports up to METAL_ROWS.
METAL_HEAD_DIM, METAL_GROUP, METAL_ROWS = 256, 16, 128
# These functions use the matrix units in tiles of 16 components, and support any number of query rows per KV head.
MATRIX_FUNCTIONS = frozenset({"sample", "sample_scores", "sample_select", "attend_blocks"})


def unavailable(backend: str) -> str | None:
    """Return the reason why ``backend`` cannot run on this machine, or None."""
    if backend not in BACKENDS:
        return f"unknown; this version has {', '.join(BACKENDS)}.{did_you_mean(backend, BACKENDS)}".removesuffix(".")
    if backend == "metal":
        return _no_metal()
    if backend == "triton":
        return _ask("cuda_ref.availability")
    if backend in ("onnx", "ort"):
        return _no_onnx(backend)
    return not_installed("mlx") if backend == "ops" else None


def _no_metal() -> str | None:
    try:
        import mlx.core as mx
    except ImportError:
        return "MLX cannot be imported; run `mlx-sparse doctor` for details"
    if not mx.metal.is_available():
        return "MLX finds no Metal GPU on this machine"
    if mx.default_device() != mx.gpu:
        return "the default device is not the GPU; call mx.set_default_device(mx.gpu)"
    return None


def _no_onnx(backend: str) -> str | None:
    reason = not_installed("onnx", "onnxruntime")
    return reason if reason or backend == "onnx" else _ask("onnx_export.runtime.native")


def _ask(module: str) -> str | None:
    """Return the reason why the backend in ``module`` cannot run on this machine, or None."""
    reason: str | None = importlib.import_module(f"mlx_sparse.{module}").unavailable()
    return reason


@functools.cache
def gpu_kind() -> str:
    """Return the kind of Apple GPU: g (base, Pro and unknown), s (Max) or d (Ultra), as in MLX's architecture name."""
    import mlx.core as mx

    letter = str(mx.device_info().get("architecture", ""))[-1:]
    return letter if letter in ("g", "s", "d") else "g"


def unsupported(backend: str, function: str, D: int, G: int, bits: int | None = None) -> str | None:
    """Return the reason why ``backend`` cannot run ``function`` for the given sizes, or None.

    Args:
        D: head dim.
        G: number of query heads per KV head.
        bits: number of bits per component of a quantized KV cache; None if the cache is not quantized.
    """
    if backend == "metal" and function in MATRIX_FUNCTIONS and bits is not None:
        return "its prefill kernels do not read quantized KV caches"
    if backend == "metal" and function in MATRIX_FUNCTIONS:
        fits = D % 16 == 0 and D <= METAL_HEAD_DIM
        return None if fits else f"its kernels take head dims that are multiples of 16 up to {METAL_HEAD_DIM}, not {D}"
    if backend == "metal" and (D % 4 or not 8 <= D <= METAL_HEAD_DIM):
        return f"its kernels take head dims that are multiples of 4 from 8 to {METAL_HEAD_DIM}, not {D}"
    if backend == "metal" and G > METAL_GROUP:
        return f"its kernels take up to {METAL_GROUP} query heads per KV head, not {G}"
    return None


def refusal(backend: str, function: str, reason: str | None = None) -> str | None:
    """Return the reason why ``backend`` cannot run ``function`` on MLX arrays, or None.

    Args:
        reason: reason that the caller has already found; None if the caller has found no reason. If ``backend`` cannot
            run any function, the result is a more general reason.
    """
    reason = FOREIGN.get(backend) or unavailable(backend) or reason
    if reason is None and backend not in FUNCTIONS.get(function, {}):
        return f"it does not support {function}; `mlx-sparse matrix` lists the methods of each backend"
    return reason


def require(backend: str, function: str, reason: str | None = None) -> None:
    """Raise an error if ``backend`` cannot run ``function`` on MLX arrays on this machine.

    If ``backend`` is "auto", do nothing.

    Args:
        reason: reason that the caller has already found; None if the caller has found no reason.

    Raises:
        BackendUnavailable: the backend cannot run the function. A call never falls back to another backend.
    """
    if backend != "auto" and (reason := refusal(backend, function, reason)) is not None:
        *others, last = ["auto", *(name for name in BACKENDS if name != backend and refusal(name, function) is None)]
        raise BackendUnavailable(f"backend: expected {', '.join(others)} or {last}, got {backend} ({reason}).")


def resolve(backend: str, function: str, *, D: int, G: int, bits: int | None = None) -> str:
    """Return the name of the backend that runs ``function`` for the given sizes.

    "auto" selects metal if metal supports the function and can run on this machine, and ops otherwise.

    Args:
        D: head dim.
        G: number of query heads per KV head.
        bits: number of bits per component of a quantized KV cache; None if the cache is not quantized.

    Raises:
        BackendUnavailable: ``backend`` is not "auto" and cannot run the function on this machine.
    """
    if backend == "auto":
        served = "metal" in FUNCTIONS.get(function, {})
        return (
            "metal"
            if served and (unavailable("metal") or unsupported("metal", function, D, G, bits)) is None
            else "ops"
        )
    require(backend, function, unsupported(backend, function, D, G, bits))
    return backend


def load(function: str, backend: str) -> Callable[..., Any]:
    """Import and return the implementation of ``function`` in ``backend``.

    Raises:
        ConfigError: ``backend`` does not support the function.
    """
    entry = FUNCTIONS.get(function, {}).get(backend)
    if entry is None:
        raise ConfigError(f"backend: expected one that supports {function}, got {backend}.")
    loaded: Callable[..., Any] = _import(entry)
    return loaded


def load_state(method: str) -> Callable[[], Any] | None:
    """Return the class for the auxiliary cache state of ``method``, or None if the method needs no state."""
    return _import(STATES[method]) if method in STATES else None


def load_hooks(method: str) -> Any:
    """Return the class for the model hooks of ``method``, or None if the method needs no hooks."""
    return _import(HOOKS[method]) if method in HOOKS else None


@functools.cache
def _import(entry: str) -> Any:
    """Import the object ``entry`` ("module:name"). The result is cached, because every decode step needs the object."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(f"mlx_sparse.{module}"), name)
