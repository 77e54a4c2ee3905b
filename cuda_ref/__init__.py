"""Triton kernels for NVIDIA GPUs behind the functions of `mlx_sparse`, on torch tensors. Needs no mlx.

`sparq_attention`, `dense_attention`, `attend_indices` and `top_k_select` are the functions for decode steps,
`saap_attention`, `saap_assign`, `saap_route`, `saap_index` and `saap_indices` those for steps of SAAP, and
`sample_attention`, `sample_select`, `sample_scores` and `attend_blocks` those for prompts; `register` and `SparQCache`
run models of transformers.
"""

if __name__ != "mlx_sparse.cuda_ref":  # an editable install puts the project root on sys.path
    raise ImportError("cuda_ref/ is installed as mlx_sparse.cuda_ref: run `pip install -e .`, then import that")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .api.decode import attend_indices as attend_indices
    from .api.decode import dense_attention as dense_attention
    from .api.decode import sparq_attention as sparq_attention
    from .api.decode import top_k_select as top_k_select
    from .api.prefill import attend_blocks as attend_blocks
    from .api.prefill import sample_attention as sample_attention
    from .api.prefill import sample_scores as sample_scores
    from .api.prefill import sample_select as sample_select
    from .api.saap import saap_assign as saap_assign
    from .api.saap import saap_attention as saap_attention
    from .api.saap import saap_index as saap_index
    from .api.saap import saap_indices as saap_indices
    from .api.saap import saap_route as saap_route
    from .availability import unavailable as unavailable
    from .hf.attention import register as register
    from .hf.cache import SparQCache as SparQCache

_HOME_OF = {
    "SparQCache": "hf",
    "attend_blocks": "api.prefill",
    "attend_indices": "api.decode",
    "dense_attention": "api.decode",
    "register": "hf",
    "saap_assign": "api.saap",
    "saap_attention": "api.saap",
    "saap_index": "api.saap",
    "saap_indices": "api.saap",
    "saap_route": "api.saap",
    "sample_attention": "api.prefill",
    "sample_scores": "api.prefill",
    "sample_select": "api.prefill",
    "sparq_attention": "api.decode",
    "top_k_select": "api.decode",
    "unavailable": "availability",
}  # imported when used: torch takes seconds


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from mlx_sparse.common.extras import naming_missing

    with naming_missing():
        home = import_module(f"{__name__}.{_HOME_OF[name]}")
    return getattr(home, name)
