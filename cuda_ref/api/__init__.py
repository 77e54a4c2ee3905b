"""The public functions on torch tensors: `mlx_sparse.common.functions`, which says what they take and return.

Slices of larger buffers are taken as they are; ``keys_t`` is fast as a slice of a buffer whose last axis is a multiple
of 16. `mlx_sparse.cuda_ref.api.parts` has what only this backend shows.
"""

from mlx_sparse.common.functions import Functions

from .library import Torch
from .parts import saap_index, saap_indices, sample_scores, top_k_select

_functions = Functions(Torch())

attend_blocks = _functions.attend_blocks
attend_indices = _functions.attend_indices
dense_attention = _functions.dense_attention
saap_assign = _functions.saap_assign
saap_attention = _functions.saap_attention
saap_route = _functions.saap_route
sample_attention = _functions.sample_attention
sample_select = _functions.sample_select
sparq_attention = _functions.sparq_attention

__all__ = [
    "attend_blocks",
    "attend_indices",
    "dense_attention",
    "saap_assign",
    "saap_attention",
    "saap_index",
    "saap_indices",
    "saap_route",
    "sample_attention",
    "sample_scores",
    "sample_select",
    "sparq_attention",
    "top_k_select",
]
