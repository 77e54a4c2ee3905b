"""The specification, runnable: every method in NumPy float64, with the equation numbers of docs/spec.

Arrays of any float type come in and are promoted to float64; results are float64. Clarity before speed. Nothing outside
the tests and the evaluation calls this package.
"""

from .attend import attend_indices, dense_attention
from .baselines import (
    flexgen_attention,
    h2o_attention,
    h2o_scores,
    oracle_top_k_attention,
    streaming_attention,
)
from .select import top_k_select, valid_keys
from .sparq import SparQSelection, sparq_attention, sparq_select

__all__ = [
    "SparQSelection",
    "attend_indices",
    "dense_attention",
    "flexgen_attention",
    "h2o_attention",
    "h2o_scores",
    "oracle_top_k_attention",
    "sparq_attention",
    "sparq_select",
    "streaming_attention",
    "top_k_select",
    "valid_keys",
]
