"""Every backend for MLX arrays against the float64 oracle, over the one list of cases."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import (
    CASES,
    SPARQ,
    Array,
    Case,
    assert_as_good_as_plain,
    assert_same_choice,
    parameters,
    plain_attention,
    plain_sparq,
    ulp,
)
from mlx_arrays import DTYPES, to_mlx, to_numpy
from require import absent

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.kernels import attend, sparq
from mlx_sparse.methods import registry, table

by_case = pytest.mark.parametrize("case", CASES, ids=str)


# Every decode method on every backend that has it.
METHODS = [
    pytest.param(method, backend, id=f"{method}-{backend}")
    for method in ("sparq", "streaming", "flexgen", "oracle_top_k", "dense")
    for backend in table.FUNCTIONS[method]
    if backend not in table.FOREIGN
]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """A backend by name; metal runs in the harness of tests/msl where there is no Metal GPU."""
    if request.param == "metal":
        request.getfixturevalue("metal")
    name: str = request.param
    return name


by_backend = pytest.mark.parametrize("backend", ["ops", "metal"], indirect=True)
by_method = pytest.mark.parametrize(("method", "backend"), METHODS, indirect=["backend"])


def arrays(case: Case, *given: Array) -> list[mx.array]:
    return [to_mlx(array, case.dtype) for array in given]


def padding(case: Case) -> mx.array | None:
    return None if case.padding is None else mx.array(case.padding)


def select(case: Case, q: Array, k: Array, params: dict[str, Any]) -> oracle.SparQSelection:
    names = ("rank", "top_k", "local_window", "group_reduce", "component_score", "scale")
    return oracle.sparq_select(q, k, left_padding=case.padding, **{n: params[n] for n in names if n in params})


def choice(backend: str, case: Case, q: mx.array, k: mx.array, params: dict[str, Any]) -> tuple[Array, Array]:
    """Indices and alpha, chosen by a backend."""
    weighted = params.get("component_score") == "query_key"
    arguments = {
        "rank": params["rank"],
        "top_k": params["top_k"],
        "local_window": params.get("local_window", params["top_k"] // 4),
        "group_reduce": params.get("group_reduce", "softmax"),
        "component_weight": registry.load("deviation", backend)(k, padding(case)) if weighted else None,
        "scale": params.get("scale", case.D**-0.5),
        "left_padding": padding(case),
        "keys_t": None,
    }
    if backend == "ops":
        indices, alpha = registry.load("sparq_select", "ops")(q, k, **arguments)
    else:
        indices, softmax, logits = sparq.sparq_select(q, k, **arguments)
        reallocation = attend.Reallocation(logits, softmax, mx.zeros(k.shape[:2] + k.shape[3:]))
        parts = attend.parts(q, k, k, indices, scale=1.0, reallocation=reallocation)
        alpha = parts[2].sum(axis=2).reshape(q.shape[:2])
    return np.array(indices), np.array(alpha)


@pytest.mark.parametrize("setting", SPARQ)
@by_case
@by_backend
def test_sparq_chooses_the_keys_of_the_oracle(backend: str, case: Case, setting: str) -> None:
    q, k, _ = case.inputs()
    params = parameters(case, setting)
    expected = select(case, q, k, params)
    indices, alpha = choice(backend, case, *arrays(case, q, k), params)
    assert_same_choice(indices, expected.indices, expected.scores)
    mass = np.take_along_axis(
        expected.s_hat.reshape(case.B, case.Hkv, -1, case.S), np.maximum(indices, 0)[:, :, None], axis=-1
    )
    mass = np.where(indices[:, :, None] >= 0, mass, 0).sum(axis=-1).reshape(case.B, case.Hq)
    # 1 - alpha is what counts: alpha is a float32 sum of up to S float32 exponentials.
    np.testing.assert_allclose(alpha, mass, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True], ids=["keys", "keys_t"])
@pytest.mark.parametrize("setting", SPARQ)
@by_case
@by_backend
def test_sparq_attention_equals_the_oracle(backend: str, case: Case, setting: str, transposed: bool) -> None:
    q, k, v = case.inputs()
    params = parameters(case, setting)
    expected, stats = oracle.sparq_attention(q, k, v, left_padding=case.padding, return_stats="mass", **params)
    mq, mk, mv = arrays(case, q, k, v)
    keys_t = mx.contiguous(mk.swapaxes(-1, -2)) if transposed else None
    out, measured = mlx_sparse.sparq_attention(
        mq, mk, mv, left_padding=padding(case), keys_t=keys_t, return_stats="mass", backend=backend, **params
    )
    assert out.dtype == DTYPES[case.dtype]
    chosen = select(case, q, k, params).indices
    plain = plain_sparq(case, params, q, k, v, chosen)
    assert_as_good_as_plain(to_numpy(out), expected, plain, case.dtype)
    assert (measured.elements, measured.density) == (stats.elements, stats.density)
    np.testing.assert_allclose(np.array(measured.retained_mass), stats.retained_mass, rtol=1e-4, atol=1e-6)


@by_case
@by_backend
def test_attend_indices_equals_the_oracle_on_its_own_indices(backend: str, case: Case) -> None:
    q, k, v = case.inputs()
    chosen = select(case, q, k, {"rank": 16, "top_k": 40}).indices
    expected, lse = oracle.attend_indices(q, k, v, chosen, scale=0.2)
    out, got = mlx_sparse.attend_indices(*arrays(case, q, k, v), mx.array(chosen), scale=0.2, backend=backend)
    assert_as_good_as_plain(to_numpy(out), expected, plain_attention(q, k, v, chosen, 0.2, case.dtype), case.dtype)
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), lse, rtol=0, atol=4 * ulp(lse[np.isfinite(lse)], "f32"))


@pytest.mark.parametrize("empty", [-1, 20, 25000])
@by_backend
def test_an_index_that_is_no_key_is_an_empty_slot(backend: str, empty: int) -> None:
    case = Case(1, 4, 2, 20, 64, "f32")
    q, k, v = case.inputs()
    indices = np.array([[[3, 7, empty]] * 2], dtype=np.int32)
    expected, _ = oracle.attend_indices(q, k, v, indices[..., :2], scale=0.2)
    out, _ = mlx_sparse.attend_indices(*arrays(case, q, k, v), mx.array(indices), scale=0.2, backend=backend)
    np.testing.assert_allclose(np.array(out), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(oracle.attend_indices(q, k, v, indices, scale=0.2)[0], expected)


BASELINES: dict[str, dict[str, Any]] = {
    "streaming": {"sink_tokens": 4, "recent_tokens": 20},
    "flexgen": {"top_k": 24},
    "oracle_top_k": {"top_k": 24},
    "dense": {},
}


@pytest.mark.parametrize("method", BASELINES)
@by_case
def test_baseline_equals_the_oracle(case: Case, method: str) -> None:
    q, k, v = case.inputs(seed=1)
    name = f"{method}_attention"
    settings = BASELINES[method]
    expected, stats = getattr(oracle, name)(q, k, v, left_padding=case.padding, return_stats="mass", **settings)
    out, measured = getattr(mlx_sparse, name)(
        *arrays(case, q, k, v), left_padding=padding(case), return_stats="mass", **settings
    )
    everything = np.broadcast_to(np.arange(case.S), (case.B, case.Hkv, case.S))
    if case.padding:
        everything = np.where(everything >= np.array(case.padding)[:, None, None], everything, -1)
    plain = plain_attention(q, k, v, everything, case.D**-0.5, case.dtype)
    dense = oracle.dense_attention(q, k, v, left_padding=case.padding)
    assert_as_good_as_plain(to_numpy(out), expected, expected + (plain - dense), case.dtype)
    np.testing.assert_allclose(np.array(measured.retained_mass), stats.retained_mass, rtol=1e-4, atol=1e-6)


@by_case
def test_h2o_evicts_what_the_oracle_evicts(case: Case) -> None:
    q, k, v = case.inputs(seed=2, L=min(8, case.S))
    mq, mk, mv = arrays(case, q, k, v)
    received = oracle.h2o_scores(q, k, left_padding=case.padding)
    scores = mlx_sparse.h2o_scores(mq, mk, left_padding=padding(case))
    valid = np.isfinite(received)
    assert (np.isfinite(np.array(scores)) == valid).all()
    np.testing.assert_allclose(np.array(scores)[valid], received[valid], rtol=0, atol=1e-5)
    settings = {"top_k": 24, "left_padding": case.padding}
    expected, kept = oracle.h2o_attention(q[:, :, -1:], k, v, scores=received, **settings)
    out, updated = mlx_sparse.h2o_attention(
        mq[:, :, -1:], mk, mv, scores=mx.array(received), top_k=24, left_padding=padding(case)
    )
    assert (np.isfinite(np.array(updated)) == np.isfinite(kept)).all()
    indices = oracle.top_k_select(received, top_k=24, local_window=6, left_padding=case.padding)
    plain = plain_attention(q[:, :, -1:], k, v, indices, case.D**-0.5, case.dtype)
    assert_as_good_as_plain(to_numpy(out), expected, plain, case.dtype)


@pytest.mark.parametrize("L", [2, 5])
@by_method
def test_several_queries_are_attended_densely_and_causally(method: str, backend: str, L: int) -> None:
    case = Case(2, 6, 2, 70, 64, "f32", padding=(0, 30))
    q, k, v = case.inputs(L=L)
    out = getattr(mlx_sparse, f"{method}_attention")(
        *arrays(case, q, k, v), left_padding=padding(case), backend=backend
    )
    expected = oracle.dense_attention(q, k, v, left_padding=case.padding)
    np.testing.assert_allclose(np.array(out), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("poison", [1e3, float("inf"), float("nan")])
@by_method
def test_padded_rows_never_reach_the_output(method: str, backend: str, poison: float) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(290, 7))
    q, k, v = case.inputs()
    clean = getattr(oracle, f"{method}_attention")(q, k, v, left_padding=case.padding)
    for row, first in enumerate(case.padding or ()):
        k[row, :, :first] = poison
        v[row, :, :first] = poison
    out = getattr(mlx_sparse, f"{method}_attention")(
        *arrays(case, q, k, v), left_padding=padding(case), backend=backend
    )
    np.testing.assert_allclose(np.array(out), clean, rtol=0, atol=1e-5)


@by_case
@by_backend
def test_keeping_every_key_is_dense_attention_to_the_last_bit(backend: str, case: Case) -> None:
    q, k, v = arrays(case, *case.inputs())
    dense = mlx_sparse.dense_attention(q, k, v, left_padding=padding(case))
    sparse = mlx_sparse.sparq_attention(q, k, v, rank=2, top_k=case.S, left_padding=padding(case), backend=backend)
    assert mx.array_equal(dense, sparse)


@by_backend
def test_rank_D_is_oracle_top_k(backend: str) -> None:
    case = Case(1, 8, 2, 300, 64, "f32")
    q, k, v = arrays(case, *case.inputs())
    sparq = mlx_sparse.sparq_attention(q, k, v, rank=64, top_k=40, reallocate=False, backend=backend)
    np.testing.assert_allclose(
        np.array(sparq), np.array(mlx_sparse.oracle_top_k_attention(q, k, v, top_k=40)), rtol=0, atol=1e-6
    )


@by_method
def test_a_row_without_a_valid_key_gives_zeros_and_has_lost_nothing(method: str, backend: str) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(300, 0))
    q, k, v = case.inputs()
    out, stats = getattr(mlx_sparse, f"{method}_attention")(
        *arrays(case, q, k, v), left_padding=padding(case), return_stats="mass", backend=backend
    )
    assert mx.all(out[0] == 0)
    assert mx.all(stats.retained_mass[0] == 1)


@by_backend
def test_a_row_without_a_valid_key_gives_zeros_whatever_value_mean_is(backend: str) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(300, 0))
    given = {"value_mean": mx.full((2, 2, 64), 7.0), "left_padding": padding(case), "backend": backend}
    out = mlx_sparse.sparq_attention(*arrays(case, *case.inputs()), rank=16, top_k=32, reallocate=True, **given)
    assert mx.all(out[0] == 0)
    assert mx.all(out[1] != 0)


@by_backend
def test_a_given_value_mean_is_used(backend: str) -> None:
    case = Case(1, 2, 2, 300, 64, "f32")
    q, k, v = case.inputs()
    mean = np.full((1, 2, 64), 7.0, dtype=np.float32)
    out = mlx_sparse.sparq_attention(
        *arrays(case, q, k, v), rank=8, top_k=16, value_mean=mx.array(mean), backend=backend
    )
    np.testing.assert_allclose(
        np.array(out), oracle.sparq_attention(q, k, v, rank=8, top_k=16, value_mean=mean), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("function", "backend"), [(name, backend) for name, row in table.FUNCTIONS.items() for backend in row]
)
def test_what_the_table_names_is_there(function: str, backend: str) -> None:
    if backend != "metal" and (reason := registry.unavailable(backend)):  # the launchers of Metal load anywhere
        absent(backend, reason)
    assert callable(registry.load(function, backend))


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("sparq", {"rank": 0}, mlx_sparse.ConfigError, "rank: expected an integer of at least 1, got 0"),
    ("sparq", {"rank": 65}, mlx_sparse.ConfigError, "rank: expected at most the head dim D=64, got 65"),
    ("sparq", {"top_k": -3}, mlx_sparse.ConfigError, "top_k: expected an integer of at least 1, got -3"),
    ("sparq", {"local_window": 200}, mlx_sparse.ConfigError, "local_window: expected at most top_k=128"),
    ("sparq", {"reallocate": "yes"}, mlx_sparse.ConfigError, "reallocate: expected one of auto, true, false"),
    ("sparq", {"group_reduce": "max"}, mlx_sparse.ConfigError, "group_reduce: expected one of softmax, logits"),
    ("sparq", {"component_score": "key"}, mlx_sparse.ConfigError, "component_score: expected one of query, query_key"),
    ("sparq", {"keys_t": mx.zeros((1, 2, 50, 64))}, mlx_sparse.ShapeError, "keys_t: expected shape"),
    ("sparq", {"value_mean": mx.zeros((1, 2))}, mlx_sparse.ShapeError, "value_mean: expected shape"),
    ("sparq", {"left_padding": [0, 1]}, mlx_sparse.ShapeError, "left_padding: expected shape"),
    ("sparq", {"backend": "metal"}, mlx_sparse.BackendUnavailable, r"got metal .MLX finds no Metal GPU"),
    ("sparq", {"backend": "triton"}, mlx_sparse.BackendUnavailable, r"got triton .*: .* mlx_sparse.cuda_ref"),
    ("sparq", {"backend": "oracle"}, mlx_sparse.BackendUnavailable, "mlx_sparse.oracle"),
    ("sparq", {"return_stats": "all"}, mlx_sparse.ConfigError, "return_stats: expected one of"),
    ("streaming", {"recent_tokens": 0}, mlx_sparse.ConfigError, "recent_tokens: expected an integer of at least 1"),
    ("flexgen", {"top_k": 0}, mlx_sparse.ConfigError, "top_k: expected an integer of at least 1"),
    ("sparq", {"left_padding": [0.5]}, mlx_sparse.ShapeError, "left_padding: expected integers"),
    ("h2o", {"scores": mx.zeros((1, 2, 3))}, mlx_sparse.ShapeError, "scores: expected shape"),
]


@pytest.mark.parametrize(("method", "settings", "error", "message"), BAD, ids=[f"{b[0]}-{b[3][:24]}" for b in BAD])
def test_a_wrong_argument_gets_one_clear_line(
    method: str, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = Case(1, 4, 2, 50, 64, "f32")
    q, k, v = arrays(case, *case.inputs())
    with pytest.raises(error, match=message) as caught:
        getattr(mlx_sparse, f"{method}_attention")(q, k, v, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("queries", "keys", "values", "message"),
    [
        ((1, 4, 64), (1, 2, 50, 64), (1, 2, 50, 64), "queries: expected 4 axes"),
        ((1, 4, 1, 64), (1, 2, 50, 64), (1, 2, 49, 64), "values: expected the shape of keys"),
        ((1, 4, 1, 64), (1, 2, 50, 32), (1, 2, 50, 32), "keys: expected"),
        ((1, 5, 1, 64), (1, 2, 50, 64), (1, 2, 50, 64), "queries: expected a multiple of Hkv=2"),
        ((1, 4, 3, 64), (1, 2, 2, 64), (1, 2, 2, 64), "keys: expected at least L=3 keys"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], message: str
) -> None:
    with pytest.raises(mlx_sparse.ShapeError, match=message):
        mlx_sparse.sparq_attention(mx.zeros(queries), mx.zeros(keys), mx.zeros(values))
