"""Run SparQ in Hugging Face transformers with ``attn_implementation="sparq"`` and a `SparQCache`.

    from mlx_sparse.cuda_ref.hf import SparQCache, register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparq", dtype="auto", device_map="cuda")
    cache = SparQCache(model.config, "sparq:rank=32,top_k=128")
    model.generate(**inputs, past_key_values=cache)
    print(cache.report)

transformers is imported when one of the exported names is first used.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from mlx_sparse.checks import BackendUnavailable

from .. import unavailable

__all__ = ["SparQCache", "SparQLayer", "register"]

_HOME = {"SparQCache": ".cache", "SparQLayer": ".cache", "register": ".attention"}
OLDEST = (5, 17)  # oldest version with the cache classes and the attention interface used here


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_transformers()
    return getattr(import_module(_HOME[name], __name__), name)


def _require_transformers() -> None:
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = "none"
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if tuple(numbers) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise BackendUnavailable(
            f"transformers: expected version {wanted} or newer, got {version}. "
            f"Run `pip install 'transformers>={wanted},<6'`."
        )


def require() -> None:
    """Raise `BackendUnavailable` if the Triton kernels cannot run, because models would silently stay dense."""
    reason = unavailable()
    if reason is not None:
        raise BackendUnavailable(f"attn_implementation: expected a machine that runs Triton, got none: {reason}.")
