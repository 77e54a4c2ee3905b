"""Test the training of SAAP's query networks against the oracle: k-means, targets, gradient and batch norm."""

from __future__ import annotations

import dataclasses
from typing import Any

import faiss
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from saap_training import BUCKETS, DISTANCES, GROUP, HEADS, WINDOWS, D, S, bucket_ids, texts

from mlx_sparse import oracle
from mlx_sparse.checks import ConfigError
from mlx_sparse.methods.saap import kmeans
from mlx_sparse.methods.saap.artefact import Layer
from mlx_sparse.tools.train import network
from mlx_sparse.tools.train.layers import POINTS, fit_centroids, losses, routers_of
from mlx_sparse.tools.train.network import MIN_ROWS, Training, train_layer
from mlx_sparse.tools.train.rows import Rows, long_range_rows

Array = npt.NDArray[Any]


def clustered(n: int, seed: int = 0, *, groups: int = 20) -> Array:
    """Return keys of different norms around a few directions with a common offset, like a model's keys."""
    random = np.random.default_rng(seed)
    centers = random.normal(size=(groups, D)) + 2 * random.normal(size=D)
    keys = centers[random.integers(groups, size=n)] + 0.4 * random.normal(size=(n, D))
    return (keys * random.uniform(0.5, 2.0, (n, 1))).astype(np.float32)


def test_heads_and_chunks_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.stack([clustered(101, seed) for seed in range(6)]).reshape(2, 3, 101, D)
    centroids = np.stack([clustered(BUCKETS, 10 + seed) for seed in range(3)])
    expected = oracle.saap_assign(keys, centroids)
    for chunk in (kmeans.PRODUCTS_AT_ONCE, 7 * 6 * BUCKETS):
        monkeypatch.setattr(kmeans, "PRODUCTS_AT_ONCE", chunk)
        np.testing.assert_array_equal(np.array(kmeans.saap_assign(mx.array(keys), mx.array(centroids))), expected)
    moved = np.array(kmeans.move(mx.array(keys[0]), mx.array(centroids)))
    for head in range(3):
        np.testing.assert_allclose(moved[head], oracle.kmeans_step(keys[0, head], centroids[head]), atol=1e-6)
    fitted = np.array(kmeans.fit(mx.array(keys), BUCKETS, seed=3))
    assert fitted.shape == (2, 3, BUCKETS, D)
    np.testing.assert_allclose(fitted[1, 2], np.array(kmeans.fit(mx.array(keys[1, 2]), BUCKETS, seed=3)), atol=1e-6)


@pytest.mark.parametrize("n", [2000, POINTS * BUCKETS + 500])
def test_centroids_match_faiss(n: int) -> None:
    keys = clustered(n)
    found = fit_centroids(keys, BUCKETS, seed=5)
    if n > POINTS * BUCKETS:
        keys = keys[np.sort(np.random.default_rng(5).choice(n, POINTS * BUCKETS, replace=False))]
    theirs = faiss.Kmeans(
        D, BUCKETS, niter=kmeans.ITERATIONS, spherical=True, max_points_per_centroid=POINTS, min_points_per_centroid=1
    )
    theirs.train(keys, init_centroids=keys[kmeans.start_points(len(keys), BUCKETS, 5)])
    np.testing.assert_allclose(found, theirs.centroids, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_more_buckets_than_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most the number of keys to cluster, 5, got 12"):
        fit_centroids(clustered(5), BUCKETS)


def test_targets_match_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_sparse.tools.train.rows.SCORES_AT_ONCE", 64 * S)  # several chunks
    data, ids = texts(), bucket_ids()
    options = {"sink_tokens": 2, "recent_tokens": 40, "farthest_top": 20, "scale": 0.6, "causal": True}
    for head in range(HEADS):
        found = long_range_rows(data, ids, head, buckets=BUCKETS, distances=DISTANCES, max_rows=10**6)
        queries, mass = [], []
        for window, query_head in np.ndindex(WINDOWS, GROUP):
            rows = data.rope_queries[window, head * GROUP + query_head]
            target = oracle.saap_target(
                rows, data.rope_keys[window, head], ids[window, head], buckets=BUCKETS, **options
            )
            queries.append(data.pre_rope_queries[window, head * GROUP + query_head][target.rows])
            mass.append(target.mass)
        assert 10 < len(found.target) < found.seen == WINDOWS * GROUP * S
        np.testing.assert_array_equal(found.queries, np.concatenate(queries))
        assert found.counts.tolist() == [sum(map(len, queries[w * GROUP : (w + 1) * GROUP])) for w in range(WINDOWS)]
        # half a float16 ulp below 1, plus the float32 error of the scores
        np.testing.assert_allclose(found.target, np.concatenate(mass), atol=2**-12 + 1e-5)


def test_rows_are_bounded_and_deterministic() -> None:
    data, ids = texts(), bucket_ids()
    options = {"buckets": BUCKETS, "distances": DISTANCES, "max_rows": 40}
    first, second, other = (long_range_rows(data, ids, 1, seed=seed, **options) for seed in (0, 0, 1))
    assert len(first.queries) == len(first.target) == 40
    np.testing.assert_array_equal(first.queries, second.queries)
    assert not np.array_equal(first.queries, other.queries)


HIDDEN, SCALE = 2 * D + 5, 0.25
SHARE = (np.arange(1, BUCKETS + 1) / np.arange(1, BUCKETS + 1).sum()).astype(np.float32)
EVEN = mx.ones((HEADS, BUCKETS))


def long_tailed_rows(n: int, seed: int = 0, *, heads: int = HEADS) -> list[Rows]:
    """Return queries and their targets, a nonlinear function of the queries that centroids cannot predict."""
    random = np.random.default_rng(seed)
    truth = np.random.default_rng(99).normal(size=(heads, D, BUCKETS))
    found = []
    for head in range(heads):
        queries = random.normal(size=(n, D)) + 0.5
        logits = 1.5 * np.abs(queries) @ truth[head]
        target = np.exp(logits - logits.max(axis=1, keepdims=True))
        target /= target.sum(axis=1, keepdims=True)
        counts = np.array([n // 4, 0, n - n // 4])
        found.append(Rows(queries.astype(np.float32), target.astype(np.float16), 2 * n, SHARE, counts))
    return found


def unit_centroids(seed: int = 1) -> Array:
    centroids = np.random.default_rng(seed).normal(size=(HEADS, BUCKETS, D))
    return (centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)).astype(np.float32)


def started(rows: list[Rows], *, at_random: bool = False) -> network.Params:
    spread = network.Spread.of([found.queries for found in rows])
    params = network.start(mx.array(unit_centroids()), spread, HIDDEN, SCALE, seed=4)
    if at_random:
        keys = mx.random.split(mx.random.key(8), len(params))
        noise = [0.3 * mx.random.normal(array.shape, key=key) for array, key in zip(params.values(), keys, strict=True)]
        params = {name: array + extra for (name, array), extra in zip(params.items(), noise, strict=True)}
    return params


def plain_loss(params: dict[str, Array], queries: Array, target: Array) -> float:
    """Compute `network.loss` in float64, head by head."""
    total = 0.0
    for head in range(len(queries)):
        x = queries[head] @ params["hidden_weight"][head]
        x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + network.EPS)
        h = np.maximum(x * params["gain"][head] + params["shift"][head], 0)
        logits = h @ params["out_weight"][head] + params["out_bias"][head]
        logf = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= (target[head] * logf).sum(axis=1).mean()
    return total


def test_gradient_matches_finite_differences() -> None:
    rows = long_tailed_rows(9)
    params = started(rows, at_random=True)
    queries, target = np.stack([r.queries for r in rows]), np.stack([r.target for r in rows]).astype(np.float32)
    loss, gradient = mx.value_and_grad(network.loss)(params, mx.array(queries), mx.array(target))
    exact = {name: np.array(array).astype(np.float64) for name, array in params.items()}
    assert loss.item() == pytest.approx(plain_loss(exact, queries, target), rel=1e-5)
    random, step = np.random.default_rng(0), 1e-5
    for name, array in exact.items():
        for place in random.choice(array.size, 25):
            at = np.unravel_index(place, array.shape)
            here, sides = array[at], []
            for array[at] in (here + step, here - step):
                sides.append(plain_loss(exact, queries, target))
            array[at] = here
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float(np.array(gradient[name])[at]) == pytest.approx(slope, abs=2e-5), (name, at)


def folded_probabilities(layer: Layer, queries: Array) -> Array:
    """Return the oracle's probabilities ``(Hkv, n, C)`` for ``queries (Hkv, n, D)``."""
    arrays = {name: np.array(array.astype(mx.float32)) for name, array in layer.arrays().items()}
    del arrays["centroids"]
    return np.stack(
        [
            oracle.query_network(queries[:, [row]].reshape(1, HEADS, 1, D), **arrays)[0, :, 0]
            for row in range(queries.shape[1])
        ],
        axis=1,
    )


def test_batch_norm_folding_matches_the_oracle() -> None:
    rows = long_tailed_rows(50)
    spread = network.Spread.of([found.queries for found in rows])
    params = started(rows, at_random=True)
    folded = network.fold(params, spread, EVEN)
    of = {name: np.array(array).astype(np.float64) for name, array in params.items()}
    for head, found in enumerate(rows):
        before = found.queries.astype(np.float64) @ of["hidden_weight"][head]
        weight, bias = oracle.fold_batch_norm(
            of["hidden_weight"][head],
            np.zeros(HIDDEN),
            mean=before.mean(axis=0),
            variance=before.var(axis=0),
            gain=of["gain"][head],
            shift=of["shift"][head],
            eps=network.EPS,
        )
        np.testing.assert_allclose(np.array(folded["hidden_weight"][head]), weight, atol=1e-5)
        np.testing.assert_allclose(np.array(folded["hidden_bias"][head]), bias, atol=1e-5)
    layer = Layer(mx.array(unit_centroids()), **folded)
    queries = np.stack([found.queries for found in rows])
    ours = np.array(mx.softmax(network.logits(folded, mx.array(queries)), axis=-1))
    np.testing.assert_allclose(ours, folded_probabilities(layer, queries), atol=1e-5)


def test_training_starts_at_the_kmeans_router() -> None:
    rows, centroids = long_tailed_rows(80), unit_centroids()
    queries = np.stack([found.queries for found in rows])
    linear = SCALE * np.einsum("hnd,hcd->hnc", queries, centroids)
    spread = network.Spread.of([found.queries for found in rows])
    for folded in (network.fold(started(rows), spread, EVEN), network.router(mx.array(centroids), HIDDEN, SCALE)):
        np.testing.assert_allclose(np.array(network.logits(folded, mx.array(queries))), linear, atol=1e-4)


TRAINING = Training(HIDDEN, steps=60, batch=64, rate=1e-2, seed=2)


@pytest.mark.parametrize("recipe", [{}, {"start": "random", "one_text": True}])
def test_trained_network_beats_kmeans_on_new_queries(recipe: dict[str, Any]) -> None:
    training = dataclasses.replace(TRAINING, **recipe)
    layer = train_layer(long_tailed_rows(2000), unit_centroids(), training, scale=SCALE)
    for head, rows in enumerate(long_tailed_rows(300, seed=1)):
        found = losses(rows, routers_of(layer, SCALE), head, rows)
        assert 0 < found["trained"] < 0.7 * found["kmeans"]


def test_file_is_per_key_and_report_per_bucket() -> None:
    rows = long_tailed_rows(200)
    even = [dataclasses.replace(found, share=np.full(BUCKETS, 1 / BUCKETS, np.float32)) for found in rows]
    per_key, per_bucket = (train_layer(each, unit_centroids(), TRAINING, scale=SCALE) for each in (rows, even))
    odds = np.array(per_key.out_bias - per_bucket.out_bias)
    np.testing.assert_allclose(odds, np.tile(-np.log(SHARE * BUCKETS), (HEADS, 1)), atol=1e-5)
    for head, (one, other) in enumerate(zip(rows, even, strict=True)):
        a, b = (
            losses(one, routers_of(per_key, SCALE), head, one),
            losses(other, routers_of(per_bucket, SCALE), head, other),
        )
        assert a["trained"] == pytest.approx(b["trained"], abs=1e-5)


def test_key_shares_exclude_sinks_and_are_positive() -> None:
    data, ids = texts(), bucket_ids()
    ids[ids == 3] = 4
    found = long_range_rows(data, ids, 0, buckets=BUCKETS, distances=DISTANCES, max_rows=10)
    counted = ids[:, 0, DISTANCES.sink_tokens :]
    expected = [(counted == c).mean() for c in range(BUCKETS)]
    expected[3] = 1 / counted.size
    np.testing.assert_allclose(found.share, expected, rtol=1e-6)


def test_reported_loss_is_the_divergence() -> None:
    rows, centroids = long_tailed_rows(40), mx.array(unit_centroids())
    layer = Layer(centroids, **network.router(centroids, HIDDEN, SCALE))
    logits = SCALE * rows[1].queries.astype(np.float64) @ unit_centroids()[1].T.astype(np.float64)
    f = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    target = rows[1].target.astype(np.float64)
    expected = np.where(target > 0, target * np.log(np.maximum(target, 1e-30) / f), 0).sum(axis=1).mean()
    # targets are float16, so their sums are 1 to within 0.0005
    assert losses(rows[1], routers_of(layer, SCALE), 1, rows[1])["kmeans"] == pytest.approx(expected, abs=2e-3)
    none = dataclasses.replace(rows[0], queries=rows[0].queries[:0], target=rows[0].target[:0])
    assert losses(none, routers_of(layer, SCALE), 0, rows[0]) == {}


def test_queries_of_a_step_come_from_one_text() -> None:
    rows = long_tailed_rows(80, heads=1)  # 20 of text 0, none of text 1, 60 of text 2
    training, texts = dataclasses.replace(TRAINING, one_text=True), list[set[bool]]()
    for step in range(20):
        (queries,) = np.array(network._batch(rows, training, step)[0])
        places = {int(np.flatnonzero((rows[0].queries == query).all(axis=1))[0]) for query in queries}
        texts.append({place >= 20 for place in places})
    assert {len(of_step) for of_step in texts} == {1}
    assert set.union(*texts) == {False, True}


def test_learning_rate_decays_to_zero() -> None:
    rates = [Training(2 * D, steps=8, rate=0.5).rate_at(step) for step in range(9)]
    np.testing.assert_allclose([rates[0], rates[4], rates[8]], [0.5, 0.25, 0], atol=1e-12)
    assert (np.diff(rates) < 0).all()


def test_heads_with_few_rows_keep_the_kmeans_router() -> None:
    many, few = long_tailed_rows(500)[0], long_tailed_rows(MIN_ROWS - 1)[1]
    layer = train_layer([many, few], unit_centroids(), TRAINING, scale=SCALE)
    found = losses(many, routers_of(layer, SCALE), 0, many), losses(few, routers_of(layer, SCALE), 1, few)
    assert found[0]["trained"] < 0.8 * found[0]["kmeans"]
    assert found[1]["trained"] == pytest.approx(found[1]["kmeans"], abs=1e-5)
    queries = np.stack([few.queries] * HEADS)
    logits = np.array(network.logits({k: v for k, v in layer.arrays().items() if k != "centroids"}, mx.array(queries)))
    np.testing.assert_allclose(logits[1], SCALE * few.queries @ unit_centroids()[1].T, atol=1e-5)
    alone = train_layer([few, few], unit_centroids(), TRAINING, scale=SCALE)
    np.testing.assert_array_equal(np.array(alone.out_bias), 0)
