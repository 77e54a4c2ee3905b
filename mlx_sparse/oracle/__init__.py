"""Implement every method in NumPy as a reference. Comments refer to the equations in docs/spec.

Inputs of any float dtype are converted to float64, and results are float64. The code is written for clarity, not for
speed. Only the tests, the evaluation and the benchmarks import this package.
"""

from ..core.attend.oracle import attend_indices, dense_attention
from ..core.blocks.oracle import attend_blocks, block_lists, block_mask
from ..core.select.oracle import top_k_select, valid_keys
from ..methods.baselines.oracle import (
    flexgen_attention,
    h2o_attention,
    h2o_scores,
    oracle_top_k_attention,
    streaming_attention,
)
from ..methods.patterns.oracle import (
    bigbird_attention,
    hash_sparse_attention,
    hyperattention_attention,
    minference_attention,
    minference_select,
    streaming_prefill_attention,
)
from ..methods.quest.oracle import page_bounds, quest_attention, quest_select
from ..methods.saap.oracle import (
    Target,
    fold_batch_norm,
    imbalance,
    kmeans_step,
    query_network,
    route_scores,
    saap_assign,
    saap_attention,
    saap_index,
    saap_indices,
    saap_keys,
    saap_route,
    saap_target,
    selectivity,
)
from ..methods.sample.oracle import SampleSelection, merge, sample_attention, sample_scores, sample_select, select_share
from ..methods.sparq.oracle import SparQSelection, code_keys, key_spread, sparq_attention, sparq_select

__all__ = [
    "SampleSelection",
    "SparQSelection",
    "Target",
    "attend_blocks",
    "attend_indices",
    "bigbird_attention",
    "block_lists",
    "block_mask",
    "code_keys",
    "dense_attention",
    "flexgen_attention",
    "fold_batch_norm",
    "h2o_attention",
    "h2o_scores",
    "hash_sparse_attention",
    "hyperattention_attention",
    "imbalance",
    "key_spread",
    "kmeans_step",
    "merge",
    "minference_attention",
    "minference_select",
    "oracle_top_k_attention",
    "page_bounds",
    "query_network",
    "quest_attention",
    "quest_select",
    "route_scores",
    "saap_assign",
    "saap_attention",
    "saap_index",
    "saap_indices",
    "saap_keys",
    "saap_route",
    "saap_target",
    "sample_attention",
    "sample_scores",
    "sample_select",
    "select_share",
    "selectivity",
    "sparq_attention",
    "sparq_select",
    "streaming_attention",
    "streaming_prefill_attention",
    "top_k_select",
    "valid_keys",
]
