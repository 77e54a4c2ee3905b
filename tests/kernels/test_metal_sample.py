"""SampleAttention's Metal kernels: any sample, whole cache buffers, pieces; tests/conformance has the cases."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_arrays import to_mlx, to_numpy, whole
from msl import Metal
from sample_cases import (
    SAMPLE_CASES,
    SampleCase,
    assert_attends,
    assert_same_blocks,
    assert_same_scores,
    logit_error,
    selection,
)

from mlx_sparse import oracle
from mlx_sparse.kernels import sample

SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)


def scores_of(case: SampleCase, *, spare: int = 0, **sampling: Any) -> tuple[mx.array, mx.array]:
    q, k, _ = case.inputs()
    return sample.sample_scores(
        to_mlx(q, case.dtype), whole(k, case.S + spare, case.dtype), length=case.S, **(case.sampling | sampling)
    )


@pytest.mark.parametrize("case", [SAMPLE_CASES[3], SAMPLE_CASES[5], SAMPLE_CASES[13]], ids=str)
def test_the_whole_method_reads_only_what_is_in_use(metal: Metal, case: SampleCase) -> None:
    q, k, v = case.inputs()
    results = []
    for spare in (0, 45):
        keys, values = (whole(array, case.S + spare, case.dtype) for array in (k, v))
        results.append(sample.sample_attention(to_mlx(q, case.dtype), keys, values, length=case.S, **case.parameters))
    out, lse, blocks = results[0]
    assert all(mx.array_equal(a, b) for a, b in zip(*results, strict=True))
    assert_same_blocks(blocks, case, selection(case))
    assert_attends(to_numpy(out), np.array(lse), case, np.array(blocks))
    if metal.emulated:
        assert [report.kernel for report in metal.launches[:3]] == ["sample_scores", "sample_sums", "attend_blocks"]


@pytest.mark.parametrize(("rows", "block_size"), [(64, 32), (64, 128), (1, 64), (200, 32)])
def test_a_sample_may_have_any_number_of_rows(metal: Metal, rows: int, block_size: int) -> None:
    case = SampleCase(1, 2, 1, 220, 300, 64, "f32", block_size)
    q, k, _ = case.inputs()
    expected = oracle.sample_scores(q, k, **case.sampling, rows=rows)
    for got, scores in zip(scores_of(case, rows=rows), expected, strict=True):
        assert_same_scores(got, scores, logit_error(q, k, case.scale))


@pytest.mark.parametrize("groups", [1, 13])
def test_a_threadgroup_may_have_many_blocks(metal: Metal, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(sample, "GROUPS", groups)
    q, k, _ = SMALL.inputs()
    expected = selection(SMALL)
    for got, scores in zip(scores_of(SMALL), (expected.column, expected.slash), strict=True):
        assert_same_scores(got, scores, logit_error(q, k, SMALL.scale))


def test_scores_of_many_heads_are_work_in_bounded_pieces(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    together = scores_of(SMALL)
    work = SMALL.Hq * SMALL.B * 2 * 32 * SMALL.S * SMALL.D
    sent: list[int] = []
    send = mx.async_eval
    monkeypatch.setattr(sample, "PIECE", work // 2)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (sent.append(len(metal.launches)), send(*arrays))[1])
    metal.clear()
    apart = scores_of(SMALL)
    assert all(mx.array_equal(a, b) for a, b in zip(apart, together, strict=True))
    if metal.emulated:
        assert [report.kernel for report in metal.launches] == ["sample_scores", "sample_sums"] * 2
        assert sent == [2]  # the first piece is sent off before the second is made


def test_nothing_recompiles_as_the_context_grows(metal: Metal) -> None:
    texts: set[tuple[str, str]] = set()
    for L, S, chunks in ((90, 90, 1), (64, 200, 2), (150, 300, 3)):
        scores_of(SampleCase(1, 4, 2, L, S, 64, "f16", 32, chunks=chunks), spare=9)
        if metal.emulated:
            texts.update(metal.texts.items())
    assert len(texts) in (0, 2)


@pytest.mark.parametrize("spoiled", [0, 1], ids=["query", "key"])
def test_nan_is_no_fault_and_stays_in_its_head(metal: Metal, spoiled: int) -> None:
    arrays = list(SMALL.inputs())
    arrays[spoiled][0, 0, 120, 3] = np.nan
    out, _, _ = sample.sample_attention(*(to_mlx(array, "f32") for array in arrays), **SMALL.parameters)
    bad = np.isnan(np.array(out)).any(axis=(2, 3))
    assert bad[0, 0]
    assert not bad[0, 2:].any()
    assert not bad[1].any()
