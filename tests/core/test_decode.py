"""Compare every backend of the decode methods with the float64 oracle over all cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from adapters import backends_with
from cases import CASES, DECODE, ODD_CASES, PRECISION, SOME_CASES, Array, Case, Padded, covering, every_parameter, ulp
from expected import assert_conforms, attended, expected

from mlx_sparse import oracle
from mlx_sparse.core import registry

ATTENDING = backends_with("attend_indices")
by_case = pytest.mark.parametrize("case", SOME_CASES, ids=str)
by_attending = pytest.mark.parametrize("backend", ATTENDING, indirect=True)


def runs_odd(name: str, case: Case) -> bool:
    """Return True if a backend supports an odd case. Function bodies and Triton's interpreter are slow."""
    if hasattr(case, "Dv"):
        return name == "ops" or name.startswith("cpu")
    if name == "triton":
        return case.D % 8 == 0 and 16 <= case.D and case.S < 4000
    return (
        name in ("ops", "ort")
        or name.startswith("cpu")
        or (name == "metal" and registry.unsupported(name, "sparq", case.D, case.Hq // case.Hkv) is None)
    )


STEPS = [
    pytest.param(name, method, setting, case, id="-".join(filter(None, (method, setting, str(case), name))))
    for method, settings in DECODE.items()
    for name in backends_with(method)
    for cases in (CASES, ODD_CASES)
    for case, setting in covering(cases, list(settings))
    if cases is CASES or (method == "sparq" and runs_odd(name, case))
    if (name, method) != ("metal", "dense")  # MLX's own kernel
]
# One setting of each code path of a method.
WAYS = [
    ("sparq", "paper"),
    ("sparq", "reallocate"),
    ("sparq", "odd-sizes"),
    *((m, "") for m in DECODE if "" in DECODE[m]),
]
EACH_WAY = [(name, *way) for way in WAYS for name in backends_with(way[0]) if (name, way[0]) != ("metal", "dense")]
by_way = pytest.mark.parametrize(("backend", "method", "setting"), EACH_WAY, indirect=["backend"])


@pytest.mark.parametrize(("backend", "method", "setting", "case"), STEPS, indirect=["backend"])
def test_a_backend_selects_and_attends_as_the_oracle(backend: Any, method: str, setting: str, case: Case) -> None:
    found = getattr(backend, method)(case, every_parameter(case, setting, method))
    assert_conforms(found, expected(case, setting, method), case)


@by_case
@by_attending
def test_attention_to_the_keys_of_the_oracle_equals_the_oracle(backend: Any, case: Case) -> None:
    """Attend to the oracle's keys, so that ties do not affect the comparison."""
    q, k, _ = case.inputs()
    chosen = reference.sparq_select(q, k, rank=16, top_k=40, left_padding=case.padding).indices
    found, wanted = backend.attend_indices(case, chosen, 0.2), attended(case, chosen, 0.2)
    assert_conforms(found, wanted, case)
    if backend.name != "triton":
        some = np.isfinite(wanted.lse)
        np.testing.assert_allclose(found.lse[some], wanted.lse[some], rtol=0, atol=4 * ulp(wanted.lse[some], "f32"))


@pytest.mark.parametrize("N", [1, 129, 512, 513, 20_000])
@by_attending
def test_lists_of_any_length_are_attended(backend: Any, N: int) -> None:
    case, rng = Case(1, 4, 2, max(N, 200), 64, "f16"), np.random.default_rng(N)
    lists = np.array([[np.sort(rng.choice(case.S, N, replace=False)) for _ in range(case.Hkv)]])
    lists[0, 0, rng.random(N) < 0.2] = -1
    assert_conforms(backend.attend_indices(case, lists, 0.125), attended(case, lists, 0.125), case)


@pytest.mark.parametrize("empty", [-1, 20, 25_000, 2**31 - 1])
@by_attending
def test_an_index_that_is_not_a_key_is_an_empty_slot(backend: Any, empty: int) -> None:
    case = Case(1, 4, 2, 20, 64, "f32")
    indices = np.array([[[3, 7, empty]] * 2], dtype=np.int32)
    found = backend.attend_indices(case, indices, 0.2)
    assert_conforms(found, attended(case, indices[..., :2], 0.2), case)
    np.testing.assert_array_equal(
        oracle.attend.attend_indices(*case.inputs(), indices, scale=0.2)[0], attended(case, indices[..., :2], 0.2).out
    )


@by_attending
def test_an_index_of_64_bits_does_not_wrap_to_a_key(backend: Any) -> None:
    case = Case(1, 4, 2, 20, 64, "f32")
    indices = np.array([[[3, 2**32 + 5]] * 2])
    out, _ = backend.public("attend_indices", case, indices=backend.integers(indices, "int64"), scale=0.2)
    np.testing.assert_allclose(backend.numpy(out), attended(case, indices[..., :1], 0.2).out, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "N"), [(name, N) for name in ATTENDING for N in (0, 700) if N or name != "ops"], indirect=["backend"]
)
def test_an_empty_list_gives_zeros(backend: Any, N: int) -> None:
    _, out, lse = backend.attend_indices(Case(1, 4, 2, 20, 64, "f32"), np.full((1, 2, N), -1), 1.0)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(
    ("backend", "method", "setting", "poison"),
    [(*way, poison) for way, poison in covering(EACH_WAY, [1e3, np.inf, np.nan])],
    indirect=["backend"],
)
def test_padded_rows_never_reach_the_output(backend: Any, method: str, setting: str, poison: float) -> None:
    sizes = (2, 6, 2, 300, 64, "f32", (290, 7))
    found = getattr(backend, method)(Padded(*sizes, poison), every_parameter(Padded(*sizes), setting, method))
    clean = expected(Padded(*sizes), setting, method)
    np.testing.assert_allclose(found.out, clean.out, rtol=0, atol=1e-5)


@by_way
def test_a_row_without_a_valid_key_gives_zeros(backend: Any, method: str, setting: str) -> None:
    case = Padded(2, 6, 2, 300, 64, "f32", (300, 0), np.nan)
    choice, out, lse = getattr(backend, method)(case, every_parameter(case, setting, method))
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()
    assert choice is None or (choice[0] == -1).all()
    assert lse is None or (np.isneginf(lse[0]).all() and np.isfinite(lse[1]).all())


@pytest.mark.parametrize("backend", backends_with("sparq"), indirect=True)
def test_a_zero_query_attends_uniformly(backend: Any) -> None:
    class Zero(Case):
        def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
            q, k, v = super().inputs(seed, L)
            return 0 * q, k, v

    case = Zero(1, 2, 2, 300, 64, "f32")
    params = every_parameter(case, "paper")
    wanted = reference.sparq_attention(*case.inputs(), **params)
    np.testing.assert_allclose(backend.sparq(case, params).out, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["oracle", "ops", "cpu", "metal", "triton"], indirect=True)
def test_keys_t_changes_nothing(backend: Any) -> None:
    q, k, v = Case(1, 6, 2, 203, 64, "f32").inputs()
    *arrays, keys_t = (backend.array(array, "f32") for array in (q, k, v, k.swapaxes(2, 3)))
    given = {"rank": 8, "top_k": 40, "backend": backend.name}
    out = backend.functions.sparq_attention(*arrays, keys_t=keys_t, **given)
    expected = backend.functions.sparq_attention(*arrays, **given)
    np.testing.assert_array_equal(backend.numpy(out), backend.numpy(expected))


@pytest.mark.parametrize("backend", [name for name in backends_with("sparq") if name != "ops"], indirect=True)
def test_ties_between_components_go_to_the_lower_index(backend: Any) -> None:
    """Test ties, because MLX's partition has no defined order."""

    class Signs(Case):
        def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
            q, k, v = super().inputs(seed, L)
            return np.sign(q), k, v

    case = Signs(1, 2, 2, 300, 64, "f32")
    assert_conforms(backend.sparq(case, every_parameter(case, "paper")), expected(case, "paper", "sparq"), case)


@by_case
@pytest.mark.parametrize("backend", [name for name in backends_with("sparq") if name not in ATTENDING], indirect=True)
def test_a_node_that_keeps_every_key_is_dense(backend: Any, case: Case) -> None:
    params = every_parameter(case, "reallocate") | {"rank": 2, "top_k": case.S, "local_window": 0}
    found, wanted = backend.sparq(case, params), expected(case, "", "dense")
    assert_conforms(found._replace(choice=None), wanted, case)
    np.testing.assert_array_equal(np.sort(found.choice), np.sort(wanted.choice))


# The public functions, which select a backend and report the elements moved.

METHODS = [(name, method) for name in ATTENDING for method in DECODE]
METHODS += [("ops", method) for method in ("streaming", "flexgen", "oracle_top_k")]


@pytest.mark.parametrize("setting", ["paper", "reallocate"])
@by_case
@by_attending
def test_public_functions_attend_as_the_oracle_and_report_elements_moved(
    backend: Any, case: Case, setting: str
) -> None:
    wanted, params = expected(case, setting, "sparq"), every_parameter(case, setting)
    given = {**params, "left_padding": case.padding, "return_stats": "recall"}
    _, stats = oracle.sparq_attention(*case.inputs(), **given)
    out, got = backend.public("sparq_attention", case, **given)
    assert_conforms(backend.result(None, out, got.recall, case)._replace(lse=None), wanted, case)
    assert (got.elements, got.density) == (stats.elements, stats.density)
    np.testing.assert_allclose(backend.numpy(got.recall), stats.recall, rtol=1e-4, atol=1e-6)


@by_case
@by_attending
def test_keeping_every_key_is_dense_attention_to_the_last_bit(backend: Any, case: Case) -> None:
    given = {"left_padding": case.padding}
    out = backend.public("sparq_attention", case, rank=2, top_k=case.S, **given)
    assert (backend.numpy(out) == backend.numpy(backend.public("dense_attention", case, **given))).all()


@pytest.mark.parametrize("padding", [None, (0, 30)], ids=["", "padded"])
@pytest.mark.parametrize("L", [2, 69])
@pytest.mark.parametrize(("backend", "method"), METHODS, indirect=["backend"])
def test_several_queries_are_attended_densely_and_causally(
    backend: Any, method: str, L: int, padding: tuple[int, ...] | None
) -> None:
    case = Case(2, 6, 2, 70, 64, "f32", padding)
    q, k, v = case.inputs(L=L)
    arrays = [backend.array(array, "f32") for array in (q, k, v)]
    function = getattr(backend.functions, f"{method}_attention")
    wanted = reference.dense_attention(q, k, v, left_padding=padding)
    out = function(*arrays, left_padding=padding, backend=backend.name)
    np.testing.assert_allclose(backend.numpy(out), wanted, rtol=0, atol=1e-5)


@by_attending
def test_a_row_without_a_valid_key_has_recall_1_with_any_value_mean(backend: Any) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(300, 0))
    given = {"value_mean": backend.array(np.full((2, 2, 64), 7.0), "f32"), "left_padding": case.padding}
    settings = {"rank": 16, "top_k": 32, "reallocate": True, "return_stats": "recall"}
    out, stats = backend.public("sparq_attention", case, **settings, **given)
    assert (backend.numpy(out)[0] == 0).all()
    assert (backend.numpy(out)[1] != 0).all()
    assert (backend.numpy(stats.recall)[0] == 1).all()


@pytest.mark.parametrize(("dtype", "most"), [("f32", 7), ("bf16", 1000)])
@by_attending
def test_a_value_mean_of_any_strides_is_used_and_alpha_is_not_rounded(backend: Any, dtype: str, most: float) -> None:
    """Test a small 1 - alpha, because bfloat16 has few numbers just below 1."""
    case = Case(1, 2, 2, 300, 64, dtype)
    mean = np.linspace(0, most, 128, dtype=np.float32).reshape(1, 64, 2)
    settings = {"rank": 32, "top_k": 250}
    out = backend.public("sparq_attention", case, value_mean=backend.array(mean, "f32").swapaxes(1, 2), **settings)
    wanted = reference.sparq_attention(*case.inputs(), value_mean=mean.swapaxes(1, 2), **settings)
    rounding = np.abs(wanted) * 2.0 ** -(PRECISION[dtype] + 1) if dtype != "f32" else 0
    assert (np.abs(backend.numpy(out) - wanted) <= 2 * rounding + 1e-5 * max(most / 7, 1)).all()
