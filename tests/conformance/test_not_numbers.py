"""NaN and infinity in valid keys, values and queries: every backend attends to the keys that the oracle attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from adapters import having
from cases import SPARQ, Array, Case, assert_same_choice, every_parameter
from expected import Expected, expected
from saap_cases import SaapCase, assert_attends, visited
from sample_cases import SampleCase, selection

from mlx_sparse import oracle

RANKED, ALSO_RANKED, NOT_RANKED = 3, 4, 7  # components of the queries: two large ones, one small one
Spoil = Callable[[Array, Array, Array], None]


def at(array: int, row: object, component: object, number: float) -> Spoil:
    """Put ``number`` into queries (0), keys (1) or values (2) of KV head 0 of the first sequence."""

    def spoil(*arrays: Array) -> None:
        arrays[array][0, 0, row, component] = number

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(*arrays: Array) -> None:
        for each in spoils:
            each(*arrays)

    return spoil


NAN, INF = np.nan, np.inf
SPOILED: dict[str, Spoil] = {
    "nan": at(1, 40, RANKED, NAN),
    "nan-local": at(1, -2, RANKED, NAN),
    "nan-current": at(1, -1, RANKED, NAN),
    "nan-first": at(1, 0, RANKED, NAN),
    "nan-not-ranked": at(1, 40, NOT_RANKED, NAN),
    "nan-everywhere-in-a-key": at(1, 40, slice(None), NAN),
    "inf": at(1, 40, RANKED, INF),
    "inf-local": at(1, -2, RANKED, INF),
    "minus-inf": at(1, 40, RANKED, -INF),
    "inf-and-minus-inf": both(at(1, 40, RANKED, INF), at(1, 60, RANKED, -INF)),
    "inf-minus-inf": both(at(1, 40, RANKED, INF), at(1, 40, ALSO_RANKED, -INF)),
    "nan-and-inf": both(at(1, 40, RANKED, INF), at(1, 60, RANKED, NAN)),
    "more-than-are-attended": at(1, slice(20, 90), RANKED, NAN),
    "all-keys": at(1, slice(None), slice(None), NAN),
    "value": at(2, 40, 5, NAN),
    "value-of-an-attended-key": at(2, -1, 5, NAN),
    "query": at(0, 0, RANKED, NAN),
    "query-inf": at(0, 0, RANKED, INF),
}


@dataclass(frozen=True)
class Spoiled(Case):
    """A case in which KV head 0 of the first sequence has numbers that are none."""

    spoil: str = ""

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        arrays = super().inputs(seed, L)
        queries = arrays[0]
        queries[..., [RANKED, ALSO_RANKED]] = np.copysign(8, queries[..., [RANKED, ALSO_RANKED]])
        queries[..., NOT_RANKED] = 2.0**-10
        SPOILED[self.spoil](*arrays)
        return arrays


# Groups of 1 and 4 query heads; scores in one tile and in several, which takes Triton's interpreter long.
SIZES = {
    "G1": (2, 2, 2, 130, 64, "f32", (0, 5)),
    "G4": (2, 8, 2, 130, 64, "f16", (0, 5)),
    "tiles": (1, 4, 1, 1300, 64, "f32"),
}
# By method the sizes and settings that run.
ARMS = {"sparq": (("G1", "reallocate"), ("G4", "paper"), ("G4", "eval"))}
STEPS = [(method, spoil, *arm) for method, arms in ARMS.items() for spoil in SPOILED for arm in arms]
STEPS += [("sparq", spoil, "tiles", "paper") for spoil in ("nan", "inf", "more-than-are-attended")]
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


def assert_shows(out: Array, wanted: Array, atol: float = 2e-5) -> None:
    """Equal, and NaN in the same places."""
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    np.testing.assert_allclose(out, wanted, rtol=0, atol=atol)


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


@dataclass(frozen=True)
class SpoiledPrompt(SampleCase):
    """A prompt in which one component of key 300 of the first KV head is no number."""

    number: float = NAN

    def inputs(self, seed: int = 0) -> tuple[Array, Array, Array]:
        arrays = super().inputs(seed)
        arrays[1][0, 0, 300, 3] = self.number
        return arrays


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
