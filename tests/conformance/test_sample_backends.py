"""Every backend of SampleAttention for MLX arrays against the float64 oracle, over the one list of prompts."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import Array, ulp
from mlx_arrays import DTYPES, to_mlx, to_numpy
from sample_cases import (
    SAMPLE_CASES,
    SampleCase,
    assert_attends,
    assert_same_blocks,
    assert_same_scores,
    logit_error,
    selection,
)

import mlx_sparse
from mlx_sparse import ConfigError, ShapeError, oracle
from mlx_sparse.common import block_select
from mlx_sparse.common.block_layout import MINFERENCE_ROWS
from mlx_sparse.methods import registry
from mlx_sparse.ops import attend, blocks

by_case = pytest.mark.parametrize("case", SAMPLE_CASES, ids=str)
by_backend = pytest.mark.parametrize("backend", ["ops"])
SPARSE = [case for case in SAMPLE_CASES if not case.layout.everything]
BASELINES: dict[str, dict[str, Any]] = {
    "minference": {"vertical_tokens": 70, "slash_tokens": 100},
    "bigbird": {"window": 0.1, "global_share": 0.1, "random_blocks": 2},
    "streaming_prefill": {"sink_tokens": 40, "window": 0.2},
}


def arrays(case: SampleCase) -> list[mx.array]:
    return [to_mlx(array, case.dtype) for array in case.inputs()]


@cache
def error(case: SampleCase) -> float:
    """How far a float32 logit may be off."""
    return logit_error(*case.inputs()[:2], case.scale)


@cache
def dense_lse(case: SampleCase) -> Array:
    lse: Array = oracle.attend.dense_with_lse(*case.inputs(), scale=case.scale, left_padding=None)[1]
    return lse


def assert_retains(mass: mx.array, case: SampleCase, chosen: Array) -> None:
    """``mass`` is what attention over the chosen blocks keeps."""
    q, k, v = case.inputs()
    _, lse = oracle.attend_blocks(q, k, v, chosen, block_size=case.block_size, scale=case.scale)
    expected = np.exp(lse - dense_lse(case))
    # Of two log-sum-exps, each as far off as a logit, and its own rounding.
    allowed = 2 * (error(case) + ulp(lse, "f32"))
    assert (np.abs(np.array(mass) - expected) <= allowed * expected).all()


@pytest.mark.parametrize("rows", [None, MINFERENCE_ROWS])
@by_case
@by_backend
def test_scores_are_those_of_the_oracle(backend: str, case: SampleCase, rows: int | None) -> None:
    q, k, _ = case.inputs()
    expected = oracle.sample_scores(q, k, **case.sampling, rows=rows)
    found = registry.load("sample_scores", backend)(*arrays(case)[:2], **case.sampling, rows=rows)
    for got, scores in zip(found, expected, strict=True):
        assert got.dtype == mx.float32
        assert_same_scores(got, scores, error(case))


@by_case
@by_backend
def test_the_blocks_are_those_of_the_oracle(backend: str, case: SampleCase) -> None:
    chosen = mlx_sparse.sample_select(*arrays(case)[:2], **case.parameters, backend=backend)
    assert_same_blocks(chosen, case, selection(case))


@by_case
@by_backend
def test_attention_over_the_oracles_blocks_is_the_oracles(backend: str, case: SampleCase) -> None:
    chosen = selection(case).blocks
    out, lse = mlx_sparse.attend_blocks(
        *arrays(case), mx.array(chosen), block_size=case.block_size, scale=case.scale, backend=backend
    )
    assert out.dtype == DTYPES[case.dtype]
    assert lse.dtype == mx.float32
    assert_attends(to_numpy(out), lse, case, chosen)


@by_case
@by_backend
def test_sample_attention_is_attention_over_its_blocks_and_says_what_it_lost(backend: str, case: SampleCase) -> None:
    found = arrays(case)
    out, stats = mlx_sparse.sample_attention(*found, **case.parameters, return_stats="mass", backend=backend)
    if case.layout.everything:
        assert mx.array_equal(out, mlx_sparse.dense_attention(*found, scale=case.scale))
        assert mx.all(stats.retained_mass == 1)
        return
    lists = mlx_sparse.sample_select(*found[:2], **case.parameters, backend=backend)
    again, _ = mlx_sparse.attend_blocks(*found, lists, block_size=case.block_size, scale=case.scale, backend=backend)
    assert mx.array_equal(out, again)
    chosen = np.array(lists)
    np.testing.assert_allclose(stats.head_density, (chosen >= 0).sum(axis=(2, 3)) / case.layout.causal_pairs, rtol=1e-6)
    assert stats.sampled == case.layout.sampled_share
    assert_retains(stats.retained_mass, case, chosen)
    for start, stop in (region.sample for region in case.layout.regions):
        least = np.array(stats.retained_mass)[..., start:stop].mean(axis=-1)
        assert (least >= max(case.alpha_column, case.alpha_slash)).all(), "the sampled rows lost something"


@by_case
@by_backend
def test_the_mass_that_is_counted_is_attended(backend: str, case: SampleCase) -> None:
    """By the kept columns alone, and by the kept bins alone, where sampled rows are not attended in full."""
    q, k, v = arrays(case)
    scores = registry.load("sample_scores", backend)(q, k, **case.sampling)
    alphas = (case.alpha_column, case.alpha_slash)
    columns, bins = (block_select.keep(side, alpha) for side, alpha in zip(scores, alphas, strict=True))
    nothing = mx.zeros_like(columns)
    for flags, alpha in (((columns, nothing), alphas[0]), ((nothing, bins), alphas[1])):
        lists = block_select.block_lists(block_select.merge(*flags, case.layout, sampled_in_full=False))
        _, lse = mlx_sparse.attend_blocks(q, k, v, lists, block_size=case.block_size, scale=case.scale, backend=backend)
        mass = np.exp(np.array(lse, np.float64) - dense_lse(case))
        for start, stop in (region.sample for region in case.layout.regions):
            assert (mass[..., start:stop].mean(axis=-1) >= alpha - 1e-6 - 4 * error(case)).all()


@pytest.mark.parametrize("parameter", ["alpha_column", "alpha_slash"])
@by_case
@by_backend
def test_an_alpha_of_one_is_dense_attention_to_the_last_bit(backend: str, case: SampleCase, parameter: str) -> None:
    found = arrays(case)
    out = mlx_sparse.sample_attention(*found, **{**case.parameters, parameter: 1}, backend=backend)
    assert mx.array_equal(out, mlx_sparse.dense_attention(*found, scale=case.scale))


@by_backend
def test_a_prompt_in_steps_is_one_shot_with_as_many_regions(backend: str) -> None:
    case = SampleCase(1, 4, 2, 512, 640, 64, "f32", 32, chunks=4)
    q, k, v = arrays(case)
    at_once = mlx_sparse.sample_attention(q, k, v, **case.parameters, backend=backend)
    chosen = np.array(mlx_sparse.sample_select(q, k, **case.parameters, backend=backend))
    assert (chosen >= 0).sum() < 0.9 * case.B * case.Hq * case.layout.causal_pairs
    steps = []
    for start in range(0, case.L, 128):
        stop = start + 128
        seen = case.S - case.L + stop
        piece = (q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen])
        settings = {**case.parameters, "chunks": 1}
        listed = np.array(mlx_sparse.sample_select(*piece[:2], **settings, backend=backend))
        of_piece = chosen[:, :, start // 32 : stop // 32]
        assert (oracle.block_mask(listed, 20) == oracle.block_mask(of_piece, 20)).all()
        steps.append(mlx_sparse.sample_attention(*piece, **settings, backend=backend))
    for out in (at_once, mx.concatenate(steps, axis=2)):
        assert_attends(to_numpy(out), None, case, chosen)


def random_lists(case: SampleCase, width: int, seed: int = 0) -> Array:
    """Lists in any order with blocks twice, none, above the diagonal, and numbers that are no block's."""
    rng = np.random.default_rng(seed)
    shape = (case.B, case.Hq, case.layout.row_blocks, width)
    lists = rng.integers(-3, case.layout.key_blocks + 4, size=shape).astype(np.int32)
    lists[rng.random(shape) < 0.1] = np.iinfo(np.int32).max
    lists[:, 0, 0] = -1
    return lists


@pytest.mark.parametrize("width", [0, 1, 3, 40])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (70, 70), (31, 63), (33, 65), (130, 257), (257, 384), (100, 511)])
@by_backend
def test_any_list_is_legal_wherever_the_piece_begins(
    backend: str, sizes: tuple[int, int], block_size: int, width: int
) -> None:
    case = SampleCase(2, 4, 2, *sizes, 16, "f32", block_size)
    lists = random_lists(case, width)
    out, lse = mlx_sparse.attend_blocks(
        *arrays(case), mx.array(lists), block_size=block_size, scale=case.scale, backend=backend
    )
    assert_attends(out, lse, case, lists)
    empty = np.isneginf(np.array(lse))
    assert empty[:, 0, 0].all()
    assert (np.array(out)[empty] == 0).all()


@pytest.mark.parametrize("poison", [1e30, np.inf, np.nan])
@by_backend
def test_what_is_not_listed_is_not_touched(backend: str, poison: float) -> None:
    case = SampleCase(1, 4, 2, 200, 300, 64, "f16", 32)
    q, k, v = arrays(case)
    lists = mx.broadcast_to(mx.array([0, 2, 5], mx.int32), (1, 4, case.layout.row_blocks, 3))
    expected = mlx_sparse.attend_blocks(q, k, v, lists, block_size=32, backend=backend)
    unlisted = ~mx.array([block in (0, 2, 5) for block in np.arange(case.S) // 32])[:, None]
    k, v = (mx.where(unlisted, mx.array(poison, array.dtype), array) for array in (k, v))
    for got, wanted in zip(
        mlx_sparse.attend_blocks(q, k, v, lists, block_size=32, backend=backend), expected, strict=True
    ):
        assert mx.array_equal(got, wanted)


@by_backend
def test_slices_of_cache_buffers_do_as_well(backend: str) -> None:
    case = SampleCase(2, 6, 2, 200, 300, 64, "f16", 32)
    q, k, v = arrays(case)
    parameters = {**case.parameters, "backend": backend}
    rest = mx.full((case.B, case.Hkv, 84, case.D), mx.nan, k.dtype)
    views = [mx.concatenate([array, rest], axis=2)[:, :, : case.S] for array in (k, v)]
    assert mx.array_equal(
        mlx_sparse.sample_attention(q, *views, **parameters), mlx_sparse.sample_attention(q, k, v, **parameters)
    )


@pytest.mark.parametrize("method", BASELINES)
@pytest.mark.parametrize("case", SPARSE, ids=str)
@by_backend
def test_baselines_attend_the_blocks_of_the_oracle(backend: str, case: SampleCase, method: str) -> None:
    q, k, v = case.inputs()
    found = arrays(case)
    settings = {**BASELINES[method], "block_size": case.block_size, "scale": case.scale}
    _, _, lists = registry.load(method, backend)(*found, **settings)
    chosen = np.array(lists)
    mask = oracle.block_mask(chosen, case.layout.key_blocks)
    if method == "minference":
        np.testing.assert_array_equal(
            mask, oracle.block_mask(oracle.prefill.minference_select(q, k, **settings), case.layout.key_blocks)
        )
    out, stats = getattr(mlx_sparse, f"{method}_attention")(*found, return_stats="mass", backend=backend, **settings)
    again, _ = mlx_sparse.attend_blocks(*found, lists, block_size=case.block_size, scale=case.scale, backend=backend)
    assert mx.array_equal(out, again)
    _, expected = getattr(oracle, f"{method}_attention")(q, k, v, return_stats=True, **settings)
    np.testing.assert_allclose(stats.head_density, expected.head_density, rtol=1e-6)
    assert stats.sampled == expected.sampled
    assert_retains(stats.retained_mass, case, chosen)


@pytest.mark.parametrize("diagonal", [False, True])
def test_mlxs_own_kernel_attends_a_packed_batch_alike(diagonal: bool) -> None:
    """It is what a GPU runs."""
    case = SampleCase(1, 6, 6, 32, 96, 64, "f32", 32)
    q, k, v = (array[0] for array in arrays(case))
    both = [attend_batch(q, k, v, case.scale, diagonal) for attend_batch in (blocks._fused, blocks._plain)]
    assert mx.allclose(*both, rtol=0, atol=1e-5)


@by_backend
def test_nobody_pays_for_a_log_sum_exp_that_is_not_used(backend: str) -> None:
    case = SPARSE[0]
    found = mlx_sparse.attend_blocks(
        *arrays(case), mx.array(selection(case).blocks), block_size=case.block_size, backend=backend
    )
    for array, contains in zip(found, (False, True), strict=True):
        graph = io.StringIO()
        mx.export_to_dot(graph, array)
        assert ("LogSumExp" in graph.getvalue()) == contains


def peak(run: Any) -> int:
    """Bytes that ``run`` needs beyond what is there already."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("chunks", [1, 3])
@by_backend
def test_the_sample_holds_one_block_of_scores_per_head(backend: str, chunks: int) -> None:
    case = SampleCase(1, 32, 8, 1024, 4096, 16, "f32", 128, chunks)
    q, k, _ = arrays(case)
    mx.eval(q, k)
    needed = peak(lambda: registry.load("sample_scores", backend)(q, k, **case.sampling))
    assert needed <= case.Hq * case.block_size * case.S * 4


@by_backend
def test_attention_and_its_log_sum_exp_never_hold_all_scores(backend: str) -> None:
    """Not even those of two heads, were they all attended."""
    case = SampleCase(1, 8, 2, 4096, 4096, 16, "f32", 128)
    q, k, v = arrays(case)
    near = np.arange(32)[:, None] - np.array([7, 6, 5, 4, 3, 2, 1, 0])
    lists = mx.array(np.broadcast_to(near, (1, 8, 32, 8)).astype(np.int32))
    mx.eval(q, k, v, lists)
    for n in range(2):
        found = peak(lambda n=n: mlx_sparse.attend_blocks(q, k, v, lists, block_size=128, backend=backend)[n])
        assert found <= 2 * case.L * case.S * 4
    found = peak(lambda: attend.dense_lse(q, k, scale=case.scale, left_padding=None))
    assert found <= 2 * case.L * case.S * 4


ARRAYS = tuple(mx.zeros(shape) for shape in ((1, 2, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16)))


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("alpha_column", 0, "alpha_column: expected a number above 0 and at most 1, got 0."),
        ("alpha_slash", 1.01, "alpha_slash: expected a number above 0 and at most 1, got 1.01."),
        ("chunks", 0, "chunks: expected an integer of at least 1, got 0."),
        ("block_size", 48, "block_size: expected one of 32, 64, 128, got 48."),
    ],
)
@by_backend
def test_bad_parameters_are_refused_in_one_line(backend: str, parameter: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mlx_sparse.sample_attention(*ARRAYS, **{parameter: value}, backend=backend)
    assert str(caught.value) == message


@by_backend
def test_arrays_that_do_not_fit_are_refused_in_one_line(backend: str) -> None:
    q, k, v = ARRAYS
    with pytest.raises(ShapeError, match=r"^keys: expected at least L=8 keys, got S=5\. Keys include [^\n]*$"):
        mlx_sparse.sample_attention(q, k[:, :, :5], v[:, :, :5], backend=backend)
    with pytest.raises(ShapeError, match=r"^blocks: expected shape [^\n]*$"):
        mlx_sparse.attend_blocks(q, k, v, mx.zeros((1, 1, 1, 3), mx.int32), block_size=32, backend=backend)
    with pytest.raises(ShapeError, match=r"^blocks: expected integers[^\n]*$"):
        mlx_sparse.attend_blocks(q, k, v, mx.zeros((1, 2, 1, 3)), block_size=32, backend=backend)
