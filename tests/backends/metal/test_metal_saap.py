"""Test SAAP's Metal kernels with networks, lists and calls that tests/core does not have."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS
from cases import Array, Case
from mlx_arrays import to_mlx, to_numpy, whole
from msl import Metal
from saap_cases import SaapCase, router, visited

from mlx_sparse import oracle
from mlx_sparse.core import registry
from mlx_sparse.core.attend import metal as attend
from mlx_sparse.methods.saap import metal as saap
from mlx_sparse.methods.saap.ops import saap_index

network_of = ADAPTERS["metal"].network


def route(case: SaapCase, **weights: mx.array | None) -> Array:
    queries = to_mlx(case.queries_before(), case.step.dtype)
    return np.array(saap.saap_route(queries, probes=case.probes, **(network_of(case) | weights)))


# route


def test_a_missing_bias_is_zero(metal: Metal) -> None:
    case = router(64, 4, 48, 64, 6, "f16", "f16")
    zeros = {name: mx.zeros_like(network_of(case)[name]) for name in ("hidden_bias", "out_bias")}
    assert (route(case, hidden_bias=None, out_bias=None) == route(case, **zeros)).all()


@pytest.mark.parametrize("spoiled", ["query", "hidden_weight", "out_weight"])
def test_nan_visits_the_first_buckets_and_stays_in_its_head(metal: Metal, spoiled: str) -> None:
    case = router(64, 4, 48, 64, 6, "f32", "f32")
    queries, weights = mx.array(case.queries_before()), network_of(case)
    expected = route(case)
    if spoiled == "query":
        queries[0, 1, 0, 5] = mx.nan
    else:
        weights[spoiled][0, 3] = mx.nan
    got = np.array(saap.saap_route(queries, probes=case.probes, **weights))
    assert (got[0, 0] == np.arange(case.probes)).all()
    assert (got[0, 1] == expected[0, 1]).all()


@pytest.mark.parametrize("hidden", [None, 192])
def test_weights_are_read_once_for_the_whole_group(metal: Metal, hidden: int | None) -> None:
    case = SaapCase(Case(2, 8, 2, 1, 128, "f16"), "random", buckets=1100, probes=4, hidden=hidden, weights="f16")
    route(case)
    if metal.emulated:
        for name, array in network_of(case).items():
            read = metal.last("saap_route").reads[name]
            assert read.lane == case.step.B * array.nbytes, name
            assert read.threadgroup <= case.step.B * (array.nbytes + 2 * 128 * case.step.Hkv), name


# list


def listed(case: SaapCase, chosen: Array, *, pending: int = 0, spare: int = 0) -> tuple[list[Array], list[Array]]:
    """Return the indices and counts of a step with ``spare`` additional slots, and the same from the oracle."""
    covered, capacity = max(case.covered - pending, 0), case.step.S + spare
    window = {"sink_tokens": case.sink_tokens, "left_padding": case.step.padding}
    index = oracle.saap_index(case.bucket_ids()[..., :covered], buckets=case.buckets, **window)
    sizes = {"length": case.step.S, "covered": covered, "capacity": capacity}
    found = ADAPTERS["metal"].lists(case, chosen, covered, capacity)[1]
    return found, list(oracle.saap_indices(chosen, *index, **sizes, **window))


def test_a_random_index_and_duplicate_buckets_cause_no_fault(metal: Metal) -> None:
    rng = np.random.default_rng(0)
    offsets = mx.array(rng.integers(-(2**31), 2**31, size=(1, 2, 65)).astype(np.int32))
    key_ids = mx.array(rng.integers(-(2**31), 2**31, size=(1, 2, 300)).astype(np.int32))
    chosen = mx.array(np.full((1, 2, 50), 3, np.int32))
    sizes = {"length": 400, "covered": 300, "sink_tokens": 1, "capacity": 777}
    for visits in (chosen, mx.broadcast_to(mx.arange(64, dtype=mx.int32), (1, 2, 64))):
        indices, counts = saap.saap_indices(visits, offsets, key_ids, **sizes)
        assert indices.shape == (1, 2, 777)
        assert ((np.array(counts) >= 101) & (np.array(counts) <= 777)).all()


def test_a_bucket_of_half_the_keys_is_divided_among_threadgroups(metal: Metal) -> None:
    case = SaapCase(Case(1, 1, 1, 20_000, 8, "f32"), "one", buckets=16, probes=4)
    got, _ = listed(case, visited(case))
    assert (got[1] == 20_000).all()
    if metal.emulated:
        report = metal.last("saap_indices")
        assert report.grid[0] // report.threadgroup[0] == 20
        assert report.reads["key_ids"].lane == 4 * (20_000 - 42)  # each key once


# attention over counted lists

WIDE = Case(1, 8, 2, 9000, 64, "f16")


def attend_counted(counts: list[int]) -> tuple[Array, Array]:
    """Attend to the counted entries of lists of all keys. Return the output and the log-sum-exp."""
    q, k, v = WIDE.inputs()
    lists = np.array([[np.random.default_rng(head).permutation(WIDE.S) for head in range(WIDE.Hkv)]])
    arrays = to_mlx(q, "f16"), whole(k, WIDE.S + 9, "f16"), whole(v, WIDE.S + 9, "f16")
    used = mx.array([counts], dtype=mx.int32)
    out, lse = attend.attend_indices(*arrays, mx.array(lists), counts=used, scale=0.125, length=WIDE.S)
    return to_numpy(out), np.array(lse)


def test_an_invalid_count_is_the_whole_list(metal: Metal) -> None:
    out, lse = attend_counted([9000, 9000])
    for counts in ([9001, 2**31 - 1], [-1, -(2**31)]):
        got, got_lse = attend_counted(counts)
        assert (got == out).all()
        assert (got_lse == lse).all()


@pytest.mark.parametrize("counts", [(9000, 9000), (2500, 700), (100, 0)], ids=str)
def test_threadgroups_divide_the_counted_entries_and_others_return_at_once(
    metal: Metal, counts: tuple[int, int]
) -> None:
    attend_counted(list(counts))
    if not metal.emulated:
        return
    report = next(report for report in metal.launches if report.kernel == "attend_indices")
    splits = report.grid[0] // report.threadgroup[0]
    assert splits == 36
    # Each working threadgroup reads the queries of its group once. The tiles are divided evenly.
    tiles = [-(-count // attend.TILE) for count in counts]
    working = [-(-n // -(-n // splits)) if n else 0 for n in tiles]
    row = WIDE.D * 2
    assert report.reads["queries"].lane == sum(working) * WIDE.Hq // WIDE.Hkv * row
    for name in ("keys", "values"):
        assert report.reads[name].lane == report.reads[name].dispatch == sum(counts) * row
    assert report.reads["indices"].lane == sum(counts) * 4


# the whole step


@pytest.mark.skipif(mx.metal.is_available(), reason="the GPU's own launches are not recorded")
def test_a_step_is_four_launches_and_nothing_waits_for_the_gpu() -> None:
    """Trace the step without running it, so that reading a value would fail."""
    case = SaapCase(Case(1, 4, 2, 900, 64, "f16"), "balanced", buckets=64, probes=8)
    ids = mx.array(case.bucket_ids()[..., :860])
    index = saap_index(ids, buckets=64, sink_tokens=2)
    q, k, v = (to_mlx(array, "f16") for array in case.inputs())
    weights = network_of(case)

    def traced(q: mx.array, k: mx.array, v: mx.array, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        *named, offsets, key_ids = arrays
        chosen = saap.saap_route(q, probes=8, **dict(zip(weights, named, strict=True)))
        sizes = {"length": 900, "covered": 860, "sink_tokens": 2, "capacity": 1200}
        indices, counts = saap.saap_indices(chosen, offsets, key_ids, **sizes)
        return attend.attend_indices(q, k, v, indices, counts=counts, scale=0.125, length=900)

    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, traced, q, k, v, *weights.values(), *index)
    launched = [node["arguments"][0] for node in nodes if node.get("name") == "CustomKernel"]
    kinds = ["saap_route", "saap_indices", "attend_indices", "merge_parts"]
    assert [next(kind for kind in kinds if kind in name) for name in launched] == kinds


@pytest.mark.parametrize("function", ["saap", "saap_route", "saap_indices"])
def test_auto_is_metal_for_saap_if_it_supports_the_shape(metal: Metal, function: str) -> None:
    assert registry.resolve("auto", function, D=128, G=16) == "metal"
    assert registry.resolve("auto", function, D=128, G=17) == "ops"
    assert registry.resolve("auto", function, D=320, G=4) == "ops"
