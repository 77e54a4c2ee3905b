"""Test the report of a training run: recall and selectivity of known routers, counted key by key."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean

import commands
import mlx.core as mx
import numpy as np
import pytest
from saap_training import BUCKETS, DISTANCES, GROUP, HEADS, WINDOWS, D, bucket_ids, texts

from mlx_sparse import oracle
from mlx_sparse.methods.saap.artefact import Layer, load
from mlx_sparse.tools.train import network
from mlx_sparse.tools.train.layers import (
    Indexed,
    Recipe,
    curve,
    grouped_queries,
    imbalance,
    index,
    keys_per_bucket,
    make_centroids,
    make_layer,
    report_layer,
    router_scores,
    routers_of,
)
from mlx_sparse.tools.train.layers import bucket_ids as assign_all
from mlx_sparse.tools.train.network import Training
from mlx_sparse.tools.train.rows import Distances

RECIPE = Recipe(BUCKETS, DISTANCES, Training(2 * D, steps=5, batch=16), 10**6, 0)


def test_keys_per_bucket_match_a_decode_step() -> None:
    ids, positions = bucket_ids()[0, 0], np.arange(0, 150, 7)
    found = keys_per_bucket(ids, positions, BUCKETS, DISTANCES)
    for row, position in enumerate(positions):
        S = position + 1  # includes the current token
        covered = max(S - DISTANCES.recent_tokens, 0)
        offsets, _ = oracle.saap_index(ids[None, None, :covered], buckets=BUCKETS, sink_tokens=DISTANCES.sink_tokens)
        np.testing.assert_array_equal(found[row], np.diff(offsets[0, 0]))


def test_mass_matches_dense_attention() -> None:
    data, ids = texts(every=9), bucket_ids()
    found = index(data, ids, 1, buckets=BUCKETS, distances=DISTANCES)
    n = data.positions.shape[1]
    assert found.mass.shape == (WINDOWS * n, GROUP, BUCKETS)
    for window, row, query_head in ((0, 8, 0), (1, n - 1, 2)):
        position = data.positions[window, row]
        keys = data.rope_keys[window, 1, : position + 1].astype(np.float64)
        logits = data.scale * keys @ data.rope_queries[window, GROUP + query_head, row].astype(np.float64)
        attention = np.exp(logits - logits.max())
        attention /= attention.sum()
        far = np.arange(position + 1) <= position - DISTANCES.recent_tokens
        far[: DISTANCES.sink_tokens] = False
        expected = [attention[far & (ids[window, 1, : position + 1] == c)].sum() for c in range(BUCKETS)]
        np.testing.assert_allclose(found.mass[window * n + row, query_head], expected, atol=1e-6)
        best = DISTANCES.sink_tokens + np.argmax(logits[DISTANCES.sink_tokens :])
        assert found.distance[window * n + row, query_head] == position - best


def test_curve_follows_the_order_of_the_scores() -> None:
    mass = np.array([[[0.1, 0.3, 0.0], [0.2, 0.0, 0.2]]])
    keys, distance = np.array([[10, 30, 60]]), np.array([[900, 900]])
    selectivity, recall = curve(Indexed(mass, keys, distance), np.array([[0.2, 0.5, 0.1]]), DISTANCES)
    np.testing.assert_allclose(selectivity, [0, 0.3, 0.4, 1])
    np.testing.assert_allclose(recall, [0, (0.75 + 0) / 2, (1 + 0.5) / 2, 1])


def test_recall_uses_long_range_queries_if_enough() -> None:
    n = 40
    mass, keys = np.zeros((n, 1, 2)), np.full((n, 2), 5)
    mass[:, 0, 0] = 1
    mass[:20, 0] = (0, 1)
    distance = np.where(np.arange(n) < 20, 900, DISTANCES.farthest_top)[:, None]
    scores = np.tile([1.0, 0.0], (n, 1))
    assert curve(Indexed(mass, keys, distance), scores, DISTANCES)[1][1] == 0
    few = np.where(np.arange(n) < 5, 900, 3)[:, None]
    assert curve(Indexed(mass, keys, few), scores, DISTANCES)[1][1] == 0.5


def test_routers_match_the_oracle() -> None:
    data = texts(every=50)
    layer, _ = make_layer(data, RECIPE)
    arrays = {name: np.array(array.astype(mx.float32)) for name, array in layer.arrays().items()}
    centroids = arrays.pop("centroids")
    n = data.positions.shape[1]
    every, linear = (
        [router_scores(grouped_queries(data, head), router, head) for head in range(HEADS)]
        for router in routers_of(layer, 0.6).values()
    )
    for window, row in np.ndindex(WINDOWS, n):
        queries = data.pre_rope_queries[window, :, row].astype(np.float32)[None, :, None]
        expected = oracle.query_network(queries, **arrays)[0].sum(axis=1)
        of_kmeans = oracle.query_network(queries, out_weight=0.6 * centroids.swapaxes(1, 2))[0].sum(axis=1)
        for head in range(HEADS):
            np.testing.assert_allclose(every[head][window * n + row], expected[head], atol=1e-4)
            np.testing.assert_allclose(linear[head][window * n + row], of_kmeans[head], atol=1e-5)


def test_report_covers_every_head_and_router() -> None:
    train, held_out = texts(), texts(seed=1, every=3)
    layer, rows = make_layer(train, RECIPE)
    heads = report_layer(5, held_out, layer, rows, RECIPE)
    assert [(found.layer, found.head) for found in heads] == [(5, 0), (5, 1)]
    for found in heads:
        assert found.recall.keys() == {"trained", "kmeans"}
        assert found.loss.keys() == {"trained", "kmeans"}
        assert 0 < found.long_range < 1 and found.rows > 64
        assert all(0 <= a <= b <= c <= 1 for a, b, c in found.recall.values())
        ids = assign_all(held_out.pre_rope_keys, np.array(layer.centroids.astype(mx.float32)))
        expected = oracle.imbalance(ids[:, found.head, DISTANCES.sink_tokens :], BUCKETS)
        assert found.imbalance == pytest.approx(expected)
    assert imbalance(np.zeros((1, 9), np.int32), RECIPE) == BUCKETS


def test_routers_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = texts(), texts(seed=1, every=3)
    layer, rows = make_layer(train, RECIPE)
    whole = report_layer(5, held_out, layer, rows, RECIPE)
    as_centroids = network.router(layer.centroids.astype(mx.float32), 2 * D, held_out.scale)
    linear = report_layer(5, held_out, Layer(layer.centroids, **as_centroids), rows, RECIPE)
    for trained, untrained in zip(whole, linear, strict=True):
        assert untrained.recall["kmeans"] == trained.recall["kmeans"] != trained.recall["trained"]
        np.testing.assert_allclose(untrained.recall["trained"], trained.recall["kmeans"], atol=1e-6)
    # The report uses only some queries of many texts.
    monkeypatch.setattr("mlx_sparse.tools.train.layers.MAX_REPORTED", 5 * WINDOWS)
    assert report_layer(5, held_out, layer, rows, RECIPE) == report_layer(5, held_out.thinned(5), layer, rows, RECIPE)


def test_no_steps_keep_the_kmeans_router() -> None:
    recipe = replace(RECIPE, training=replace(RECIPE.training, steps=0))
    layer, rows = make_layer(texts(), recipe)
    expected = network.router(mx.array(make_centroids(texts(), recipe)), 2 * D, texts().scale)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.array(layer.arrays()[name]), np.array(array.astype(mx.float16)))
    for found in report_layer(5, texts(seed=1, every=3), layer, rows, recipe):
        assert found.rows == 0
        np.testing.assert_allclose(found.recall["trained"], found.recall["kmeans"], atol=5e-3)  # float16 weights
        assert found.loss["trained"] == pytest.approx(found.loss["kmeans"], abs=1e-2)


def test_thinned_texts_keep_all_keys() -> None:
    data = texts(every=2)  # 75 queries
    few = data.thinned(30)
    np.testing.assert_array_equal(few.positions, data.positions[:, ::3])
    np.testing.assert_array_equal(few.pre_rope_queries[1], data.pre_rope_queries[1][:, ::3])
    np.testing.assert_array_equal(few.rope_queries[0], data.rope_queries[0][:, ::3])
    assert few.rope_keys is data.rope_keys
    assert data.thinned(75).positions.shape == data.positions.shape


def test_sinks_are_not_clustered() -> None:
    data = texts()
    recipe = replace(RECIPE, distances=Distances(sink_tokens=20, recent_tokens=40, farthest_top=20))
    found = make_centroids(data, recipe)
    data.pre_rope_keys[:, :, :20] *= 1000
    np.testing.assert_array_equal(make_centroids(data, recipe), found)


# Five texts of Python's language reference and two layers take less than a minute on one core.
ARGUMENTS = (
    "--context 1024 --windows 3 --queries 600 --buckets 32 --recent-tokens 127 --farther-than 64 --layers 20 24 "
    "--steps 150 --json"
)


@pytest.mark.slow  # a real model
def test_routers_find_long_range_attention_of_a_real_model(
    smollm2: Path, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    out = tmp_path / "smollm2.safetensors"
    command = ["-m", "mlx_sparse.cli", "train-saap", "--model", str(smollm2), "-o", str(out), *ARGUMENTS.split()]
    done = commands.run(command, os.environ | without_torch)
    assert done.returncode == 0, done.stderr
    made = load(out)
    assert (list(made.layers), made.hidden, made.layers[20].centroids.shape) == ([20, 24], 128, (3, 32, 64))
    found = json.loads(done.stdout)
    recall = found["mean"]["recall"]
    at_20 = 2
    # Random buckets would have recalls of 0.05, 0.1 and 0.2.
    assert all(recall["kmeans"][i] > 2.5 * share for i, share in enumerate(found["selectivities"]))
    assert all(recall["trained"][i] > 2.5 * share for i, share in enumerate(found["selectivities"]))
    assert recall["trained"][at_20] > recall["kmeans"][at_20]
    # The networks beat k-means on held-out text in every head.
    assert all(head["loss"]["trained"] < 0.7 * head["loss"]["kmeans"] for head in found["heads"])
    assert mean(head["rows"] for head in found["heads"]) > 1000
