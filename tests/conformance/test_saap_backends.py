"""Every backend of SAAP for MLX arrays against the float64 oracle, over the one list of cases."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import Case
from mlx_arrays import DTYPES, to_mlx, to_numpy
from saap_cases import SAAP_CASES, SaapCase, assert_attends, assert_same_buckets, assert_same_list, listed, visited

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError
from mlx_sparse.methods import registry


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """A backend by name; metal runs in the harness of tests/msl where there is no Metal GPU."""
    if request.param == "metal":
        request.getfixturevalue("metal")
    name: str = request.param
    return name


by_backend = pytest.mark.parametrize("backend", ["ops", "metal"], indirect=True)
by_case = pytest.mark.parametrize("case", SAAP_CASES, ids=str)


def padding(case: SaapCase) -> mx.array | None:
    return None if case.step.padding is None else mx.array(case.step.padding)


def inputs(case: SaapCase) -> list[mx.array]:
    return [to_mlx(array, case.step.dtype) for array in case.inputs()]


def index(case: SaapCase, backend: str, covered: int) -> tuple[mx.array, mx.array]:
    ids = mx.array(case.bucket_ids()[..., :covered])
    arguments = {"buckets": case.buckets, "sink_tokens": case.sink_tokens, "left_padding": padding(case)}
    offsets, key_ids = registry.load("saap_index", backend)(ids, **arguments)
    return offsets, key_ids


@by_case
@by_backend
def test_keys_go_to_the_buckets_of_the_oracle(backend: str, case: SaapCase) -> None:
    _, keys, _ = case.inputs()
    rng = np.random.default_rng(4)
    centroids = rng.normal(size=(case.step.Hkv, case.buckets, case.step.D)).astype(np.float32)
    got = np.array(mlx_sparse.saap_assign(to_mlx(keys, case.step.dtype), mx.array(centroids), backend=backend))
    products = np.einsum("bhnd,hcd->bhnc", keys.astype(np.float64), centroids)
    best = products.max(axis=-1)
    chosen = np.take_along_axis(products, got[..., None], axis=-1)[..., 0]
    assert (best - chosen).max() <= 1e-5 * np.abs(products).max()  # a float32 product of D numbers
    assert (got == oracle.saap_assign(keys, centroids)).mean() > 0.99


@by_case
@by_backend
def test_a_group_visits_the_buckets_of_the_oracle(backend: str, case: SaapCase) -> None:
    network = {name: to_mlx(array, case.weights) for name, array in case.network().items()}
    queries = to_mlx(case.queries_before(), case.step.dtype)
    got = mlx_sparse.saap_route(queries, probes=case.probes, backend=backend, **network)
    assert_same_buckets(np.array(got), case)


@by_case
@by_backend
def test_buckets_list_their_keys(backend: str, case: SaapCase) -> None:
    offsets, key_ids = (np.array(array) for array in index(case, backend, case.covered))
    expected = oracle.saap_index(
        case.bucket_ids()[..., : case.covered],
        buckets=case.buckets,
        sink_tokens=case.sink_tokens,
        left_padding=case.step.padding,
    )
    assert (offsets == expected[0]).all()
    for b, h in np.ndindex(offsets.shape[:2]):
        used = offsets[b, h, -1]
        assert (key_ids[b, h, :used] == expected[1][b, h, :used]).all()


@pytest.mark.parametrize("pending", [0, 1, 37], ids="pending{}".format)
@by_case
@by_backend
def test_a_step_lists_the_keys_of_the_oracle_once(backend: str, case: SaapCase, pending: int) -> None:
    covered = max(case.covered - pending, 0)
    offsets, key_ids = index(case, backend, covered)
    sizes = {"length": case.step.S, "covered": covered, "sink_tokens": case.sink_tokens, "capacity": case.step.S + 70}
    chosen = visited(case)
    # A slot that is empty may hold any number that is no bucket's.
    holes = np.concatenate([chosen, np.broadcast_to(np.array([-1, case.buckets, 1 << 20]), (*chosen.shape[:2], 3))], -1)
    indices, counts = registry.load("saap_indices", backend)(
        mx.array(holes.astype(np.int32)), offsets, key_ids, left_padding=padding(case), **sizes
    )
    exact = oracle.saap_indices(chosen, np.array(offsets), np.array(key_ids), left_padding=case.step.padding, **sizes)
    assert_same_list(np.array(indices), np.array(counts), exact)


@by_backend
def test_each_sequence_of_a_step_may_have_listed_as_many_keys_as_it_likes(backend: str) -> None:
    case = SaapCase(Case(3, 4, 2, 150, 64, "f32", padding=(0, 60, 7)), "random")
    covered = np.array([130, 90, 7])
    ids = np.where(np.arange(150) < covered[:, None, None], case.bucket_ids(), -1)
    sinks = {"sink_tokens": 4, "left_padding": padding(case)}
    offsets, key_ids = registry.load("saap_index", backend)(mx.array(ids), buckets=case.buckets, **sinks)
    sizes = {"length": 150, "capacity": 150}
    expand = registry.load("saap_indices", backend)
    indices, counts = expand(
        mx.array(visited(case)), offsets, key_ids, covered=mx.array(covered.astype(np.int32)), **sizes, **sinks
    )
    given = np.array(offsets), np.array(key_ids)
    window = {"sink_tokens": 4, "left_padding": case.step.padding}
    expected = oracle.saap_indices(visited(case), *given, covered=covered, **sizes, **window)
    assert_same_list(np.array(indices), np.array(counts), expected)


@by_case
@by_backend
def test_a_list_longer_than_its_capacity_is_cut_and_nothing_else_is_touched(backend: str, case: SaapCase) -> None:
    offsets, key_ids = index(case, backend, case.covered)
    sizes = {"length": case.step.S, "covered": case.covered, "sink_tokens": case.sink_tokens, "capacity": 20}
    indices, counts = registry.load("saap_indices", backend)(
        mx.array(visited(case)), offsets, key_ids, left_padding=padding(case), **sizes
    )
    assert (np.array(counts) == np.minimum(listed(case)[1], 20)).all()
    assert indices.shape[2] == 20


@by_backend
def test_more_sinks_than_numbers_of_32_bits_are_all_keys(backend: str) -> None:
    case = SaapCase(Case(2, 4, 2, 150, 64, "f32", padding=(0, 60)), "random")
    ids = mx.array(case.bucket_ids()[..., : case.covered])
    many = {"sink_tokens": (1 << 31) - 1, "left_padding": padding(case)}
    offsets, key_ids = registry.load("saap_index", backend)(ids, buckets=case.buckets, **many)
    assert (offsets == 0).all()
    sizes = {"length": case.step.S, "covered": case.covered, "capacity": case.step.S}
    expand = registry.load("saap_indices", backend)
    _, counts = expand(mx.array(visited(case)), offsets, key_ids, **sizes, **many)
    assert counts.tolist() == [[150, 150], [90, 90]]


@by_case
@by_backend
def test_saap_attention_equals_the_oracle(backend: str, case: SaapCase) -> None:
    q, k, v = case.inputs()
    arguments: dict[str, Any] = {**case.window, "return_stats": "mass"}
    ids, chosen = case.bucket_ids(), visited(case)
    expected, stats = oracle.saap_attention(
        q, k, v, bucket_ids=ids, visited=chosen, left_padding=case.step.padding, **arguments
    )
    given = {"bucket_ids": mx.array(ids), "visited": mx.array(chosen), "left_padding": padding(case)}
    out, measured = mlx_sparse.saap_attention(*inputs(case), **given, backend=backend, **arguments)
    assert out.dtype == DTYPES[case.step.dtype]
    assert out.shape == expected.shape
    assert_attends(to_numpy(out), None, case)
    assert measured.elements == stats.elements
    assert measured.density == pytest.approx(stats.density, rel=1e-6)
    assert measured.selectivity == pytest.approx(stats.selectivity, rel=1e-5)
    np.testing.assert_allclose(np.array(measured.retained_mass), stats.retained_mass, rtol=1e-4, atol=1e-6)


@by_case
@by_backend
def test_attending_counted_lists_ignores_what_is_behind_the_count(backend: str, case: SaapCase) -> None:
    indices, counts = listed(case)
    # Real keys in the slots behind the count: whoever reads them is wrong.
    filled = np.where(np.arange(case.step.S) < counts[..., None], indices, np.arange(case.step.S)).astype(np.int32)
    attend = registry.load("attend_indices", backend)
    out, lse = attend(*inputs(case), mx.array(filled), scale=case.scale, counts=mx.array(counts))
    assert_attends(to_numpy(out), np.array(lse), case)


@by_backend
def test_every_bucket_visited_is_dense_attention(backend: str) -> None:
    case = SaapCase(Case(1, 6, 2, 300, 64, "f32"), "skewed")
    arrays = inputs(case)
    every = mx.broadcast_to(mx.arange(case.buckets), (1, 2, case.buckets))
    given = {"bucket_ids": mx.array(case.bucket_ids()), "visited": every}
    out = mlx_sparse.saap_attention(*arrays, **given, backend=backend, **case.window)
    dense = mlx_sparse.dense_attention(*arrays, backend=backend)
    np.testing.assert_allclose(to_numpy(out), to_numpy(dense), rtol=0, atol=2e-6)


@by_backend
@pytest.mark.parametrize("again", [[3, 3, 5], [5, 3, -1, 3, -7, 5], []], ids=["twice", "unordered", "nothing"])
def test_a_bucket_listed_twice_is_visited_once(backend: str, again: list[int]) -> None:
    case = SaapCase(Case(1, 6, 2, 300, 64, "f32"), "random")
    arrays = inputs(case)

    def attend(buckets: list[int]) -> mx.array:
        given = {"visited": mx.array([[buckets] * 2], dtype=mx.int32).reshape(1, 2, len(buckets))}
        ids = mx.array(case.bucket_ids())
        out: mx.array = mlx_sparse.saap_attention(*arrays, bucket_ids=ids, **given, backend=backend, **case.window)
        return out

    assert (attend(again) == attend(sorted({bucket for bucket in again if bucket >= 0}))).all()


def test_numbers_of_64_bits_do_not_become_buckets() -> None:
    case = SaapCase(Case(1, 2, 2, 300, 64, "f32"), "random")
    wide = {"visited": np.array([[[3, 5 - 2**32]] * 2]), "bucket_ids": case.bucket_ids() + (np.arange(300) % 2 << 32)}
    narrow = {"visited": np.array([[[3]] * 2]), "bucket_ids": np.where(np.arange(300) % 2, -1, case.bucket_ids())}
    outs = [
        mlx_sparse.saap_attention(
            *inputs(case), **{name: mx.array(array, mx.int64) for name, array in given.items()}, **case.window
        )
        for given in (wide, narrow)
    ]
    assert (outs[0] == outs[1]).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_integers_of_every_type_are_buckets(dtype: str) -> None:
    case = SaapCase(Case(1, 2, 2, 300, 64, "f32"), "balanced")
    q, k, v = inputs(case)

    def attend(visited: list[int], type_of_visited: str, type_of_ids: str) -> mx.array:
        given = {"visited": mx.array([[visited] * 2], getattr(mx, type_of_visited))}
        ids = mx.array(case.bucket_ids(), getattr(mx, type_of_ids))
        out: mx.array = mlx_sparse.saap_attention(q, k, v, bucket_ids=ids, **given, **case.window)
        return out

    assert (attend([3, 5], dtype, dtype) == attend([3, 5], "int32", "int32")).all()
    # More buckets than a number of one byte can tell.
    assert (attend([3, 1000], "int32", dtype) == attend([3], "int32", "int32")).all()


@by_backend
def test_a_context_of_the_window_and_a_prompt_are_dense(backend: str) -> None:
    case = SaapCase(Case(1, 4, 2, 42, 64, "f32"), "one")
    q, k, v = inputs(case)
    given = {"bucket_ids": mx.array(case.bucket_ids()), "visited": mx.array(visited(case))}
    out, stats = mlx_sparse.saap_attention(q, k, v, **given, backend=backend, return_stats=True, **case.window)
    assert (out == mlx_sparse.dense_attention(q, k, v, backend=backend)).all()
    assert (stats.elements, stats.density) == (stats.dense_elements, 1.0)
    queries = mx.concatenate([q, q], axis=2)
    prompt = mlx_sparse.saap_attention(queries, k, v, **given, backend=backend, sink_tokens=0, recent_tokens=1)
    assert (prompt == mlx_sparse.dense_attention(queries, k, v, backend=backend)).all()


GOOD: dict[str, Any] = {"bucket_ids": mx.zeros((1, 2, 8), mx.int32), "visited": mx.zeros((1, 2, 3), mx.int32)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bucket_ids": mx.zeros((1, 2, 7), mx.int32)}, ShapeError, r"bucket_ids: expected shape \(1, 2, 8\)"),
        ({"bucket_ids": mx.zeros((1, 2, 8))}, ShapeError, "bucket_ids: expected integers"),
        ({"visited": mx.zeros((2, 2, 3), mx.int32)}, ShapeError, r"visited: expected shape \(B=1, Hkv=2, n\)"),
        ({"visited": mx.zeros((1, 2, 3))}, ShapeError, "visited: expected integers"),
        (
            {"visited": mx.full((1, 2, 3), 1 << 30, mx.int32)},
            ConfigError,
            "visited: expected buckets of at most 4095, got 1073741824",
        ),
        ({"sink_tokens": -1}, ConfigError, "sink_tokens: expected an integer of at least 0"),
        ({"recent_tokens": 0}, ConfigError, "recent_tokens: expected an integer of at least 1"),
        ({"backend": "triton"}, BackendUnavailable, "torch tensors"),
    ],
)
def test_bad_arguments_of_saap_attention_are_one_clear_line(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k = mx.zeros((1, 4, 1, 16)), mx.zeros((1, 2, 8, 16))
    with pytest.raises(error, match=message) as caught:
        mlx_sparse.saap_attention(q, k, k, **{**GOOD, "recent_tokens": 2, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out_weight": mx.zeros((2, 8, 5))}, ShapeError, r"hidden_weight: expected shape \(2, 16, 8\)"),
        ({"out_weight": mx.zeros((3, 6, 5))}, ShapeError, "out_weight: expected"),
        ({"out_weight": mx.zeros((6, 5))}, ShapeError, "out_weight: expected"),
        ({"hidden_weight": None}, ShapeError, r"out_weight: expected shape \(2, 16, 5\)"),
        ({"hidden_bias": mx.zeros((2, 7))}, ShapeError, "hidden_bias: expected"),
        ({"out_bias": mx.zeros((2, 6))}, ShapeError, "out_bias: expected"),
        ({"probes": 6}, ConfigError, "probes: expected an integer of at least 1 and at most 5"),
        ({"queries": mx.zeros((1, 4, 2, 16))}, ShapeError, "queries: expected"),
    ],
)
def test_bad_arguments_of_saap_route_are_one_clear_line(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good = {"queries": mx.zeros((1, 4, 1, 16)), "out_weight": mx.zeros((2, 6, 5)), "probes": 2}
    good["hidden_weight"] = mx.zeros((2, 16, 6))
    with pytest.raises(error, match=message) as caught:
        mlx_sparse.saap_route(**{**good, **change})
    assert "\n" not in str(caught.value)


def test_no_keys_have_no_buckets() -> None:
    assert mlx_sparse.saap_assign(mx.zeros((1, 2, 0, 16)), mx.zeros((2, 5, 16))).shape == (1, 2, 0)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 0, 16), (3, 5, 16), (5, 16)], ids=str)
def test_centroids_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="centroids: expected"):
        mlx_sparse.saap_assign(mx.zeros((1, 2, 8, 16)), mx.zeros(shape))
