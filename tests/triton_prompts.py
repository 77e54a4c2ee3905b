"""Prompts for tests of the Triton backend. Whoever imports this needs it."""

from __future__ import annotations

import numpy as np
import torch
from cases import Array
from sample_cases import SAMPLE_CASES, SampleCase
from torch_arrays import cached, to_torch

from mlx_sparse import oracle

# Blocks of 128 take the interpreter longest: a smaller prompt of them stands for the shared ones. The prompts of
# test_parity_sample.py run as well, one of them with such blocks.
INTERPRETED = [
    *(case for case in SAMPLE_CASES if case.block_size < 128),
    SampleCase(1, 4, 1, 200, 390, 128, "f16", 128, alpha_column=0.8, alpha_slash=0.8),
    SampleCase(1, 2, 1, 130, 191, 64, "f32", 32, alpha_column=0.3, alpha_slash=0.3),  # the sample begins in a last row
]


def tensors(case: SampleCase) -> list[torch.Tensor]:
    """Queries as a model has them, heads side by side, and slices of caches."""
    q, k, v = (to_torch(array, case.dtype) for array in case.inputs())
    return [q.transpose(1, 2).contiguous().transpose(1, 2), cached(k), cached(v)]


def retained(case: SampleCase, lse: Array) -> Array:
    """Retained mass behind a float64 ``lse``."""
    dense = oracle.attend.dense_with_lse(*case.inputs(), scale=case.scale, left_padding=None)[1]
    mass: Array = np.exp(lse - dense)
    return mass
