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
    from .api import attend_blocks as attend_blocks
    from .api import attend_indices as attend_indices
    from .api import dense_attention as dense_attention
    from .api import saap_assign as saap_assign
    from .api import saap_attention as saap_attention
    from .api import saap_index as saap_index
    from .api import saap_indices as saap_indices
    from .api import saap_route as saap_route
    from .api import sample_attention as sample_attention
    from .api import sample_scores as sample_scores
    from .api import sample_select as sample_select
    from .api import sparq_attention as sparq_attention
    from .api import top_k_select as top_k_select
    from .availability import unavailable as unavailable
    from .hf.attention import register as register
    from .hf.cache import SparQCache as SparQCache

_HOME_OF = {
    "SparQCache": "hf",
    "attend_blocks": "api",
    "attend_indices": "api",
    "dense_attention": "api",
    "register": "hf",
    "saap_assign": "api",
    "saap_attention": "api",
    "saap_index": "api",
    "saap_indices": "api",
    "saap_route": "api",
    "sample_attention": "api",
    "sample_scores": "api",
    "sample_select": "api",
    "sparq_attention": "api",
    "top_k_select": "api",
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
