"""Run the functions of `mlx_sparse` on torch tensors with Triton kernels on NVIDIA GPUs. MLX is not required.

`sparq_attention`, `dense_attention` and `attend_indices` compute decode steps, and `sample_attention` computes a
prefill. Use `register` and `SparQCache` to run SparQ in Hugging Face transformers models.
"""

if __name__ != "mlx_sparse.cuda_ref":  # an editable install puts the project root on sys.path
    raise ImportError("cuda_ref/ is installed as mlx_sparse.cuda_ref: run `pip install -e .`, then import that")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .availability import unavailable as unavailable
    from .hf.attention import register as register
    from .hf.cache import SparQCache as SparQCache

_HOMES = {
    "hf": "SparQCache register",
    "availability": "unavailable",
    "api.parts": "saap_index saap_indices sample_scores top_k_select",
}  # imported on first use, because importing torch takes seconds
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    from mlx_sparse.api.functions import public_functions
    from mlx_sparse.extras import naming_missing

    if name not in _HOME_OF and (name.startswith("_") or name not in public_functions("triton")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_missing():
        home = import_module(f"{__name__}.{_HOME_OF.get(name, 'api')}")
    return getattr(home, name)
