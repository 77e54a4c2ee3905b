"""Implement every method in NumPy as a reference. Comments refer to the equations in docs/spec.

This package has the public functions of `mlx_sparse`, for NumPy arrays of any float dtype. Results are float64. The
modules contain the mathematics, which `mlx_sparse.api` calls after it has checked the arguments. The code is written
for clarity, not for speed. Only the tests, the evaluation and the benchmarks import this package.
"""

from typing import Any

from ..core.attend import oracle as attend
from ..core.blocks import oracle as blocks
from ..core.blocks.oracle import block_lists, block_mask
from ..core.select import oracle as select
from ..core.select.oracle import top_k_select, valid_keys
from ..methods.baselines import oracle as baselines
from ..methods.baselines.oracle import quest_select
from ..methods.patterns import oracle as prefill
from ..methods.patterns.oracle import minference_select
from ..methods.saap import oracle as saap
from ..methods.saap.oracle import (
    Target,
    fold_batch_norm,
    imbalance,
    kmeans_step,
    query_network,
    route_scores,
    saap_index,
    saap_indices,
    saap_keys,
    saap_target,
    selectivity,
)
from ..methods.sample import oracle as sample
from ..methods.sample.oracle import SampleSelection, merge_kept, sample_scores, sample_selection, select_share
from ..methods.sparq import oracle as sparq
from ..methods.sparq.oracle import SparQSelection, key_spread, sparq_select

__all__ = [
    "SampleSelection",
    "SparQSelection",
    "Target",
    "attend",
    "baselines",
    "block_lists",
    "block_mask",
    "blocks",
    "fold_batch_norm",
    "imbalance",
    "key_spread",
    "kmeans_step",
    "merge_kept",
    "minference_select",
    "prefill",
    "query_network",
    "quest_select",
    "route_scores",
    "saap",
    "saap_index",
    "saap_indices",
    "saap_keys",
    "saap_target",
    "sample",
    "sample_scores",
    "sample_selection",
    "select",
    "select_share",
    "selectivity",
    "sparq",
    "sparq_select",
    "top_k_select",
    "valid_keys",
]


def __getattr__(name: str) -> Any:
    """Return a public function (`mlx_sparse.api.functions`)."""
    from ..api import numpy_functions

    return getattr(numpy_functions, name)
