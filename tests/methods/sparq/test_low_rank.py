"""Test the low-rank projection of latents, docs/spec/low_rank.md, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from mlx_sparse import oracle
from mlx_sparse.methods.sparq import low_rank, ops
from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.methods.sparq.oracle import Array
from mlx_sparse.methods.sparq.scoring_keys import KeyCodes, Projection

H, D, S, NOPE = 6, 48, 333, 8
SCALE = D**-0.5


def make(seed: int = 0, n: int = S) -> tuple[Array, Array, Array]:
    """Return ``C_q (D, D)``, queries ``(1, H, 1, D)`` with this covariance, and latents ``(1, 1, n, D)``."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((H, D, NOPE))
    queries = np.einsum("hdn,hn->hd", weights, rng.standard_normal((H, NOPE)))[None, :, None]
    mixing = np.exp(-np.arange(D) / 6)[:, None] * np.linalg.qr(rng.standard_normal((D, D)))[0]
    latents = rng.standard_normal((1, 1, n, D)) @ mixing + rng.standard_normal(D)
    return np.einsum("hdn,hen->de", weights, weights), queries, latents


def logits(projection: Projection, queries: Array, latents: Array) -> Array:
    """Return the float64 approximate logits ``(1, 1, H, n)`` (low_rank.4), less their mean over the latents."""
    x, y = queries[:, None, :, 0] @ np.array(projection.queries, float), latents @ np.array(projection.keys, float)
    found: Array = x @ y.swapaxes(-1, -2) * SCALE
    return found - found.mean(axis=-1, keepdims=True)


def selected(projection: Projection, queries: Array, latents: Array, *, top_k: int = 32) -> tuple[Array, Array]:
    """Return the keys that `ops` and the oracle select with int4 codes of the projected latents."""
    rank, arrays = projection.keys.shape[3], [mx.array(array, mx.float32) for array in (queries, latents)]
    coded = ops.code_keys(low_rank.project(projection, *arrays)[1], None)
    selection = Selection(rank, top_k, 0, SCALE, keys_t=coded, projection=projection)
    exact = Projection(*(np.array(array, float) for array in projection))
    codes = oracle.sparq.code_keys(np.array(arrays[1], float) @ exact.keys)
    wanted = oracle.sparq_select(queries, latents, selection._replace(keys_t=codes, projection=exact))
    return np.array(ops.sparq_select(*arrays, selection)[0]), wanted.indices


@pytest.mark.parametrize("n", [1, 20, S])
@pytest.mark.parametrize("rank", [2, 8, D])
def test_the_fit_equals_the_oracles(n: int, rank: int) -> None:
    C_q, queries, latents = make(n=n)
    found, wanted = low_rank.fit(C_q, mx.array(latents), rank), oracle.sparq.fit_low_rank(C_q, latents, rank)
    assert found.keys.shape == wanted.keys.shape == (1, 1, D, wanted.keys.shape[3])
    np.testing.assert_allclose(found.share, wanted.share, rtol=1e-5)
    np.testing.assert_allclose(logits(found, queries, latents), logits(wanted, queries, latents), atol=2e-4)


def test_the_oracles_projection_is_the_best_of_its_rank() -> None:
    """Test that the mean square error is the sum of the dropped S^2, which no rank-r matrix can reduce."""
    C_q, _, latents = make()
    C_k = np.cov(latents[0, 0], rowvar=False, bias=True)
    roots = [oracle.sparq._roots(oracle.sparq._regular(C))[0] for C in (C_q, C_k)]
    S = np.linalg.svd(roots[0] @ roots[1], compute_uv=False)
    projection = oracle.sparq.fit_low_rank(C_q, latents, 4)
    r = projection.keys.shape[3]
    bilinear = projection.queries[0, 0] @ projection.keys[0, 0].T
    error = np.sum((roots[0] @ (np.eye(D) - bilinear) @ roots[1]) ** 2)
    assert r < D and error == pytest.approx(np.sum(S[r:] ** 2), rel=1e-9)
    assert projection.share[0, 0] == pytest.approx(np.sum(S[:r] ** 2) / np.sum(S**2))
    assert projection.share[0, 0] >= 0.9


def test_a_rotation_of_the_latents_does_not_change_the_selection() -> None:
    C_q, queries, latents = make()
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((D, D)))[0]
    plain = low_rank.fit(C_q, mx.array(latents), 4)
    turned = low_rank.fit(turn.T @ C_q @ turn, mx.array(latents @ turn), 4)
    assert plain.keys.shape == turned.keys.shape
    np.testing.assert_allclose(plain.share, turned.share, rtol=1e-5)
    np.testing.assert_allclose(
        logits(plain, queries, latents), logits(turned, queries @ turn, latents @ turn), atol=2e-4
    )
    exact = [
        oracle.sparq.fit_low_rank(turn.T @ C_q @ turn, latents @ turn, 4),
        oracle.sparq.fit_low_rank(C_q, latents, 4),
    ]
    for top_k in (16, 32, 64):
        indices = [
            oracle.sparq_select(q, k, Selection(p.keys.shape[3], top_k, 0, SCALE, projection=p)).indices
            for q, k, p in ((queries @ turn, latents @ turn, exact[0]), (queries, latents, exact[1]))
        ]
        np.testing.assert_array_equal(*indices)


def test_all_components_give_the_exact_logits() -> None:
    C_q, queries, latents = make()
    new = np.random.default_rng(3).standard_normal((1, 1, 50, D))  # not in the span of the fitted latents
    projection = low_rank.fit(C_q, mx.array(latents[:, :, :5]), D)
    dense = queries[:, None, :, 0] @ new.swapaxes(-1, -2) * SCALE
    np.testing.assert_allclose(logits(projection, queries, new), dense - dense.mean(axis=-1, keepdims=True), atol=1e-3)
    selection = Selection(D, 10, 0, SCALE, projection=projection)
    found, _, _ = ops.sparq_select(mx.array(queries), mx.array(new, mx.float32), selection)
    wanted = oracle.sparq_select(queries, new, Selection(D, 10, 0, SCALE)).indices
    np.testing.assert_array_equal(np.array(found), wanted)


@pytest.mark.parametrize("rank", [2, 8])
def test_the_selection_equals_the_oracles(rank: int) -> None:
    C_q, queries, latents = make()
    found, wanted = selected(low_rank.fit(C_q, mx.array(latents), rank), queries, latents)
    np.testing.assert_array_equal(found, wanted)


def test_the_rank_is_the_smallest_that_captures_nine_tenths() -> None:
    shares = np.linspace(0, 1, 300)[None]
    assert [low_rank.smallest_rank(shares**p, 32) for p in (0.01, 0.05, 0.1, 1)] == [32, 64, 128, 300]
    assert low_rank.smallest_rank(shares[:, :20], 32) == 20


@pytest.mark.parametrize("kind", ["indefinite", "constant", "zero component", "one", "few", "huge", "zero weights"])
def test_degenerate_latents_give_finite_projections(kind: str) -> None:
    C_q, _, latents = make()
    few = {"constant": latents[:, :, :1].repeat(S, 2), "one": latents[:, :, :1], "few": latents[:, :, :7]}
    latents = few.get(kind, latents)
    latents[..., 0] = 0 if kind == "zero component" else latents[..., 0]
    latents = latents * 1e30 if kind == "huge" else latents
    C_q = C_q * (kind != "zero weights")
    C_q = C_q - 1e-4 * np.trace(C_q) * np.eye(D) if kind == "indefinite" else C_q  # as after rounding
    projection = low_rank.fit(C_q, mx.array(latents, mx.float32), 8)
    wanted = oracle.sparq.fit_low_rank(C_q, latents, 8)
    for found in (projection, wanted):
        assert all(np.isfinite(np.array(array)).all() for array in found)
        assert 0.9 <= found.share.min() <= found.share.max() <= 1 + 1e-12


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", [5, S - 1])
def test_a_latent_that_is_not_finite_is_left_out_of_the_fit_and_ranks_first(value: float, row: int) -> None:
    C_q, queries, latents = make()
    bad = latents.copy()
    bad[0, 0, row, 3] = value
    clean = np.delete(latents, row, axis=2)
    fits = [fit(C_q, array, 8) for fit, array in ((low_rank.fit, mx.array(bad)), (oracle.sparq.fit_low_rank, clean))]
    np.testing.assert_allclose(*(logits(fit, queries, latents) for fit in fits), atol=2e-4)
    for indices in selected(fits[0], queries, bad, top_k=64):
        assert row in indices[0, 0]


def test_a_batch_has_the_fit_of_each_sequence() -> None:
    C_q, queries, latents = make()
    narrow = latents * (np.arange(D) < 2)
    parts = [low_rank.fit(C_q, mx.array(rows), 2) for rows in (latents, narrow)]
    batch = low_rank.stack(parts)
    assert parts[0].keys.shape[3] > parts[1].keys.shape[3] == 2
    for b, rows in enumerate((latents, narrow)):
        one = Projection(*(array[b : b + 1] for array in batch))
        np.testing.assert_allclose(logits(one, queries, rows), logits(parts[b], queries, rows))
        np.testing.assert_array_equal(*selected(one, queries, rows))


class Absorbed(nn.Module):
    """The layers of an attention module of mlx-lm that absorb the query."""

    def __init__(self, q_lora: bool) -> None:
        super().__init__()
        self.embed_q = MultiLinear(NOPE * 4, 64, H)
        if q_lora:
            self.q_a_layernorm = nn.RMSNorm(64)
            self.q_a_layernorm.weight = mx.random.uniform(shape=(64,))
            self.q_b_proj = nn.Linear(64, H * (NOPE * 4 + 4), bias=False)
        else:
            self.q_proj = nn.Linear(64, H * (NOPE * 4 + 4), bias=False)


@pytest.mark.parametrize("q_lora", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
def test_the_query_covariance_is_that_of_absorbed_queries_of_white_inputs(q_lora: bool, bits: int | None) -> None:
    mx.random.seed(0)
    layers = Absorbed(q_lora)
    if bits:
        nn.quantize(layers, group_size=32, bits=bits)
    inputs = mx.eye(64)[None, None]
    queries = layers.q_b_proj(layers.q_a_layernorm.weight * inputs) if q_lora else layers.q_proj(inputs)
    absorbed = layers.embed_q(queries.reshape(64, H, -1).swapaxes(0, 1)[None, ..., : NOPE * 4])
    wanted = np.einsum("hid,hie->de", *[np.array(absorbed[0], float)] * 2)
    np.testing.assert_allclose(low_rank.query_covariance(layers), wanted, rtol=1e-4, atol=1e-5)


def test_scoring_keys_read_only_the_indexed_rows() -> None:
    C_q, _, latents = make()
    projection = low_rank.fit(C_q, mx.array(latents), 4)
    rows = low_rank.ProjectedRows(mx.array(latents), projection.keys)
    assert rows.shape == (1, 1, S, projection.keys.shape[3])
    wanted = latents @ np.array(projection.keys, float)
    for at in (np.s_[:], np.s_[..., 3:9, :], np.s_[0:1, :, 64:]):
        np.testing.assert_allclose(np.array(rows[at]), wanted[at], atol=1e-4)
    assert isinstance(ops.code_keys(rows, None), KeyCodes)
