"""The public functions on MLX arrays: `mlx_sparse.common.functions`, which says what they take and return."""

from ..common.functions import Functions
from ..methods import METHODS, Prefill
from .mlx import MLX

_functions = Functions(MLX())

attend_blocks = _functions.attend_blocks
attend_indices = _functions.attend_indices
dense_attention = _functions.dense_attention
flexgen_attention = _functions.flexgen_attention
h2o_attention = _functions.h2o_attention
h2o_scores = _functions.h2o_scores
oracle_top_k_attention = _functions.oracle_top_k_attention
saap_assign = _functions.saap_assign
saap_attention = _functions.saap_attention
saap_route = _functions.saap_route
sample_attention = _functions.sample_attention
sample_select = _functions.sample_select
sparq_attention = _functions.sparq_attention
streaming_attention = _functions.streaming_attention

__all__ = [
    "attend_blocks",
    "attend_indices",
    "dense_attention",
    "flexgen_attention",
    "h2o_attention",
    "h2o_scores",
    "oracle_top_k_attention",
    "saap_assign",
    "saap_attention",
    "saap_route",
    "sample_attention",
    "sample_select",
    "sparq_attention",
    "streaming_attention",
]

# Baselines for prompts are their settings.
_baselines = [method for name, method in METHODS.items() if issubclass(method, Prefill) and name != "sample"]
globals().update({f"{method.name}_attention": _functions.of_method(method) for method in _baselines})
