"""Test the reported statistics of sparse prefill and their memory."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_prompts import BLOCK, LAYERS, SAMPLE, SPARQ, PrefillCall, batch, causal_pairs, generated, process
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.core.blocks.layout import Layout
from mlx_sparse.lm.statistics import PrefillStatistics, recall_arrays


def test_report_has_density_and_recall_by_layer_and_head(model: Any, prefill_calls: list[PrefillCall]):
    with mlx_sparse.sparse(model, SAMPLE + ",chunks=2", recall=True) as report:
        process(model, prompt_of(400), 200)
    statistics = report.as_dict()["prefill"]
    assert json.loads(json.dumps(statistics)) == statistics
    assert statistics["calls"] == len(prefill_calls) == 2 * LAYERS
    recalls = []
    for layer in range(LAYERS):
        calls = [call for call in prefill_calls if call.cache is prefill_calls[layer].cache]
        kept = sum((call.blocks >= 0).sum(axis=(0, 2, 3)) for call in calls)
        expected = kept / sum(causal_pairs(call) for call in calls)
        recall = np.concatenate([call.expected(return_stats="recall")[1].recall for call in calls], axis=2)
        entry = statistics["layers"][layer]
        assert entry["layer"] == layer
        np.testing.assert_allclose(entry["heads"], expected)
        np.testing.assert_allclose(report.prefill.density[layer], expected)
        assert entry["density"] == pytest.approx(expected.mean())
        assert entry["recall"] == pytest.approx({"mean": recall.mean(), "min": recall.min()}, abs=1e-5)
        recalls.append(recall)
    heads = [density for entry in statistics["layers"] for density in entry["heads"]]
    assert (statistics["density"]["min"], statistics["density"]["max"]) == (min(heads), max(heads))
    assert statistics["density"]["mean"] == pytest.approx(np.mean([entry["heads"] for entry in statistics["layers"]]))
    rows = np.concatenate([recall.ravel() for recall in recalls])
    # Two samples of 32 rows each in a chunk of 200 rows.
    assert statistics["sampled"] == pytest.approx(64 / 200)
    assert statistics["recall"]["mean"] == pytest.approx(rows.mean(), abs=1e-5)
    assert statistics["recall"]["min"] == pytest.approx(rows.min(), abs=1e-5)
    assert statistics["recall"] == report.prefill.recall
    low = statistics["recall"]["low"]
    assert low - 1e-5 <= np.sort(rows)[int(np.ceil(0.01 * rows.size)) - 1] <= low + 1e-3 + 1e-5


def test_batch_counts_the_mean_density_of_its_rows(
    model: Any, tokenizer: TokenizerWrapper, prefill_calls: list[PrefillCall]
):
    with mlx_sparse.sparse(model, SAMPLE) as report:
        batch(model, tokenizer, [300] * 2)
    assert report.prefill.calls == len(prefill_calls) == 2 * LAYERS
    for layer in range(LAYERS):
        calls = prefill_calls[2 * layer : 2 * layer + 2]  # one per sequence
        density = [(call.blocks >= 0).sum(axis=(0, 2, 3)) / causal_pairs(call) for call in calls]
        np.testing.assert_allclose(report.prefill.density[layer], np.mean(density, axis=0))


def test_text_report_summarizes_prefill(model: Any):
    with mlx_sparse.sparse(model, SAMPLE + "+" + SPARQ, recall=True) as report:
        generated(model, prompt_of(300))
    first, settings, *crossovers, prompts, density, recall, decoding, estimate = str(report).splitlines()
    assert estimate.startswith("  estimated attention recall: ")
    assert first.startswith(f"{SAMPLE}+{SPARQ[: SPARQ.index(',dense')]}"[:30])
    assert settings.startswith("  settings: sample:block_size=32,")
    assert crossovers == ["  prefill sparse at 0 keys and longer (given)", "  sparse at 5 keys and longer (given)"]
    assert prompts == f"  sparse prefill calls: {LAYERS}, {BLOCK / 299:.1%} of the queries sampled"
    percent = r"\d+\.\d%"
    assert re.fullmatch(rf"  density: {percent}, by layer {percent} to {percent}", density)
    assert re.fullmatch(
        r"  attention recall: mean 0\.\d{4}, at least 0\.\d{3} for 99% of the queries and 0\.\d{4} for all queries",
        recall,
    )
    assert decoding.startswith(f"  sparse calls: {LAYERS * 7}, ")


def test_no_prefill_figures_without_a_prefill_method(model: Any):
    with mlx_sparse.sparse(model, SPARQ, recall=True) as report:
        generated(model, prompt_of(300))
    assert report.prefill is None
    assert report.as_dict()["prefill"] is None
    assert "sparse prefill calls" not in str(report)
    assert "density" not in str(report)


def test_statistics_keep_no_arrays_alive():
    statistics, layout = PrefillStatistics(), Layout(64, 64, 1, 32)
    mx.synchronize()
    before = mx.get_active_memory()
    for step in range(20):
        big = mx.random.normal((1 << 20,), key=mx.random.key(step))
        mx.eval(big)
        blocks = mx.where(big.max() > 0, mx.array([[[[0, -1], [0, 1]]]]), -1)
        arrays = {"attended": (blocks >= 0).sum(axis=(2, 3)), **recall_arrays(mx.full((1, 1, 64), 0.5) + 0 * big[:64])}
        statistics += PrefillStatistics.read([((0, layout), arrays)])
    assert mx.get_active_memory() - before < 3 * big.nbytes
    assert statistics.density == {0: [1.0]}
    assert statistics.recall == {"mean": 0.5, "low": 0.5, "min": 0.5}


def test_nan_is_reported():
    model = build()
    projection = model.layers[1].self_attn.q_proj
    projection.weight = projection.weight * mx.nan
    with mlx_sparse.sparse(model, SAMPLE, recall=True) as report:
        process(model, prompt_of(400), 200)
    assert math.isnan(report.prefill.recall["mean"])
    assert report.prefill.recall["low"] == 0
    assert "nan" in str(report)
