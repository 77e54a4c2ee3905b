"""Find the function that runs a method on a backend, or the reason why the backend cannot run on this machine.

Functions are found by name, so that a new method needs no entry in a list. The function of method NAME on a backend is
``NAME_attention`` in ``methods/ROOM/BACKEND.py``. Functions that methods share are in ``core/ROOM/BACKEND.py``. The
search reads the files without importing MLX or torch, which takes time and fails if the library is missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import native
from ..checks import BackendUnavailable, ConfigError, did_you_mean
from ..extras import PackageMissing, not_installed

BACKENDS: Mapping[str, str] = {
    "oracle": "NumPy float64, everywhere: the reference that the tests compare with",
    "ops": "MLX array operations, everywhere MLX runs (CPU, Metal, CUDA)",
    "cpu": "native kernels on the memory of MLX arrays, where MLX's default device is a CPU",
    "metal": "custom Metal kernels, on Apple GPUs; under test on any Linux machine (tests/msl)",
    "triton": "Triton kernels for torch tensors, on NVIDIA GPUs; slowly on any Linux machine with TRITON_INTERPRET=1",
    "onnx": "exported files on any ONNX runtime: the operators as functions of standard ones",
    "ort": "exported files on ONNX Runtime with native kernels for the CPU (AVX2, AVX-512, NEON)",
}
# Backends that do not accept MLX arrays, with the reason.
FOREIGN: Mapping[str, str] = {
    "oracle": "it takes NumPy arrays: call the same function in mlx_sparse.oracle",
    "triton": "it takes torch tensors: call the same function in mlx_sparse.cuda_ref",
    **dict.fromkeys(("onnx", "ort"), "it runs exported files: export-onnx, then mlx-sparse run-onnx"),
}
# Backends that take whole cache buffers ``(B, Hkv, capacity, D)`` and a `length`, because MLX would copy a slice on
# every call. The first `length` rows are in use, and the last of them belong to the queries.
WHOLE_BUFFERS = frozenset({"cpu", "metal"})
# Files that are searched for a function or class, if they are not core/ROOM/KIND.py and methods/ROOM/KIND.py. The first
# file that defines a name counts.
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "triton": ("cuda_ref/api/parts.py", "cuda_ref/launchers/*.py", "cuda_ref/torch_functions.py"),
    "hooks": ("lm/hooks/*.py",),
}
# A definition, or an import "NAME as NAME" of a function that a backend shares with another backend.
DEFINED = re.compile(r"^(?:def|class) (\w+)|\b(\w+) as \2\b", re.MULTILINE)

# Registers and threadgroup memory limit the head dim and the query rows per KV head of the Metal kernels. A thread
# accumulates up to METAL_GROUP rows; `attend_rows`, the dense verification step, supports up to METAL_ROWS.
METAL_HEAD_DIM, METAL_GROUP, METAL_ROWS = 256, 16, 128
# Larger limits of the functions that divide a query group among threadgroups, for multi-head latent attention.
METAL_LIMITS = dict.fromkeys(("sparq", "attend_indices"), (576, 128))
# These functions use the matrix units in tiles of 16 components, and support more query rows per KV head.
MATRIX_FUNCTIONS = frozenset({"sample", "sample_scores", "sample_select", "attend_blocks", "attend_rows"})


def unavailable(backend: str) -> str | None:
    """Return the reason why ``backend`` cannot run on this machine, or None."""
    if backend not in BACKENDS:
        return f"unknown; this version has {', '.join(BACKENDS)}.{did_you_mean(backend, BACKENDS)}".removesuffix(".")
    if backend in WHOLE_BUFFERS:
        return _not_default(backend)
    if backend == "triton":
        return _ask("cuda_ref")
    if backend in ("onnx", "ort"):
        return _no_onnx(backend)
    return not_installed("mlx") if backend == "ops" else None


def _not_default(backend: str) -> str | None:
    """Return the reason why kernels for MLX's default device, "cpu" or "metal", cannot run on this machine, or None."""
    try:
        import mlx.core as mx
    except ImportError:
        return "MLX cannot be imported; run `mlx-sparse doctor` for details"
    if backend == "cpu":
        if mx.default_device().type != mx.DeviceType.cpu:
            return "the default device is not the CPU; call mx.set_default_device(mx.cpu)"
        return native.unavailable()
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


def unsupported(backend: str, function: str, D: int, G: int, bits: int | None = None, Dv: int = 0) -> str | None:
    """Return the reason why ``backend`` cannot run ``function`` for the given sizes, or None.

    Args:
        D: head dim.
        G: number of query heads per KV head.
        bits: number of bits per component of a quantized KV cache; None if the cache is not quantized.
        Dv: head dim of the values; 0 means D.
    """
    if backend != "metal":
        return "its kernels do not read quantized KV caches" if backend == "cpu" and bits is not None else None
    if Dv not in (0, D):
        return f"its kernels take values with the head dim of the keys ({D}), not {Dv}"
    if function in MATRIX_FUNCTIONS and bits is not None:
        return "its prefill kernels do not read quantized KV caches"
    if function in MATRIX_FUNCTIONS:
        fits = D % 16 == 0 and D <= METAL_HEAD_DIM
        return None if fits else f"its kernels take head dims that are multiples of 16 up to {METAL_HEAD_DIM}, not {D}"
    head_dim, group = METAL_LIMITS.get(function, (METAL_HEAD_DIM, METAL_GROUP))
    if D % 4 or not 8 <= D <= head_dim:
        return f"its kernels take head dims that are multiples of 4 from 8 to {head_dim}, not {D}"
    return None if G <= group else f"its kernels take up to {group} query heads per KV head, not {G}"


def refusal(backend: str, function: str, reason: str | None = None) -> str | None:
    """Return the reason why ``backend`` cannot run ``function`` on MLX arrays, or None.

    Args:
        reason: reason that the caller has already found; None if the caller has found no reason. If ``backend`` cannot
            run any function, the result is a more general reason.
    """
    reason = FOREIGN.get(backend) or unavailable(backend) or reason
    if reason is None and backend not in backends_of(function):
        return f"it does not support {function}; `mlx-sparse matrix` lists the methods of each backend"
    return reason


def require(backend: str, function: str, reason: str | None = None) -> None:
    """Raise an error if ``backend`` is not "auto" and has a `refusal`.

    Raises:
        BackendUnavailable: the backend cannot run the function. A call never falls back to another backend.
    """
    if backend != "auto" and (reason := refusal(backend, function, reason)) is not None:
        *others, last = ["auto", *(name for name in BACKENDS if name != backend and refusal(name, function) is None)]
        raise BackendUnavailable(f"backend: expected {', '.join(others)} or {last}, got {backend} ({reason}).")


def resolve(backend: str, function: str, *, D: int, G: int, bits: int | None = None, Dv: int = 0) -> str:
    """Return the name of the backend that runs ``function`` for the given sizes.

    "auto" selects metal or cpu if it supports the function and can run on this machine, and ops otherwise.
    `unsupported` describes the sizes.

    Raises:
        BackendUnavailable: ``backend`` is not "auto" and cannot run the function on this machine.
    """
    if backend == "auto":
        for name in ("metal", "cpu"):
            if name in backends_of(function) and not (unavailable(name) or unsupported(name, function, D, G, bits, Dv)):
                return name
        return "ops"
    require(backend, function, unsupported(backend, function, D, G, bits, Dv))
    return backend


@functools.cache
def backends_of(function: str) -> tuple[str, ...]:
    """Return the backends that support ``function``. Exported files contain the methods that have a function body."""
    exported = (_folder("onnx_export") / "bodies" / f"{function}.onnxtxt").is_file()
    return tuple(name for name in BACKENDS if (exported if name in ("onnx", "ort") else _home(function, name)))


@functools.cache  # every decode step loads a function
def load(function: str, backend: str) -> Callable[..., Any]:
    """Import and return the implementation of ``function`` in ``backend``.

    Args:
        function: name of a method, such as "sparq", or of a function, such as "sparq_select".

    Raises:
        ConfigError: ``backend`` does not support the function, or it runs exported files only.
    """
    if (home := _home(function, backend)) is None:
        raise ConfigError(f"backend: expected one that supports {function}, got {backend}.")
    loaded: Callable[..., Any] = _import(*home)
    return loaded


@functools.cache
def load_class(method: str, kind: str) -> Any:
    """Return the class ``NAMEState`` (kind "state") or ``NAMEHooks`` (kind "hooks") of ``method``, or None.

    Auxiliary cache state is a `mlx_sparse.cache.state.State`, and hooks are `mlx_sparse.lm.hooks.ModelHooks`.
    """
    found = _definitions(kind).get(method.replace("_", "") + kind)
    return found and _import(*found)


def _home(function: str, backend: str) -> tuple[str, str] | None:
    """Return the module of ``function`` in ``backend`` and the name in this module, or None if there is none."""
    found = _definitions(backend)
    return found.get(f"{function}_attention") or found.get(function)


@functools.cache
def _definitions(kind: str) -> dict[str, tuple[str, str]]:
    """Return a dict from each name that the files of ``kind`` define, in lower case, to the module and the name."""
    found: dict[str, tuple[str, str]] = {}
    places = ELSEWHERE.get(kind, (f"core/*/{kind}.py", f"methods/*/{kind}.py"))
    for package, _, pattern in (place.partition("/") for place in places):
        folder = _folder(package)
        for path in sorted(folder.glob(pattern)):
            module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            for names in DEFINED.findall(path.read_text(encoding="utf-8")):
                name = "".join(names)
                found.setdefault(name.lower(), (module, name))
    return found


def _folder(package: str) -> Path:
    """Return the folder of a package inside mlx_sparse. An editable installation has packages in several folders."""
    spec = importlib.util.find_spec(f"mlx_sparse.{package}")
    if spec is None or spec.origin is None:  # Python imports the clone's folder if a program lies beside it
        raise PackageMissing(
            f"mlx_sparse: expected the installed package, got the sources in {Path(__file__).parents[1]}, without "
            f"{package}. Move the program to another folder, or run `pip install -e .` in the clone."
        )
    return Path(spec.origin).parent


def _import(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"mlx_sparse.{module}"), name)
