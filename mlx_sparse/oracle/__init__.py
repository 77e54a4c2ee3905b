"""Implement every method in NumPy as a reference. Comments refer to the equations in docs/spec.

This package has the public functions of `mlx_sparse`, for NumPy arrays of any float dtype. Results are float64. The
modules contain the mathematics, which `mlx_sparse.api` calls after it has checked the arguments. The code is written
for clarity, not for speed. Only the tests, the evaluation and the benchmarks import this package.
"""

from typing import Any

from .blocks import block_lists, block_mask
from .key_codes import key_spread
from .prefill import minference_select
from .quest import page_bounds, quest_select
from .saap import (
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
from .sample import SampleSelection, merge, sample_scores, sample_selection, select_share
from .select import top_k_select, valid_keys
from .sparq import SparQSelection, sparq_select

__all__ = [
    "SampleSelection",
    "SparQSelection",
    "Target",
    "block_lists",
    "block_mask",
    "fold_batch_norm",
    "imbalance",
    "key_spread",
    "kmeans_step",
    "merge",
    "minference_select",
    "page_bounds",
    "query_network",
    "quest_select",
    "route_scores",
    "saap_index",
    "saap_indices",
    "saap_keys",
    "saap_target",
    "sample_scores",
    "sample_selection",
    "select_share",
    "selectivity",
    "sparq_select",
    "top_k_select",
    "valid_keys",
]


def __getattr__(name: str) -> Any:
    """Return a public function (`mlx_sparse.api.functions`)."""
    from ..api import numpy_functions

    return getattr(numpy_functions, name)
