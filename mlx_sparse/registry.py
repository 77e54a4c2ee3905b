"""The table method x backend: what exists, where its code is, and why a backend cannot run here.

Code is named by import strings, so that reading the table imports no backend.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .checks import BackendUnavailable, ConfigError

BACKENDS: Mapping[str, str] = {
    "oracle": "NumPy float64, everywhere: the specification that the tests compare with",
    "ops": "MLX array operations, everywhere MLX runs (CPU, Metal, CUDA)",
}


@dataclass(frozen=True)
class Method:
    """What a method is.

    Attributes:
        stage: "decode" (one query per step) or "prefill and decode".
        source: the paper it comes from.
    """

    stage: str
    source: str


METHODS: Mapping[str, Method] = {
    "dense": Method("prefill and decode", "the baseline"),
    "sparq": Method("decode", "SparQ Attention, arXiv 2312.04985"),
    "streaming": Method("decode", "StreamingLLM, arXiv 2309.17453"),
    "flexgen": Method("decode", "FlexGen, arXiv 2303.06865"),
    "oracle_top_k": Method("decode", "the bound in the SparQ paper"),
    "h2o": Method("decode", "H2O, arXiv 2306.14048"),
}

# Function by method and backend, then the functions that methods share.
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "dense": {"oracle": "oracle:dense_attention", "ops": "ops.attend:dense_attention"},
    "sparq": {"oracle": "oracle:sparq_attention", "ops": "ops.sparq:sparq_attention"},
    "streaming": {"oracle": "oracle:streaming_attention", "ops": "ops.baselines:streaming_attention"},
    "flexgen": {"oracle": "oracle:flexgen_attention", "ops": "ops.baselines:flexgen_attention"},
    "oracle_top_k": {"oracle": "oracle:oracle_top_k_attention", "ops": "ops.baselines:oracle_top_k_attention"},
    "h2o": {"oracle": "oracle:h2o_attention", "ops": "ops.baselines:h2o_attention"},
    "h2o_scores": {"oracle": "oracle:h2o_scores", "ops": "ops.baselines:h2o_scores"},
    "attend_indices": {"oracle": "oracle:attend_indices", "ops": "ops.attend:attend_indices"},
    "dense_lse": {"ops": "ops.attend:dense_lse"},
    "sparq_select": {"oracle": "oracle:sparq_select", "ops": "ops.sparq:sparq_select"},
    "deviation": {"ops": "ops.sparq:deviation"},
}


def unavailable(backend: str) -> str | None:
    """Why ``backend`` cannot run here; None when it can."""
    if backend not in BACKENDS:
        return f"unknown; this version has {', '.join(BACKENDS)}"
    if backend == "ops" and importlib.util.find_spec("mlx") is None:
        return "mlx is not installed"
    return None


def resolve(backend: str) -> str:
    """The backend that ``backend`` ("auto" or a name) means for MLX arrays.

    Raises:
        BackendUnavailable: a backend asked for by name cannot run here; nothing falls back silently.
    """
    name = "ops" if backend == "auto" else backend
    reason = unavailable(name)
    if reason is None and name == "oracle":
        reason = "it takes NumPy arrays: call the same function in mlx_sparse.oracle"
    if reason is not None:
        raise BackendUnavailable(f"backend: expected auto or ops, got {backend} ({reason}).")
    return name


def load(function: str, backend: str) -> Callable[..., Any]:
    """Import and return ``function`` of ``backend``.

    Raises:
        ConfigError: no such entry in the table.
    """
    entry = FUNCTIONS.get(function, {}).get(backend)
    if entry is None:
        raise ConfigError(f"backend: expected one that has {function}, got {backend}.")
    module, _, name = entry.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return loaded
