"""Sparse attention for long-context language models on MLX.

Functions on arrays: `sparq_attention` and the baselines. Models: `enable`, `disable`, `sparse`.
Names are imported on first use: importing this package imports neither mlx nor mlx_lm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BackendUnavailable": "checks",
    "ConfigError": "checks",
    "ShapeError": "checks",
    "ArtefactError": "checks",
    "SparseAttentionError": "checks",
    "Stats": "stats",
    "attend_indices": "api",
    "dense_attention": "api",
    "flexgen_attention": "api",
    "h2o_attention": "api",
    "h2o_scores": "api",
    "oracle_top_k_attention": "api",
    "sparq_attention": "api",
    "streaming_attention": "api",
    "disable": "lm",
    "enable": "lm",
    "report": "lm",
    "sparse": "lm",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .api import (
        attend_indices,
        dense_attention,
        flexgen_attention,
        h2o_attention,
        h2o_scores,
        oracle_top_k_attention,
        sparq_attention,
        streaming_attention,
    )
    from .checks import ArtefactError, BackendUnavailable, ConfigError, ShapeError, SparseAttentionError
    from .lm import disable, enable, report, sparse
    from .stats import Stats


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
