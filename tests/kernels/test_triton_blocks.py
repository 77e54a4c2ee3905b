"""Attention over listed key blocks in Triton against the float64 oracle; on the CPU in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref.launchers import blocks, sample, torch_ops
from sample_cases import SAMPLE_CASES, SampleCase, assert_attends, logit_error, selection
from torch_arrays import DEVICE, DTYPES, cached, to_numpy, to_torch
from triton_prompts import INTERPRETED, retained, tensors

from mlx_sparse import cuda_ref, oracle

pytestmark = pytest.mark.usefixtures("guarded")
by_case = pytest.mark.parametrize("case", INTERPRETED, ids=str)
SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)


@by_case
def test_attention_over_the_oracles_blocks_is_the_oracles(case: SampleCase) -> None:
    chosen = selection(case).blocks
    listed = torch.tensor(chosen, device=DEVICE)
    out, lse = cuda_ref.attend_blocks(*tensors(case), listed, block_size=case.block_size, scale=case.scale)
    assert out.dtype == DTYPES[case.dtype]
    assert lse.dtype == torch.float32
    assert_attends(to_numpy(out), to_numpy(lse), case, chosen)


@pytest.mark.parametrize("case", [SAMPLE_CASES[n] for n in (2, 5)], ids=str)
def test_the_mass_that_is_counted_is_attended(case: SampleCase) -> None:
    """By the kept columns alone, and by the kept bins alone, where sampled rows are not attended in full."""
    queries, keys, values = tensors(case)
    scores = cuda_ref.sample_scores(queries, keys, **case.sampling)
    alphas = (case.alpha_column, case.alpha_slash)
    columns, bins = (to_numpy(sample.keep(side, alpha)) != 0 for side, alpha in zip(scores, alphas, strict=True))
    error = 4 * logit_error(*case.inputs()[:2], case.scale)
    for flags, alpha in (((columns, False & bins), alphas[0]), ((False & columns, bins), alphas[1])):
        lists = torch.tensor(oracle.block_lists(oracle.merge(*flags, case.layout)), device=DEVICE)
        _, lse = cuda_ref.attend_blocks(queries, keys, values, lists, block_size=case.block_size, scale=case.scale)
        mass = retained(case, to_numpy(lse).astype(np.float64))
        for start, stop in (region.sample for region in case.layout.regions):
            assert (mass[..., start:stop].mean(axis=-1) >= alpha - 1e-6 - error).all()


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


# Row blocks 0 to 4 of five.
HOSTILE = {
    "a hole": [[-1], [1], [0, -1, 2], [-1, -1, 3], [0, 1, 2, 3, 4]],
    "beyond the keys": [[0, 5], [0, 1, 2**31 - 1], [2**31 - 1, 0, 7], [0, 2, 100], [4, 5, 6, 7]],
    "above the diagonal": [[0, 1, 2], [2, 3], [0, 3, 4], [1, 4], [0]],
    "negative": [[-(2**31), 0], [-7, 1], [-2, -1, 1], [-5], [-1, 4]],
    "empty": [[], [], [], [], []],
}


@pytest.mark.parametrize("lists", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(("L", "block_size", "dtype"), [(150, 32, "f32"), (560, 128, "f16")])
def test_what_is_no_block_in_a_list_is_an_empty_slot(
    lists: list[list[int]], L: int, block_size: int, dtype: str
) -> None:
    case = SampleCase(1, 2, 1, L, L, 64, dtype, block_size)
    width = max(map(len, lists))
    one = np.array([row + [-1] * (width - len(row)) for row in lists], dtype=np.int32).reshape(5, width)
    blocks = np.stack([one, np.where(one == 0, 99, one)])[None]  # one head without the first block
    out, lse = cuda_ref.attend_blocks(
        *tensors(case), torch.tensor(blocks, device=DEVICE), block_size=block_size, scale=case.scale
    )
    q, k, v = case.inputs()
    _, expected_lse = oracle.attend_blocks(q, k, v, blocks, block_size=block_size, scale=case.scale)
    assert_attends(to_numpy(out), to_numpy(lse), case, blocks)
    nothing = np.isneginf(expected_lse)
    assert nothing.any()
    assert (to_numpy(out)[nothing] == 0).all()


def test_a_block_number_of_64_bits_does_not_wrap_to_a_block() -> None:
    arrays = tensors(SMALL)
    shape = (SMALL.B, SMALL.Hq, SMALL.layout.row_blocks, 1)
    blocks = torch.full(shape, 1, device=DEVICE)
    for found, alone in zip(
        cuda_ref.attend_blocks(*arrays, torch.cat([blocks, blocks + 2**32], dim=3), block_size=32),
        cuda_ref.attend_blocks(*arrays, blocks.int(), block_size=32),
        strict=True,
    ):
        assert torch.equal(found, alone)


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
