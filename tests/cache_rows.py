"""Rows of caches and padding masks, for the tests of transformers models and of their cache."""

from __future__ import annotations

import numpy as np
import torch
from torch_arrays import DEVICE


def padded(*first: int, length: int) -> torch.Tensor:
    """2-D mask of sequences whose first valid token is ``first``."""
    return (torch.arange(length) >= torch.tensor(first)[:, None]).to(DEVICE)


def states(B: int, Hkv: int, L: int, D: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys whose mean is far larger than their spread, and values."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(B, Hkv, L, D)) * np.linspace(0.1, 2, D) + 300 * np.linspace(-1, 1, D)
    values = rng.normal(size=(B, Hkv, L, D)) + 0.5
    return torch.tensor(keys, dtype=torch.float32, device=DEVICE), torch.tensor(
        values, dtype=torch.float32, device=DEVICE
    )
