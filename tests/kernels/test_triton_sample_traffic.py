"""Bytes that the Triton kernels of a prompt move, counted in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_sparse.cuda_ref.availability import interpreted, unavailable
from require import absent

if not interpreted():
    absent("triton-interpreter", "on a GPU nothing is counted")
if reason := unavailable():
    absent("triton", reason)

import torch
from sample_cases import SampleCase
from triton_bytes import Launch, shuffled, watched
from triton_prompts import tensors

from mlx_sparse import cuda_ref

CASE = SampleCase(1, 4, 2, 300, 600, 64, "f16", 64)
ITEM, SIZE, D = 2, CASE.block_size, CASE.D


def watch(function: Any, *given: Any, **settings: Any) -> tuple[Any, list[Launch]]:
    with watched(settings.pop("order", None)) as launches:
        found = function(*given, **settings)
    return found, launches


def test_attention_reads_the_listed_blocks_and_nothing_else_of_the_keys() -> None:
    layout = CASE.layout
    lists = np.full((1, 4, layout.row_blocks, 6), -1, np.int32)
    for h in range(4):
        for index in range(layout.row_blocks):
            row_block = layout.first_block + index
            chosen = sorted({0, row_block, (h * 3 + index) % (row_block + 1)})
            lists[0, h, index, : len(chosen)] = chosen
    _, (launch,) = watch(cuda_ref.attend_blocks, *tensors(CASE), torch.tensor(lists), block_size=SIZE, scale=CASE.scale)
    filled = lists[lists >= 0]
    keys = np.minimum((filled + 1) * SIZE, CASE.S) - filled * SIZE
    traffic = launch.traffic
    assert traffic["keys"].loaded == traffic["values"].loaded == keys.sum() * D * ITEM
    assert traffic["queries"].loaded == traffic["queries"].distinct == traffic["out"].stored == 4 * 300 * D * ITEM
    assert traffic["lse"].stored == 4 * 300 * 4
    assert traffic["blocks"].loaded == lists.size * 4 + filled.size * 4  # once to find their ends


def test_programs_of_the_last_row_blocks_start_first() -> None:
    _, (launch,) = watch(torch.ops.mlx_sparse.attend_blocks, *tensors(CASE), None, SIZE, CASE.scale)
    read = [launch.traffic["keys"].by_program[program] for program in range(launch.grid[0])]
    assert read == sorted(read, reverse=True)
    assert len(set(read)) == CASE.layout.row_blocks


def test_the_sample_reads_each_key_once_a_head_and_writes_no_scores() -> None:
    _, (parts, sums) = watch(cuda_ref.sample_scores, *tensors(CASE)[:2], **CASE.sampling)
    assert (parts.kernel, sums.kernel) == ("sample_scores", "sample_sums")
    key_blocks = CASE.layout.key_blocks
    assert parts.traffic["keys"].loaded == CASE.Hq * CASE.S * D * ITEM
    assert parts.traffic["keys"].distinct == CASE.Hkv * CASE.S * D * ITEM
    assert parts.traffic["queries"].loaded == CASE.Hq * SIZE * D * ITEM * parts.grid[1]
    written = CASE.Hq * key_blocks * 2 * SIZE * 4  # 8 bytes for a sampled query and key block
    assert parts.traffic["parts"].stored == parts.traffic["parts"].distinct == written
    assert 1.8 * written <= sums.traffic["parts"].loaded <= 2 * written
    scores = CASE.Hq * SIZE * CASE.S * 4
    assert written <= scores * 2 / SIZE * 1.1


def test_lists_are_made_from_a_byte_for_a_column_and_a_bin() -> None:
    _, launches = watch(cuda_ref.sample_select, *tensors(CASE)[:2], **CASE.parameters)
    merge = launches[-1].traffic
    causal = CASE.Hq * CASE.layout.causal_pairs
    assert merge["column_kept"].loaded == causal
    assert causal <= merge["slash_kept"].loaded <= 2 * causal
    assert merge["blocks"].stored == merge["blocks"].distinct
    assert merge["blocks"].stored == CASE.Hq * CASE.layout.row_blocks * CASE.layout.key_blocks * 4


@pytest.mark.parametrize("order", [shuffled, lambda programs: np.arange(programs)[::-1]])
def test_the_order_of_programs_changes_no_bit(order: Any) -> None:
    given, _ = watch(cuda_ref.sample_attention, *tensors(CASE), **CASE.parameters)
    other, _ = watch(cuda_ref.sample_attention, *tensors(CASE), **CASE.parameters, order=order)
    assert torch.equal(given, other)
