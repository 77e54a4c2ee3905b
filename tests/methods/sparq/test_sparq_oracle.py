"""Compare the SparQ oracle with a naive implementation of the papers, and test identities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from naive import EPS, Array, Row, appendix_b, apply, argtopk, assert_same, every_method, make, paper
from reference import sparq_select

from mlx_sparse.oracle import (
    attend_indices,
    dense_attention,
    flexgen_attention,
    oracle_top_k_attention,
    sparq_attention,
    streaming_attention,
    top_k_select,
)

IMPLEMENTATIONS: dict[str, tuple[Callable[..., list[Row]], dict[str, Any]]] = {
    "paper": (paper, {}),
    "appendix_b": (appendix_b, {"reallocate": True}),
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("G", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(
    ("S", "D", "rank", "top_k", "local_window"),
    [(65, 64, 8, 16, 4), (33, 80, 16, 9, 0), (50, 16, 1, 5, 5), (40, 8, 8, 39, 3), (20, 8, 3, 1, 1)],
)
@pytest.mark.parametrize("padding", [[0, 0], [7, 0]], ids=["unpadded", "padded"])
def test_sparq_equals_a_naive_implementation(
    name: str, G: int, S: int, D: int, rank: int, top_k: int, local_window: int, padding: list[int]
) -> None:
    qkv = make(B=2, G=G, S=S, D=D, seed=S + G)
    naive, options = IMPLEMENTATIONS[name]
    window = 0 if name == "appendix_b" else local_window
    out = sparq_attention(*qkv, rank=rank, top_k=top_k, local_window=window, left_padding=np.array(padding), **options)
    assert_same(out, apply(naive, qkv, padding, rank, top_k, window), qkv[1])


def test_the_default_local_window_is_a_quarter_of_top_k() -> None:
    qkv = make(S=64)
    assert (sparq_attention(*qkv, rank=4, top_k=18) == sparq_attention(*qkv, rank=4, top_k=18, local_window=4)).all()


# --- Identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component_score", ["query", "query_key"])
@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("reallocate", ["auto", True, False])
@pytest.mark.parametrize("top_k", [40, 41, 1000])
def test_no_more_keys_than_top_k_is_dense(rank: int, top_k: int, reallocate: str | bool, component_score: str) -> None:
    qkv = make(G=1, S=40)
    out = sparq_attention(*qkv, rank=rank, top_k=top_k, reallocate=reallocate, component_score=component_score)
    assert_same(out, dense_attention(*qkv), qkv[1])


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("component_score", ["query", "query_key"])
def test_all_components_select_as_the_exact_scores(G: int, component_score: str) -> None:
    qkv = make(G=G)
    choice = {"top_k": 12, "local_window": 3}
    out = sparq_attention(*qkv, rank=16, reallocate=False, component_score=component_score, **choice)
    assert_same(out, oracle_top_k_attention(*qkv, **choice), qkv[1])


@pytest.mark.parametrize("method", [sparq_attention, oracle_top_k_attention, streaming_attention, flexgen_attention])
def test_recall_is_the_exact_mass_of_the_attended_keys(method: Callable[..., Any]) -> None:
    q, k, _ = qkv = make(G=4, S=40, D=40)
    options = {"sink_tokens": 2, "recent_tokens": 10} if method is streaming_attention else {"top_k": 12}
    if method is sparq_attention:
        options["rank"] = 4
    mass = method(*qkv, return_stats="recall", **options)[1].recall
    # A method attends to a key if the unit value of the key reaches the output.
    unit = np.broadcast_to(np.eye(40), k.shape)
    attended = method(q, k, unit, **options) != 0
    exact = np.where(attended, dense_attention(q, k, unit), 0).sum(axis=-1)
    assert_same(mass, exact, k)


@every_method
@pytest.mark.parametrize("padding", [1, 5, 30, 33, 39])
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 1e3])
def test_a_padded_row_equals_the_sequence_alone(
    method: Callable[..., Any], options: dict[str, Any], padding: int, poison: float
) -> None:
    q, k, v = make(B=2, G=3)
    alone = method(q[:1], k[:1, :, padding:], v[:1, :, padding:], **options)
    k[0, :, :padding] = v[0, :, :padding] = poison
    out, info = method(q, k, v, left_padding=np.array([padding, 0]), return_stats="recall", **options)
    assert_same(out[:1], alone, k)
    assert_same(out[1:], method(q[1:], k[1:], v[1:], **options), k)
    assert np.isfinite(info.recall).all()


@every_method
def test_a_row_without_valid_key_gives_zeros(method: Callable[..., Any], options: dict[str, Any]) -> None:
    q, k, v = make(B=2, G=3)
    k[0] = v[0] = np.nan
    out, info = method(q, k, v, left_padding=np.array([40, 0]), return_stats="recall", **options)
    assert (out[0] == 0).all()
    assert np.isfinite(out).all()
    assert (info.recall[0] == 1).all(), "nothing to lose"


def test_a_row_without_valid_key_has_empty_slots_alpha_0_and_lse_minus_inf() -> None:
    q, k, v = make(G=2)
    choice = sparq_select(q, k, rank=4, top_k=9, left_padding=[40])
    assert (choice.indices == -1).all()
    assert (choice.alpha == 0).all()
    out, lse = attend_indices(q, k, v, choice.indices, scale=0.25)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_keys_and_values_that_are_not_listed_never_reach_the_output(poison: float) -> None:
    q, k, v = make(G=2)
    indices = np.array([[[3, 7, -1], [5, -1, -1]]], dtype=np.int32)
    expected = attend_indices(q, k, v, indices, scale=0.25)
    listed = np.zeros((1, 2, 40), dtype=bool)
    listed[0, 0, [3, 7]] = listed[0, 1, 5] = True
    k[~listed] = v[~listed] = poison
    for actual, wanted in zip(attend_indices(q, k, v, indices, scale=0.25), expected, strict=True):
        assert (actual == wanted).all()


@pytest.mark.parametrize("left_padding", [0, 8])
def test_a_zero_query_gives_uniform_alpha(left_padding: int) -> None:
    q, k, v = make(G=2)
    choice = sparq_select(np.zeros_like(q), k, rank=4, top_k=9, left_padding=[left_padding])
    assert_same(choice.alpha, np.full((1, 4), 9 / (40 - left_padding)), k)
    assert np.isfinite(sparq_attention(np.zeros_like(q), k, v, rank=4, top_k=9, reallocate=True)).all()


def rescale(q: Array, k: Array) -> tuple[Array, Array]:
    """Rescale the components by powers of two, which changes no exact logit and causes no rounding."""
    factors = 2.0 ** np.random.default_rng(2).integers(-6, 7, size=q.shape[-1])
    return q * factors, k / factors


@pytest.mark.parametrize("G", [1, 4])
def test_query_key_ignores_a_rescaling_of_channels(G: int) -> None:
    q, k, v = make(G=G)
    choice = {"rank": 4, "top_k": 9, "component_score": "query_key"}
    q2, k2 = rescale(q, k)
    assert_same(dense_attention(q2, k2, v), dense_attention(q, k, v), k)
    before, after = sparq_select(q, k, **choice), sparq_select(q2, k2, **choice)
    assert (before.indices == after.indices).all()
    assert_same(after.alpha, before.alpha, k)


@pytest.mark.parametrize("G", [1, 4])
def test_query_does_not_ignore_a_rescaling_of_channels(G: int) -> None:
    q, k, _ = make(G=G)
    choice = {"rank": 4, "top_k": 9, "local_window": 0}
    assert (sparq_select(q, k, **choice).indices != sparq_select(*rescale(q, k), **choice).indices).any()


def test_query_key_ignores_a_shift_common_to_all_keys() -> None:
    q, k, v = make(G=4)
    shift = 10 * np.random.default_rng(3).standard_normal((1, 2, 1, 16))
    choice = {"rank": 4, "top_k": 9, "component_score": "query_key"}
    assert (sparq_select(q, k + shift, **choice).indices == sparq_select(q, k, **choice).indices).all()
    np.testing.assert_allclose(dense_attention(q, k + shift, v), dense_attention(q, k, v))


def test_query_key_ranks_components_by_the_deviation_of_the_keys() -> None:
    # |q| is larger for component 0, which is constant over the keys; only component 1 varies.
    q = np.array([[[[10.0, 1.0]]]])
    k = np.stack([np.full(8, 5.0), np.arange(8) % 4 + np.arange(8) / 10], axis=-1)[None, None]
    choice = {"rank": 1, "top_k": 2, "local_window": 0}
    assert sparq_select(q, k, component_score="query_key", **choice).indices.tolist() == [[[3, 7]]]
    assert sparq_select(q, k, component_score="query", **choice).indices.tolist() == [[[0, 1]]], "all scores tie"


def test_query_key_logits_carry_no_coverage_factor() -> None:
    q, k, _ = make()
    grouped, spread = q[0, :, 0], k[0].std(axis=1)
    weights = sparq_select(q, k, rank=3, top_k=9, component_score="query_key").s_hat[0]
    for h in range(2):
        i1 = argtopk((np.abs(grouped[h]) * spread[h]).tolist(), 3)
        expected = np.exp(k[0, h][:, i1] @ grouped[h, i1] / 4)
        np.testing.assert_allclose(weights[h], expected / expected.sum(), atol=16 * EPS)


def test_local_keys_are_forced_in_where_adding_1_to_the_group_sum_loses_them() -> None:
    # Four heads agree on key 0 (group sum near 4), and key 1 gets the rest. The local key has almost no weight.
    q = np.ones((1, 4, 1, 2))
    k = np.array([[4.0, 4], [3.9, 3.9], [0, 0], [-4, -4]])[None, None]
    choice = sparq_select(q, k, rank=2, top_k=2, local_window=1)
    literal = choice.scores[0, 0] + [0, 0, 0, 1]
    assert argtopk(literal.tolist(), 2) == [0, 1], "the paper's +1 after the group sum drops the local key"
    assert choice.indices.tolist() == [[[0, 3]]]


def test_top_k_includes_the_local_window_without_counting_twice() -> None:
    # The local keys also have the largest scores, so a top-k over all keys would count them twice.
    scores = np.arange(10.0)[None, None]
    assert top_k_select(scores, top_k=5, local_window=2).tolist() == [[[5, 6, 7, 8, 9]]]
    assert top_k_select(-scores, top_k=5, local_window=2).tolist() == [[[0, 1, 2, 8, 9]]]


def test_ties_go_to_the_lower_index_and_minus_inf_is_never_chosen() -> None:
    scores = np.array([[[1.0, 2.0, 1.0, 2.0, -np.inf, 1.0]]])
    assert top_k_select(scores, top_k=3, local_window=0).tolist() == [[[0, 1, 3]]]
    assert top_k_select(scores, top_k=6, local_window=0).tolist() == [[[0, 1, 2, 3, 5, -1]]]
    many = np.tile([0.0, 1.0], 500)[None, None]
    assert top_k_select(many, top_k=7, local_window=2).tolist() == [[[1, 3, 5, 7, 9, 998, 999]]]


def test_alpha_near_1_keeps_its_complement() -> None:
    # alpha = 1 - 4e-4 is 1 in bfloat16. Values of selected keys are 0, so the output is (1 - alpha) * mean.
    q = np.array([[[[1.0]]]])
    k = np.array([0.0, 8.0, 0.0, 0.0])[None, None, :, None]
    v = np.array([4.0, 0.0, 4.0, 4.0])[None, None, :, None]
    complement = 3 / (3 + math.exp(8))
    out = sparq_attention(q, k, v, rank=1, top_k=1, local_window=0)
    # 1 - alpha has fewer significant digits than alpha.
    np.testing.assert_allclose(out, 3 * complement, rtol=2 * EPS / complement)


def test_reallocate_auto_is_on_for_one_head_per_kv_head_only() -> None:
    for G, same in ((1, True), (4, False)):
        qkv = make(G=G)
        auto, on, off = (sparq_attention(*qkv, rank=4, top_k=9, reallocate=r) for r in ("auto", True, False))
        assert (auto == (on if same else off)).all()
        assert (on != off).any()


def test_value_mean_stands_for_the_mean_of_the_values() -> None:
    q, k, v = make(G=1)
    choice = {"rank": 4, "top_k": 9}
    assert_same(sparq_attention(q, k, v, value_mean=v.mean(axis=2), **choice), sparq_attention(q, k, v, **choice), k)
    moved = sparq_attention(q, k, v, value_mean=v.mean(axis=2) + 1, **choice) - sparq_attention(q, k, v, **choice)
    alpha = sparq_select(q, k, **choice).alpha[..., None, None]
    assert_same(moved, np.broadcast_to(1 - alpha, moved.shape), k)


@every_method
def test_a_prompt_is_dense_and_causal(method: Callable[..., Any], options: dict[str, Any]) -> None:
    _, k, v = make(G=3)
    q = np.random.default_rng(4).standard_normal((1, 6, 5, 16))
    out = method(q, k, v, **options)
    for i in range(5):
        step = dense_attention(q[:, :, i : i + 1], k[:, :, : 36 + i], v[:, :, : 36 + i])
        assert_same(out[:, :, i : i + 1], step, k)
