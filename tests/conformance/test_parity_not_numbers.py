"""NaN and infinity in valid keys, values and queries: every backend attends to the keys that the oracle attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
import test_parity_saap
import test_parity_sample
from cases import SPARQ, Array, Case, assert_same_choice, every_parameter
from mlx_arrays import to_mlx
from require import absent
from saap_cases import SaapCase, assert_attends, visited
from sample_cases import SampleCase, selection
from test_parity import BACKENDS

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.common import kmeans
from mlx_sparse.methods import registry

RANKED, ALSO_RANKED, NOT_RANKED = 3, 4, 7  # components of the queries: two large ones, one small one
Spoil = Callable[[Array, Array, Array], None]


def at(array: int, row: object, component: object, number: float, heads: object = 0) -> Spoil:
    """Put ``number`` into queries (0), keys (1) or values (2) of KV head 0 of the first sequence."""

    def spoil(*arrays: Array) -> None:
        arrays[array][0, heads, row, component] = number

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
ARMS = [(spoil, *arm) for spoil in SPOILED for arm in (("G1", "reallocate"), ("G4", "paper"), ("G4", "eval"))]
ARMS += [(spoil, "tiles", "paper") for spoil in ("nan", "inf", "more-than-are-attended")]
assert {setting for *_, setting in ARMS} < set(SPARQ)


def assert_same_keys(indices: Array, expected: oracle.SparQSelection) -> None:
    """The same choice, where what is no number counts as more than any number."""
    scores = expected.scores
    most = np.abs(scores[np.isfinite(scores)]).max(initial=0)
    assert_same_choice(indices, expected.indices, np.where(scores < np.inf, np.maximum(scores, -most), 2 * most + 1))


def assert_shows(out: Array, expected: Array, atol: float = 2e-5) -> None:
    """Equal, and NaN in the same places."""
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that is here; metal runs in the harness of tests/msl where there is no Metal GPU."""
    if request.param == "metal":
        request.getfixturevalue("metal")
    elif reason := registry.unavailable(request.param):
        absent(request.param, reason)
    name: str = request.param
    return name


@pytest.mark.parametrize(("spoil", "sizes", "setting"), ARMS)
def test_what_is_no_number_is_ranked_and_shows_as_in_the_oracle(
    backend: str, spoil: str, sizes: str, setting: str
) -> None:
    case = Spoiled(*SIZES[sizes], spoil=spoil)
    params = every_parameter(case, setting)
    q, k, v = case.inputs()
    indices, out = BACKENDS[backend](case, params)
    expected = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    selection = {name: value for name, value in params.items() if name != "reallocate"}
    assert_same_keys(indices, oracle.sparq_select(q, k, left_padding=case.padding, **selection))
    assert_shows(out, expected, atol=4e-3 if case.dtype == "f16" else 2e-5)


@pytest.mark.parametrize("setting", [setting for setting in SPARQ if setting != "k1"])  # which reads one component
@pytest.mark.parametrize("spoil", ["nan", "nan-everywhere-in-a-key", "inf", "minus-inf", "inf-minus-inf", "all-keys"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_key_that_is_no_number_shows_where_it_shows_in_dense_attention(sizes: str, spoil: str, setting: str) -> None:
    case = Spoiled(*SIZES[sizes], spoil=spoil)
    q, k, v = case.inputs()
    dense = oracle.dense_attention(q, k, v, left_padding=case.padding)
    sparse = oracle.sparq_attention(q, k, v, left_padding=case.padding, **every_parameter(case, setting))
    np.testing.assert_array_equal(np.isnan(sparse), np.isnan(dense))


@pytest.mark.parametrize("spoil", ["nan", "inf", "minus-inf", "nan-and-inf", "more-than-are-attended"])
@pytest.mark.parametrize("method", ["oracle_top_k", "flexgen"])
def test_baselines_that_read_every_key_attend_to_it(method: str, spoil: str) -> None:
    case = Spoiled(*SIZES["G4"][:5], "f32", SIZES["G4"][6], spoil=spoil)
    q, k, v = case.inputs()
    expected = getattr(oracle, f"{method}_attention")(q, k, v, top_k=32, left_padding=case.padding)
    given = {"left_padding": mx.array(case.padding), "backend": "ops"}
    out = getattr(mlx_sparse, f"{method}_attention")(*map(mx.array, (q, k, v)), top_k=32, **given)
    assert_shows(np.array(out), expected)
    dense = oracle.dense_attention(q, k, v, left_padding=case.padding)
    np.testing.assert_array_equal(np.isnan(expected), np.isnan(dense))


@pytest.mark.parametrize("spoil", ["nan", "inf", "minus-inf"])
def test_h2o_keeps_a_key_whose_attention_is_no_number_and_the_best_of_the_others(spoil: str) -> None:
    case = Spoiled(1, 4, 1, 60, 64, "f32", spoil=spoil)
    q, k, v = case.inputs(L=20)
    received = oracle.h2o_scores(q, k)
    assert_shows(np.array(mlx_sparse.h2o_scores(mx.array(q), mx.array(k))), received)
    assert np.isfinite(np.delete(received, 40)).all()
    expected, scores = oracle.h2o_attention(q[:, :, -1:], k, v, scores=received, top_k=16)
    out, updated = mlx_sparse.h2o_attention(*map(mx.array, (q[:, :, -1:], k, v)), scores=mx.array(received), top_k=16)
    assert_shows(np.array(out), expected)
    assert_shows(np.array(updated), scores)


@dataclass(frozen=True)
class SpoiledPrompt(SampleCase):
    """A prompt in which one component of key 300 of the first KV head is no number."""

    number: float = NAN

    def inputs(self, seed: int = 0) -> tuple[Array, Array, Array]:
        arrays = super().inputs(seed)
        arrays[1][0, 0, 300, 3] = self.number
        return arrays


@pytest.mark.parametrize("number", [NAN, INF])
def test_prompts_keep_every_block_where_a_sampled_query_has_no_softmax(backend: str, number: float) -> None:
    case = SpoiledPrompt(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3, number)
    q, k, v = case.inputs()
    expected = selection(case).blocks
    blocks, out = test_parity_sample.BACKENDS[backend](case)
    listed, wanted = (oracle.block_mask(lists, case.layout.key_blocks) for lists in (blocks, expected))
    np.testing.assert_array_equal(listed, wanted)
    assert_shows(out, oracle.sample_attention(q, k, v, **case.parameters))
    everything = wanted[0].sum(axis=(1, 2)) == case.layout.causal_pairs
    assert everything.tolist() == [True, True, False, False]


def test_a_prompt_with_a_key_that_is_nan_is_nan_where_dense_attention_is() -> None:
    case = SpoiledPrompt(1, 4, 2, 250, 400, 64, "f32", 32, 1, 0.3, 0.3, NAN)
    sparse = oracle.sample_attention(*case.inputs(), **case.parameters)
    np.testing.assert_array_equal(np.isnan(sparse), np.isnan(oracle.dense_attention(*case.inputs())))


@pytest.mark.parametrize("number", [NAN, INF])
def test_budgets_of_blocks_are_not_held_where_the_sample_has_no_softmax(number: float) -> None:
    case = SpoiledPrompt(1, 4, 2, 250, 400, 64, "f32", number=number)
    q, k, v = case.inputs()
    budgets = {"vertical_tokens": 64, "slash_tokens": 64, "block_size": 32}
    expected = oracle.minference_attention(q, k, v, **budgets)
    out = mlx_sparse.minference_attention(*map(mx.array, (q, k, v)), **budgets)
    assert_shows(np.array(out), expected)
    np.testing.assert_array_equal(np.isnan(expected), np.isnan(oracle.dense_attention(q, k, v)))


@dataclass(frozen=True)
class SpoiledRoute(SaapCase):
    """A step in which the first query before RoPE is no number."""

    def queries_before(self) -> Array:
        queries = super().queries_before()
        queries[0, 0, 0, 5] = NAN
        return queries


@pytest.mark.parametrize("hidden", [None, 32])
def test_a_query_that_is_nan_visits_the_first_buckets(backend: str, hidden: int | None) -> None:
    case = SpoiledRoute(Case(1, 4, 2, 300, 64, "f32"), "random", hidden=hidden)
    expected = visited(case)
    assert expected[0, 0].tolist() == [0, 1, 2, 3]
    chosen, out = test_parity_saap.BACKENDS[backend](case)
    if chosen is not None:
        np.testing.assert_array_equal(chosen, expected)
    assert_attends(out, None, case)


def assigned(backend: str, keys: Array, centroids: Array) -> Array:
    """Buckets of ``keys (B, Hkv, n, D)`` by a backend."""
    if backend in ("onnx", "ort"):
        from onnx_operators import Operator, saap_settings, saap_step

        case = SaapCase(Case(*keys.shape[:1], 4, keys.shape[1], 60, keys.shape[3], "f32"), "random")
        given = saap_step(case, room=keys.shape[2])
        queries = np.zeros((1, 4, *keys.shape[2:]), np.float32)
        new = {"query": queries, "query_before": queries, "key": keys, "value": keys, "key_before": keys}
        attend = Operator(
            "native" if backend == "ort" else "onnxruntime", "SaapAttention", "f32", **saap_settings(case)
        )
        past = int(given["past_length"][0])
        ids = attend(**{**given, **new, "centroids": centroids})["present_bucket_ids"]
        return ids[:, :, past : past + keys.shape[2]]
    if backend == "triton":
        from torch_arrays import to_numpy, to_torch

        from mlx_sparse import cuda_ref

        return to_numpy(cuda_ref.saap_assign(to_torch(keys, "f32"), to_torch(centroids, "f32")))
    if backend == "oracle":
        return oracle.saap_assign(keys, centroids)
    return np.array(mlx_sparse.saap_assign(mx.array(keys), mx.array(centroids), backend=backend))


def test_keys_that_are_no_numbers_are_in_the_first_bucket_and_the_others_in_their_own(backend: str) -> None:
    rng = np.random.default_rng(0)
    keys, centroids = rng.normal(size=(1, 2, 9, 64)).astype(np.float32), rng.normal(size=(2, 16, 64)).astype(np.float32)
    clean = oracle.saap_assign(keys, centroids)
    for row, number in enumerate((NAN, INF, -INF)):
        keys[0, 1, row, 5] = number
    expected = clean.copy()
    expected[0, 1, :3] = 0
    np.testing.assert_array_equal(oracle.saap_assign(keys, centroids), expected)
    np.testing.assert_array_equal(assigned(backend, keys, centroids), expected)


@pytest.mark.parametrize("number", [NAN, INF])
def test_keys_that_are_no_numbers_leave_no_centroid_that_is_none(number: float) -> None:
    keys = np.random.default_rng(0).normal(size=(1, 200, 16)).astype(np.float32)
    keys[0, ::7, 3] = number
    assert mx.isfinite(kmeans.fit(mx.array(keys), 40)).all()
    centroids = np.random.default_rng(1).normal(size=(40, 16))
    expected = oracle.kmeans_step(keys[0], centroids)
    assert np.isfinite(expected).all()
    moved = kmeans.move(mx.array(keys), to_mlx(centroids[None].astype(np.float32), "f32"))
    np.testing.assert_allclose(np.array(moved)[0], expected, rtol=0, atol=1e-5)
