"""Finding the function that runs a method on a backend, and the reasons why a backend cannot run here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from ..checks import BackendUnavailable, ConfigError, meant
from ..extras import not_installed
from .table import BACKENDS, FOREIGN, FUNCTIONS, HOOKS, STATES

# What the Metal kernels keep in registers and threadgroup memory bounds the head dim and the query rows of a KV head:
# a thread keeps the sums of up to METAL_GROUP rows; `attend_rows`, the dense check, takes up to METAL_ROWS.
METAL_HEAD_DIM, METAL_GROUP, METAL_ROWS = 256, 16, 128
# These run on the matrix units, in tiles of 16 components and rows of any head.
MATRIX_FUNCTIONS = frozenset({"sample", "sample_scores", "sample_select", "attend_blocks"})


def unavailable(backend: str) -> str | None:
    """Why ``backend`` cannot run here; None when it can."""
    if backend not in BACKENDS:
        return f"unknown; this version has {', '.join(BACKENDS)}.{meant(backend, BACKENDS)}".removesuffix(".")
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
        return "MLX does not work here; `mlx-sparse doctor` says more"
    if not mx.metal.is_available():
        return "MLX finds no Metal GPU on this machine"
    if mx.default_device() != mx.gpu:
        return "the default device is not the GPU; mx.set_default_device(mx.gpu) makes it so"
    return None


def _no_onnx(backend: str) -> str | None:
    reason = not_installed("onnx", "onnxruntime")
    return reason if reason or backend == "onnx" else _ask("onnx_export.runtime.native")


def _ask(module: str) -> str | None:
    """What a backend that is not a part of this folder says of itself."""
    reason: str | None = importlib.import_module(f"mlx_sparse.{module}").unavailable()
    return reason


@functools.cache
def gpu_kind() -> str:
    """The kind of Apple GPU by MLX's letter: g (base and Pro), s (Max) or d (Ultra); g for any other."""
    import mlx.core as mx

    letter = str(mx.device_info().get("architecture", ""))[-1:]
    return letter if letter in ("g", "s", "d") else "g"


def unfit(backend: str, function: str, D: int, G: int, bits: int | None = None) -> str | None:
    """Why ``function`` of ``backend`` takes no head dim ``D`` with ``G`` query heads per KV head; None when it does.

    ``bits`` are those of packed rows.
    """
    if backend == "metal" and function in MATRIX_FUNCTIONS and bits is not None:
        return "its kernels for prompts read no packed rows"
    if backend == "metal" and function in MATRIX_FUNCTIONS:
        fits = D % 16 == 0 and D <= METAL_HEAD_DIM
        return None if fits else f"its kernels take head dims that are multiples of 16 up to {METAL_HEAD_DIM}, not {D}"
    if backend == "metal" and (D % 4 or not 8 <= D <= METAL_HEAD_DIM):
        return f"its kernels take head dims that are multiples of 4 from 8 to {METAL_HEAD_DIM}, not {D}"
    if backend == "metal" and G > METAL_GROUP:
        return f"its kernels take up to {METAL_GROUP} query heads per KV head, not {G}"
    return None


def refusal(backend: str, function: str, reason: str | None = None) -> str | None:
    """Why a backend asked for by name cannot run ``function`` on MLX arrays here; ``reason`` if nothing else."""
    reason = FOREIGN.get(backend) or unavailable(backend) or reason
    if reason is None and backend not in FUNCTIONS.get(function, {}):
        return f"it does not have {function}; `mlx-sparse matrix` shows what it has"
    return reason


def require(backend: str, function: str, reason: str | None = None) -> None:
    """Check that a backend asked for by name can run ``function`` on MLX arrays here; "auto" always can.

    Args:
        reason: why it cannot, if the caller knows one.

    Raises:
        BackendUnavailable: it cannot; nothing falls back silently.
    """
    if backend != "auto" and (reason := refusal(backend, function, reason)) is not None:
        raise BackendUnavailable(f"backend: expected auto or ops, got {backend} ({reason}).")


def resolve(backend: str, function: str, *, D: int, G: int, bits: int | None = None) -> str:
    """The backend that ``backend`` means for ``function`` on MLX arrays of these sizes, or rows packed in ``bits``.

    "auto" is metal where it has the function and can run, and ops otherwise.

    Raises:
        BackendUnavailable: a backend asked for by name cannot run here.
    """
    if backend == "auto":
        served = "metal" in FUNCTIONS.get(function, {})
        return "metal" if served and (unavailable("metal") or unfit("metal", function, D, G, bits)) is None else "ops"
    require(backend, function, unfit(backend, function, D, G, bits))
    return backend


def load(function: str, backend: str) -> Callable[..., Any]:
    """Import and return ``function`` of ``backend``.

    Raises:
        ConfigError: no such entry in the table.
    """
    entry = FUNCTIONS.get(function, {}).get(backend)
    if entry is None:
        raise ConfigError(f"backend: expected one that has {function}, got {backend}.")
    loaded: Callable[..., Any] = _import(entry)
    return loaded


def load_state(method: str) -> Callable[[], Any] | None:
    """The class of what a cache begins for ``method`` at its first step; None if it keeps nothing."""
    return _import(STATES[method]) if method in STATES else None


def load_hooks(method: str) -> Any:
    """The class of what ``method`` does around a model and its calls; None if attending is all."""
    return _import(HOOKS[method]) if method in HOOKS else None


@functools.cache
def _import(entry: str) -> Any:
    """What a string of the table names; asked for in every layer of every step."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(f"mlx_sparse.{module}"), name)
