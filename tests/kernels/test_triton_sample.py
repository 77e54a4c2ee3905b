"""SampleAttention's Triton kernels against the float64 oracle; on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import ulp
from mlx_sparse.cuda_ref.launchers import configs, sample
from sample_cases import (
    SAMPLE_CASES,
    SampleCase,
    assert_attends,
    assert_same_blocks,
    assert_same_scores,
    logit_error,
    selection,
)
from torch_arrays import DEVICE, to_numpy
from torch_operators import assert_keeps_its_promises_and_compiles
from triton_prompts import INTERPRETED, retained, tensors

from mlx_sparse import ConfigError, ShapeError, cuda_ref, oracle
from mlx_sparse.common.block_layout import Layout

pytestmark = pytest.mark.usefixtures("guarded")
by_case = pytest.mark.parametrize("case", INTERPRETED, ids=str)
SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)


@by_case
def test_scores_and_blocks_are_those_of_the_oracle(case: SampleCase) -> None:
    q, k, _ = case.inputs()
    queries, keys, _ = tensors(case)
    expected, error = selection(case), logit_error(q, k, case.scale)
    column, slash = cuda_ref.sample_scores(queries, keys, **case.sampling)
    assert column.dtype == slash.dtype == torch.float32
    assert_same_scores(to_numpy(column), expected.column, error)
    assert_same_scores(to_numpy(slash), expected.slash, error)
    layout = case.layout
    kept = sample.Kept(sample.keep(column, case.alpha_column), sample.keep(slash, case.alpha_slash))
    counts = torch.empty(case.B, case.Hq, layout.row_blocks, dtype=torch.int32, device=DEVICE)
    blocks = sample.merge(kept, layout, 0, layout.row_blocks, layout.key_blocks, counts)
    assert torch.equal(counts, (blocks >= 0).sum(dim=3, dtype=torch.int32))
    assert_same_blocks(to_numpy(blocks), case, expected)


@pytest.mark.parametrize("case", [SAMPLE_CASES[n] for n in (0, 2, 5)], ids=str)
def test_sample_attention_is_attention_over_its_blocks_and_says_what_it_lost(case: SampleCase) -> None:
    arrays = tensors(case)
    out, stats = cuda_ref.sample_attention(*arrays, **case.parameters, return_stats="mass")
    q, k, v = case.inputs()
    _, expected = oracle.sample_attention(q, k, v, **case.parameters, return_stats=True)
    if case.layout.everything:
        assert torch.equal(out, cuda_ref.dense_attention(*arrays, scale=case.scale))
        assert (stats.retained_mass == 1).all()
        assert (stats.density, stats.elements) == (1.0, expected.elements)
        return
    chosen = to_numpy(cuda_ref.sample_select(*arrays[:2], **case.parameters))
    assert_attends(to_numpy(out), None, case, chosen)
    density = (chosen >= 0).sum(axis=(2, 3)) / case.layout.causal_pairs
    np.testing.assert_allclose(to_numpy(stats.head_density), density, rtol=1e-6)
    assert stats.density == pytest.approx(density.mean())
    assert (stats.sampled, stats.dense_elements) == (expected.sampled, expected.dense_elements)
    assert stats.elements == pytest.approx(expected.elements, rel=0.05)  # blocks in doubt
    lse = oracle.attend_blocks(q, k, v, chosen, block_size=case.block_size, scale=case.scale)[1]
    mass = retained(case, lse)
    allowed = 2 * (logit_error(q, k, case.scale) + ulp(lse, "f32"))  # each of two log-sum-exps is off by as much
    assert (np.abs(to_numpy(stats.retained_mass) - mass) <= allowed * mass).all()


@pytest.mark.parametrize("alphas", [(1.0, 0.5), (0.5, 1)])
def test_an_alpha_of_one_is_dense_attention_to_the_last_bit(alphas: tuple[float, float]) -> None:
    arrays = tensors(SMALL)
    given = SMALL.parameters | {"alpha_column": alphas[0], "alpha_slash": alphas[1]}
    out, stats = cuda_ref.sample_attention(*arrays, **given, return_stats=True)
    assert torch.equal(out, cuda_ref.dense_attention(*arrays, scale=SMALL.scale))
    assert stats.density == 1


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_may_be_negative_or_zero(scale: float) -> None:
    q, k, v = SMALL.inputs()
    settings: dict[str, Any] = {**SMALL.parameters, "scale": scale}
    queries, keys, values = tensors(SMALL)
    for got, expected in zip(
        cuda_ref.sample_scores(queries, keys, chunks=2, block_size=32, scale=scale),
        oracle.sample_scores(q, k, chunks=2, block_size=32, scale=scale),
        strict=True,
    ):
        np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-4, atol=1e-5)
    blocks = cuda_ref.sample_select(queries, keys, **settings)
    out, _ = oracle.attend_blocks(q, k, v, to_numpy(blocks), block_size=32, scale=scale)
    found = cuda_ref.sample_attention(queries, keys, values, **settings)
    np.testing.assert_allclose(to_numpy(found), out, rtol=0, atol=1e-4)


@pytest.mark.parametrize("processors", [1, 40])
def test_keys_may_be_split_between_any_number_of_programs(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: processors)
    monkeypatch.setattr(sample, "BLOCK_SPLITS", 2)  # so that their statistics are read in several turns
    q, k, _ = SMALL.inputs()
    found = cuda_ref.sample_scores(*tensors(SMALL)[:2], **SMALL.sampling)
    expected = selection(SMALL)
    for got, scores in zip(found, (expected.column, expected.slash), strict=True):
        assert_same_scores(to_numpy(got), scores, logit_error(q, k, SMALL.scale))


RAGGED = SampleCase(1, 2, 1, 70, 106, 64, "f32", 32, chunks=9)  # regions of 28, 32 and 10 rows


@pytest.mark.parametrize("case", [SMALL, RAGGED], ids=str)
def test_each_sampled_row_spends_its_mass_once(case: SampleCase) -> None:
    sampled = [stop - start for start, stop in (region.sample for region in case.layout.regions)]
    for got in cuda_ref.sample_scores(*tensors(case)[:2], **case.sampling):
        np.testing.assert_allclose(
            to_numpy(got).sum(axis=-1), np.broadcast_to(sampled, (case.B, case.Hq, len(sampled))), rtol=1e-5
        )


def test_lists_are_made_for_as_many_row_blocks_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = tensors(SMALL)
    at_once = cuda_ref.sample_attention(*arrays, **SMALL.parameters, return_stats=True)
    made: list[int] = []
    merge = sample.merge

    def counted(*given: Any) -> torch.Tensor:
        blocks = merge(*given)
        made.append(blocks.numel() * 4)
        return blocks

    monkeypatch.setattr(sample, "merge", counted)
    monkeypatch.setattr(sample, "LIST_BYTES", 500)
    out, stats = cuda_ref.sample_attention(*arrays, **SMALL.parameters, return_stats=True)
    assert len(made) >= 3
    assert max(made) <= 500
    assert torch.equal(out, at_once[0])
    assert torch.equal(stats.head_density, at_once[1].head_density)


@pytest.mark.parametrize("entry", [1, 100, 1000, 10**9])
@pytest.mark.parametrize(("L", "S"), [(1 << 20, 1 << 20), (2048, 1 << 20), (1, 1), (100, 300)])
def test_portions_cover_every_row_block_once_the_last_first(L: int, S: int, entry: int) -> None:
    layout = Layout(L, S, 1, 128)
    found = list(sample.portions(layout, entry))
    assert [row for first, stop in reversed(found) for row in range(first, stop)] == list(range(layout.row_blocks))
    for first, stop in found:
        assert first + 1 == stop or (stop - first) * (layout.first_block + stop) * entry <= sample.LIST_BYTES


@pytest.mark.parametrize(("L", "S", "chunks"), [(600, 700, 3), (130, 191, 1), (1, 40, 1), (70, 106, 9)])
def test_lists_are_those_of_the_oracle_for_any_flags(
    monkeypatch: pytest.MonkeyPatch, L: int, S: int, chunks: int
) -> None:
    """Also where the first block is not kept, and a list is made in several turns."""
    monkeypatch.setattr(sample, "MERGED", 16)
    layout = Layout(L, S, chunks, 32)
    flags = np.random.default_rng(0).random((2, 1, 2, len(layout.regions), layout.key_blocks)) < 0.2
    expected = oracle.merge(*flags, layout)
    for block in layout.sampled_blocks:
        expected[:, :, block - layout.first_block, : block + 1] = True
    kept = sample.Kept(*(torch.tensor(side.astype(np.uint8), device=DEVICE) for side in flags))
    counts = torch.empty(1, 2, layout.row_blocks, dtype=torch.int32, device=DEVICE)
    blocks = sample.merge(kept, layout, 0, layout.row_blocks, layout.key_blocks, counts)
    assert (oracle.block_mask(to_numpy(blocks), layout.key_blocks) == expected).all()
    assert (to_numpy(counts) == expected.sum(axis=3)).all()
    filled = to_numpy(blocks >= 0)
    assert (filled[..., :-1] >= filled[..., 1:]).all()


def test_shares_that_are_reached_but_for_rounding_are_reached() -> None:
    for count in range(1, 26):
        kept = sample.keep(torch.full((1, 25), 0.3, device=DEVICE), count / 25)
        assert int(kept.sum()) == count


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 0.999999])
def test_the_fewest_of_the_largest_are_kept_ties_to_the_lower_index(alpha: float) -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 9, size=(3, 2, 40)).astype(np.float32) / 8
    kept = sample.keep(torch.tensor(scores, device=DEVICE), alpha)
    assert (to_numpy(kept) == oracle.keep(scores.astype(np.float64), alpha)).all()


OPERATORS: dict[str, Callable[[list[torch.Tensor]], tuple[Any, ...]]] = {
    "sample_prefill": lambda qkv: (*qkv, 0.8, 0.7, 2, 32, 0.1),
    "sample_scores": lambda qkv: (*qkv[:2], 2, 32, 0.1),
    "sample_select": lambda qkv: (*qkv[:2], 0.8, 0.7, 2, 32, 0.1),
    "attend_blocks": lambda qkv: (*qkv, torch.zeros(1, 2, 3, 2, dtype=torch.int32, device=DEVICE), 32, 0.1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_torch_keeps_its_promises_and_compiles(name: str) -> None:
    arguments = OPERATORS[name](tensors(SampleCase(1, 2, 1, 66, 90, 64, "f32", 32)))
    assert_keeps_its_promises_and_compiles(name, arguments)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"alpha_column": 0.0}, ConfigError, "alpha_column: expected a number above 0 and at most 1, got 0.0"),
    ({"alpha_slash": 1.5}, ConfigError, "alpha_slash: expected a number above 0 and at most 1, got 1.5"),
    ({"alpha_slash": float("nan")}, ConfigError, "alpha_slash: expected a number above 0 and at most 1, got nan"),
    ({"chunks": 0}, ConfigError, "chunks: expected an integer of at least 1, got 0"),
    ({"block_size": 48}, ConfigError, "block_size: expected one of 32, 64, 128, got 48"),
    ({"return_stats": "all"}, ConfigError, "return_stats: expected one of"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD, ids=[str(settings) for settings, _, _ in BAD])
def test_a_wrong_argument_gets_one_clear_line(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        cuda_ref.sample_attention(*tensors(SMALL), **settings)
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_refused() -> None:
    queries, keys, values = tensors(SMALL)
    with pytest.raises(ShapeError, match="keys: expected at least L=150 keys, got S=100"):
        cuda_ref.sample_attention(queries, keys[:, :, :100], values[:, :, :100])
    listed = torch.zeros(2, 4, 6, 3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ShapeError, match=r"blocks: expected shape \(B, Hq, R, N\) with \(2, 4, 6\) first, got"):
        cuda_ref.attend_blocks(queries, keys, values, listed[:, :, :5], block_size=32)
    with pytest.raises(ShapeError, match="blocks: expected integers, got float32"):
        cuda_ref.attend_blocks(queries, keys, values, listed.float(), block_size=32)
    with pytest.raises(ConfigError, match="blocks: expected a tensor of torch, got list"):
        cuda_ref.attend_blocks(queries, keys, values, listed.tolist(), block_size=32)
    with pytest.raises(Exception, match="backend: expected head dims that are multiples of 8 from 16 to 256, got 12"):
        cuda_ref.sample_scores(queries[..., :12], keys[..., :12])
