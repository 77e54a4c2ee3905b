"""What SAAP's query networks are trained with, against the oracle: k-means, targets, the gradient, batch norm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlx_sparse import kmeans, oracle
from mlx_sparse.checks import ConfigError
from mlx_sparse.saap.clusters import POINTS, fit_centroids
from mlx_sparse.saap.rows import Distances, Texts, bucket_mass, long_range_rows

Array = npt.NDArray[Any]
D, BUCKETS = 16, 12


def clustered(n: int, seed: int = 0, *, groups: int = 20) -> Array:
    """Keys of different lengths around a few directions, off the origin as a model's are."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(groups, D)) + 2 * random.normal(size=D)
    keys = centres[random.integers(groups, size=n)] + 0.4 * random.normal(size=(n, D))
    return (keys * random.uniform(0.5, 2.0, (n, 1))).astype(np.float32)


def objective(keys: Array, centroids: Array) -> float:
    return float((keys.astype(np.float64) @ centroids.astype(np.float64).T).max(axis=1).sum())


def test_keys_go_to_the_bucket_that_the_oracle_and_faiss_give_them() -> None:
    faiss = pytest.importorskip("faiss")
    keys, centroids = clustered(3000), fit_centroids(clustered(3000), BUCKETS, by="mlx")
    ids = np.array(kmeans.assign(mx.array(keys), mx.array(centroids)))
    np.testing.assert_array_equal(ids, oracle.saap_assign(keys[None, None], centroids[None])[0, 0])
    index = faiss.IndexFlatIP(D)
    index.add(centroids)
    np.testing.assert_array_equal(ids, index.search(keys, 1)[1][:, 0])


def test_heads_and_chunks_of_keys_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.stack([clustered(101, seed) for seed in range(6)]).reshape(2, 3, 101, D)
    centroids = np.stack([clustered(BUCKETS, 10 + seed) for seed in range(3)])
    expected = oracle.saap_assign(keys, centroids)
    for chunk in (kmeans.CHUNK, 7 * 6 * BUCKETS):
        monkeypatch.setattr(kmeans, "CHUNK", chunk)
        np.testing.assert_array_equal(np.array(kmeans.assign(mx.array(keys), mx.array(centroids))), expected)
    moved = np.array(kmeans.move(mx.array(keys[0]), mx.array(centroids)))
    for head in range(3):
        np.testing.assert_allclose(moved[head], oracle.kmeans_step(keys[0, head], centroids[head]), atol=1e-6)
    fitted = np.array(kmeans.fit(mx.array(keys), BUCKETS, seed=3))
    assert fitted.shape == (2, 3, BUCKETS, D)
    np.testing.assert_allclose(fitted[1, 2], np.array(kmeans.fit(mx.array(keys[1, 2]), BUCKETS, seed=3)), atol=1e-6)


def test_a_bucket_that_no_key_wants_keeps_its_centroid() -> None:
    keys = clustered(50)
    centroids = np.concatenate([keys[:3], -keys.mean(axis=0, keepdims=True)])
    moved = np.array(kmeans.move(mx.array(keys), mx.array(centroids)))
    np.testing.assert_allclose(moved[3], centroids[3])
    np.testing.assert_allclose(moved, oracle.kmeans_step(keys, centroids), atol=1e-6)


@pytest.mark.parametrize("n", [2000, POINTS * BUCKETS + 500])
def test_faiss_and_mlx_find_the_same_centroids_from_the_same_start(n: int) -> None:
    pytest.importorskip("faiss")
    keys = clustered(n)
    by_faiss, by_mlx = (fit_centroids(keys, BUCKETS, seed=5, by=library) for library in ("faiss", "mlx"))
    np.testing.assert_allclose(by_mlx, by_faiss, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(by_mlx, axis=1), 1, atol=1e-6)


def test_the_objective_is_that_of_faiss_left_to_itself() -> None:
    faiss = pytest.importorskip("faiss")
    keys = clustered(3000)
    own = faiss.Kmeans(D, BUCKETS, niter=10, spherical=True, seed=7)
    own.train(keys)
    ours = objective(keys, fit_centroids(keys, BUCKETS, by="mlx"))
    assert ours == pytest.approx(objective(keys, own.centroids), rel=0.02)
    assert ours > 1.02 * objective(keys, keys[:BUCKETS] / np.linalg.norm(keys[:BUCKETS], axis=1, keepdims=True))


def test_more_buckets_than_keys_are_refused() -> None:
    for library in ("faiss", "mlx"):
        with pytest.raises(ConfigError, match="at most the number of keys to cluster, 5, got 12"):
            fit_centroids(clustered(5), BUCKETS, by=library)


S, HEADS, GROUP, WINDOWS = 150, 2, 3, 2
DISTANCES = Distances(sink_tokens=2, recent_tokens=40, farthest_top=20)


def texts(seed: int = 0, *, every: int = 1) -> Texts:
    """Random texts in which "before RoPE" is told from "after"; float16, as on disk."""
    random = np.random.default_rng(seed)

    def array(heads: int, n: int) -> Array:
        return random.normal(size=(WINDOWS, heads, n, D)).astype(np.float16)

    positions = np.tile(np.arange(0, S, every), (WINDOWS, 1))
    n = positions.shape[1]
    return Texts(array(HEADS, S), array(HEADS, S), array(HEADS * GROUP, n), array(HEADS * GROUP, n), positions, 0.6)


def bucket_ids(seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, BUCKETS, (WINDOWS, HEADS, S)).astype(np.int32)


def test_targets_are_the_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_sparse.saap.rows.CHUNK", 64 * S)  # several chunks
    data, ids = texts(), bucket_ids()
    options = {"sink_tokens": 2, "recent_tokens": 40, "farthest_top": 20, "scale": 0.6, "causal": True}
    for head in range(HEADS):
        found = long_range_rows(data, ids, head, buckets=BUCKETS, distances=DISTANCES, most=10**6)
        queries, mass = [], []
        for window, query_head in np.ndindex(WINDOWS, GROUP):
            rows = data.queries_after[window, head * GROUP + query_head]
            target = oracle.saap_target(
                rows, data.keys_after[window, head], ids[window, head], buckets=BUCKETS, **options
            )
            queries.append(data.queries_before[window, head * GROUP + query_head][target.rows])
            mass.append(target.mass)
        assert 10 < len(found.target) < found.seen == WINDOWS * GROUP * S
        np.testing.assert_array_equal(found.queries, np.concatenate(queries))
        # float16: half a unit in the last place of a number below 1, and float32 scores before it
        np.testing.assert_allclose(found.target, np.concatenate(mass), atol=2**-12 + 1e-5)


def test_a_sample_of_queries_has_the_targets_that_they_have_among_all() -> None:
    every = 7
    data, ids = texts(), bucket_ids()
    options = {"buckets": BUCKETS, "distances": DISTANCES, "scale": 0.6}
    of_all = bucket_mass(data.queries_after[0, 0], data.keys_after[0, 0], ids[0, 0], data.positions[0], **options)
    sampled = data.queries_after[0, 0][::every], data.keys_after[0, 0], ids[0, 0], data.positions[0][::every]
    found = bucket_mass(*sampled, **options)
    np.testing.assert_allclose(found.mass, of_all.mass[::every], atol=1e-6)
    np.testing.assert_array_equal(found.distance, of_all.distance[::every])


def test_rows_are_bounded_and_the_same_for_the_same_seed() -> None:
    data, ids = texts(), bucket_ids()
    options = {"buckets": BUCKETS, "distances": DISTANCES, "most": 40}
    first, second, other = (long_range_rows(data, ids, 1, seed=seed, **options) for seed in (0, 0, 1))
    assert len(first.queries) == len(first.target) == 40
    np.testing.assert_array_equal(first.queries, second.queries)
    assert not np.array_equal(first.queries, other.queries)
