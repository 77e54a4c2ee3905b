"""Compare the baselines in array operations with the float64 oracle over all cases."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from adapters import ADAPTERS
from cases import CASES, Case, assert_as_good_as_plain, plain_attention
from expected import expected
from mlx_arrays import to_mlx, to_numpy
from non_finite_cases import SIZES, NonFinite, NonFiniteChunk, assert_same_with_nan
from sample_cases import SPARSE_CASES, SampleCase, assert_retains

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.core import registry
from mlx_sparse.methods.saap import kmeans

OPS = ADAPTERS["ops"]
DECODE: dict[str, dict[str, Any]] = {
    "streaming": {"sink_tokens": 4, "recent_tokens": 20},
    "flexgen": {"top_k": 24},
    "oracle_top_k": {"top_k": 24},
    "dense": {},
}
PREFILL: dict[str, dict[str, Any]] = {
    "minference": {"vertical_tokens": 70, "slash_tokens": 100},
    "bigbird": {"window": 0.1, "global_share": 0.1, "random_blocks": 2},
    "streaming_prefill": {"sink_tokens": 40, "window": 0.2},
}
PADDED = (2, 6, 2, 300, 64, "f32")
by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_method = pytest.mark.parametrize("method", DECODE)


@by_method
@by_case
def test_a_decode_baseline_equals_the_oracle(case: Case, method: str) -> None:
    arrays = case.inputs(seed=1)
    given = {**DECODE[method], "left_padding": case.padding, "return_stats": "recall"}
    wanted, stats = getattr(oracle, f"{method}_attention")(*arrays, **given)
    out, got = getattr(mlx_sparse, f"{method}_attention")(*(to_mlx(a, case.dtype) for a in arrays), **given)
    plain = plain_attention(*arrays, expected(case, "", "dense").choice, case.D**-0.5, case.dtype)
    dense = reference.dense_attention(*arrays, left_padding=case.padding)
    assert_as_good_as_plain(to_numpy(out), wanted, wanted + (plain - dense), case.dtype)
    assert (got.elements, got.density) == (stats.elements, stats.density)
    np.testing.assert_allclose(np.array(got.recall), stats.recall, rtol=1e-4, atol=1e-6)


@by_case
def test_h2o_evicts_what_the_oracle_evicts(case: Case) -> None:
    q, k, v = case.inputs(seed=2, L=min(8, case.S))
    mq, mk, mv = (to_mlx(array, case.dtype) for array in (q, k, v))
    padding = {"left_padding": case.padding}
    received = oracle.h2o_scores(q, k, **padding)
    scores = np.array(mlx_sparse.h2o_scores(mq, mk, **padding))
    valid = np.isfinite(received)
    assert (np.isfinite(scores) == valid).all()
    np.testing.assert_allclose(scores[valid], received[valid], rtol=0, atol=1e-5)
    wanted, _, kept = reference.run("h2o", q[:, :, -1:], k, v, scores=received, top_k=24, **padding)
    out, updated = mlx_sparse.h2o_attention(mq[:, :, -1:], mk, mv, scores=mx.array(received), top_k=24, **padding)
    left = np.isfinite(kept)
    assert (np.isfinite(np.array(updated)) == left).all()
    np.testing.assert_allclose(np.array(updated)[left], kept[left], rtol=0, atol=1e-3 if case.dtype == "bf16" else 1e-4)
    indices = oracle.top_k_select(received, top_k=24, local_window=6, **padding)
    plain = plain_attention(q[:, :, -1:], k, v, indices, case.D**-0.5, case.dtype)
    assert_as_good_as_plain(to_numpy(out), wanted, plain, case.dtype)


@pytest.mark.parametrize("poison", [1e3, np.inf, np.nan])
@by_method
def test_padded_rows_never_reach_the_output(method: str, poison: float) -> None:
    case = Case(*PADDED, padding=(290, 7))
    q, k, v = case.inputs()
    clean = getattr(reference, f"{method}_attention")(q, k, v, left_padding=case.padding)
    for row, first in enumerate(case.padding or ()):
        k[row, :, :first] = v[row, :, :first] = poison
    out = getattr(mlx_sparse, f"{method}_attention")(*map(mx.array, (q, k, v)), left_padding=case.padding)
    np.testing.assert_allclose(np.array(out), clean, rtol=0, atol=1e-5)


@by_method
def test_a_row_without_a_valid_key_gives_zeros_and_recall_1(method: str) -> None:
    out, stats = OPS.public(f"{method}_attention", Case(*PADDED), left_padding=(300, 0), return_stats="recall")
    assert mx.all(out[0] == 0)
    assert mx.all(stats.recall[0] == 1)


@pytest.mark.parametrize("method", PREFILL)
@pytest.mark.parametrize("case", SPARSE_CASES, ids=str)
def test_a_prefill_baseline_attends_the_blocks_of_the_oracle(case: SampleCase, method: str) -> None:
    q, k, v = case.inputs()
    settings = {**PREFILL[method], "block_size": case.block_size, "scale": case.scale}
    _, _, lists = registry.load(method, "ops")(*OPS.arrays(case), **settings)
    chosen = np.array(lists)
    if method == "minference":
        wanted = oracle.prefill.minference_select(q, k, **settings)
        masks = (oracle.block_mask(blocks, case.layout.key_blocks) for blocks in (chosen, wanted))
        np.testing.assert_array_equal(*masks)
    out, stats = OPS.public(f"{method}_attention", case, return_stats="recall", **settings)
    again = OPS.attend_blocks(case, chosen).out
    np.testing.assert_array_equal(to_numpy(out), again)
    _, oracle_stats = getattr(oracle, f"{method}_attention")(q, k, v, return_stats=True, **settings)
    np.testing.assert_allclose(stats.head_density, oracle_stats.head_density, rtol=1e-6)
    assert stats.sampled == oracle_stats.sampled
    assert_retains(stats.recall, case, chosen)


# NaN and infinity


@pytest.mark.parametrize("edit", ["nan", "inf", "minus-inf", "nan-and-inf", "more-than-are-attended"])
@pytest.mark.parametrize("method", ["oracle_top_k", "flexgen"])
def test_baselines_that_read_every_key_attend_non_finite_keys(method: str, edit: str) -> None:
    case = NonFinite(*SIZES["G4"][:5], "f32", SIZES["G4"][6], edit=edit)
    given = {"top_k": 32, "left_padding": case.padding}
    wanted = getattr(reference, f"{method}_attention")(*case.inputs(), **given)
    assert_same_with_nan(np.array(OPS.public(f"{method}_attention", case, **given)), wanted)
    dense = reference.dense_attention(*case.inputs(), left_padding=case.padding)
    np.testing.assert_array_equal(np.isnan(wanted), np.isnan(dense))


@pytest.mark.parametrize("edit", ["nan", "inf", "minus-inf"])
def test_h2o_keeps_keys_with_non_finite_attention_and_the_best_others(edit: str) -> None:
    case = NonFinite(1, 4, 1, 60, 64, "f32", edit=edit)
    q, k, v = case.inputs(L=20)
    received = oracle.h2o_scores(q, k)
    assert_same_with_nan(np.array(mlx_sparse.h2o_scores(mx.array(q), mx.array(k))), received)
    assert np.isfinite(np.delete(received, 40)).all()
    wanted, _, scores = reference.run("h2o", q[:, :, -1:], k, v, scores=received, top_k=16)
    out, updated = mlx_sparse.h2o_attention(*map(mx.array, (q[:, :, -1:], k, v)), scores=mx.array(received), top_k=16)
    assert_same_with_nan(np.array(out), wanted)
    assert_same_with_nan(np.array(updated), scores)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_block_budgets_are_exceeded_if_the_sample_has_no_softmax(number: float) -> None:
    case = NonFiniteChunk(1, 4, 2, 250, 400, 64, "f32", number=number)
    budgets = {"vertical_tokens": 64, "slash_tokens": 64, "block_size": 32}
    wanted = reference.minference_attention(*case.inputs(), **budgets)
    assert_same_with_nan(np.array(OPS.public("minference_attention", case, **budgets)), wanted)
    np.testing.assert_array_equal(np.isnan(wanted), np.isnan(reference.dense_attention(*case.inputs())))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_non_finite_keys_leave_all_centroids_finite(number: float) -> None:
    keys = np.random.default_rng(0).normal(size=(1, 200, 16)).astype(np.float32)
    keys[0, ::7, 3] = number
    assert mx.isfinite(kmeans.fit(mx.array(keys), 40)).all()
    centroids = np.random.default_rng(1).normal(size=(40, 16))
    wanted = oracle.kmeans_step(keys[0], centroids)
    assert np.isfinite(wanted).all()
    moved = kmeans.move(mx.array(keys), to_mlx(centroids[None].astype(np.float32), "f32"))
    np.testing.assert_allclose(np.array(moved)[0], wanted, rtol=0, atol=1e-5)
