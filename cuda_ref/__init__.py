"""Run the functions of `mlx_sparse` on torch tensors with Triton kernels on NVIDIA GPUs. MLX is not required.

`sparq_attention`, `dense_attention` and `attend_indices` compute decode steps, and `sample_attention` computes a
prefill. Use `register` and `SparQCache` to run SparQ in Hugging Face transformers models.
"""

if __name__ != "mlx_sparse.cuda_ref":  # an editable install puts the project root on sys.path
    raise ImportError("cuda_ref/ is installed as mlx_sparse.cuda_ref: run `pip install -e .`, then import that")

import importlib.util
import os
import sys

from mlx_sparse.extras import not_installed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .hf.attention import register as register
    from .hf.cache import SparQCache as SparQCache

_HOMES = {
    "hf": "SparQCache register",
    "api.parts": "saap_index saap_indices sample_scores top_k_select",
}  # imported on first use, because importing torch takes seconds
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
OLDEST = (8, 0)  # the oldest compute capability that the tests compile the kernels for


def interpreted() -> bool:
    """Return True if TRITON_INTERPRET=1 is set. Triton then interprets kernels on the CPU (slow, for tests only)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def unavailable() -> str | None:
    """Return the reason why the Triton kernels cannot run on this machine, or None."""
    if importlib.util.find_spec("triton") is None and sys.platform != "linux":
        return "triton has packages for Linux only"
    reason = not_installed("torch", "triton")
    return reason if reason or interpreted() else _no_gpu()


def _no_gpu() -> str | None:
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch does not work here: {error}"
    if torch.version.hip:
        return "torch is built for AMD GPUs; the kernels were tested for NVIDIA GPUs only"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU; TRITON_INTERPRET=1 runs the kernels on the CPU for tests"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return "the GPU is an sm_{}{}; the kernels need an sm_{}{} (A100) or newer".format(*capability, *OLDEST)
    return None


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    from mlx_sparse.api.functions import public_functions
    from mlx_sparse.extras import naming_missing

    if name not in _HOME_OF and (name.startswith("_") or name not in public_functions("triton")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_missing():
        home = import_module(f"{__name__}.{_HOME_OF.get(name, 'api')}")
    return getattr(home, name)
