"""The oracle against a second, naive reading of the papers (lists and loops), and identities that must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError
from mlx_sparse.config import SparQ, parse
from mlx_sparse.oracle import (
    attend_indices,
    dense_attention,
    flexgen_attention,
    h2o_attention,
    h2o_scores,
    oracle_top_k_attention,
    select_top_k,
    sparq_attention,
    sparq_select,
    streaming_attention,
)

Array = npt.NDArray[np.float64]
Row = list[float]
EPS = float(np.finfo(np.float64).eps)


def make(
    *, B: int = 1, Hkv: int = 2, G: int = 1, S: int = 40, D: int = 16, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one decode step: normal, so no two scores are equal."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((B, Hkv * G, 1, D)),
        rng.standard_normal((B, Hkv, S, D)),
        rng.standard_normal((B, Hkv, S, D)),
    )


def assert_same(actual: Array, expected: Array, keys: Array) -> None:
    """Equal up to the rounding of one multiplication and one addition for each of the ``S D`` numbers read."""
    S, D = keys.shape[2:]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2 * S * D * EPS * np.abs(expected).max())


# --- The second reading ----------------------------------------------------------------------------------------------
# One KV head at a time: q holds G rows, K and V one row per valid key. Written from the text of the papers only.


def dot(a: Row, b: Row) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(x: Row) -> Row:
    exps = [math.exp(xi - max(x)) for xi in x]
    return [e / math.fsum(exps) for e in exps]


def argtopk(x: Row, k: int) -> list[int]:
    return sorted(sorted(range(len(x)), key=lambda i: -x[i])[:k])


def mix(weights: Row, rows: list[Row]) -> Row:
    return [math.fsum(w * row[i] for w, row in zip(weights, rows, strict=True)) for i in range(len(rows[0]))]


def approximate(q: list[Row], K: list[Row], r: int) -> list[Row]:
    """Step 1 with its GQA paragraph: approximate logits of every query head."""
    d = len(K[0])
    i1 = argtopk([sum(abs(head[i]) for head in q) for i in range(d)], r)
    logits = []
    for head in q:
        tau = math.sqrt(d * sum(abs(head[i]) for i in i1) / sum(abs(x) for x in head))
        logits.append([dot([head[i] for i in i1], [key[i] for i in i1]) / tau for key in K])
    return logits


def attention(head: Row, K: list[Row], V: list[Row], i2: list[int]) -> Row:
    return mix(softmax([dot(head, K[j]) / math.sqrt(len(head)) for j in i2]), [V[j] for j in i2])


def interpolate(y: Row, alpha: float, V: list[Row]) -> Row:
    mean = mix([1 / len(V)] * len(V), V)
    return [alpha * a + (1 - alpha) * b for a, b in zip(y, mean, strict=True)]


def paper(q: list[Row], K: list[Row], V: list[Row], r: int, k: int, local: int) -> list[Row]:
    """Algorithm 1. Its local mask adds 1, which forces local keys for one head; for a group it takes more."""
    bonus = 1.0 if len(q) == 1 else math.inf
    s_hat = [softmax(logits) for logits in approximate(q, K, r)]
    m = [bonus if j >= len(K) - local else 0.0 for j in range(len(K))]
    i2 = argtopk([sum(s[j] for s in s_hat) + m[j] for j in range(len(K))], k)
    y = [attention(head, K, V, i2) for head in q]
    if len(q) == 1 and len(K) > k:
        return [interpolate(y[0], math.fsum(s_hat[0][j] for j in i2), V)]
    return y


def appendix_b(q: list[Row], K: list[Row], V: list[Row], r: int, k: int, local: int) -> list[Row]:
    """The listing: no local window, the mean value for every group size."""
    assert local == 0
    s_hat = [softmax(logits) for logits in approximate(q, K, r)]
    i2 = argtopk([sum(column) for column in zip(*s_hat, strict=True)], k)
    alpha = [math.fsum(s[j] for j in i2) for s in s_hat]
    return [interpolate(attention(head, K, V, i2), a, V) for head, a in zip(q, alpha, strict=True)]


def evaluation(q: list[Row], K: list[Row], V: list[Row], r: int, k: int, local: int) -> list[Row]:
    """The authors' evaluation code with k - 1 and local - 1, as its current token is free; groups do not reallocate."""
    s = approximate(q, K, r)
    forced = [[math.inf if len(K) - 1 - j < local else x for j, x in enumerate(head)] for head in s]
    i2 = argtopk([sum(column) for column in zip(*forced, strict=True)], min(k, len(K)))
    y = [attention(head, K, V, i2) for head in q]
    if len(q) == 1 and len(K) > k:
        return [interpolate(y[0], math.fsum(softmax(s[0])[j] for j in i2), V)]
    return y


def apply(reading: Callable[..., list[Row]], qkv: tuple[Array, Array, Array], padding: list[int], *args: Any) -> Array:
    """A reading over batch and KV heads; invalid keys are cut off before it sees them."""
    q, k, v = qkv
    Hkv = k.shape[1]
    out = np.empty_like(q)
    for b, h in np.ndindex(k.shape[:2]):
        heads = slice(h * q.shape[1] // Hkv, (h + 1) * q.shape[1] // Hkv)
        valid = slice(padding[b], None)
        out[b, heads, 0] = reading(q[b, heads, 0].tolist(), k[b, h, valid].tolist(), v[b, h, valid].tolist(), *args)
    return out


READINGS: dict[str, tuple[Callable[..., list[Row]], dict[str, Any]]] = {
    "paper": (paper, {}),
    "appendix_b": (appendix_b, {"reallocate": True}),
    "eval": (evaluation, {"group_reduce": "logits"}),
}


@pytest.mark.parametrize("preset", READINGS)
@pytest.mark.parametrize("G", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(
    ("S", "D", "rank", "top_k", "local_window"),
    [(65, 64, 8, 16, 4), (33, 80, 16, 9, 0), (50, 16, 1, 5, 5), (40, 8, 8, 39, 3), (20, 8, 3, 1, 1)],
)
@pytest.mark.parametrize("padding", [[0, 0], [7, 0]], ids=["unpadded", "padded"])
def test_sparq_equals_a_naive_reading(
    preset: str, G: int, S: int, D: int, rank: int, top_k: int, local_window: int, padding: list[int]
) -> None:
    qkv = make(B=2, G=G, S=S, D=D, seed=S + G)
    reading, options = READINGS[preset]
    window = 0 if preset == "appendix_b" else local_window
    out = sparq_attention(*qkv, rank=rank, top_k=top_k, local_window=window, left_padding=np.array(padding), **options)
    assert_same(out, apply(reading, qkv, padding, rank, top_k, window), qkv[1])


@pytest.mark.parametrize("preset", READINGS)
def test_the_preset_is_the_reading_of_its_name(preset: str) -> None:
    config = parse(f"sparq:preset={preset}")[0]
    assert isinstance(config, SparQ)
    qkv = make(G=3, S=200, D=64)
    choice = {name: getattr(config, name) for name in ("rank", "top_k", "local_window", "reallocate", "group_reduce")}
    out = sparq_attention(*qkv, component_score=config.component_score, **choice)
    window = config.top_k // 4 if config.local_window is None else config.local_window
    assert_same(out, apply(READINGS[preset][0], qkv, [0], config.rank, config.top_k, window), qkv[1])


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


def test_no_more_keys_than_top_k_leaves_the_value_mean_alone() -> None:
    qkv = make(G=1, S=40)
    out = sparq_attention(*qkv, rank=4, top_k=40, value_mean=np.full((1, 2, 16), np.inf))
    assert_same(out, dense_attention(*qkv), qkv[1])


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("group_reduce", ["softmax", "logits"])
@pytest.mark.parametrize("component_score", ["query", "query_key"])
def test_all_components_choose_as_the_exact_scores(G: int, group_reduce: str, component_score: str) -> None:
    qkv = make(G=G)
    choice = {"top_k": 12, "local_window": 3, "group_reduce": group_reduce}
    out = sparq_attention(*qkv, rank=16, reallocate=False, component_score=component_score, **choice)
    assert_same(out, oracle_top_k_attention(*qkv, **choice), qkv[1])


@pytest.mark.parametrize("method", [sparq_attention, oracle_top_k_attention, streaming_attention, flexgen_attention])
def test_retained_mass_is_the_exact_mass_of_the_attended_keys(method: Callable[..., Any]) -> None:
    q, k, _ = qkv = make(G=4, S=40, D=40)
    options = {"sink_tokens": 2, "recent_tokens": 10} if method is streaming_attention else {"top_k": 12}
    if method is sparq_attention:
        options["rank"] = 4
    mass = method(*qkv, return_stats="mass", **options)[1].retained_mass
    # The keys a method attends to are those whose unit values reach the output.
    unit = np.broadcast_to(np.eye(40), k.shape)
    attended = method(q, k, unit, **options) != 0
    exact = np.where(attended, dense_attention(q, k, unit), 0).sum(axis=-1)
    assert_same(mass, exact, k)


def test_retained_mass_is_the_difference_of_the_log_sum_exps() -> None:
    q, k, v = make(G=3)
    indices = sparq_select(q, k, rank=4, top_k=10).indices
    _, lse = attend_indices(q, k, v, indices, scale=0.25)
    _, dense_lse = attend_indices(q, k, v, np.broadcast_to(np.arange(40), (1, 2, 40)), scale=0.25)
    mass = sparq_attention(q, k, v, rank=4, top_k=10, return_stats="mass")[1].retained_mass
    assert_same(mass, np.exp(lse - dense_lse), k)


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("reallocate", [True, False])
def test_the_order_of_keys_does_not_matter_without_local_window(G: int, reallocate: bool) -> None:
    q, k, v = make(G=G)
    order = np.random.default_rng(1).permutation(40)
    choice = {"rank": 4, "top_k": 9, "local_window": 0, "reallocate": reallocate}
    assert_same(sparq_attention(q, k[:, :, order], v[:, :, order], **choice), sparq_attention(q, k, v, **choice), k)


@pytest.mark.parametrize("reallocate", [True, False])
def test_scaled_values_scale_the_output(reallocate: bool) -> None:
    q, k, v = make(G=3)
    choice = {"rank": 4, "top_k": 9, "reallocate": reallocate}
    assert_same(sparq_attention(q, k, -8 * v, **choice), -8 * sparq_attention(q, k, v, **choice), k)


@pytest.mark.parametrize("group_reduce", ["softmax", "logits"])
@pytest.mark.parametrize("component_score", ["query", "query_key"])
def test_a_group_of_equal_heads_chooses_as_one_head(group_reduce: str, component_score: str) -> None:
    q, k, _ = make(G=1)
    choice = {"rank": 4, "top_k": 9, "group_reduce": group_reduce, "component_score": component_score}
    grouped, single = sparq_select(q.repeat(4, axis=1), k, **choice), sparq_select(q, k, **choice)
    assert (grouped.indices == single.indices).all()
    assert_same(grouped.alpha, single.alpha.repeat(4, axis=1), k)


METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (dense_attention, {}),
    "sparq": (sparq_attention, {"rank": 4, "top_k": 9, "reallocate": True}),
    "sparq-query_key": (sparq_attention, {"rank": 4, "top_k": 9, "component_score": "query_key"}),
    "sparq-logits": (sparq_attention, {"rank": 4, "top_k": 9, "group_reduce": "logits"}),
    "streaming": (streaming_attention, {"sink_tokens": 2, "recent_tokens": 7}),
    "flexgen": (flexgen_attention, {"top_k": 9}),
    "oracle_top_k": (oracle_top_k_attention, {"top_k": 9}),
}
every_method = pytest.mark.parametrize(("method", "options"), METHODS.values(), ids=METHODS)


@every_method
@pytest.mark.parametrize("padding", [1, 5, 30, 33, 39])
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 1e3])
def test_a_padded_row_equals_the_sequence_alone(
    method: Callable[..., Any], options: dict[str, Any], padding: int, poison: float
) -> None:
    q, k, v = make(B=2, G=3)
    alone = method(q[:1], k[:1, :, padding:], v[:1, :, padding:], **options)
    k[0, :, :padding] = v[0, :, :padding] = poison
    out, info = method(q, k, v, left_padding=np.array([padding, 0]), return_stats="mass", **options)
    assert_same(out[:1], alone, k)
    assert_same(out[1:], method(q[1:], k[1:], v[1:], **options), k)
    assert np.isfinite(info.retained_mass).all()


@every_method
def test_a_row_without_valid_key_gives_zeros(method: Callable[..., Any], options: dict[str, Any]) -> None:
    q, k, v = make(B=2, G=3)
    k[0] = v[0] = np.nan
    out, info = method(q, k, v, left_padding=np.array([40, 0]), return_stats="mass", **options)
    assert (out[0] == 0).all()
    assert np.isfinite(out).all()
    assert (info.retained_mass[0] == 1).all(), "nothing to lose"


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
    """A change of channels that leaves every exact logit as it is; powers of two, so without rounding."""
    factors = 2.0 ** np.random.default_rng(2).integers(-6, 7, size=q.shape[-1])
    return q * factors, k / factors


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("group_reduce", ["softmax", "logits"])
def test_query_key_ignores_a_rescaling_of_channels(G: int, group_reduce: str) -> None:
    q, k, v = make(G=G)
    choice = {"rank": 4, "top_k": 9, "component_score": "query_key", "group_reduce": group_reduce}
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
    # |q| prefers component 0, in which all keys agree; component 1 tells the keys apart.
    q = np.array([[[[10.0, 1.0]]]])
    k = np.stack([np.full(8, 5.0), np.arange(8) % 4 + np.arange(8) / 10], axis=-1)[None, None]
    choice = {"rank": 1, "top_k": 2, "local_window": 0}
    assert sparq_select(q, k, component_score="query_key", **choice).indices.tolist() == [[[3, 7]]]
    assert sparq_select(q, k, component_score="query", **choice).indices.tolist() == [[[0, 1]]], "all scores tie"


def test_query_key_logits_carry_no_coverage_factor() -> None:
    q, k, _ = make()
    grouped, spread = q[0, :, 0], k[0].std(axis=1)
    logits = sparq_select(q, k, rank=3, top_k=9, component_score="query_key", group_reduce="logits").scores[0]
    for h in range(2):
        i1 = argtopk((np.abs(grouped[h]) * spread[h]).tolist(), 3)
        np.testing.assert_allclose(logits[h], k[0, h][:, i1] @ grouped[h, i1] / 4, atol=16 * EPS)


def test_local_keys_are_forced_in_where_adding_1_to_the_group_sum_loses_them() -> None:
    # Four heads agree on key 0 (group sum near 4) and key 1 gets the rest; the local key has next to nothing.
    q = np.ones((1, 4, 1, 2))
    k = np.array([[4.0, 4], [3.9, 3.9], [0, 0], [-4, -4]])[None, None]
    choice = sparq_select(q, k, rank=2, top_k=2, local_window=1)
    literal = choice.scores[0, 0] + [0, 0, 0, 1]
    assert argtopk(literal.tolist(), 2) == [0, 1], "the paper's +1 after the group sum drops the local key"
    assert choice.indices.tolist() == [[[0, 3]]]


def test_top_k_includes_the_local_window_without_counting_twice() -> None:
    # The local keys are also the best ones, so a top-k over all keys would count them twice.
    scores = np.arange(10.0)[None, None]
    assert select_top_k(scores, top_k=5, local_window=2).tolist() == [[[5, 6, 7, 8, 9]]]
    assert select_top_k(-scores, top_k=5, local_window=2).tolist() == [[[0, 1, 2, 8, 9]]]


def test_ties_go_to_the_lower_index_and_minus_inf_is_never_chosen() -> None:
    scores = np.array([[[1.0, 2.0, 1.0, 2.0, -np.inf, 1.0]]])
    assert select_top_k(scores, top_k=3, local_window=0).tolist() == [[[0, 1, 3]]]
    assert select_top_k(scores, top_k=6, local_window=0).tolist() == [[[0, 1, 2, 3, 5, -1]]]
    many = np.tile([0.0, 1.0], 500)[None, None]
    assert select_top_k(many, top_k=7, local_window=2).tolist() == [[[1, 3, 5, 7, 9, 998, 999]]]


def test_alpha_near_1_keeps_its_complement() -> None:
    # alpha = 1 - 4e-4 is 1 in bfloat16. The values are 0 where attended, so the output is (1 - alpha) * mean.
    q = np.array([[[[1.0]]]])
    k = np.array([0.0, 8.0, 0.0, 0.0])[None, None, :, None]
    v = np.array([4.0, 0.0, 4.0, 4.0])[None, None, :, None]
    complement = 3 / (3 + math.exp(8))
    out = sparq_attention(q, k, v, rank=1, top_k=1, local_window=0)
    # 1 - alpha loses the digits that 1 has more than it.
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


def test_keys_t_changes_nothing() -> None:
    q, k, v = make(G=3)
    out = sparq_attention(q, k, v, rank=4, top_k=9, keys_t=k.swapaxes(2, 3))
    assert (out == sparq_attention(q, k, v, rank=4, top_k=9)).all()


@every_method
def test_a_prompt_is_dense_and_causal(method: Callable[..., Any], options: dict[str, Any]) -> None:
    _, k, v = make(G=3)
    q = np.random.default_rng(4).standard_normal((1, 6, 5, 16))
    out = method(q, k, v, **options)
    for i in range(5):
        step = dense_attention(q[:, :, i : i + 1], k[:, :, : 36 + i], v[:, :, : 36 + i])
        assert_same(out[:, :, i : i + 1], step, k)


def test_stats_are_the_formulae_of_the_shapes() -> None:
    qkv = make(G=4, S=40, D=16)
    out, info = sparq_attention(*qkv, rank=4, top_k=9, return_stats=True)
    assert (out == sparq_attention(*qkv, rank=4, top_k=9)).all()
    assert info.elements == 40 * 4 + 2 * 9 * 16 + 4 * 16
    assert info.dense_elements == 2 * 40 * 16 + 2 * 16
    assert info.density == 9 / 40
    assert info.retained_mass is None
    info = sparq_attention(*qkv, rank=4, top_k=40, return_stats=True)[1]
    assert (info.elements, info.density) == (info.dense_elements, 1), "nothing to choose"


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"rank": 0}, ConfigError, "rank"),
        ({"rank": -1}, ConfigError, "rank"),
        ({"rank": 17}, ConfigError, "rank"),
        ({"rank": 2.0}, ConfigError, "rank"),
        ({"rank": True}, ConfigError, "rank"),
        ({"top_k": 0}, ConfigError, "top_k"),
        ({"top_k": -4}, ConfigError, "top_k"),
        ({"top_k": None}, ConfigError, "top_k"),
        ({"local_window": -1}, ConfigError, "local_window"),
        ({"local_window": 10}, ConfigError, "local_window"),
        ({"reallocate": "yes"}, ConfigError, "reallocate"),
        ({"reallocate": 1}, ConfigError, "reallocate"),
        ({"group_reduce": "mean"}, ConfigError, "group_reduce"),
        ({"component_score": "auto"}, ConfigError, "component_score"),
        ({"backend": "cuda"}, BackendUnavailable, "backend"),
        ({"queries": np.zeros((4, 1, 16))}, ShapeError, "queries"),
        ({"queries": np.zeros((1, 3, 1, 16))}, ShapeError, "queries"),
        ({"queries": np.zeros((1, 4, 0, 16))}, ShapeError, "queries"),
        ({"queries": np.zeros((2, 4, 1, 16))}, ShapeError, "keys"),
        ({"queries": np.zeros((1, 4, 1, 8))}, ShapeError, "keys"),
        ({"queries": np.zeros((1, 4, 41, 16))}, ShapeError, "keys"),
        ({"values": np.zeros((1, 2, 39, 16))}, ShapeError, "values"),
        ({"left_padding": np.zeros(2)}, ShapeError, "left_padding"),
        ({"left_padding": 3}, ShapeError, "left_padding"),
        ({"keys_t": np.zeros((1, 2, 40, 16))}, ShapeError, "keys_t"),
        ({"value_mean": np.zeros((1, 4, 16))}, ShapeError, "value_mean"),
    ],
    ids=lambda value: (
        "-".join(f"{k}={getattr(v, 'shape', v)}" for k, v in value.items()) if type(value) is dict else ""
    ),
)
def test_a_wrong_argument_is_named_in_one_line(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    q, k, v = make(G=2)
    with pytest.raises(error, match=rf"^{argument}: expected .*, got .*\.$") as caught:
        sparq_attention(**{"queries": q, "keys": k, "values": v, "rank": 4, "top_k": 9, **change})
    assert "\n" not in str(caught.value)


@every_method
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"backend": "metal"}, BackendUnavailable),
        ({"left_padding": np.zeros(3)}, ShapeError),
        ({"keys": np.zeros((2, 40, 16))}, ShapeError),
    ],
    ids=["backend", "left_padding", "keys"],
)
def test_every_method_checks_its_arguments(
    method: Callable[..., Any], options: dict[str, Any], change: dict[str, Any], error: type[Exception]
) -> None:
    q, k, v = make(G=2)
    with pytest.raises(error, match=rf"^{next(iter(change))}: expected"):
        method(**{"queries": q, "keys": k, "values": v, **options, **change})


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (streaming_attention, {"sink_tokens": -1}),
        (streaming_attention, {"recent_tokens": 0}),
        (flexgen_attention, {"top_k": 0}),
        (oracle_top_k_attention, {"top_k": 0}),
        (oracle_top_k_attention, {"top_k": 4, "local_window": 5}),
        (oracle_top_k_attention, {"group_reduce": "max"}),
        (h2o_attention, {"scores": np.zeros((1, 2, 40)), "top_k": 0}),
        (h2o_attention, {"scores": np.zeros((1, 2, 40)), "top_k": 4, "local_window": 5}),
    ],
)
def test_baseline_parameters_out_of_range_raise(method: Callable[..., Any], change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected .*, got "):
        method(*make(G=2), **change)


@pytest.mark.parametrize("shape", [(1, 4, 40), (1, 2, 39), (2, 40)])
def test_h2o_scores_of_the_wrong_shape_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"^scores: expected"):
        h2o_attention(*make(G=2), scores=np.zeros(shape))


def test_h2o_takes_one_query_only() -> None:
    _, k, v = make()
    with pytest.raises(ShapeError, match=r"^queries: expected one query"):
        h2o_attention(np.zeros((1, 2, 3, 16)), k, v, scores=np.zeros((1, 2, 40)))


@pytest.mark.parametrize("indices", [np.zeros((2, 3)), np.zeros((1, 4, 3)), np.zeros((2, 2, 3))])
def test_indices_that_do_not_fit_the_keys_raise(indices: Array) -> None:
    with pytest.raises(ShapeError, match=r"^indices: expected"):
        attend_indices(*make(), indices.astype(np.int32), scale=1.0)


# --- Baselines -------------------------------------------------------------------------------------------------------


def exact_weights(head: Row, K: list[Row]) -> Row:
    return softmax([dot(head, key) / math.sqrt(len(head)) for key in K])


def naive_streaming(q: list[Row], K: list[Row], V: list[Row], sinks: int, recent: int) -> list[Row]:
    kept = [j for j in range(len(K)) if j < sinks or j >= len(K) - recent]
    return [attention(head, K, V, kept) for head in q]


def naive_flexgen(q: list[Row], K: list[Row], V: list[Row], k: int) -> list[Row]:
    weights = [exact_weights(head, K) for head in q]
    kept = argtopk([sum(column) for column in zip(*weights, strict=True)], k)
    return [mix([w[j] for j in kept], [V[j] for j in kept]) for w in weights]


def naive_top_k(q: list[Row], K: list[Row], V: list[Row], k: int, local: int) -> list[Row]:
    scores = [sum(column) for column in zip(*(exact_weights(head, K) for head in q), strict=True)]
    kept = argtopk([math.inf if j >= len(K) - local else s for j, s in enumerate(scores)], k)
    return [attention(head, K, V, kept) for head in q]


@pytest.mark.parametrize("G", [1, 3, 8])
@pytest.mark.parametrize("padding", [[0, 0], [0, 11]], ids=["unpadded", "padded"])
@pytest.mark.parametrize(
    ("method", "options", "naive", "arguments"),
    [
        (streaming_attention, {"sink_tokens": 4, "recent_tokens": 9}, naive_streaming, (4, 9)),
        (streaming_attention, {"sink_tokens": 0, "recent_tokens": 1}, naive_streaming, (0, 1)),
        (streaming_attention, {"sink_tokens": 20, "recent_tokens": 30}, naive_streaming, (20, 30)),
        (flexgen_attention, {"top_k": 7}, naive_flexgen, (7,)),
        (flexgen_attention, {"top_k": 100}, naive_flexgen, (100,)),
        (oracle_top_k_attention, {"top_k": 8}, naive_top_k, (8, 2)),
        (oracle_top_k_attention, {"top_k": 8, "local_window": 8}, naive_top_k, (8, 8)),
        (oracle_top_k_attention, {"top_k": 8, "local_window": 0}, naive_top_k, (8, 0)),
    ],
)
def test_a_baseline_equals_a_naive_reading(
    method: Callable[..., Any],
    options: dict[str, int],
    naive: Callable[..., list[Row]],
    arguments: tuple[int, ...],
    G: int,
    padding: list[int],
) -> None:
    qkv = make(B=2, G=G, S=35, seed=G)
    out = method(*qkv, left_padding=np.array(padding), **options)
    assert_same(out, apply(naive, qkv, padding, *arguments), qkv[1])


def naive_h2o(Q: list[list[Row]], K: list[Row], V: list[Row], prompt: int, k: int, local: int) -> list[list[Row]]:
    """Outputs of the steps after a dense prompt; Q holds the group's rows of every position. Evicted keys are gone."""
    received = [0.0] * prompt
    for i in range(prompt):
        for head in Q[i]:
            for j, w in enumerate(exact_weights(head, K[: i + 1])):
                received[j] += w / len(Q[i])
    kept = dict(enumerate(received))
    outputs = []
    for i in range(prompt, len(K)):
        kept[i] = 0.0
        ranked = sorted(kept, key=lambda j: (j <= i - local, -kept[j]))  # local keys first, then heavy hitters
        kept = {j: kept[j] for j in sorted(ranked[:k])}
        outputs.append([attention(head, K, V, list(kept)) for head in Q[i]])
        for head in Q[i]:
            for j, w in zip(kept, exact_weights(head, [K[j] for j in kept]), strict=True):
                kept[j] += w / len(Q[i])
    return outputs


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("padding", [[0, 0], [6, 0]], ids=["unpadded", "padded"])
@pytest.mark.parametrize(("top_k", "local_window"), [(8, 2), (8, 8), (5, 1), (50, 3)])
def test_h2o_equals_a_naive_loop_over_the_sequence(G: int, padding: list[int], top_k: int, local_window: int) -> None:
    prompt, S, D, Hkv = 12, 30, 8, 2
    rng = np.random.default_rng(G)
    q = 3 * rng.standard_normal((2, Hkv * G, S, D))
    k, v = rng.standard_normal((2, 2, Hkv, S, D))
    left_padding = np.array(padding)
    scores = h2o_scores(q[:, :, :prompt], k[:, :, :prompt], left_padding=left_padding)
    steps = []
    for n in range(prompt, S):
        scores = np.pad(scores, ((0, 0), (0, 0), (0, 1)))  # the current key has received nothing yet
        evicted = scores == -np.inf
        out, scores = h2o_attention(
            q[:, :, n : n + 1],
            k[:, :, : n + 1],
            v[:, :, : n + 1],
            scores=scores,
            top_k=top_k,
            local_window=local_window,
            left_padding=left_padding,
        )
        assert (scores[evicted] == -np.inf).all(), "evicted for good"
        assert (np.isfinite(scores).sum(axis=-1) <= top_k).all()
        steps.append(out[:, :, 0])
    actual = np.stack(steps, axis=2)
    expected = np.empty_like(actual)
    for b, h in np.ndindex(2, Hkv):
        heads, valid = slice(h * G, (h + 1) * G), slice(padding[b], None)
        Q = q[b, heads, valid].swapaxes(0, 1).tolist()
        rows = naive_h2o(Q, k[b, h, valid].tolist(), v[b, h, valid].tolist(), prompt - padding[b], top_k, local_window)
        expected[b, heads] = np.array(rows).swapaxes(0, 1)
    assert_same(actual, expected, k)


def test_h2o_scores_of_a_prompt_in_parts_add_up() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 4, 20, 8)), rng.standard_normal((1, 2, 20, 8))
    first = np.pad(h2o_scores(q[:, :, :13], k[:, :, :13]), ((0, 0), (0, 0), (0, 7)))
    assert_same(first + h2o_scores(q[:, :, 13:], k), h2o_scores(q, k), k)


def test_an_evicted_key_stays_out_even_if_it_would_now_be_the_best() -> None:
    q, k, v = make(Hkv=1)
    scores = np.ones((1, 1, 40))
    scores[0, 0, 5] = -np.inf
    k[0, 0, 5] = 100 * q[0, 0, 0]
    v[0, 0, 5] = 1e6
    out, updated = h2o_attention(q, k, v, scores=scores, top_k=8)
    assert np.abs(out).max() < np.abs(v[v < 1e6]).max()
    assert updated[0, 0, 5] == -np.inf


def test_h2o_returns_stats_after_the_scores() -> None:
    out, _, info = h2o_attention(*make(), scores=np.zeros((1, 2, 40)), top_k=8, return_stats="mass")
    assert info.elements == 2 * 8 * 16 + 2 * 16 + 2 * 40
    assert ((info.retained_mass > 0) & (info.retained_mass < 1)).all()
    assert out.shape == (1, 2, 1, 16)
