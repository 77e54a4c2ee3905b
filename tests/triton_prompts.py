"""Prompts for tests of the Triton backend. Whoever imports this needs it."""

from __future__ import annotations

import numpy as np
import torch
from cases import Array
from sample_cases import SampleCase
from torch_arrays import cached, to_torch

from mlx_sparse import oracle


def tensors(case: SampleCase) -> list[torch.Tensor]:
    """Queries as a model has them, heads side by side, and slices of caches."""
    q, k, v = (to_torch(array, case.dtype) for array in case.inputs())
    return [q.transpose(1, 2).contiguous().transpose(1, 2), cached(k), cached(v)]


def retained(case: SampleCase, lse: Array) -> Array:
    """Retained mass behind a float64 ``lse``."""
    dense = oracle.attend.dense_with_lse(*case.inputs(), scale=case.scale, left_padding=None)[1]
    mass: Array = np.exp(lse - dense)
    return mass
