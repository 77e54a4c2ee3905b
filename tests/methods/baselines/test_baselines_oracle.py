"""Compare the decode baselines of the oracle with naive loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from naive import Row, apply, argtopk, assert_same, attention, dot, make, mix, softmax

from mlx_sparse.oracle import flexgen_attention, h2o_attention, h2o_scores, oracle_top_k_attention, streaming_attention


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
def test_a_baseline_equals_a_naive_implementation(
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
    """Return the outputs of H2O's steps after a dense prompt. Q has the queries of the group for each position."""
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
        scores = np.pad(scores, ((0, 0), (0, 0), (0, 1)))  # the current key has not received attention yet
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


def test_h2o_scores_of_prompt_chunks_add_up() -> None:
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
    out, _, info = h2o_attention(*make(), scores=np.zeros((1, 2, 40)), top_k=8, return_stats="recall")
    assert info.elements == 2 * 8 * 16 + 2 * 16 + 2 * 40
    assert ((info.recall > 0) & (info.recall < 1)).all()
    assert out.shape == (1, 2, 1, 16)
