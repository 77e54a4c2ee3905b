"""Compare the SAAP oracle with a naive implementation of docs/spec/saap.md and with known facts."""

from __future__ import annotations

import math
from itertools import pairwise

import faiss
import numpy as np
import pytest
from cases import Array
from saap_cases import SAAP_CASES, SaapCase, visited

from mlx_sparse import oracle

by_case = pytest.mark.parametrize("case", SAAP_CASES, ids=str)

# Table 5 of the paper: selectivity in percent by number of probes, for 1,024 equal buckets.
BALANCED = {4: 0.4, 8: 0.8, 16: 1.6, 32: 3.1, 64: 6.2, 128: 12.5}


def attended(case: SaapCase, b: int, h: int) -> list[int]:
    """Return the keys that a step attends to, by the definition."""
    S, first = case.step.S, case.step.padding[b] if case.step.padding else 0
    ids, chosen = case.bucket_ids()[b, h].tolist(), set(visited(case)[b, h].tolist())
    keys = []
    for j in range(first, S):
        sink, recent = j - first < case.sink_tokens, S - j <= case.recent_tokens
        if sink or recent or ids[j] in chosen:
            keys.append(j)
    return keys


@by_case
def test_a_step_attends_sinks_recent_keys_and_visited_buckets(case: SaapCase) -> None:
    q, k, v = case.inputs()
    given = {"bucket_ids": case.bucket_ids(), "visited": visited(case), "left_padding": case.step.padding}
    out, stats = oracle.saap_attention(q, k, v, return_stats="recall", **given, **case.window)
    G = case.step.Hq // case.step.Hkv
    count = 0
    for b, head in np.ndindex(case.step.B, case.step.Hq):
        keys = attended(case, b, head // G)
        count += len(keys)
        query = q[b, head, 0].astype(np.float64)
        weights = [math.exp(float(query @ k[b, head // G, j]) * case.scale) for j in keys]
        mean = sum(w * v[b, head // G, j].astype(np.float64) for w, j in zip(weights, keys, strict=True)) / sum(weights)
        np.testing.assert_allclose(out[b, head, 0], mean, rtol=1e-12, atol=1e-12)
        first = case.step.padding[b] if case.step.padding else 0
        everything = sum(math.exp(float(query @ k[b, head // G, j]) * case.scale) for j in range(first, case.step.S))
        assert stats.recall[b, head, 0] == pytest.approx(sum(weights) / everything, rel=1e-10)
    assert stats.density == pytest.approx(count / (case.step.B * case.step.Hq * case.step.S))


@pytest.mark.parametrize("pending", [0, 1, 25, 10**6])
@by_case
def test_a_list_holds_the_same_keys_however_many_are_pending(case: SaapCase, pending: int) -> None:
    covered = max(case.covered - pending, 0)
    index = {"sink_tokens": case.sink_tokens, "left_padding": case.step.padding}
    offsets, key_ids = oracle.saap_index(case.bucket_ids()[..., :covered], buckets=case.buckets, **index)
    sizes = {"length": case.step.S, "covered": covered, "capacity": case.step.S}
    indices, counts = oracle.saap_indices(visited(case), offsets, key_ids, **sizes, **index)
    for b, h in np.ndindex(counts.shape):
        keys = indices[b, h, : counts[b, h]].tolist()
        first = case.step.padding[b] if case.step.padding else 0
        late = set(range(max(covered, first), case.step.S))
        assert sorted(keys) == sorted({*attended(case, b, h), *late})
        assert (indices[b, h, counts[b, h] :] == -1).all()


@by_case
def test_the_group_visits_the_buckets_with_the_largest_summed_probability(case: SaapCase) -> None:
    network, queries = case.network(), case.queries_before().astype(np.float64)
    G = case.step.Hq // case.step.Hkv
    for b, h in np.ndindex(case.step.B, case.step.Hkv):
        total = [0.0] * case.buckets
        for q in queries[b, h * G : (h + 1) * G, 0]:
            x = q
            if case.hidden is not None:
                x = np.maximum(q @ network["hidden_weight"][h] + network["hidden_bias"][h], 0)
            logits = x @ network["out_weight"][h] + network.get("out_bias", np.zeros((h + 1, 1)))[h]
            top = max(logits)
            exps = [math.exp(value - top) for value in logits]
            total = [old + e / sum(exps) for old, e in zip(total, exps, strict=True)]
        best = sorted(range(case.buckets), key=lambda c: (-total[c], c))[: case.probes]
        assert visited(case)[b, h].tolist() == sorted(best)


def test_a_folded_batch_norm_is_the_layer_and_the_batch_norm() -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(50, 8)), rng.normal(size=(8, 5)), rng.normal(size=5)
    norm = {
        "mean": rng.normal(size=5),
        "variance": rng.random(5),
        "gain": rng.normal(size=5),
        "shift": rng.normal(size=5),
    }
    expected = (x @ weight + bias - norm["mean"]) / np.sqrt(norm["variance"] + 1e-5) * norm["gain"] + norm["shift"]
    folded_weight, folded_bias = oracle.fold_batch_norm(weight, bias, **norm)
    np.testing.assert_allclose(x @ folded_weight + folded_bias, expected, rtol=1e-12)


def blobs(N: int = 2000, D: int = 16, C: int = 12) -> tuple[Array, Array]:
    """Return keys around a few directions, and initial centroids for k-means."""
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(C, D))
    keys = directions[rng.integers(0, C, N)] * rng.uniform(0.5, 2, (N, 1)) + 0.4 * rng.normal(size=(N, D))
    start = keys[rng.choice(N, C, replace=False)]
    return keys.astype(np.float32), (start / np.linalg.norm(start, axis=1, keepdims=True)).astype(np.float32)


def objective(keys: Array, centroids: Array) -> float:
    """Return the objective of spherical k-means: the sum of the inner products of keys and their centroids."""
    return float((keys.astype(np.float64) @ centroids.T).max(axis=1).sum())


def test_each_step_of_k_means_raises_the_objective() -> None:
    keys, centroids = blobs()
    reached = [objective(keys, centroids)]
    for _ in range(10):
        centroids = oracle.kmeans_step(keys, centroids)
        np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, rtol=1e-12)
        reached.append(objective(keys, centroids))
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(reached))
    assert reached[-1] > 1.05 * reached[0]


def test_k_means_is_that_of_faiss() -> None:
    keys, start = blobs()
    index = faiss.IndexFlatIP(keys.shape[1])
    index.add(start)
    assert (index.search(keys, 1)[1][:, 0] == oracle.saap_assign(keys[None, None], start[None])[0, 0]).all()
    theirs = faiss.Kmeans(keys.shape[1], len(start), niter=10, spherical=True, seed=1, max_points_per_centroid=10**6)
    theirs.train(keys, init_centroids=start)
    ours = start.astype(np.float64)
    for _ in range(10):
        ours = oracle.kmeans_step(keys, ours)
    assert objective(keys, ours) == pytest.approx(objective(keys, theirs.centroids), rel=0.02)


def test_a_bucket_without_keys_keeps_its_centroid() -> None:
    keys = np.array([[1.0, 0.0], [2.0, 0.1]])
    centroids = np.array([[1.0, 0.0], [0.0, -1.0]])
    moved = oracle.kmeans_step(keys, centroids)
    assert (moved[1] == centroids[1]).all()
    np.testing.assert_allclose(moved[0], np.array([3.0, 0.1]) / math.hypot(3.0, 0.1))


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_target_is_the_long_range_attention_by_bucket(causal: bool) -> None:
    rng = np.random.default_rng(2)
    S, D, C, near, farthest_top, sinks = 90, 8, 5, 20, 12, 2
    q, k, ids = rng.normal(size=(S, D)), rng.normal(size=(S, D)), rng.integers(0, C, S)
    window = {"recent_tokens": near, "farthest_top": farthest_top, "sink_tokens": sinks}
    target = oracle.saap_target(q, k, ids, buckets=C, causal=causal, **window)
    rows, masses, far = [], [], []
    for i in range(S):
        seen = range(i + 1) if causal else range(S)
        weight = {j: math.exp(float(q[i] @ k[j]) * D**-0.5) for j in seen}
        others = [j for j in seen if j >= sinks]
        distant = [j for j in others if abs(i - j) >= near]
        if not others or not distant or abs(i - max(others, key=lambda j: weight[j])) <= farthest_top:
            continue
        kept = sum(weight[j] for j in distant)
        rows.append(i)
        far.append(kept / sum(weight.values()))
        masses.append([sum(weight[j] for j in distant if ids[j] == c) / kept for c in range(C)])
    assert 5 < len(rows) < S
    assert target.rows.tolist() == rows
    np.testing.assert_allclose(target.mass, masses, rtol=1e-10)
    np.testing.assert_allclose(target.mass.sum(axis=1), 1)
    np.testing.assert_allclose(target.far, far, rtol=1e-10)


@pytest.mark.parametrize(("probes", "per_cent"), BALANCED.items())
def test_equal_buckets_have_the_selectivity_of_the_paper_and_imbalance_one(probes: int, per_cent: float) -> None:
    C, window = 1024, {"sink_tokens": 1, "recent_tokens": 2047}
    S = 1 + 2047 + 4 * C
    ids = np.full((1, 1, S), -1)
    ids[..., 1 : S - 2047] = np.arange(4 * C) % C
    chosen = np.arange(probes)[None, None]
    share = oracle.selectivity(ids, chosen, **window)
    assert share == pytest.approx(probes / C)
    assert abs(100 * share - per_cent) <= 0.05 + 1e-9  # the paper prints one decimal
    assert oracle.imbalance(ids, C) == pytest.approx(1)


def test_imbalance_counts_pairs() -> None:
    assert oracle.imbalance([0] * 6 + [1] * 2, 2) == pytest.approx(2 * (36 + 4) / 64)
    assert oracle.imbalance([3] * 10, 8) == pytest.approx(8)
    assert oracle.imbalance([-1, 9], 8) == 0
