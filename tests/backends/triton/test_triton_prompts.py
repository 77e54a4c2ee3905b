"""Test SampleAttention's Triton launchers and lists of key blocks; tests/core compares numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref.launchers import blocks, configs, sample
from sample_cases import SampleCase, assert_attends, assert_same_scores, logit_error, selection
from torch_arrays import DEVICE, to_numpy
from triton_prompts import tensors

from mlx_sparse import BackendUnavailable, cuda_ref, oracle
from mlx_sparse.core.blocks.layout import Layout

pytestmark = pytest.mark.usefixtures("checked_memory")
SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)


def test_long_lists_are_read_in_several_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LIST", 16)
    layout, arrays = SMALL.layout, tensors(SMALL)
    listed = np.full((2, 4, layout.row_blocks, 40), -1, dtype=np.int32)
    listed[:, :, :, 0] = 0
    listed[:, 0, :, 17] = 1
    out, lse = cuda_ref.attend_blocks(*arrays, torch.tensor(listed, device=DEVICE), block_size=32, scale=SMALL.scale)
    assert_attends(to_numpy(out), to_numpy(lse), SMALL, listed)


def test_missing_list_attends_every_block() -> None:
    case = SampleCase(1, 3, 1, 100, 170, 80, "f16", 32)
    queries, keys, values = tensors(case)
    everything = np.broadcast_to(np.arange(6, dtype=np.int32), (1, 3, case.layout.row_blocks, 6))
    out, lse = blocks.attend_blocks(queries, keys, values, None, case.block_size, case.scale)
    assert_attends(to_numpy(out), to_numpy(lse), case, everything)


@pytest.mark.parametrize("processors", [1, 40])
def test_keys_split_between_any_number_of_programs(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: processors)
    monkeypatch.setattr(sample, "BLOCK_SPLITS", 2)  # statistics are read in several iterations
    q, k, _ = SMALL.inputs()
    found = cuda_ref.sample_scores(*tensors(SMALL)[:2], **SMALL.sampling)
    expected = selection(SMALL)
    for got, scores in zip(found, (expected.column, expected.slash), strict=True):
        assert_same_scores(to_numpy(got), scores, logit_error(q, k, SMALL.scale))


def test_lists_are_built_within_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = tensors(SMALL)
    at_once = cuda_ref.sample_attention(*arrays, **SMALL.parameters, return_stats=True)
    made: list[int] = []
    merge = sample.merge_kept

    def counted(*given: Any) -> torch.Tensor:
        blocks = merge(*given)
        made.append(blocks.numel() * 4)
        return blocks

    monkeypatch.setattr(sample, "merge_kept", counted)
    monkeypatch.setattr(sample, "LIST_BYTES", 500)
    out, stats = cuda_ref.sample_attention(*arrays, **SMALL.parameters, return_stats=True)
    assert len(made) >= 3
    assert max(made) <= 500
    assert torch.equal(out, at_once[0])
    assert torch.equal(stats.head_density, at_once[1].head_density)


@pytest.mark.parametrize("entry", [1, 100, 1000, 10**9])
@pytest.mark.parametrize(("L", "S"), [(1 << 20, 1 << 20), (2048, 1 << 20), (1, 1), (100, 300)])
def test_portions_cover_every_row_block_once(L: int, S: int, entry: int) -> None:
    layout = Layout(L, S, 1, 128)
    found = list(sample.portions(layout, entry))
    assert [row for first, stop in reversed(found) for row in range(first, stop)] == list(range(layout.row_blocks))
    for first, stop in found:
        assert first + 1 == stop or (stop - first) * (layout.first_block + stop) * entry <= sample.LIST_BYTES


@pytest.mark.parametrize(("L", "S", "chunks"), [(600, 700, 3), (130, 191, 1), (1, 40, 1), (70, 106, 9)])
def test_merged_lists_match_the_oracle(monkeypatch: pytest.MonkeyPatch, L: int, S: int, chunks: int) -> None:
    """Include flags without the first block, and lists that need several iterations."""
    monkeypatch.setattr(sample, "MERGED", 16)
    layout = Layout(L, S, chunks, 32)
    flags = np.random.default_rng(0).random((2, 1, 2, len(layout.regions), layout.key_blocks)) < 0.2
    expected = oracle.merge_kept(*flags, layout)
    for block in layout.sampled_blocks:
        expected[:, :, block - layout.first_block, : block + 1] = True
    kept = sample.SampleMasks(*(torch.tensor(side.astype(np.uint8), device=DEVICE) for side in flags))
    counts = torch.empty(1, 2, layout.row_blocks, dtype=torch.int32, device=DEVICE)
    blocks = sample.merge_kept(kept, layout, 0, layout.row_blocks, layout.key_blocks, counts)
    assert (oracle.block_mask(to_numpy(blocks), layout.key_blocks) == expected).all()
    assert (to_numpy(counts) == expected.sum(axis=3)).all()
    filled = to_numpy(blocks >= 0)
    assert (filled[..., :-1] >= filled[..., 1:]).all()


def test_head_dims_without_a_kernel_are_refused() -> None:
    queries, keys, _ = tensors(SMALL)
    with pytest.raises(BackendUnavailable, match="head dims that are multiples of 8 from 16 to 256, got 12"):
        cuda_ref.sample_scores(queries[..., :12], keys[..., :12])
    with pytest.raises(BackendUnavailable, match="head dims that are multiples of 8 from 16 to 256, got 12"):
        cuda_ref.sample_attention(queries[..., :12], keys[..., :12], keys[..., :12])
