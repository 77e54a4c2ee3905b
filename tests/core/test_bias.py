"""Compare SparQ with a bias (sparq.25, sparq.26) on every backend that takes one with the float64 oracle."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from adapters import ADAPTERS
from cases import (
    CODED,
    SPARQ,
    Array,
    Case,
    assert_as_good_as_plain,
    assert_same_selection,
    assert_selection_within,
    covering,
    plain_attention,
    round_to,
    ulp,
)
from naive import assert_same, make

import mlx_sparse
from mlx_sparse import ShapeError, oracle
from mlx_sparse.checks import BackendUnavailable
from mlx_sparse.core import registry
from mlx_sparse.core.attend import ops
from mlx_sparse.methods.sparq import metal as sparq
from mlx_sparse.methods.sparq import ops as sparq_ops
from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.methods.sparq.low_rank import project
from mlx_sparse.methods.sparq.scoring_keys import Projection

LOWEST = {"f32": -3.4028234663852886e38, "f16": -65504.0, "bf16": -3.3895313892515355e38}
BACKENDS = [name for name in ADAPTERS if name.partition("-")[0] in ("ops", "cpu", "metal")]
by_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
# Query groups and head dims of absorbed MLA, and others.
CASES = [
    Case(1, 16, 1, 300, 512, "f32"),
    Case(1, 20, 1, 333, 512, "bf16"),
    Case(2, 40, 1, 150, 256, "f16", padding=(0, 20)),
    Case(1, 64, 1, 200, 576, "f32"),
    Case(1, 128, 1, 260, 512, "f16"),
    Case(2, 6, 2, 290, 64, "f32", padding=(130, 0)),
    Case(1, 3, 3, 100, 36, "bf16"),
    Case(1, 4, 1, 30, 64, "f32"),  # fewer keys than are attended
]
SETTINGS = {
    **{name: SPARQ[name] for name in ("paper", "no-window", "robust", "no-reallocate", "rank-D", "own-scale", "k1")},
    **{f"{name}-int4": {**CODED[name], "reallocate": False} for name in ("4-bits", "spread", "every-component")},
}


def bias_of(case: Case, seed: int = 1) -> Array:
    """Return a random bias. -inf hides the last but one key and others from all heads, and some keys from one head."""
    rng = np.random.default_rng(seed)
    bias = round_to(2 * rng.normal(size=(case.B, case.Hq, 1, case.S)), case.dtype)
    bias[..., rng.random(case.S) < 0.2] = bias[..., -2] = -np.inf
    bias[:, 0, :, 3:9] = -np.inf
    return bias


def given(backend: Any, case: Case, bias: Array) -> Any:
    """Convert a bias to the type of the case. Half of the hidden keys have the lowest number of the type."""
    lowest = np.isneginf(bias) & (np.arange(case.S) % 2 == 0)
    return backend.array(np.where(lowest, LOWEST[case.dtype], bias), case.dtype)


def parameters(case: Case, setting: str) -> dict[str, Any]:
    chosen = {"rank": 16, "top_k": 32, "local_window": 8, "scale": case.D**-0.5, **SETTINGS[setting]}
    window = min(chosen["local_window"], chosen["top_k"])
    return {**chosen, "rank": min(chosen["rank"] or case.D, case.D), "local_window": window}


def expected(case: Case, setting: str, bias: Array) -> tuple[Any, Array, Array]:
    """Return the oracle's selection, output and log-sum-exp."""
    q, k, v = case.inputs()
    params = {**parameters(case, setting), "left_padding": case.padding, "bias": bias}
    chosen = reference.sparq_select(q, k, **{name: n for name, n in params.items() if name != "reallocate"})
    out, lse, *_ = oracle.sparq.sparq_attention(q, k, v, **_arguments(q, k, v, params))
    return chosen, out, lse


def _arguments(q: Array, k: Array, v: Array, params: dict[str, Any]) -> dict[str, Any]:
    found = reference._sparq_arguments(q, k, v, {**reference.DEFAULTS["sparq"], **params})
    return {**found, "value_mean": oracle.sparq.masked_mean(v, params["left_padding"], params["bias"])}


@pytest.mark.parametrize(
    ("backend", "case", "setting"),
    [
        pytest.param(name, case, setting, id=f"{name}-{case}-{setting}")
        for name in BACKENDS
        for case, setting in covering(CASES, list(SETTINGS))
    ],
    indirect=["backend"],
)
def test_a_biased_step_conforms_to_the_oracle(backend: Any, case: Case, setting: str) -> None:
    q, k, v = case.inputs()
    bias, params = bias_of(case), parameters(case, setting)
    chosen, out, lse = expected(case, setting, bias)
    indices, how = chosen.indices, {**params, "bias": given(backend, case, bias)}
    if backend.name == "metal" and params.get("key_bits"):  # 8-bit logits
        indices = backend.sparq(case, {"component_score": "query", **how}).choice
        assert_selection_within(indices, chosen.indices, chosen.scores, 1 / 16)
        out, lse = oracle.attend.attend_indices(q, k, v, indices, scale=params["scale"], bias=bias)
    how["left_padding"] = backend.padding(case)
    found, stats = backend.public("sparq_attention", case, **how, return_stats="recall")
    if params.get("reallocate", case.Hq == case.Hkv) and case.S > params["top_k"]:
        assert_as_good_as_plain(backend.numpy(found), out, out, case.dtype)
    else:
        plain = plain_attention(q, k, v, indices, params["scale"], case.dtype, bias)
        assert_as_good_as_plain(backend.numpy(found), out, plain, case.dtype)
    wanted = np.exp(lse - oracle.attend.dense_lse(q, k, scale=params["scale"], left_padding=case.padding, bias=bias))
    np.testing.assert_allclose(backend.numpy(stats.recall), wanted, rtol=1e-4)
    assert 0 < stats.estimated_recall.mean().item() <= 1 + 1e-5


@by_backend
def test_the_selection_is_the_oracles(backend: Any) -> None:
    """Read the selection from unit values, which show the attended keys."""
    case, bias = CASES[5], bias_of(CASES[5])
    q, k, _ = case.inputs()
    params = {**parameters(case, "no-reallocate"), "left_padding": case.padding, "bias": bias}
    chosen = reference.sparq_select(q, k, **{name: n for name, n in params.items() if name != "reallocate"})
    found = []
    for first in range(0, case.S, case.D):
        values = np.zeros((case.B, case.Hkv, case.S, case.D), np.float32)
        unit = np.eye(case.S)[first : first + case.D].T
        values[..., : unit.shape[1]] = unit
        arrays = [backend.array(array, "f32") for array in (q, k, values)]
        how = {**params, "left_padding": backend.padding(case), "bias": given(backend, case, bias)}
        out = backend.numpy(mlx_sparse.sparq_attention(*arrays, **how, backend=backend.name))
        found.append(out[:, 1 :: case.Hq // case.Hkv, 0, : unit.shape[1]])  # heads that no key is hidden from alone
    mask = np.concatenate(found, axis=-1) > 0
    listed = np.sort(np.where(mask, np.arange(case.S), case.S), axis=-1)[..., : chosen.indices.shape[-1]]
    indices = np.where(listed < case.S, listed, -1)
    assert_same_selection(indices, chosen.indices, chosen.scores)
    visible = oracle.attend.visible_keys(bias, case.Hkv)
    assert np.take_along_axis(visible, chosen.indices, axis=-1)[chosen.indices >= 0].all()


@pytest.mark.parametrize("backend", ["metal"], indirect=True)
@pytest.mark.parametrize(("case", "rank"), [(CASES[1], 6), (CASES[2], 32), (Case(1, 16, 1, 50, 64, "f32"), 8)], ids=str)
def test_projected_latents_select_the_keys_of_array_operations(backend: Any, case: Case, rank: int) -> None:
    q, k, _ = backend.arrays(case)
    bias, padding = given(backend, case, bias_of(case)), backend.padding(case)
    rng, shape = np.random.default_rng(5), (case.B, 1, case.D, rank)
    projection = Projection(*(backend.array(rng.normal(size=shape) / case.D**0.5, "f32") for _ in range(2)), None)
    coded = backend.load("code_keys")(project(projection, q, k)[1], padding)
    selection = Selection(rank, 16, 4, 0.2, None, padding, coded, bias, projection)
    held = selection._replace(keys_t=backend.cached_codes(coded))
    found = sparq.sparq_select(q, backend.cached(k), held, length=case.S)
    logits, valid = ops.add_bias(
        sparq_ops.sparq_logits(q, k, selection), bias.reshape(case.B, 1, case.Hq, case.S), None
    )
    if padding is not None:
        valid = valid & ops.valid_keys(case.S, padding)[:, None, None]
    scores = backend.numpy(ops.softmax_lse(logits, valid)[0].sum(axis=2))
    wanted = backend.numpy(sparq_ops.sparq_select(q, k, selection)[0])
    assert_selection_within(backend.numpy(found), wanted, scores, 1 / 16)


@by_backend
def test_hidden_keys_never_reach_the_output(backend: Any) -> None:
    case = CASES[5]
    bias = bias_of(case)
    q, k, v = case.inputs()
    hidden = ~oracle.attend.visible_keys(bias, case.Hkv)
    poisoned = [np.where(hidden[..., None], np.nan, array) for array in (k, v)]
    how = {"left_padding": backend.padding(case), "bias": given(backend, case, bias), "backend": backend.name}
    for top_k, reallocate in ((32, True), (32, False), (400, False)):
        out, clean = (
            mlx_sparse.sparq_attention(
                *(backend.array(array, "f32") for array in arrays), top_k=top_k, reallocate=reallocate, **how
            )
            for arrays in ((q, *poisoned), (q, k, v))
        )
        np.testing.assert_array_equal(backend.numpy(out), backend.numpy(clean))
        assert np.isfinite(backend.numpy(out)).all()


@by_backend
def test_a_listed_key_that_is_hidden_from_all_heads_is_an_empty_slot(backend: Any) -> None:
    case, bias = CASES[5], bias_of(CASES[5])
    q, k, v = case.inputs()
    spoiled = ~oracle.attend.visible_keys(bias, case.Hkv)[..., None]
    every = np.tile(np.arange(case.S), (case.B, case.Hkv, 1))
    wanted = oracle.attend_indices(q, k, v, every, scale=0.1, bias=bias)
    arrays = [backend.array(array, "f32") for array in (q, *(np.where(spoiled, np.nan, rows) for rows in (k, v)))]
    how = {"scale": 0.1, "bias": given(backend, case, bias), "backend": backend.name}
    found = mlx_sparse.attend_indices(*arrays, backend.integers(every), **how)
    for array, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(backend.numpy(array), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@by_backend
def test_a_bias_without_a_softmax_has_the_effect_of_such_a_logit(backend: Any, number: float) -> None:
    case = Case(1, 4, 2, 130, 64, "f32")
    bias = np.zeros((1, 4, 1, 130), np.float32)
    bias[0, 1, 0, 40] = number
    out = backend.numpy(backend.public("sparq_attention", case, bias=backend.array(bias, "f32"), top_k=20))
    wanted = oracle.sparq_attention(*case.inputs(), bias=bias, top_k=20)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    assert np.isnan(out[0, 1]).all()
    np.testing.assert_allclose(out[0, [0, 2, 3]], wanted[0, [0, 2, 3]], rtol=0, atol=2e-5)


@pytest.mark.parametrize("top_k", [32, 400])
@by_backend
def test_a_head_whose_keys_are_all_hidden_attends_to_nothing(backend: Any, top_k: int) -> None:
    case = CASES[5]
    bias = np.zeros((case.B, case.Hq, 1, case.S), np.float32)
    bias[0, :2] = -np.inf
    bias[1, :3] = -np.inf  # all heads of a group
    how = {"left_padding": backend.padding(case), "bias": given(backend, case, bias), "return_stats": "recall"}
    out, stats = backend.public("sparq_attention", case, **how, top_k=top_k)
    assert (backend.numpy(out)[0, :2] == 0).all() and (backend.numpy(out)[1, :3] == 0).all()
    assert (backend.numpy(out)[0, 2:] != 0).all()
    assert (backend.numpy(stats.recall)[0, :2] == 1).all()


@pytest.mark.parametrize("case", [CASES[6], CASES[0]], ids=str)
@by_backend
def test_zeros_change_nothing_and_minus_inf_is_padding(backend: Any, case: Case) -> None:
    zeros = np.zeros((case.B, case.Hq, 1, case.S), np.float32)
    plain = backend.numpy(backend.public("sparq_attention", case, top_k=20, rank=8))
    same = backend.public("sparq_attention", case, bias=backend.array(zeros, "f32"), top_k=20, rank=8)
    tolerance = ulp(plain, case.dtype)
    np.testing.assert_allclose(backend.numpy(same), plain, rtol=0, atol=tolerance)
    zeros[..., :50] = -np.inf
    padded = backend.public("sparq_attention", case, left_padding=backend.integers([50] * case.B), top_k=20, rank=8)
    same = backend.public("sparq_attention", case, bias=backend.array(zeros, "f32"), top_k=20, rank=8)
    np.testing.assert_allclose(backend.numpy(same), backend.numpy(padded), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
@by_backend
def test_every_key_gives_mlx_attention_under_the_mask(backend: Any, case: Case) -> None:
    q, k, v = backend.arrays(case)
    bias = given(backend, case, bias_of(case))
    rounded = [array.astype(mx.float32) for array in (q, k, v)]
    mask = mx.where(bias < -60000, -mx.inf, bias.astype(mx.float32))
    dense = mx.fast.scaled_dot_product_attention(*rounded, scale=0.1, mask=mask)
    how = {"scale": 0.1, "bias": bias, "backend": backend.name}
    every = mx.broadcast_to(mx.arange(case.S), (case.B, case.Hkv, case.S))
    outs = mlx_sparse.sparq_attention(q, k, v, top_k=case.S, **how), mlx_sparse.attend_indices(q, k, v, every, **how)[0]
    for out in outs:
        np.testing.assert_allclose(backend.numpy(out), backend.numpy(dense), rtol=0, atol=1e-5 + ulp(dense, case.dtype))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "ops"], indirect=True)
def test_ties_go_to_the_lower_visible_key(backend: Any) -> None:
    """Test ties, except in `ops`, because MLX's partition has no defined order."""
    q, k = np.zeros((1, 2, 1, 64)), np.zeros((1, 1, 60, 64))
    values = np.eye(60, 64)[None, None]
    bias = np.zeros((1, 2, 1, 60))
    bias[..., [0, 2, 58]] = -np.inf
    arrays = [backend.array(array, "f32") for array in (q, k, values)]
    out = mlx_sparse.sparq_attention(
        *arrays, top_k=8, local_window=3, bias=backend.array(bias, "f32"), backend=backend.name
    )
    assert np.flatnonzero(backend.numpy(out)[0, 0, 0]).tolist() == [1, 3, 4, 5, 6, 56, 57, 59]


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_the_best_keys_under_a_bias_are_those_of_all_components(case: Case) -> None:
    q, k, v = case.inputs()
    bias = bias_of(case)
    how = {"top_k": 32, "local_window": 8, "scale": 0.1, "left_padding": case.padding, "bias": bias}
    mean = {"component_weight": np.ones((case.B, case.Hkv, case.D)), "value_mean": None}
    wanted = oracle.sparq.sparq_attention(q, k, v, rank=case.D, reallocate=False, keys_t=None, **mean, **how)
    found = oracle.baselines.oracle_top_k_attention(q, k, v, **how)
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=1e-12)
    how |= {"left_padding": ADAPTERS["ops"].padding(case), "bias": mx.array(bias)}
    arrays = [mx.array(array) for array in (q, k, v)]
    out = registry.load("oracle_top_k", "ops")(*arrays, **how)[0]
    np.testing.assert_allclose(np.array(out), wanted[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("G", [1, 3])
def test_a_bias_equals_a_further_component_of_queries_and_keys(G: int) -> None:
    """Test the oracle: a query component of 1 reads the bias from a component of the keys, if all heads share it."""
    q, k, v = make(G=G, S=60, D=16)
    bias = np.random.default_rng(3).normal(size=(1, 2, 1, 60))
    wide = np.concatenate([k, 4 * bias.swapaxes(2, 3)], axis=3)  # 4 is the inverse of the scale
    given = np.concatenate([q, np.ones((*q.shape[:3], 1))], axis=3), wide, np.concatenate([v, v[..., :1]], axis=3)
    per_head = np.repeat(bias, G, axis=1)
    choice: dict[str, Any] = {"top_k": 12, "local_window": 3, "scale": 0.25}
    every = {"rank": 16, "reallocate": False, "component_score": "query_key"}
    out = oracle.sparq_attention(q, k, v, bias=per_head, **every, **choice)
    assert_same(out, oracle.oracle_top_k_attention(*given, **choice)[..., :16], k)
    out, lse = oracle.attend_indices(q, k, v, np.tile([1, 5, 40], (1, 2, 1)), scale=0.25, bias=per_head)
    wider, same = oracle.attend_indices(*given, np.tile([1, 5, 40], (1, 2, 1)), scale=0.25)
    assert_same(out, wider[..., :16], k)
    assert_same(lse, same, k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": mx.zeros((1, 4, 1, 49))}, r"bias: expected shape \(1, 4, 1, 50\), got"),
        ({"bias": mx.zeros((4, 1, 50))}, "bias: expected shape"),
        ({"bias": mx.ones((1, 4, 1, 50), mx.bool_)}, "bias: expected floating-point numbers, got mlx.core.bool"),
        ({"bias": mx.zeros((1, 4, 2, 50)), "queries": mx.zeros((1, 4, 2, 64))}, "expected one query per .* a bias"),
    ],
)
def test_a_wrong_bias_is_a_one_line_error(change: dict[str, Any], message: str) -> None:
    arrays = {"queries": mx.zeros((1, 4, 1, 64)), "keys": mx.zeros((1, 2, 50, 64)), "values": mx.zeros((1, 2, 50, 64))}
    for run, more in (
        (mlx_sparse.sparq_attention, {}),
        (mlx_sparse.attend_indices, {"indices": mx.zeros((1, 2, 3), mx.int32)}),
    ):
        with pytest.raises(ShapeError, match=message):
            run(**{**arrays, **change}, **more)


def test_other_backends_refuse_a_bias() -> None:
    row, bias = mx.zeros((1, 2, 60, 64)), mx.zeros((1, 2, 1, 60))
    for backend in ("triton", "onnx"):
        with pytest.raises(BackendUnavailable, match=f"^backend: .*got {backend}"):
            mlx_sparse.sparq_attention(row[:, :, :1], row, row, bias=bias, backend=backend)
