"""Test NaN and infinity in valid keys, values and queries: all backends attend to the keys of the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
from adapters import backends_with
from cases import SPARQ, Array, Case, assert_same_selection, covering, every_parameter
from expected import Expected, expected
from non_finite_cases import (
    FEW_KEYS,
    INF,
    NAN,
    NON_FINITE,
    SIZES,
    NonFinite,
    NonFiniteChunk,
    NoSoftmaxChunk,
    assert_same_with_nan,
)
from saap_cases import SaapCase, assert_attends, visited
from sample_cases import selection

from mlx_sparse import oracle

# Sizes and settings by method.
ARMS = {"sparq": (("G1", "reallocate"), ("G4", "paper"), ("G4", "odd-sizes"))}
STEPS = [(method, edit, *arm) for method, arms in ARMS.items() for edit, arm in covering(list(NON_FINITE), arms)]
STEPS += [("sparq", edit, "tiles", "paper") for edit in ("nan", "more-than-are-attended")]
# Skip runtimes that evaluate the same function bodies as another backend.
FORMS = ("onnx-compat", "onnx-reference")
BACKENDS = [name for name in backends_with("sparq") if name not in FORMS]
by_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)


def assert_same_keys(indices: Array, wanted: Expected) -> None:
    """Assert that the selections are equal, with NaN and infinity ranked above every finite score."""
    scores = wanted.scores
    assert scores is not None
    most = np.abs(scores[np.isfinite(scores)]).max(initial=0)
    assert_same_selection(indices, wanted.choice, np.where(scores < np.inf, np.maximum(scores, -most), 2 * most + 1))


@pytest.mark.parametrize(("method", "edit", "sizes", "setting"), STEPS)
@by_backend
def test_non_finite_numbers_are_ranked_and_shown_as_in_the_oracle(
    backend: Any, method: str, edit: str, sizes: str, setting: str
) -> None:
    case = NonFinite(*SIZES[sizes], edit=edit)
    found = getattr(backend, method)(case, every_parameter(case, setting, method))
    wanted = expected(case, setting, method)
    assert_same_keys(found.choice, wanted)
    assert_same_with_nan(found.out, wanted.out, atol=4e-3 if case.dtype == "f16" else 2e-5)


@pytest.mark.parametrize("method", ["sparq", "dense"])
@pytest.mark.parametrize("sizes", [FEW_KEYS, SIZES["G4"], SIZES["tiles"]])
@by_backend
def test_a_head_whose_logits_are_all_minus_inf_attends_to_nothing(backend: Any, sizes: Any, method: str) -> None:
    case = NonFinite(*sizes, edit="every-logit-minus-inf")
    setting = "reallocate" if method == "sparq" else ""
    found, wanted = (
        getattr(backend, method)(case, every_parameter(case, setting, method)),
        expected(case, setting, method),
    )
    assert (wanted.out[0, 0] == 0).all()
    assert wanted.lse[0, 0] == -INF
    assert_same_with_nan(found.out, wanted.out, atol=4e-3 if case.dtype == "f16" else 2e-5)
    assert found.lse is None or found.lse[0, 0] == -INF


@pytest.mark.parametrize("setting", [setting for setting in SPARQ if setting != "k1"])  # k1 reads only one component
@pytest.mark.parametrize("edit", ["nan", "nan-everywhere-in-a-key", "inf", "minus-inf", "inf-minus-inf", "all-keys"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_non_finite_key_has_the_effect_of_dense_attention(sizes: str, edit: str, setting: str) -> None:
    case = NonFinite(*SIZES[sizes], edit=edit)
    dense = reference.dense_attention(*case.inputs(), left_padding=case.padding)
    np.testing.assert_array_equal(np.isnan(expected(case, setting, "sparq").out), np.isnan(dense))


@pytest.mark.parametrize("backend", backends_with("attend_indices"), indirect=True)
def test_nan_in_a_listed_key_reaches_the_output(backend: Any) -> None:
    case = NonFinite(1, 4, 2, 130, 64, "f32", edit="nan")
    _, out, lse = backend.attend_indices(case, np.broadcast_to(np.arange(30, 50), (1, 2, 20)), 0.125)
    assert np.isnan(out[0, :2]).all()
    assert np.isnan(lse[0, :2]).all()
    assert np.isfinite(out[0, 2:]).all()


@pytest.mark.parametrize("number", [NAN, INF])
@by_backend
def test_prompts_keep_every_block_where_a_sampled_query_has_no_softmax(backend: Any, number: float) -> None:
    case = NonFiniteChunk(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3, number)
    choice, out, _ = backend.sample(case)
    listed, wanted = (oracle.block_mask(lists, case.layout.key_blocks) for lists in (choice, selection(case).blocks))
    np.testing.assert_array_equal(listed, wanted)
    assert_same_with_nan(out, reference.sample_attention(*case.inputs(), **case.parameters))
    everything = wanted[0].sum(axis=(1, 2)) == case.layout.causal_pairs
    assert everything.tolist() == [True, True, False, False]


def test_a_prompt_with_a_nan_key_has_the_nans_of_dense_attention() -> None:
    case = NonFiniteChunk(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3, NAN)
    sparse = reference.sample_attention(*case.inputs(), **case.parameters)
    np.testing.assert_array_equal(np.isnan(sparse), np.isnan(reference.dense_attention(*case.inputs())))


NO_SOFTMAX = NoSoftmaxChunk(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3)


@by_backend
def test_queries_of_a_prompt_whose_logits_are_all_minus_inf_attend_to_nothing(backend: Any) -> None:
    wanted = reference.dense_attention(*NO_SOFTMAX.inputs())
    assert (wanted[0, :2, ::2] == 0).all()
    _, out, lse = backend.dense(NO_SOFTMAX, {"scale": NO_SOFTMAX.scale})
    assert_same_with_nan(out, wanted)
    assert lse is None or np.isneginf(lse[0, :2, ::2]).all()


@by_backend
def test_sampled_queries_whose_logits_are_all_minus_inf_select_nothing(backend: Any) -> None:
    layout = NO_SOFTMAX.layout
    choice, out, lse = backend.sample(NO_SOFTMAX)
    listed, wanted = (oracle.block_mask(lists, layout.key_blocks) for lists in (choice, selection(NO_SOFTMAX).blocks))
    np.testing.assert_array_equal(listed, wanted)
    assert (wanted[0].sum(axis=(1, 2)) < layout.causal_pairs).all()
    assert_same_with_nan(out, reference.sample_attention(*NO_SOFTMAX.inputs(), **NO_SOFTMAX.parameters))
    assert lse is None or np.isneginf(lse[0, :2, ::2]).all()


@dataclass(frozen=True)
class NonFiniteRoute(SaapCase):
    """A decode step in which the first pre-RoPE query has a NaN."""

    def queries_before(self) -> Array:
        queries = super().queries_before()
        queries[0, 0, 0, 5] = NAN
        return queries


@pytest.mark.parametrize("hidden", [None, 32])
@by_backend
def test_a_nan_query_visits_the_first_buckets(backend: Any, hidden: int | None) -> None:
    case = NonFiniteRoute(Case(1, 4, 2, 300, 64, "f32"), "random", hidden=hidden)
    assert visited(case)[0, 0].tolist() == [0, 1, 2, 3]
    choice, out, lse = backend.saap(case, visited(case))
    if choice is not None:
        np.testing.assert_array_equal(choice, visited(case))
    assert_attends(out, lse, case)
