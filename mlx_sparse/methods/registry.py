"""The table method x backend: what exists, where its code is, and why a backend cannot run here.

Code is named by import strings, so that reading the table imports no backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checks import BackendUnavailable, ConfigError, meant
from ..common.extras import not_installed

BACKENDS: Mapping[str, str] = {
    "oracle": "NumPy float64, everywhere: the specification that the tests compare with",
    "ops": "MLX array operations, everywhere MLX runs (CPU, Metal, CUDA)",
    "metal": "custom Metal kernels, on Apple GPUs; under test on any Linux machine (tests/msl)",
    "triton": "Triton kernels for torch tensors, on NVIDIA GPUs; slowly on any Linux machine with TRITON_INTERPRET=1",
    "onnx": "exported files on any ONNX runtime: the operators as functions of standard ones",
    "ort": "exported files on ONNX Runtime with native kernels for the CPU (AVX2, AVX-512, NEON)",
}

# Backends that take no MLX arrays, and what they take.
FOREIGN: Mapping[str, str] = {
    "oracle": "it takes NumPy arrays: call the same function in mlx_sparse.oracle",
    "triton": "it takes torch tensors: call the same function in mlx_sparse.cuda_ref",
    **dict.fromkeys(("onnx", "ort"), "it runs exported files: export-onnx, then mlx-sparse run-onnx"),
}

# Backends that read whole cache buffers and a `length`, where a slice would be copied on every call.
WHOLE_BUFFERS = frozenset({"metal"})

# What the Metal kernels keep in registers and threadgroup memory bounds the head dim and the group.
METAL_HEAD_DIM, METAL_GROUP = 256, 16
# These run on the matrix units, in tiles of 16 components and rows of any head.
MATRIX_FUNCTIONS = frozenset({"sample", "sample_scores", "sample_select", "attend_blocks"})


@dataclass(frozen=True)
class Method:
    """What a method is.

    Attributes:
        stage: "decode" (one query per step), "prefill" (a prompt, in pieces of any size) or "prefill and decode".
        source: the paper it comes from.
    """

    stage: str
    source: str


METHODS: Mapping[str, Method] = {
    "dense": Method("prefill and decode", "the baseline"),
    "sparq": Method("decode", "SparQ Attention, arXiv 2312.04985"),
    "saap": Method("decode", "SAAP, arXiv 2502.08246"),
    "sample": Method("prefill", "SampleAttention, MLSys 2025, arXiv 2406.15486"),
    "minference": Method("prefill", "MInference, arXiv 2407.02490"),
    "bigbird": Method("prefill", "BigBird, arXiv 2007.14062"),
    "streaming_prefill": Method("prefill", "StreamingLLM, arXiv 2309.17453"),
    "streaming": Method("decode", "StreamingLLM, arXiv 2309.17453"),
    "flexgen": Method("decode", "FlexGen, arXiv 2303.06865"),
    "oracle_top_k": Method("decode", "the bound in the SparQ paper"),
    "h2o": Method("decode", "H2O, arXiv 2306.14048"),
}

# Function by method and backend, then the functions that methods share.
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "dense": {
        "oracle": "oracle:dense_attention",
        "ops": "ops.attend:dense_attention",
        "metal": "ops.attend:dense_attention",  # MLX's own kernel
        "triton": "cuda_ref.api.decode:dense_attention",
        "onnx": "onnx_export:operator_model",
        "ort": "onnx_export:session_options",
    },
    "sparq": {
        "oracle": "oracle:sparq_attention",
        "ops": "ops.sparq:sparq_attention",
        "metal": "kernels.sparq:sparq_attention",
        "triton": "cuda_ref.api.decode:sparq_attention",
        "onnx": "onnx_export:operator_model",
        "ort": "onnx_export:session_options",
    },
    "saap": {
        "oracle": "oracle:saap_attention",
        "ops": "ops.saap:saap_attention",
        "metal": "kernels.saap:saap_attention",
        "triton": "cuda_ref.api.saap:saap_attention",
        "onnx": "onnx_export:operator_model",
        "ort": "onnx_export:session_options",
    },
    "streaming": {"oracle": "oracle:streaming_attention", "ops": "ops.baselines:streaming_attention"},
    "flexgen": {"oracle": "oracle:flexgen_attention", "ops": "ops.baselines:flexgen_attention"},
    "oracle_top_k": {"oracle": "oracle:oracle_top_k_attention", "ops": "ops.baselines:oracle_top_k_attention"},
    "h2o": {"oracle": "oracle:h2o_attention", "ops": "ops.baselines:h2o_attention"},
    "h2o_scores": {"oracle": "oracle:h2o_scores", "ops": "ops.baselines:h2o_scores"},
    "sample": {
        "oracle": "oracle:sample_attention",
        "ops": "ops.sample:sample_attention",
        "metal": "kernels.sample:sample_attention",
        "triton": "cuda_ref.api.prefill:sample_attention",
        "onnx": "onnx_export:operator_model",
        "ort": "onnx_export:session_options",
    },
    "minference": {"oracle": "oracle:minference_attention", "ops": "ops.prefill:minference_attention"},
    "bigbird": {"oracle": "oracle:bigbird_attention", "ops": "ops.prefill:bigbird_attention"},
    "streaming_prefill": {
        "oracle": "oracle:streaming_prefill_attention",
        "ops": "ops.prefill:streaming_prefill_attention",
    },
    "sample_scores": {
        "oracle": "oracle:sample_scores",
        "ops": "ops.sample:sample_scores",
        "metal": "kernels.sample:sample_scores",
        "triton": "cuda_ref.api.prefill:sample_scores",
    },
    "sample_select": {
        "oracle": "oracle:sample_select",
        "ops": "ops.sample:sample_select",
        "metal": "kernels.sample:sample_select",
        "triton": "cuda_ref.api.prefill:sample_select",
    },
    "saap_assign": {
        "oracle": "oracle:saap_assign",
        "ops": "common.kmeans:assign",
        "metal": "common.kmeans:assign",  # a matrix product and a maximum, once per key
        "triton": "cuda_ref.api.saap:saap_assign",
    },
    "saap_route": {
        "oracle": "oracle:saap_route",
        "ops": "ops.saap:saap_route",
        "metal": "kernels.saap:saap_route",
        "triton": "cuda_ref.api.saap:saap_route",
    },
    "saap_index": {
        "oracle": "oracle:saap_index",
        "ops": "common.csr:saap_index",
        "metal": "common.csr:saap_index",  # once every few hundred tokens
        "triton": "cuda_ref.api.saap:saap_index",
    },
    "saap_indices": {
        "oracle": "oracle:saap_indices",
        "ops": "ops.saap:saap_indices",
        "metal": "kernels.saap:saap_indices",
        "triton": "cuda_ref.api.saap:saap_indices",
    },
    "attend_blocks": {
        "oracle": "oracle:attend_blocks",
        "ops": "ops.blocks:attend_blocks",
        "metal": "kernels.blocks:attend_blocks",
        "triton": "cuda_ref.api.prefill:attend_blocks",
    },
    "attend_indices": {
        "oracle": "oracle:attend_indices",
        "ops": "ops.attend:attend_indices",
        "metal": "kernels.attend:attend_indices",
        "triton": "cuda_ref.api.decode:attend_indices",
    },
    "top_k_select": {
        "oracle": "oracle:top_k_select",
        "ops": "ops.select:top_k_select",
        "metal": "kernels.select:top_k_select",
        "triton": "cuda_ref.api.decode:top_k_select",
    },
    "sparq_select": {"oracle": "oracle:sparq_select", "ops": "ops.sparq:sparq_select"},
    # Not on the way of a decode step: array operations do for every backend.
    "dense_lse": {"ops": "ops.attend:dense_lse", "metal": "ops.attend:dense_lse"},
    "deviation": {"ops": "ops.sparq:deviation", "metal": "ops.sparq:deviation"},
    "masked_mean": {"ops": "ops.sparq:masked_mean", "metal": "ops.sparq:masked_mean"},
}


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


def unfit(backend: str, function: str, D: int, G: int) -> str | None:
    """Why ``function`` of ``backend`` takes no head dim ``D`` with ``G`` query heads per KV head; None when it does."""
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


def resolve(backend: str, function: str, *, D: int, G: int) -> str:
    """The backend that ``backend`` means for ``function`` on MLX arrays of these sizes.

    "auto" is metal where it has the function and can run, and ops otherwise.

    Raises:
        BackendUnavailable: a backend asked for by name cannot run here.
    """
    if backend == "auto":
        served = "metal" in FUNCTIONS.get(function, {})
        return "metal" if served and (unavailable("metal") or unfit("metal", function, D, G)) is None else "ops"
    require(backend, function, unfit(backend, function, D, G))
    return backend


def load(function: str, backend: str) -> Callable[..., Any]:
    """Import and return ``function`` of ``backend``.

    Raises:
        ConfigError: no such entry in the table.
    """
    entry = FUNCTIONS.get(function, {}).get(backend)
    if entry is None:
        raise ConfigError(f"backend: expected one that has {function}, got {backend}.")
    module, _, name = entry.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(f"mlx_sparse.{module}"), name)
    return loaded
