"""NaN and infinity in valid keys, values and queries: every backend attends to the keys that the oracle attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from adapters import having
from cases import SPARQ, Array, Case, assert_same_choice, covering, every_parameter
from expected import Expected, expected
from non_finite_cases import INF, NAN, SIZES, SPOILED, Spoiled, SpoiledPrompt, assert_shows
from saap_cases import SaapCase, assert_attends, visited
from sample_cases import selection

from mlx_sparse import oracle

# By method the sizes and settings that run.
ARMS = {"sparq": (("G1", "reallocate"), ("G4", "paper"), ("G4", "eval"))}
STEPS = [(method, spoil, *arm) for method, arms in ARMS.items() for spoil, arm in covering(list(SPOILED), arms)]
STEPS += [("sparq", spoil, "tiles", "paper") for spoil in ("nan", "more-than-are-attended")]
# The other forms of a body compute as it does.
FORMS = ("onnx-compat", "onnx-reference")
BACKENDS = [name for name in having("sparq") if name not in FORMS]
by_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)


def assert_same_keys(indices: Array, wanted: Expected) -> None:
    """The same choice, where what is no number counts as more than any number."""
    scores = wanted.scores
    assert scores is not None
    most = np.abs(scores[np.isfinite(scores)]).max(initial=0)
    assert_same_choice(indices, wanted.choice, np.where(scores < np.inf, np.maximum(scores, -most), 2 * most + 1))


@pytest.mark.parametrize(("method", "spoil", "sizes", "setting"), STEPS)
@by_backend
def test_what_is_no_number_is_ranked_and_shows_as_in_the_oracle(
    backend: Any, method: str, spoil: str, sizes: str, setting: str
) -> None:
    case = Spoiled(*SIZES[sizes], spoil=spoil)
    found = getattr(backend, method)(case, every_parameter(case, setting, method))
    wanted = expected(case, setting, method)
    assert_same_keys(found.choice, wanted)
    assert_shows(found.out, wanted.out, atol=4e-3 if case.dtype == "f16" else 2e-5)


@pytest.mark.parametrize("setting", [setting for setting in SPARQ if setting != "k1"])  # which reads one component
@pytest.mark.parametrize("spoil", ["nan", "nan-everywhere-in-a-key", "inf", "minus-inf", "inf-minus-inf", "all-keys"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_key_that_is_no_number_shows_where_it_shows_in_dense_attention(sizes: str, spoil: str, setting: str) -> None:
    case = Spoiled(*SIZES[sizes], spoil=spoil)
    dense = oracle.dense_attention(*case.inputs(), left_padding=case.padding)
    np.testing.assert_array_equal(np.isnan(expected(case, setting, "sparq").out), np.isnan(dense))


@pytest.mark.parametrize("backend", having("attend_indices"), indirect=True)
def test_nan_in_a_listed_key_is_not_hidden(backend: Any) -> None:
    case = Spoiled(1, 4, 2, 130, 64, "f32", spoil="nan")
    _, out, lse = backend.attend_indices(case, np.broadcast_to(np.arange(30, 50), (1, 2, 20)), 0.125)
    assert np.isnan(out[0, :2]).all()
    assert np.isnan(lse[0, :2]).all()
    assert np.isfinite(out[0, 2:]).all()


@pytest.mark.parametrize("number", [NAN, INF])
@by_backend
def test_prompts_keep_every_block_where_a_sampled_query_has_no_softmax(backend: Any, number: float) -> None:
    case = SpoiledPrompt(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3, number)
    choice, out, _ = backend.sample(case)
    listed, wanted = (oracle.block_mask(lists, case.layout.key_blocks) for lists in (choice, selection(case).blocks))
    np.testing.assert_array_equal(listed, wanted)
    assert_shows(out, oracle.sample_attention(*case.inputs(), **case.parameters))
    everything = wanted[0].sum(axis=(1, 2)) == case.layout.causal_pairs
    assert everything.tolist() == [True, True, False, False]


def test_a_prompt_with_a_key_that_is_nan_is_nan_where_dense_attention_is() -> None:
    case = SpoiledPrompt(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3, NAN)
    sparse = oracle.sample_attention(*case.inputs(), **case.parameters)
    np.testing.assert_array_equal(np.isnan(sparse), np.isnan(oracle.dense_attention(*case.inputs())))


@dataclass(frozen=True)
class SpoiledRoute(SaapCase):
    """A step in which the first query before RoPE is no number."""

    def queries_before(self) -> Array:
        queries = super().queries_before()
        queries[0, 0, 0, 5] = NAN
        return queries


@pytest.mark.parametrize("hidden", [None, 32])
@by_backend
def test_a_query_that_is_nan_visits_the_first_buckets(backend: Any, hidden: int | None) -> None:
    case = SpoiledRoute(Case(1, 4, 2, 300, 64, "f32"), "random", hidden=hidden)
    assert visited(case)[0, 0].tolist() == [0, 1, 2, 3]
    choice, out, lse = backend.saap(case, visited(case))
    if choice is not None:
        np.testing.assert_array_equal(choice, visited(case))
    assert_attends(out, lse, case)
