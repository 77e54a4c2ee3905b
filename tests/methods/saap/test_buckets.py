"""Compare every backend of SAAP with the float64 oracle over all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from adapters import backends_with
from cases import Array, Case, Padded, covering, round_to
from saap_cases import (
    ROUTERS,
    SAAP_CASES,
    SaapCase,
    Tied,
    assert_attends,
    assert_same_buckets,
    assert_same_list,
    listed,
    visited,
)

from mlx_sparse import oracle

ROUTING = backends_with("route")
SMALL = SaapCase(Case(2, 6, 2, 200, 64, "f32", padding=(0, 60)), "random")
SOME_CASES = [SAAP_CASES[n] for n in (2, 5, 6, 9, 13, 15, 16)]
by_backend = pytest.mark.parametrize("backend", backends_with("saap"), indirect=True)
by_routing = pytest.mark.parametrize("backend", ROUTING, indirect=True)


def with_cases(names: list[str], name: str = "", values: Sequence[Any] = ("",)) -> pytest.MarkDecorator:
    """Parametrize a test: array operations with every case, other backends with some cases.

    The cases are combined with the ``values`` of one more parameter.
    """
    rows = [
        (backend, case, value)
        for backend in names
        for case, value in covering(SAAP_CASES if backend == "ops" else SOME_CASES, values)
    ]
    rows = [pytest.param(*row[: 3 if name else 2], id="-".join(map(str, row))) for row in rows]
    return pytest.mark.parametrize(("backend", "case", name)[: 3 if name else 2], rows, indirect=["backend"])


@with_cases(backends_with("saap"))
def test_a_backend_visits_and_attends_as_the_oracle(backend: Any, case: SaapCase) -> None:
    choice, out, lse = backend.saap(case, visited(case))
    if choice is not None:
        assert_same_buckets(choice, case)
    assert_attends(out, lse, case)


@pytest.mark.parametrize("case", ROUTERS, ids=str)
@by_routing
def test_a_network_of_any_size_visits_the_buckets_of_the_oracle(backend: Any, case: SaapCase) -> None:
    if backend.name == "triton" and case.step.D < 16:
        pytest.skip("triton supports head dims from 16")
    assert_same_buckets(backend.route(case), case)


@pytest.mark.parametrize("hidden", [None, 24])
@by_routing
def test_ties_go_to_the_lower_bucket(backend: Any, hidden: int | None) -> None:
    case = Tied(Case(1, 8, 2, 1, 64, "f16"), "random", buckets=50, probes=9, hidden=hidden)
    first = [*range(9)] if hidden is None else [*range(6), *Tied.best]
    assert (backend.route(case) == np.sort(first)).all()


@pytest.mark.parametrize("poison", [1e3, np.inf, np.nan])
@by_backend
def test_padded_rows_never_reach_the_output(backend: Any, poison: float) -> None:
    case = replace(SMALL, step=Padded(2, 6, 2, 200, 64, "f32", (199, 45), poison))
    assert_attends(
        backend.saap(case, visited(SMALL)).out, None, replace(SMALL, step=replace(SMALL.step, padding=(199, 45)))
    )


@by_backend
def test_a_row_without_a_valid_key_gives_zeros(backend: Any) -> None:
    case = replace(SMALL, step=Padded(2, 6, 2, 200, 64, "f32", (200, 0), np.nan))
    assert (backend.saap(case, visited(SMALL)).out[0] == 0).all()


def lists_of(case: SaapCase, chosen: Array, covered: Any, capacity: int, sinks: int | None = None) -> Any:
    """Return the oracle's index and key list, in the form of `adapters.Arrays.lists`."""
    window = {"sink_tokens": case.sink_tokens if sinks is None else sinks, "left_padding": case.step.padding}
    most = int(np.max(covered))
    ids = np.where(np.arange(most) < np.reshape(covered, (-1, 1, 1)), case.bucket_ids()[..., :most], -1)
    index = oracle.saap_index(ids, buckets=case.buckets, **window)
    sizes = {"length": case.step.S, "covered": covered, "capacity": capacity}
    return index, oracle.saap_indices(chosen, *index, **sizes, **window)


def assert_lists(backend: Any, *given: Any, chosen: Array | None = None, **more: Any) -> None:
    """Assert that index and key list equal the oracle's. ``chosen`` has the same buckets with empty slots."""
    case, wanted_buckets, *sizes = given
    (offsets, key_ids), found = backend.lists(case, wanted_buckets if chosen is None else chosen, *sizes, **more)
    index, wanted = lists_of(*given, **more)
    np.testing.assert_array_equal(offsets, index[0])
    used = np.arange(key_ids.shape[2]) < offsets[..., -1:]
    np.testing.assert_array_equal(key_ids[used], index[1][used])
    assert_same_list(*found, wanted)


@with_cases(ROUTING, "pending", [0, 1, 37])
def test_a_step_lists_the_keys_of_the_oracle_once(backend: Any, case: SaapCase, pending: int) -> None:
    chosen = visited(case)
    # An empty slot may be any number that is not a bucket.
    holes = np.concatenate([chosen, np.broadcast_to(np.array([-1, case.buckets, 1 << 20]), (*chosen.shape[:2], 3))], -1)
    covered = max(case.covered - pending, 0)
    assert_lists(backend, case, chosen, covered, case.step.S + 70, chosen=holes)


@pytest.mark.parametrize("backend", ["ops", "cpu", "metal"], indirect=True)
def test_sequences_of_a_batch_may_cover_different_numbers_of_keys(backend: Any) -> None:
    case = SaapCase(Case(3, 4, 2, 150, 64, "f32", padding=(0, 60, 7)), "random", sink_tokens=4)
    assert_lists(backend, case, visited(case), np.array([130, 90, 7]), 150)


@with_cases(ROUTING, "capacity", [1, 20, 256])
def test_a_list_longer_than_its_capacity_is_truncated(backend: Any, case: SaapCase, capacity: int) -> None:
    _, (whole, _) = backend.lists(case, visited(case), case.covered, case.step.S)
    _, (indices, counts) = backend.lists(case, visited(case), case.covered, capacity)
    assert (counts == np.minimum(listed(case)[1], capacity)).all()
    padded = np.pad(whole, [(0, 0), (0, 0), (0, max(0, capacity - case.step.S))], constant_values=-1)
    np.testing.assert_array_equal(indices, padded[..., :capacity])


@pytest.mark.parametrize("sinks", [2**31 - 1, 2**40])
@by_routing
def test_more_sinks_than_numbers_of_32_bits_are_all_keys(backend: Any, sinks: int) -> None:
    (offsets, _), (_, counts) = backend.lists(SMALL, visited(SMALL), 150, 200, sinks=sinks)
    assert (offsets == 0).all()
    assert counts.tolist() == [[200, 200], [140, 140]]


@with_cases(ROUTING)
def test_entries_behind_the_count_are_ignored(backend: Any, case: SaapCase) -> None:
    indices, counts = listed(case)
    # The slots after the count are valid keys, which must not be attended to.
    filled = np.where(np.arange(case.step.S) < counts[..., None], indices, np.arange(case.step.S))
    if backend.name == "triton":
        from mlx_sparse.cuda_ref.launchers import attend

        given = (*map(backend.cached, backend.arrays(case.step)[1:]), backend.integers(filled))
        out, lse = attend.attend_indices(
            backend.arrays(case.step)[0], *given, counts=backend.integers(counts), scale=case.scale
        )
        _, out, lse = backend.result(None, out, lse, case.step)
    else:
        _, out, lse = backend.attend_indices(case.step, filled, case.scale, counts=backend.integers(counts))
    assert_attends(out, lse, case)


@pytest.mark.parametrize("filling", ["skewed", "balanced"])
@by_backend
def test_every_bucket_visited_is_dense_attention(backend: Any, filling: str) -> None:
    case = replace(SMALL, filling=filling, probes=SMALL.buckets)
    every = np.broadcast_to(np.arange(case.buckets), (2, 2, case.buckets))
    dense = reference.dense_attention(*case.inputs(), left_padding=case.step.padding)
    np.testing.assert_allclose(backend.saap(case, every).out, dense, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    "backend",
    [name for name in backends_with("assign") if name != "metal" and not name.startswith("cpu")],
    indirect=True,
)
def test_keys_go_to_the_bucket_of_the_largest_product_and_non_finite_keys_to_the_first(
    backend: Any, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    keys = round_to(rng.normal(size=(1, 2, 300, 64)), dtype)
    centroids = rng.normal(size=(2, 20, 64)).astype(np.float32)
    for row, number in enumerate((np.nan, np.inf, -np.inf)):
        keys[0, 1, row, 5] = number
    wanted = oracle.saap_assign(keys, centroids)
    assert (wanted[0, 1, :3] == 0).all()
    got = backend.assign(keys, centroids, dtype)
    products = np.einsum("bhnd,hcd->bhnc", np.nan_to_num(keys, posinf=0, neginf=0).astype(np.float64), centroids)
    best, chosen = (np.take_along_axis(products, ids[..., None].astype(int), -1)[..., 0] for ids in (wanted, got))
    assert (best - chosen)[:, :, 3:].max() <= 1e-5 * np.abs(products).max()  # a float32 product of D numbers
    assert (got == wanted).mean() > 0.99
    np.testing.assert_array_equal(got[:, :, :3], wanted[:, :, :3])


# The public functions of a library.


@with_cases(ROUTING)
def test_saap_attention_reports_elements_moved(backend: Any, case: SaapCase) -> None:
    ids, chosen = case.bucket_ids(), visited(case)
    arguments: dict[str, Any] = {**case.window, "left_padding": case.step.padding, "return_stats": "recall"}
    _, stats = oracle.saap_attention(*case.inputs(), bucket_ids=ids, visited=chosen, **arguments)
    given = {"bucket_ids": backend.integers(ids, "int16"), "visited": backend.integers(chosen)}
    out, got = backend.public("saap_attention", case.step, **given, **arguments)
    assert_attends(backend.numpy(out), None, case)
    assert (got.elements, got.dense_elements) == (stats.elements, stats.dense_elements)
    assert got.density == pytest.approx(stats.density, rel=1e-6)
    assert got.selectivity == pytest.approx(stats.selectivity, rel=1e-5)
    np.testing.assert_allclose(backend.numpy(got.recall), stats.recall, rtol=1e-4, atol=1e-6)


def attend(backend: Any, visits: list[int], visited: str = "int32", ids: str = "int32", change: Any = None) -> Array:
    """Return the output of a step over the buckets ``visits``, with integer arrays of the given types."""
    numbers = SMALL.bucket_ids().astype(np.int64)
    shape = (2, 2, len(visits))
    given = {
        "bucket_ids": backend.integers(numbers if change is None else change(numbers), ids),
        "visited": backend.integers(np.broadcast_to(np.array(visits, np.int64), shape), visited),
    }
    out = backend.public("saap_attention", SMALL.step, **given, **SMALL.window, left_padding=SMALL.step.padding)
    return backend.numpy(out)


@pytest.mark.parametrize("again", [[3, 3, 5], [5, 3, -1, 3, -7, 5], []], ids=["twice", "unordered", "nothing"])
@by_routing
def test_a_bucket_listed_twice_is_visited_once(backend: Any, again: list[int]) -> None:
    assert (attend(backend, again) == attend(backend, sorted({bucket for bucket in again if bucket >= 0}))).all()


@by_routing
def test_64_bit_numbers_do_not_wrap_to_buckets(backend: Any) -> None:
    every_other = np.arange(200) % 2
    wide = attend(backend, [3, 5 - 2**32], "int64", "int64", lambda ids: ids + (every_other << 32))
    assert (wide == attend(backend, [3], change=lambda ids: np.where(every_other, -1, ids))).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
@by_routing
def test_integers_of_every_type_are_buckets(backend: Any, dtype: str) -> None:
    def inside(ids: Array) -> Array:
        return np.clip(ids, 0, 15)

    assert (attend(backend, [3, 5], dtype, dtype, inside) == attend(backend, [3, 5], change=inside)).all()
    # The visited bucket exceeds the range of one byte.
    assert (attend(backend, [3, 1000], "int32", dtype, inside) == attend(backend, [3], change=inside)).all()


@by_routing
def test_keys_in_no_bucket_and_empty_slots_are_not_attended(backend: Any) -> None:
    window = {**SMALL.window, "left_padding": SMALL.step.padding, "return_stats": True}
    nowhere = np.full((2, 2, SMALL.step.S), -1)
    for slots in (nowhere[..., :2], nowhere[..., :2] + [0, 1], nowhere[..., :0]):
        given = {"bucket_ids": backend.integers(nowhere), "visited": backend.integers(slots)}
        _, stats = backend.public("saap_attention", SMALL.step, **given, **window)
        assert stats.selectivity == 0
        assert stats.density == (SMALL.sink_tokens + SMALL.recent_tokens) / SMALL.step.S


@by_routing
def test_a_context_of_the_window_and_a_prompt_are_dense_to_the_last_bit(backend: Any) -> None:
    case = Case(1, 4, 2, 42, 64, "f32")
    for L, window in ((1, {}), (3, {"sink_tokens": 1, "recent_tokens": 5})):
        arrays = [backend.array(array, "f32") for array in case.inputs(L=L)]
        ids = backend.integers(np.zeros((1, 2, 42)))
        functions, how = backend.functions, {"backend": backend.name, "return_stats": True}
        out, stats = functions.saap_attention(*arrays, bucket_ids=ids, visited=ids[..., :1], **window, **how)
        dense = functions.dense_attention(*arrays, backend=backend.name)
        assert (backend.numpy(out) == backend.numpy(dense)).all()
        assert (stats.elements, stats.density) == (stats.dense_elements, 1.0)
