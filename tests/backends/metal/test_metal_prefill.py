"""Test the Metal kernels for prefill: samples, lists of key blocks and bounded launches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import Array, covering
from mlx_arrays import DTYPES, to_mlx, to_numpy, whole
from msl import Metal
from sample_cases import SampleCase, assert_attends, assert_same_scores, logit_error, selection

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.core import launch_split, registry
from mlx_sparse.core.blocks import metal as blocks
from mlx_sparse.methods.sample import metal as sample

SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)


def scores_of(case: SampleCase, *, spare: int = 0, **sampling: Any) -> tuple[mx.array, mx.array]:
    q, k, _ = case.inputs()
    return sample.sample_scores(
        to_mlx(q, case.dtype), whole(k, case.S + spare, case.dtype), length=case.S, **(case.sampling | sampling)
    )


def submissions(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of launches at each call of `mx.async_eval`."""
    sent: list[int] = []
    send = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (sent.append(len(metal.launches)), send(*arrays))[1])
    return sent


@pytest.mark.parametrize("groups", [1, 13])
def test_a_threadgroup_may_have_many_blocks(metal: Metal, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(sample, "GROUPS", groups)
    q, k, _ = SMALL.inputs()
    expected = selection(SMALL)
    for got, scores in zip(scores_of(SMALL), (expected.column, expected.slash), strict=True):
        assert_same_scores(got, scores, logit_error(q, k, SMALL.scale))


def test_scores_of_many_heads_are_split_into_bounded_launches(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    together = scores_of(SMALL)
    work = SMALL.Hq * SMALL.B * 2 * 32 * SMALL.S * SMALL.D
    monkeypatch.setattr(sample, "MAX_WORK", work // 2)
    sent = submissions(metal, monkeypatch)
    metal.clear()
    apart = scores_of(SMALL)
    assert all(mx.array_equal(a, b) for a, b in zip(apart, together, strict=True))
    if metal.emulated:
        assert [report.kernel for report in metal.launches] == ["sample_scores", "sample_sums"] * 2
        assert sent == [2]  # the first part is submitted before the second is built


@pytest.mark.parametrize("spoiled", [0, 1], ids=["query", "key"])
def test_nan_stays_in_its_head(metal: Metal, spoiled: int) -> None:
    arrays = list(SMALL.inputs())
    arrays[spoiled][0, 0, 120, 3] = np.nan
    out, _, _ = sample.sample_attention(*(to_mlx(array, "f32") for array in arrays), **SMALL.parameters)
    bad = np.isnan(np.array(out)).any(axis=(2, 3))
    assert bad[0, 0]
    assert not bad[0, 2:].any()
    assert not bad[1].any()


# lists of key blocks


def attend_lists(case: SampleCase, lists: Array, *, spare: int = 0) -> tuple[mx.array, mx.array]:
    q, k, v = case.inputs()
    return blocks.attend_blocks(
        to_mlx(q, case.dtype),
        whole(k, case.S + spare, case.dtype),
        whole(v, case.S + spare, case.dtype),
        mx.array(lists),
        block_size=case.block_size,
        scale=case.scale,
        length=case.S,
    )


def check(case: SampleCase, lists: Array, *, spare: int = 0) -> None:
    out, lse = attend_lists(case, lists, spare=spare)
    assert_attends(to_numpy(out), np.array(lse), case, lists)


def some_lists(case: SampleCase, *, seed: int = 0, share: float = 0.5) -> Array:
    """Return random block lists. Some are empty, and some lack the diagonal block."""
    layout = case.layout
    mask = np.random.default_rng(seed).random((case.B, case.Hq, layout.row_blocks, layout.key_blocks)) < share
    mask[:, 0, 0] = False
    row = np.arange(layout.first_block, layout.key_blocks)[:, None]
    return oracle.block_lists(mask & (np.arange(layout.key_blocks) <= row))


@pytest.mark.parametrize(("D", "dtype"), covering([16, 80, 96, 192, 256], list(DTYPES)))
def test_every_head_dim_is_right(metal: Metal, D: int, dtype: str) -> None:
    case = SampleCase(1, 2, 1, 45, 130, D, dtype, 32)
    check(case, some_lists(case))


def test_a_long_prompt_is_split_into_bounded_launches(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that each launch has bounded work, even with full lists, and is submitted before the next is built."""
    case = SampleCase(1, 4, 2, 300, 410, 64, "f32", 32)
    lists = some_lists(case)
    together = attend_lists(case, lists)
    most = 2 * 4 * 64 * case.S * 64  # 64 rows
    monkeypatch.setattr(launch_split, "MAX_WORK", most)
    sent = submissions(metal, monkeypatch)
    metal.clear()
    apart = attend_lists(case, lists)
    assert all(mx.array_equal(a, b) for a, b in zip(apart, together, strict=True))
    assert len(sent) > 4
    if metal.emulated:
        assert sent == list(range(1, len(metal.launches) + 1))
        for report in metal.launches:
            rows = report.grid[0] // 4  # a SIMD group has eight rows
            heads = report.grid[1] * report.grid[2]
            assert 2 * rows * heads * case.S * case.D <= most + 2 * 32 * heads * case.S * case.D  # and one partial tile


def test_unsupported_head_dims_use_ops(metal: Metal) -> None:
    for D in (8, 72, 272):
        assert registry.resolve("auto", "sample", D=D, G=4) == "ops"
        with pytest.raises(mlx_sparse.BackendUnavailable, match=f"multiples of 16 up to 256, not {D}"):
            registry.resolve("metal", "attend_blocks", D=D, G=4)
    assert registry.resolve("auto", "sample", D=80, G=32) == "metal"
