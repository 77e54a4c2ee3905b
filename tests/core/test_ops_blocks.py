"""Test block attention in MLX's array operations: its memory, and the inputs that it accepts."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS
from sample_cases import SPARSE_CASES, SampleCase, dense_lse, selection

import mlx_sparse
from mlx_sparse.core.attend import ops as attend
from mlx_sparse.core.blocks import ops as blocks
from mlx_sparse.methods.sample import ops as sample

OPS = ADAPTERS["ops"]


def test_slices_of_cache_buffers_do_as_well() -> None:
    case = SampleCase(2, 6, 2, 200, 300, 64, "f16", 32)
    q, k, v = OPS.arrays(case)
    parameters: dict[str, Any] = {**case.parameters, "backend": "ops"}
    rest = mx.full((case.B, case.Hkv, 84, case.D), mx.nan, k.dtype)
    views = [mx.concatenate([array, rest], axis=2)[:, :, : case.S] for array in (k, v)]
    assert mx.array_equal(
        mlx_sparse.sample_attention(q, *views, **parameters), mlx_sparse.sample_attention(q, k, v, **parameters)
    )


@pytest.mark.parametrize("diagonal", [False, True])
def test_fused_attention_of_a_batch_equals_plain_attention(diagonal: bool) -> None:
    """Test MLX's fused attention, which runs on a GPU."""
    case = SampleCase(1, 6, 6, 32, 96, 64, "f32", 32)
    q, k, v = (array[0] for array in OPS.arrays(case))
    both = [attend_batch(q, k, v, case.scale, diagonal) for attend_batch in (blocks._fused, blocks._plain)]
    assert mx.allclose(*both, rtol=0, atol=1e-5)


def test_an_unused_log_sum_exp_is_not_computed() -> None:
    case = SPARSE_CASES[0]
    found = mlx_sparse.attend_blocks(
        *OPS.arrays(case), mx.array(selection(case).blocks), block_size=case.block_size, backend="ops"
    )
    for array, contains in zip(found, (False, True), strict=True):
        graph = io.StringIO()
        mx.export_to_dot(graph, array)
        assert ("LogSumExp" in graph.getvalue()) == contains


def peak(run: Any) -> int:
    """Return the peak memory of ``run`` in bytes, in addition to the memory in use before the call."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_sample_stores_one_block_of_scores_per_head(chunks: int) -> None:
    case = SampleCase(1, 32, 8, 1024, 4096, 16, "f32", 128, chunks)
    q, k, _ = OPS.arrays(case)
    mx.eval(q, k)
    needed = peak(lambda: sample.sample_scores(q, k, **case.sampling))
    assert needed <= case.Hq * case.block_size * case.S * 4


def test_attention_and_its_log_sum_exp_do_not_store_all_scores() -> None:
    """Test that the peak memory is below the scores of two heads with dense attention."""
    case = SampleCase(1, 8, 2, 4096, 4096, 16, "f32", 128)
    q, k, v = OPS.arrays(case)
    near = np.arange(32)[:, None] - np.array([7, 6, 5, 4, 3, 2, 1, 0])
    lists = mx.array(np.broadcast_to(near, (1, 8, 32, 8)).astype(np.int32))
    mx.eval(q, k, v, lists)
    for n in range(2):
        found = peak(lambda n=n: mlx_sparse.attend_blocks(q, k, v, lists, block_size=128, backend="ops")[n])
        assert found <= 2 * case.L * case.S * 4
    found = peak(lambda: attend.dense_lse(q, k, scale=case.scale, left_padding=None))
    assert found <= 2 * case.L * case.S * 4


def test_dense_lse_in_parts_equals_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SampleCase(1, 4, 2, 300, 512, 16, "f32", 128)
    monkeypatch.setitem(blocks.MAX_SCORES, mx.default_device().type, 1 << 16)
    found = attend.dense_lse(*OPS.arrays(case)[:2], scale=case.scale, left_padding=None)
    np.testing.assert_allclose(found, dense_lse(case), rtol=0, atol=1e-5)
