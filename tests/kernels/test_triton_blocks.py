"""Attention over listed key blocks in Triton, launch by launch; tests/conformance has the cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref.launchers import blocks, torch_ops
from sample_cases import SampleCase, assert_attends
from torch_arrays import DEVICE, cached, to_numpy, to_torch
from triton_prompts import tensors

from mlx_sparse import cuda_ref, oracle

pytestmark = pytest.mark.usefixtures("guarded")
SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)


def test_the_end_of_a_long_list_is_found_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LIST", 16)
    layout, arrays = SMALL.layout, tensors(SMALL)
    listed = np.full((2, 4, layout.row_blocks, 40), -1, dtype=np.int32)
    listed[:, :, :, 0] = 0
    listed[:, 0, :, 17] = 1
    out, lse = cuda_ref.attend_blocks(*arrays, torch.tensor(listed, device=DEVICE), block_size=32, scale=SMALL.scale)
    assert_attends(to_numpy(out), to_numpy(lse), SMALL, listed)


def test_without_a_list_every_block_is_attended() -> None:
    case = SampleCase(1, 3, 1, 100, 170, 80, "f16", 32)
    queries, keys, values = tensors(case)
    everything = np.broadcast_to(np.arange(6, dtype=np.int32), (1, 3, case.layout.row_blocks, 6))
    out, lse = torch_ops.attend_blocks(queries, keys, values, None, case.block_size, case.scale)
    assert_attends(to_numpy(out), to_numpy(lse), case, everything)
    assert_attends(to_numpy(out), to_numpy(lse), case, oracle.block_lists(np.ones((1, 3, 4, 6), dtype=bool)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_a_block_that_is_listed_twice_is_attended_once(dtype: torch.dtype) -> None:
    arrays = tensors(SMALL)
    once = torch.tensor([0, 1, 2], device=DEVICE).expand(SMALL.B, SMALL.Hq, SMALL.layout.row_blocks, 3)
    twice = torch.tensor([0, 0, 1, 2, 2, 2], device=DEVICE).expand(*once.shape[:3], 6).to(dtype)
    for found, alone in zip(
        cuda_ref.attend_blocks(*arrays, twice, block_size=32),
        cuda_ref.attend_blocks(*arrays, once, block_size=32),
        strict=True,
    ):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_what_lies_behind_the_keys_and_outside_the_lists_is_never_read(poison: float) -> None:
    case = SampleCase(1, 2, 1, 100, 170, 64, "f16", 32)
    q, k, v = (to_torch(array, case.dtype) for array in case.inputs())
    blocks = torch.tensor([[[[0, 2, -1], [0, 9, 3], [0, -1, -1], [0, 5, -1]]] * 2], dtype=torch.int32, device=DEVICE)
    clean = cuda_ref.attend_blocks(q, cached(k), cached(v), blocks, block_size=32)
    k[:, :, 32:64] = v[:, :, 32:64] = poison  # block 1, in no list
    dirty = cuda_ref.attend_blocks(q, cached(k, poison), cached(v, poison), blocks, block_size=32)
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before, after)
