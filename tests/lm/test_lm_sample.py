"""Prompts of mlx-lm's models by a sparse method: alone and beside a decode method, in every way they are processed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_prompts import (
    EVERY_BLOCK,
    LAYERS,
    SAMPLE,
    SPARQ,
    Piece,
    generated,
    last_logits,
    process,
    prompt_logits,
    record_pieces,
    tiny_tokenizer,
)
from mlx_lm import stream_generate
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import FAMILIES, build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.lm.model import select_methods
from mlx_sparse.methods import MInference, Sample, SampleRange, SparQ

A_FEW = "in multi-token decode (verification step or short prompt)"
NO_DECODE = "of a single query (no decode method)"
ALL_SAMPLED = "with a sample in every row block"


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return tiny_tokenizer()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    return record_pieces(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sparse_call_over_every_block_gives_the_dense_logits(family: str):
    model, prompt = build(family), prompt_of(90)
    dense = [prompt_logits(model, prompt, step) for step in (90, 40)]
    with mlx_sparse.sparse(model, EVERY_BLOCK) as report:
        logits = [prompt_logits(model, prompt, step) for step in (90, 40)]
    # The last step of 40 has 10 queries.
    assert report.prefill.calls == 3 * report.served_layers
    assert all(density == [1.0] * len(density) for density in report.prefill.density.values())
    for ours, theirs in zip(logits, dense, strict=True):
        # Sinks, masks and scales are exact, or this fails by far.
        assert float(mx.abs(ours - theirs).max()) < 1e-4 * float(mx.abs(theirs).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_shows_in_every_family(family: str):
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
def test_an_alpha_of_1_is_dense_to_the_last_bit(attn: str, model: Any):
    prompt = prompt_of(300)
    dense = last_logits(model, process(model, prompt, 300))
    with mlx_sparse.sparse(model, attn) as report:
        assert mx.array_equal(last_logits(model, process(model, prompt, 300)), dense)
    assert report.dense_calls == {"with an alpha of 1": LAYERS, NO_DECODE: LAYERS}
    assert report.prefill.calls == 0
    assert "sparse prefill calls: none" in str(report)


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        # Steps of 299 tokens and what they are: "s" sparse, "a" every row block is sampled, "f" a few queries.
        (2048, "s"),
        (128, "ssa"),
        (100, "sss"),
        (64, "ssssa"),
        (71, "ssssf"),
        (33, "aaaaaaaaaf"),
        (16, "f" * 19),
    ],
)
def test_steps_of_any_size_are_processed_and_counted(step: int, calls: str, model: Any, seen: list[Piece]):
    with mlx_sparse.sparse(model, SAMPLE) as report:
        tokens = generated(model, prompt_of(300), 4, prefill_step_size=step)
    assert len(tokens) == 4
    reasons = {ALL_SAMPLED: LAYERS * calls.count("a"), A_FEW: LAYERS * calls.count("f"), NO_DECODE: LAYERS * 5}
    assert report.dense_calls == {reason: count for reason, count in reasons.items() if count}
    assert report.prefill.calls == LAYERS * calls.count("s") == len(seen)
    assert report.sparse_calls == 0


@pytest.mark.parametrize(("least", "sparse"), [(200, [200, 300, 400]), (201, [300, 400])])
def test_contexts_below_dense_below_stay_dense(least: int, sparse: list[int], model: Any, seen: list[Piece]):
    with mlx_sparse.sparse(model, SAMPLE.replace("dense_below=0", f"dense_below={least}")) as report:
        process(model, prompt_of(400), 100)
    assert report.dense_calls == {f"over fewer than {least} keys": (4 - len(sparse)) * LAYERS}
    assert sorted({piece.S for piece in seen}) == sparse


def test_by_default_short_contexts_stay_dense(model: Any):
    with mlx_sparse.sparse(model, "sample") as report:
        process(model, prompt_of(300), 300)
    assert report.dense_calls == {"over fewer than 8,192 keys": LAYERS}


def test_each_context_has_the_settings_of_its_range(model: Any, seen: list[Piece]):
    ranges = "ranges=301:0.2:0.3:2/501:1:1:1/901:0.6:0.7:3"
    with mlx_sparse.sparse(model, f"sample:block_size=32,dense_below=0,{ranges}") as report:
        process(model, prompt_of(1200), 200)
    assert report.dense_calls == {"with an alpha of 1": LAYERS}
    used = {piece.S: (piece.config.alpha_column, piece.config.alpha_slash, piece.config.chunks) for piece in seen}
    late = (0.6, 0.7, 3)
    assert used == {200: (0.2, 0.3, 2), 600: late, 800: late, 1000: late, 1200: late}
    assert ranges in report.attn


def test_configurations_in_python_are_those_in_text(model: Any):
    ranges = (SampleRange(301, 0.2, 0.3, 2), SampleRange(501, 0.6, 0.7, 3))
    config = Sample(block_size=32, dense_below=0, ranges=ranges)
    with mlx_sparse.sparse(model, (config, SparQ(rank=4))) as report:
        in_python = last_logits(model, process(model, prompt_of(300), 300))
    assert report.attn.startswith("sample:")
    with mlx_sparse.sparse(model, report.attn) as again:
        assert mx.array_equal(last_logits(model, process(model, prompt_of(300), 300)), in_python)
    assert again.attn == report.attn


def test_a_prompt_after_a_cached_prefix_is_the_oracles(model: Any, seen: list[Piece]):
    prefix, prompt = prompt_of(77, 1), prompt_of(200, 2)
    cache = process(model, prefix, 77)  # densely
    with mlx_sparse.sparse(model, SAMPLE):
        process(model, prompt, 200, cache)
        expected = last_logits(model, cache)
        # The same again over rows that were used and trimmed away.
        trim_prompt_cache(cache, 201)
        process(model, prompt, 200, cache)
        assert mx.array_equal(last_logits(model, cache), expected)
    assert [(piece.L, piece.S) for piece in seen] == [(200, 277)] * 2 * LAYERS
    for piece in seen:
        assert np.abs(piece.out - piece.expected()).max() < 64 * np.finfo(np.float32).eps * np.abs(piece.v).max()


def test_a_prompt_cache_goes_through_a_file(model: Any, tmp_path: Path):
    file = str(tmp_path / "cache.safetensors")
    with mlx_sparse.sparse(model, SAMPLE + "+" + SPARQ) as report:
        cache = process(model, prompt_of(200), 200)
        save_prompt_cache(file, cache)
        tokens = generated(model, prompt_of(150, 2), prompt_cache=cache)
        assert generated(model, prompt_of(150, 2), prompt_cache=load_prompt_cache(file)) == tokens
    assert report.prefill.calls == 3 * LAYERS
    assert generated(model, prompt_of(150, 2), prompt_cache=load_prompt_cache(file)) != tokens, "not enabled any more"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoding_after_each_turn_of_a_chat_reads_the_right_side_buffers(family: str):
    model = build(family)
    with mlx_sparse.sparse(model, SAMPLE + "+" + SPARQ + ",reallocate=true") as report:
        cache = make_prompt_cache(model)
        for turn in range(3):
            process(model, prompt_of(150, turn), 100, cache)
            for token in range(1, 4):
                last_logits(model, cache, token)
        kept = last_logits(model, cache)
        trim_prompt_cache(cache, 1)
        for entry in cache:
            entry.state = entry.state
        fresh = last_logits(model, cache)
    assert float(mx.abs(kept - fresh).max()) < 1e-4 * float(mx.abs(fresh).max())
    # 100 and then 50 queries; the second piece of the first turn lies in two blocks, and so do all of 50.
    assert report.prefill.calls + report.dense_calls[ALL_SAMPLED] == 6 * LAYERS
    assert report.sparse_calls == (3 * 3 + 2) * LAYERS
    assert set(report.dense_calls) <= {ALL_SAMPLED}


def test_both_methods_are_what_each_is_alone(model: Any):
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


def test_speculative_verification_stays_dense(model: Any, tokenizer: TokenizerWrapper):
    draft, prompt = build(seed=1), prompt_of(300)
    with mlx_sparse.sparse(model, SAMPLE) as report, mlx_sparse.sparse(draft, SAMPLE + "+" + SPARQ) as drafts:
        expected = generated(model, prompt, 8)
        assert report.prefill.calls == LAYERS
        responses = stream_generate(model, tokenizer, prompt, 8, draft_model=draft, num_draft_tokens=3)
        assert [response.token for response in responses] == expected
    assert report.prefill.calls == 2 * LAYERS
    assert report.dense_calls[A_FEW] > 0
    assert drafts.prefill.calls == LAYERS
    assert drafts.sparse_calls > 0


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("sample+minference", "attn: expected one prefill method, got sample and minference."),
        ("sample+sparq+streaming", "attn: expected one decode method, got sparq and streaming."),
        ("sample+h2o", "attn: expected dense prompts for h2o .*, got sample."),
        (5, "attn: expected text, a configuration or a tuple of them, got 5."),
        (None, "attn: expected text, a configuration or a tuple of them, got None."),
        (("sample", "sparq"), "attn: expected text, a configuration or a tuple of them, got ('sample', 'sparq')."),
        ((), "attn: expected a method for prompts or for decoding, got none."),
        ("sample:alpha_column=0", "alpha_column: expected .*, got 0."),
        ("sample:alpha_slash=1.5", "alpha_slash: expected .*, got 1.5."),
        ("sample:chunks=0", "chunks: expected .*, got 0."),
        ("sample:block_size=48", "block_size: expected .*, got 48."),
    ],
)
def test_what_a_model_cannot_run_is_refused_in_one_line(attn: Any, message: str, model: Any):
    with pytest.raises(mlx_sparse.ConfigError) as error:
        mlx_sparse.enable(model, attn)
    assert re.fullmatch(message.replace("(", r"\(").replace(")", r"\)"), str(error.value))
    assert mlx_sparse.report(model) is None


def test_the_methods_of_both_stages_are_told_apart():
    sample, sparq = Sample(), SparQ()
    assert select_methods((sparq, sample)) == select_methods((sample, sparq)) == (sample, sparq)
    assert select_methods((MInference(),)) == (MInference(), None)
    assert select_methods((sparq,)) == (None, sparq)
