"""Test SAAP in mlx-lm's models: every bucket gives dense attention, few probes use the index; memory and bytes."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from saap_artefacts import BUCKETS, LAYERS, ONLINE, PROMPT, STEPS, attn, write_artefact
from tier import some
from tiny_models import FAMILIES, build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.core.reasons import CHANGED_AFTER_ROPE
from mlx_sparse.core.stats import dense_elements, saap_elements
from mlx_sparse.lm import rope as rope_module
from mlx_sparse.lm.hooks import saap
from mlx_sparse.methods import SAAP
from mlx_sparse.methods.saap.artefact import load
from mlx_sparse.methods.saap.state import BucketIndex


@pytest.fixture
def artefact(model: Any, tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "model", model)


def close(a: mx.array, b: mx.array) -> bool:
    """Return True if the arrays are equal up to float32 errors through a few layers."""
    return bool((mx.abs(a - b).max() < 1e-4 * mx.abs(b).max()).item())


ALL_FAMILIES = [*FAMILIES, "cohere2", "starcoder2", "nemotron"]
# The modes differ only in the router, so a few families are enough for the second mode.
SOME_FAMILIES = ["llama", "qwen3", "phi3", "gpt_oss", "ministral3", "cohere2"]


@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, "trained") for family in some(ALL_FAMILIES, 7)]
    + [(family, mode) for family in SOME_FAMILIES[::2] for mode in ("online",)],
)
def test_every_bucket_gives_the_dense_tokens(family: str, mode: str, tmp_path: Path):
    model, prompt = build(family), prompt_of(PROMPT)
    tokens, logits = greedy(model, prompt, STEPS)
    if mode == "online":
        config = SAAP(mode="online", buckets=BUCKETS, probes=BUCKETS, recent_tokens=16, merge_every=8, dense_layers=0)
    else:
        config = attn(write_artefact(tmp_path / "a", model))
    with mlx_sparse.sparse(model, config) as report:
        same_tokens, same_logits = greedy(model, prompt, STEPS)
    assert report.served_layers > 0
    assert report.sparse_calls == report.served_layers * STEPS
    assert same_tokens == tokens
    assert close(same_logits, logits)
    assert report.buckets.selectivity == 1


def test_few_probes_use_the_artefact_and_count_listed_keys(model: Any, artefact: Path, monkeypatch: pytest.MonkeyPatch):
    """Count listed keys. `test_cache_histories` compares the output of these steps with the oracle."""
    calls: list[tuple[BucketIndex, int, int, int]] = []
    lists = saap.attended_keys

    def record_lists(index: BucketIndex, queries: mx.array, S: int, *args: Any) -> Any:
        indices, counts = lists(index, queries, S, *args)
        calls.append((index, S, index.lists.covered[0], int(counts.sum().item())))
        return indices, counts

    monkeypatch.setattr(saap, "attended_keys", record_lists)
    with mlx_sparse.sparse(model, attn(artefact, 2)) as report:
        greedy(model, prompt_of(PROMPT), STEPS)
    assert len(calls) == report.sparse_calls == LAYERS * STEPS
    for (index, *_), layer in zip(calls, load(artefact).layers.values(), strict=False):
        made = layer.arrays()
        assert index.network.keys() == made.keys() - {"centroids"}
        assert all(mx.array_equal(array, made[name].astype(array.dtype)) for name, array in index.network.items())
    listed = sum(2 * (covered - 1) for _, _, covered, _ in calls)
    exact = sum(2 * S for _, S, *_ in calls) - listed
    assert report.buckets.selectivity == pytest.approx((sum(counts for *_, counts in calls) - exact) / listed)
    assert 0 < report.buckets.selectivity < 0.8


def test_layer_that_saap_cannot_serve_still_has_sparse_prefill():
    model = build("hunyuan_v1_dense")
    sample = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
    with mlx_sparse.sparse(model, f"{sample}+{ONLINE},probes=2") as report:
        greedy(model, prompt_of(300), 4)
    assert report.prefill.calls == LAYERS
    assert (report.sparse_calls, report.dense_calls) == (0, {CHANGED_AFTER_ROPE: 4 * LAYERS})


def test_text_longer_than_the_window_becomes_sparse(model: Any, artefact: Path):
    tokens, _ = greedy(model, prompt_of(10), 120)
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        cache = make_prompt_cache(model)
        assert greedy(model, prompt_of(10), 120, cache)[0] == tokens
    assert report.sparse_calls == LAYERS * (120 - (17 - 10))
    assert len(cache[0].aux_states["saap"].pending) <= 8


def test_bytes_count_lists_rows_and_the_network(model: Any, artefact: Path):
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        greedy(model, prompt_of(PROMPT), STEPS)
    heads, D, hidden, size = 2, 16, 24, 4
    network = (D * hidden + hidden + hidden * BUCKETS + BUCKETS) * size  # of float32 weights
    lengths = range(PROMPT + 1, PROMPT + STEPS + 1)
    moved = sum(saap_elements(D, S) * size + network for S in lengths)
    assert report.sparse_bytes == LAYERS * heads * moved
    assert report.dense_bytes == LAYERS * heads * size * sum(dense_elements(S, D) for S in lengths)
    assert report.as_dict()["sparse_bytes"] == report.sparse_bytes
    assert report.as_dict()["buckets"]["selectivity"] == 1
    assert "selectivity: 100.0% of the keys" in str(report)


def test_device_is_synchronized_once_per_rebuild(model: Any, artefact: Path, monkeypatch: pytest.MonkeyPatch):
    folds: list[tuple[int, int]] = []
    rebuild_lists = saap.rebuild_lists

    def record_fold(caches: list[Any], S: int, *args: Any) -> None:
        folds.append((S, len(caches)))
        rebuild_lists(caches, S, *args)

    monkeypatch.setattr(saap, "rebuild_lists", record_fold)
    evaluations: list[int] = []
    evaluate = mx.eval
    with mlx_sparse.sparse(model, attn(artefact, 3), backend="ops"):
        cache = make_prompt_cache(model)
        logits = model(mx.array([prompt_of(PROMPT)]), cache=cache)[:, -1]
        monkeypatch.setattr(mx, "eval", lambda *args: evaluations.append(1) or evaluate(*args))
        for _ in range(STEPS):
            before = len(evaluations), len(folds)
            logits = model(mx.argmax(logits, axis=-1)[:, None], cache=cache)[:, -1]
            assert len(folds) > before[1] or len(evaluations) == before[0]
    assert folds == [(S, LAYERS) for S in (PROMPT + 1, *range(PROMPT + 4, PROMPT + STEPS + 1, 8))]


def test_only_the_index_stays_in_memory(model: Any, artefact: Path):
    prompt = mx.array([prompt_of(2000)])

    def left_behind() -> tuple[int, Any]:
        cache = make_prompt_cache(model)
        gc.collect()
        start = mx.get_active_memory()
        model(prompt, cache=cache)
        mx.eval([layer.state for layer in cache])  # mlx-lm evaluates these arrays after a chunk
        gc.collect()
        return mx.get_active_memory() - start, cache

    plain, _ = left_behind()
    with mlx_sparse.sparse(model, attn(artefact)):
        first, cache = left_behind()
        mx.synchronize()
        indexed = sum(layer.aux_states["saap"].nbytes for layer in cache)
    assert indexed == LAYERS * 2 * 2000 * 2
    # The tolerance covers rounded allocations.
    assert first <= plain + indexed + LAYERS * 16384


def test_disable_restores_ropes_and_caches_continue(model: Any, artefact: Path):
    ropes = [type(rope) for rope in rope_module.ropes(model)]
    cache, plain = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.array([prompt_of(PROMPT)]), cache=plain)
    with mlx_sparse.sparse(model, attn(artefact), backend="ops"):
        assert [type(rope) for rope in rope_module.ropes(model)] != ropes
        greedy(model, prompt_of(PROMPT), 3, cache)
        trim_prompt_cache(cache, 3)
    assert [type(rope) for rope in rope_module.ropes(model)] == ropes
    logits = [model(mx.array([[5]]), cache=each) for each in (cache, plain)]
    assert mx.array_equal(*logits)
    assert cache[0].aux_states["saap"].received is None


def test_another_artefact_rebuilds_the_index(model: Any, tmp_path: Path):
    files = [write_artefact(tmp_path / str(C), model, buckets=C) for C in (8, 12)]
    tokens, _ = greedy(model, prompt_of(PROMPT), 21)
    cache, found = make_prompt_cache(model), []
    for file, config in zip(files, (attn(files[0], 8), attn(files[1], 12)), strict=True):
        with mlx_sparse.sparse(model, config) as report:
            first = prompt_of(PROMPT) if file is files[0] else [found[-1]]
            found += greedy(model, first, 10, cache)[0]
        assert report.sparse_calls >= LAYERS * 10
        assert cache[0].aux_states["saap"].lists.offsets.shape[-1] == load(file).buckets + 1
    assert found[:10] == tokens[:10]
    assert found[10:] == tokens[11:], "greedy does not return the token after its prompt"


def test_fitted_centroids_survive_batches(model: Any):
    with mlx_sparse.sparse(model, f"{ONLINE},probes=2"):
        histories = []
        for length in (60, 75):
            cache = make_prompt_cache(model)
            greedy(model, prompt_of(length, length), 12, cache)
            histories.append(cache)
        alone = copy.deepcopy(histories[0])
        batch = [layer[0].merge(list(layer)) for layer in zip(*histories, strict=True)]
        for token in range(12):
            expected = model(mx.array([[token]]), cache=alone)
            assert close(model(mx.array([[token]] * 2), cache=batch)[:1], expected)
        taken_out = [layer.extract(0) for layer in batch]
        for token in range(12):
            assert close(model(mx.array([[token]]), cache=taken_out), model(mx.array([[token]]), cache=alone))
