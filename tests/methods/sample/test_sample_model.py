"""Test sparse prefill of mlx-lm's models, alone and with a decode method, with all chunk sizes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from lm_prompts import EVERY_BLOCK, LAYERS, SAMPLE, SPARQ, PrefillCall, generated, last_logits, process, prompt_logits
from tiny_models import FAMILIES, build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.lm.model import select_methods
from mlx_sparse.methods import MInference, Sample, SparQ

A_FEW = "in multi-token decode (verification step or short prompt)"
NO_DECODE = "with a single query (no decode method)"
ALL_SAMPLED = "with sampled queries in every row block"


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2"])
def test_sparse_prefill_over_every_block_gives_the_dense_logits(family: str):
    model, prompt = build(family), prompt_of(90)
    dense = [prompt_logits(model, prompt, step) for step in (90, 40)]
    with mlx_sparse.sparse(model, EVERY_BLOCK) as report:
        logits = [prompt_logits(model, prompt, step) for step in (90, 40)]
    # The last step of 40 has 10 queries.
    assert report.prefill.calls == 3 * report.served_layers
    assert all(density == [1.0] * len(density) for density in report.prefill.density.values())
    for ours, theirs in zip(logits, dense, strict=True):
        # A wrong sink, mask or scale would give a far larger difference.
        assert float(mx.abs(ours - theirs).max()) < 1e-4 * float(mx.abs(theirs).max())


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2"])
def test_sparse_prefill_changes_the_logits_of_every_family(family: str):
    model, prompt = build(family), prompt_of(200)
    dense = prompt_logits(model, prompt, 200)
    with mlx_sparse.sparse(model, "streaming_prefill:window=0.01,block_size=32") as report:
        logits = prompt_logits(model, prompt, 200)
    assert report.prefill.calls == report.served_layers
    assert float(mx.abs(logits - dense).max()) > 0.01 * float(mx.abs(dense).max())


def test_layers_with_a_sliding_window_stay_dense_in_prompts_too():
    model, reason = build("gpt_oss"), "with a sliding window (RotatingKVCache)"
    with mlx_sparse.sparse(model, SAMPLE + "+" + SPARQ) as report:
        greedy(model, prompt_of(200), 3)
    assert report.dense_layers == {reason: 1}
    assert report.dense_calls == {reason: 4}
    assert (report.prefill.calls, report.sparse_calls) == (1, 3)
    assert list(report.prefill.density) == [1]


@pytest.mark.parametrize("attn", ["sample:alpha_column=1,dense_below=0", "sample:alpha_slash=1,dense_below=0"])
def test_alpha_of_1_is_bitwise_dense(attn: str, model: Any):
    prompt = prompt_of(300)
    dense = last_logits(model, process(model, prompt, 300))
    with mlx_sparse.sparse(model, attn, backend="ops") as report:
        assert mx.array_equal(last_logits(model, process(model, prompt, 300)), dense)
    assert report.dense_calls == {"with alpha_column=1 or alpha_slash=1": LAYERS, NO_DECODE: LAYERS}
    assert report.prefill.calls == 0
    assert "sparse prefill calls: none" in str(report)


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        # Chunks of 299 tokens: "s" is sparse, "a" dense (all row blocks are sampled), "f" dense (few queries).
        (2048, "s"),
        (128, "ssa"),
        (100, "sss"),
        (64, "ssssa"),
        (71, "ssssf"),
        (33, "aaaaaaaaaf"),
        (16, "f" * 19),
    ],
)
def test_chunks_of_any_size_are_processed_and_counted(
    step: int, calls: str, model: Any, prefill_calls: list[PrefillCall]
):
    with mlx_sparse.sparse(model, SAMPLE) as report:
        tokens = generated(model, prompt_of(300), 4, prefill_step_size=step)
    assert len(tokens) == 4
    reasons = {ALL_SAMPLED: LAYERS * calls.count("a"), A_FEW: LAYERS * calls.count("f"), NO_DECODE: LAYERS * 5}
    assert report.dense_calls == {reason: count for reason, count in reasons.items() if count}
    assert report.prefill.calls == LAYERS * calls.count("s") == len(prefill_calls)
    assert report.sparse_calls == 0


@pytest.mark.parametrize(("least", "sparse"), [(200, [200, 300, 400]), (201, [300, 400])])
def test_contexts_below_dense_below_stay_dense(
    least: int, sparse: list[int], model: Any, prefill_calls: list[PrefillCall]
):
    with mlx_sparse.sparse(model, SAMPLE.replace("dense_below=0", f"dense_below={least}")) as report:
        process(model, prompt_of(400), 100)
    assert report.dense_calls == {f"over fewer than {least} keys": (4 - len(sparse)) * LAYERS}
    assert sorted({call.S for call in prefill_calls}) == sparse


def test_each_context_uses_the_settings_of_its_range(model: Any, prefill_calls: list[PrefillCall]):
    ranges = "ranges=301:0.2:0.3:2/501:1:1:1/901:0.6:0.7:3"
    with mlx_sparse.sparse(model, f"sample:block_size=32,dense_below=0,{ranges}") as report:
        process(model, prompt_of(1200), 200)
    assert report.dense_calls == {"with alpha_column=1 or alpha_slash=1": LAYERS}
    used = {call.S: (call.config.alpha_column, call.config.alpha_slash, call.config.chunks) for call in prefill_calls}
    late = (0.6, 0.7, 3)
    assert used == {200: (0.2, 0.3, 2), 600: late, 800: late, 1000: late, 1200: late}
    assert ranges in report.attn


def test_combined_methods_equal_each_method_alone(model: Any):
    prompt = prompt_of(300)
    caches = {}
    for attn in (SAMPLE, SAMPLE + "+" + SPARQ, SPARQ + "+" + SAMPLE):
        with mlx_sparse.sparse(model, attn) as report:
            caches[attn] = process(model, prompt, 300)
        assert report.attn.startswith("sample:") == (SAMPLE in attn)
    alone, both, swapped = caches.values()
    for one, other, third in zip(alone, both, swapped, strict=True):
        assert mx.array_equal(one.keys, other.keys)
        assert mx.array_equal(one.values, third.values)
    with mlx_sparse.sparse(model, SPARQ) as decoding:
        expected = last_logits(model, alone)
    with mlx_sparse.sparse(model, SAMPLE + "+" + SPARQ) as report:
        assert mx.array_equal(last_logits(model, both), expected)
    assert (report.sparse_calls, report.sparse_bytes) == (decoding.sparse_calls, decoding.sparse_bytes)
    assert report.dense_calls == {}


def test_select_methods_separates_prefill_from_decode():
    sample, sparq = Sample(), SparQ()
    assert select_methods((sparq, sample)) == select_methods((sample, sparq)) == (sample, sparq)
    assert select_methods((MInference(),)) == (MInference(), None)
    assert select_methods((sparq,)) == (None, sparq)
