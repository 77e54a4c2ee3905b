"""Test SAAP's Triton kernels with networks of any size and lists of any length; tests/core compares numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from mlx_sparse.cuda_ref import torch_functions
from mlx_sparse.cuda_ref.launchers import attend, configs, saap
from saap_cases import SaapCase
from torch_arrays import DEVICE, cached, padding, to_numpy, to_torch

from mlx_sparse import cuda_ref, oracle

pytestmark = pytest.mark.usefixtures("checked_memory")
SMALL = SaapCase(Case(2, 6, 2, 200, 64, "f32", padding=(0, 60)), "random")


def integers(array: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(array, dtype=dtype, device=DEVICE)


def index(case: SaapCase, covered: int) -> dict[str, Any]:
    """Return the arguments of `saap_indices` for an index of ``covered`` keys."""
    ids = integers(case.bucket_ids()[..., :covered])
    window = {"sink_tokens": case.sink_tokens, "left_padding": case.step.padding}
    offsets, key_ids = cuda_ref.saap_index(ids, buckets=case.buckets, **window)
    return {"offsets": offsets, "key_ids": key_ids, "covered": covered, **window}


@pytest.mark.parametrize(("size", "weight"), [(1e-5, 1e4), (1e6, 1e-6)])
def test_activations_are_not_rounded_to_half_precision(size: float, weight: float) -> None:
    """Test sizes that are subnormal in float16 and that overflow float16."""
    rng = np.random.default_rng(5)
    hidden, out = rng.normal(size=(1, 64, 40)), weight * rng.normal(size=(1, 40, 60))
    queries = np.float32(rng.normal(size=(1, 4, 1, 64)) * size)
    given = {"hidden_weight": to_torch(hidden, "f16"), "out_weight": to_torch(out, "f16")}
    got = cuda_ref.saap_route(to_torch(queries, "f32"), probes=3, **given)
    exact = {name: to_numpy(array) for name, array in given.items()}
    np.testing.assert_array_equal(to_numpy(got), oracle.saap_route(queries, probes=3, **exact))


@pytest.mark.parametrize(("processors", "most"), [(1, 1024), (4, 1), (4, 2), (132, 1024)])
def test_rows_of_any_length_are_split(monkeypatch: pytest.MonkeyPatch, processors: int, most: int) -> None:
    """Test that long rows get more programs, empty rows are zero, and slots after the count are not read."""
    monkeypatch.setattr(configs, "processors", lambda device: processors)
    monkeypatch.setattr(attend, "MOST_ROWS", most)
    case = Case(3, 4, 2, 700, 64, "f32")
    q, k, v = case.inputs()
    counts = np.array([[700, 0], [1, 33], [64, 600]], np.int32)
    rng = np.random.default_rng(0)
    order = rng.permuted(np.broadcast_to(np.arange(700, dtype=np.int32), (3, 2, 700)), axis=2)
    used = np.arange(700) < counts[..., None]
    expected, expected_lse = oracle.attend.attend_indices(q, k, v, np.where(used, order, -1), scale=0.1)
    given = [cached(to_torch(array, "f32")) if n else to_torch(array, "f32") for n, array in enumerate((q, k, v))]
    behind = integers(np.where(used, order, 3))  # a valid key that must not be attended
    out, lse = attend.attend_indices(*given, behind, 0.1, integers(counts))
    np.testing.assert_allclose(to_numpy(out), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(to_numpy(lse), expected_lse, rtol=0, atol=1e-5)


def test_offsets_beyond_the_keys_read_nothing() -> None:
    """Test wrong offsets, which must not read the keys of another head."""
    offsets = integers([[[0, 5, 90, -3], [-4, 2, 2, 2]]])
    key_ids = integers([[[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]])
    sizes = {"length": 20, "covered": 15, "sink_tokens": 1, "capacity": 128}
    indices, _ = cuda_ref.saap_indices(integers([[[0, 1, 2]] * 2]), offsets, key_ids, **sizes)
    for row, first in zip(indices[0], (1, 7), strict=True):
        assert set(row.tolist()) <= {-1, 0, *range(first, first + 6), *range(15, 20)}


def test_invalid_bucket_numbers_are_empty_slots() -> None:
    """Test bucket numbers beyond the last bucket, whose offset would belong to another head."""
    given = index(SMALL, SMALL.covered)
    sizes = {name: given[name] for name in ("offsets", "key_ids", "covered", "sink_tokens")}
    sizes |= {"length": SMALL.step.S, "capacity": SMALL.step.S, "left_padding": padding(SMALL.step)}
    found = [saap.saap_indices(integers([[[3, slot]] * 2] * 2), **sizes) for slot in (-1, SMALL.buckets)]
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_keys_are_assigned_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, centroids = torch.randn(2, 3, 70, 64, device=DEVICE), torch.randn(3, 20, 64, device=DEVICE)
    whole = cuda_ref.saap_assign(keys, centroids)
    monkeypatch.setattr(torch_functions, "ASSIGNED_AT_ONCE", 2 * 3 * 20 * 16)
    assert torch.equal(cuda_ref.saap_assign(keys, centroids), whole)
