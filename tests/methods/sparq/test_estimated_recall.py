"""Test the estimated attention recall in the report: per layer, per sequence, bounded, and without waiting."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, QuantizedKVCache, make_prompt_cache
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.api.call_report import IN_FLIGHT, Counts, Report
from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.cache.sparse_cache import SparseCache
from mlx_sparse.core import registry
from mlx_sparse.lm.call import SAMPLED_STEPS
from mlx_sparse.lm.statistics import RecallStatistics
from mlx_sparse.methods import SparQ

ATTN = "sparq:rank=4,top_k=16,dense_below=0"


def counts_of(values: dict[int, list[float]], **known: Any) -> Counts:
    counts = Counts(**known)
    for layer, recalls in values.items():
        counts.later("recalls", RecallStatistics.read, layer, mx.array(recalls))
    return counts


def statistics_of(values: dict[int, list[float]]) -> RecallStatistics:
    counts = counts_of(values)
    counts.settle("recalls")
    found: RecallStatistics = counts.recalls
    return found


def decode(model: Any, steps: int, batch: list[int] | None = None, **more: Any) -> list[Any]:
    """Process a prompt and decode ``steps`` tokens. Return the caches."""
    caches = make_prompt_cache(model) if batch is None else [BatchKVCache(batch) for _ in model.layers]
    B = len(batch or [0])
    tokens = mx.array([prompt_of(80, seed) for seed in range(B)])
    mx.eval(model(tokens, cache=caches))
    for _ in range(steps):
        mx.eval(model(tokens[:, :1], cache=caches))
    return caches


def test_report_has_the_estimate_of_every_layer_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build("llama"), []
    bind = SparseCache.bind

    def binding(cache: SparseCache, *args: Any) -> Any:
        step = bind(cache, *args)

        def stepping(queries: mx.array, cache: SparseCache, *args: Any) -> Any:
            out, lse, recall = step(queries, cache, *args)
            if cache.length % SAMPLED_STEPS == 0:
                seen.append(np.array(recall))
            return out, lse, recall

        return stepping

    monkeypatch.setattr(SparseCache, "bind", binding)
    with mlx_sparse.sparse(model, ATTN) as report:
        decode(model, 5 * SAMPLED_STEPS)
        found = report.as_dict()["recall"]
    layers = len(model.layers)
    assert len(seen) == 5 * layers
    assert [layer["layer"] for layer in found["layers"]] == list(range(layers))
    for index, layer in enumerate(found["layers"]):
        values = np.stack(seen[index::layers])
        assert layer["mean"] == pytest.approx(values.mean(), abs=0.001)
        assert layer["median"] == pytest.approx(np.quantile(values, 0.5, method="inverted_cdf"), abs=0.001)
        assert 0 < layer["low"] <= layer["median"] < 1
    assert found["worst_layer"] == min(found["layers"], key=lambda layer: layer["mean"])["layer"]
    json.dumps(found)
    (line,) = report.recall.lines()
    assert line in str(report)
    assert line in report.summary()
    assert line.startswith(f"  estimated attention recall: median {found['median']:.3f}, 5th percentile ")
    assert f"lowest in layer {found['worst_layer']}" in line


def test_a_padded_batch_counts_the_sequences_that_are_sparse() -> None:
    model = build("llama")
    with mlx_sparse.sparse(model, "sparq:rank=4,top_k=16,dense_below=60") as report:
        decode(model, SAMPLED_STEPS, batch=[0, 50, 7])
    heads = report.recall.histogram.sum(axis=1)
    assert len(set(heads)) == 1
    assert heads[0] > 0
    with mlx_sparse.sparse(model, "sparq:rank=4,top_k=16,dense_below=60") as alone:
        decode(model, SAMPLED_STEPS)
    assert heads[0] == 2 * alone.recall.histogram.sum(axis=1)[0]  # the second sequence is too short


def test_scores_of_a_quantized_cache_estimate_the_exact_recall() -> None:
    """Test all components of the quantized keys, for which the estimate is the exact recall."""
    cache: Any = QuantizedKVCache(group_size=32, bits=8)
    rng = np.random.default_rng(0)
    rows = [mx.array(rng.normal(size=(2, 2, 200, 32)), mx.float32) for _ in range(2)]
    cache.update_and_fetch(*rows)
    adopt([cache])
    queries = mx.array(rng.normal(size=(2, 4, 1, 32)), mx.float32)
    config = SparQ(top_k=20, component_score="query_key", reallocate=False)
    _, lse, recall = cache.bind(config, 2, "ops")(queries, cache, 200, 0.3)
    dense = registry.load("dense_lse", "ops")(queries, cache.rows("ops")[0], scale=0.3, left_padding=None)
    exact = mx.exp(lse - dense).reshape(2, 2, 2).mean(axis=2)
    np.testing.assert_allclose(recall, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attn", ["streaming:sink_tokens=1,recent_tokens=15", "sparq:rank=4"])
def test_no_estimate_without_sparse_steps_of_sparq(attn: str) -> None:
    model = build("llama")
    with mlx_sparse.sparse(model, attn) as report:
        decode(model, SAMPLED_STEPS)
    assert report.recall is None
    assert report.as_dict()["recall"] is None
    assert "estimated attention recall" not in str(report)


def test_decode_steps_never_wait_for_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    with mlx_sparse.sparse(model, ATTN) as report:
        read, waited = RecallStatistics.read, []
        monkeypatch.setattr(RecallStatistics, "read", lambda entries: waited.append(1) or read(entries))
        decode(model, IN_FLIGHT * SAMPLED_STEPS)
        assert not waited
        assert len(report._counting) == IN_FLIGHT
        decode(model, 10 * SAMPLED_STEPS)
        assert len(waited) == 10  # the oldest steps only, so that memory is bounded
        assert len(report._counting) == IN_FLIGHT
        assert report.sparse_bytes > 0
        assert len(waited) == 10
        assert report.recall.histogram.sum() > 0
        assert not report._counting


def test_statistics_add_and_round_to_the_nearest_bin() -> None:
    found: Any = (statistics_of({0: [0.5, 0.9], 2: [0.1, 0.3]}) + statistics_of({0: [0.7]})).as_dict()
    assert found["layers"][0] == {"layer": 0, "mean": pytest.approx(0.7), "median": 0.7, "low": 0.5}
    assert [layer["layer"] for layer in found["layers"]] == [0, 2]
    assert (found["worst_layer"], found["median"]) == (2, 0.5)
    found = statistics_of({0: [float("nan"), 1.0, 1.5]}).as_dict()
    assert found["layers"] == [{"layer": 0, "mean": pytest.approx(2 / 3), "median": 1.0, "low": 0}]


def test_summary_with_an_estimate_has_at_most_eight_lines() -> None:
    report = Report(attn="sparq", backend="ops", model_type="llama", layers=2, served_layers=2, weight_bytes=9)
    report.add(counts_of({0: [0.9], 1: [0.8]}, sparse_calls=20, modeled_bytes=100, dense_bytes=1000))
    lines = report.summary().splitlines()
    assert len(lines) <= 8
    assert any("lowest in layer 1, median 0.800" in line for line in lines)
