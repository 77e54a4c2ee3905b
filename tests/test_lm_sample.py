"""Prompts of mlx-lm's models by a sparse method: alone and beside a decode method, in every way they are processed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm import batch_generate, stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import EOS, FAMILIES, build, greedy, prompt_of, tokenizer_json
from transformers import PreTrainedTokenizerFast

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.cache import SparseBatchKVCache, SparseCache, any_padded
from mlx_sparse.config import MInference, Prefill, Sample, SampleRange, SparQ
from mlx_sparse.layout import Layout
from mlx_sparse.lm import seam
from mlx_sparse.lm.figures import PrefillFigures
from mlx_sparse.lm.model import select_methods
from mlx_sparse.ops import attend, blocks

Array = npt.NDArray[Any]
LAYERS, HEADS, BLOCK = 2, 4, 32
SAMPLE = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
SPARQ = "sparq:rank=4,top_k=4,dense_below=0"
EVERY_BLOCK = "streaming_prefill:window=1,block_size=32"
A_FEW = "of a few queries at once (verification or short prompt)"
NO_DECODE = "of a single query (no decode method)"
ALL_SAMPLED = "with a sample in every row block"
PADDED = "of a padded batch"


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer_json()), eos_token_ids=[EOS])


@pytest.fixture
def model() -> Any:
    return build()


def process(model: Any, tokens: list[int], step: int, cache: list[Any] | None = None) -> list[Any]:
    """Process a prompt in steps as `generate_step` does; return the cache."""
    cache = make_prompt_cache(model) if cache is None else cache
    for start in range(0, len(tokens), step):
        model(mx.array(tokens[start : start + step])[None], cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def prompt_logits(model: Any, tokens: list[int], step: int) -> mx.array:
    """What each token of a prompt in steps says."""
    cache = make_prompt_cache(model)
    steps = [mx.array([tokens[start : start + step]]) for start in range(0, len(tokens), step)]
    return mx.concatenate([model(inputs, cache=cache) for inputs in steps], axis=1)


def last_logits(model: Any, cache: list[Any], token: int = 5) -> mx.array:
    """What a step of one token after ``cache`` says."""
    logits: mx.array = model(mx.array([[token]]), cache=cache)[:, -1]
    return logits


def generated(model: Any, prompt: list[int], count: int = 6, **options: Any) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, **options)]


class Piece:
    """What one sparse prefill call was given and gave."""

    def __init__(self, cache: SparseCache, queries: mx.array, config: Prefill, result: tuple[mx.array, ...]) -> None:
        rows = cache.length
        self.cache, self.config = cache, config
        self.q, self.k, self.v = (
            np.array(x) for x in (queries, cache.keys[..., :rows, :], cache.values[..., :rows, :])
        )
        self.out, self.lse, self.blocks = (np.array(array) for array in result)

    @property
    def L(self) -> int:
        return self.q.shape[2]

    @property
    def S(self) -> int:
        return self.k.shape[2]

    def expected(self, **options: Any) -> Any:
        attention = getattr(oracle, f"{self.config.name}_attention")
        return attention(self.q, self.k, self.v, **self.config.parameters(), **options)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Every sparse prefill call."""
    found: list[Piece] = []
    attend_prompt = SparseCache.attend_prompt

    def recording(cache: SparseCache, queries: mx.array, config: Any, **options: Any) -> Any:
        result = attend_prompt(cache, queries, config, **options)
        found.append(Piece(cache, queries, config, result))
        return result

    monkeypatch.setattr(SparseCache, "attend_prompt", recording)
    return found


NUMERICAL = {
    "one region": ("llama", SAMPLE, {}, 128),
    "three regions": ("llama", SAMPLE + ",chunks=3", {}, 299),
    "groups of 3": ("llama", SAMPLE, {"num_attention_heads": 3, "num_key_value_heads": 1}, 200),
    "a head each": ("qwen3", SAMPLE, {"num_key_value_heads": 4}, 200),
    "steps that are no multiple of a block": ("qwen3", SAMPLE, {}, 170),
    "minference": ("llama", "minference:vertical_tokens=40,slash_tokens=40,block_size=32", {}, 128),
    "bigbird": ("llama", "bigbird:block_size=32", {}, 128),
    "streaming": ("llama", "streaming_prefill:block_size=32", {}, 128),
}


@pytest.mark.parametrize(("family", "attn", "changes", "step"), NUMERICAL.values(), ids=NUMERICAL)
def test_every_sparse_piece_of_a_prompt_is_the_oracles(
    family: str, attn: str, changes: dict[str, int], step: int, seen: list[Piece]
):
    model = build(family, **changes)
    with mlx_sparse.sparse(model, attn) as report:
        generated(model, prompt_of(400), prefill_step_size=step)
    assert len(seen) == report.prefill.calls >= LAYERS
    densities = []
    for piece in seen:
        expected, stats = piece.expected(return_stats=True)
        # Float32 scores may decide otherwise on a threshold: these prompts have none there.
        np.testing.assert_allclose((piece.blocks >= 0).sum(axis=(2, 3)) / pairs_of(piece), stats.head_density)
        assert np.abs(piece.out - expected).max() < 64 * np.finfo(np.float32).eps * np.abs(piece.v).max()
        densities.append(stats.density)
    assert min(densities) < 0.9, "nothing was left out"


def pairs_of(piece: Piece) -> int:
    return Layout(piece.L, piece.S, 1, piece.config.block_size).causal_pairs


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
    assert report.dense_calls == {"that an alpha of 1 keeps whole": LAYERS, NO_DECODE: LAYERS}
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


def test_contexts_below_dense_below_stay_dense(model: Any, seen: list[Piece]):
    with mlx_sparse.sparse(model, SAMPLE.replace("dense_below=0", "dense_below=201")) as report:
        process(model, prompt_of(400), 100)
    assert report.dense_calls == {"over fewer than 201 keys": 2 * LAYERS}
    assert sorted({piece.S for piece in seen}) == [300, 400]


def test_by_default_short_contexts_stay_dense(model: Any):
    with mlx_sparse.sparse(model, "sample") as report:
        process(model, prompt_of(300), 300)
    assert report.dense_calls == {"over fewer than 8,192 keys": LAYERS}


def test_each_context_has_the_settings_of_its_range(model: Any, seen: list[Piece]):
    ranges = "ranges=301:0.2:0.3:2/501:1:1:1/901:0.6:0.7:3"
    with mlx_sparse.sparse(model, f"sample:block_size=32,dense_below=0,{ranges}") as report:
        process(model, prompt_of(1200), 200)
    assert report.dense_calls == {"that an alpha of 1 keeps whole": LAYERS}
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
            entry.drop_side_buffers()
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


def batch(model: Any, tokenizer: TokenizerWrapper, lengths: list[int], **options: Any) -> list[str]:
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    return list(batch_generate(model, tokenizer, prompts, max_tokens=6, **options).texts)


@pytest.mark.parametrize("attn", [SAMPLE, SAMPLE + "+" + SPARQ])
def test_prompts_of_one_length_are_sparse_together_and_each_is_that_prompt_alone(
    attn: str, model: Any, tokenizer: TokenizerWrapper, seen: list[Piece]
):
    dense = batch(model, tokenizer, [300] * 3)
    with mlx_sparse.sparse(model, attn) as report:
        together = batch(model, tokenizer, [300] * 3)
        assert report.prefill.calls == LAYERS
        assert seen[0].q.shape[0] == 3
        assert not {PADDED, "with an array mask"} & set(report.dense_calls)
        for seed, text in enumerate(together):
            (alone,) = batch_generate(model, tokenizer, [prompt_of(300, seed)], max_tokens=6).texts
            assert alone == text
    assert together != dense


def test_a_ragged_batch_is_dense_and_counted(model: Any, tokenizer: TokenizerWrapper):
    dense = batch(model, tokenizer, [300, 280, 300])
    with mlx_sparse.sparse(model, SAMPLE) as report:
        assert batch(model, tokenizer, [300, 280, 300]) == dense
    assert report.prefill.calls == 0
    assert report.dense_calls[PADDED] == LAYERS


def test_a_turn_after_merged_prompts_is_dense_if_they_were_padded(model: Any, seen: list[Piece]):
    def merged(lengths: list[int]) -> list[Any]:
        caches = [process(model, prompt_of(length), length) for length in lengths]
        return [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]

    turn = mx.array([prompt_of(100, 3), prompt_of(100, 4)])
    even, ragged, plain = merged([150, 150]), merged([150, 140]), merged([150, 140])
    expected = model(turn, cache=plain)
    with mlx_sparse.sparse(model, SAMPLE) as report:
        assert mx.array_equal(model(turn, cache=ragged), expected)
        assert report.dense_calls == {PADDED: LAYERS}
        model(turn, cache=even)
    assert report.prefill.calls == LAYERS
    for piece in seen:
        assert np.abs(piece.out - piece.expected()).max() < 64 * np.finfo(np.float32).eps * np.abs(piece.v).max()


def test_padding_is_looked_at_once_for_all_layers_until_rows_move():
    rows = mx.ones((3, 2, 8, 4))
    caches = [SparseBatchKVCache([2, 0, 1]) for _ in range(3)]
    for cache in caches:
        cache.update_and_fetch(rows, rows)

    def known() -> list[bool | None]:
        return [cache._padded for cache in caches]

    assert any_padded(caches[0], [KVCache(), *caches])
    assert known() == [True] * 3
    for cache in caches[:2]:
        cache.update_and_fetch(rows, rows)
    assert known() == [True] * 3
    caches[0].filter([1])
    assert known() == [None, True, True]
    assert not any_padded(caches[0], caches)
    caches[1].extend(caches[2])
    assert known() == [False, None, True]
    caches[0].prepare(right_padding=[1])
    assert any_padded(caches[0], [])
    caches[0].finalize()
    assert any_padded(caches[0], [])
    caches[0].state = caches[0].state
    assert known()[0] is None
    loaded = SparseBatchKVCache.__new__(SparseBatchKVCache)  # as mlx-lm loads one
    loaded.state = caches[0].state
    assert any_padded(loaded, [])
    assert not any_padded(KVCache(), caches)


def test_calls_that_cannot_be_sparse_say_why(model: Any):
    queries = mx.random.normal((1, 200, 64), key=mx.random.key(3))

    def layer(mask: Any, cache: Any) -> mx.array:
        out: mx.array = model.layers[0](queries, mask, cache)
        return out

    masks = [None, mx.tril(mx.ones((200, 200), mx.bool_)), "causal"]
    dense = [layer(mask, KVCache()) for mask in masks]
    with mlx_sparse.sparse(model, SAMPLE) as report:
        model(mx.array([prompt_of(100)]))
        model(mx.array([prompt_of(100)]), cache=[RotatingKVCache(500) for _ in range(LAYERS)])
        caches = [make_prompt_cache(model) for _ in masks]
        for cache in caches:
            plan, _, _ = model._mlx_sparse
            plan.begin(cache)
        token = seam.active.set(plan)  # as a call of the model does
        outs = [layer(mask, cache[0]) for mask, cache in zip(masks, caches, strict=True)]
        seam.active.reset(token)
    assert report.dense_calls == {
        "without a KV cache": LAYERS,
        "with a sliding window (RotatingKVCache)": LAYERS,
        "without a causal mask": 1,
        "with an array mask": 1,
    }
    assert report.prefill.calls == 1
    for ours, theirs in zip(outs[:2], dense[:2], strict=True):
        assert mx.array_equal(ours, theirs)
    assert not mx.array_equal(outs[2], dense[2])


def test_a_quantised_cache_is_dense_and_counted():
    model, prompt = build(head_dim=32), mx.array(prompt_of(300))
    options = {"max_tokens": 4, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 150}
    with mlx_sparse.sparse(model, SAMPLE) as report:
        assert len(list(generate_step(prompt, model, **options))) == 4
    assert report.prefill.calls == LAYERS, "the first step finds no quantised cache yet"
    assert report.dense_calls == {"with a quantised KV cache": LAYERS * 6}


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("sample+minference", "attn: expected one prefill method, got sample and minference."),
        ("sample+sparq+streaming", "attn: expected one decode method, got sparq and streaming."),
        ("sample+h2o", "attn: expected one of .* for a model, got h2o."),
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
    assert re.fullmatch(message.replace("(", r"\("), str(error.value))
    assert mlx_sparse.report(model) is None


def test_the_methods_of_both_stages_are_told_apart():
    sample, sparq = Sample(), SparQ()
    assert select_methods((sparq, sample)) == select_methods((sample, sparq)) == (sample, sparq)
    assert select_methods((MInference(),)) == (MInference(), None)
    assert select_methods((sparq,)) == (None, sparq)


# the report


def test_the_report_holds_density_and_retained_mass_by_layer_and_head(model: Any, seen: list[Piece]):
    with mlx_sparse.sparse(model, SAMPLE + ",chunks=2", mass=True) as report:
        process(model, prompt_of(400), 200)
    figures = report.as_dict()["prefill"]
    assert json.loads(json.dumps(figures)) == figures
    assert figures["calls"] == len(seen) == 2 * LAYERS
    masses = []
    for layer in range(LAYERS):
        pieces = [piece for piece in seen if piece.cache is seen[layer].cache]
        kept = sum((piece.blocks >= 0).sum(axis=(0, 2, 3)) for piece in pieces)
        expected = kept / sum(pairs_of(piece) for piece in pieces)
        density = [(piece.blocks >= 0).sum(axis=(2, 3)) / pairs_of(piece) for piece in pieces]
        mass = np.concatenate([piece.expected(return_stats="mass")[1].retained_mass for piece in pieces], axis=2)
        entry = figures["layers"][layer]
        assert entry["layer"] == layer
        np.testing.assert_allclose(entry["heads"], expected)
        np.testing.assert_allclose(report.prefill.density[layer], expected)
        spread = {"mean": expected.mean(), "min": np.min(density), "max": np.max(density)}
        assert entry["density"] == pytest.approx(spread)
        assert entry["retained_mass"] == pytest.approx({"mean": mass.mean(), "min": mass.min()}, abs=1e-5)
        masses.append(mass)
    assert figures["density"]["mean"] == pytest.approx(np.mean([entry["heads"] for entry in figures["layers"]]))
    rows = np.concatenate([mass.ravel() for mass in masses])
    # The blocks of a step's last 32 rows of 100, twice.
    assert figures["sampled"] == pytest.approx(64 / 200)
    assert figures["retained_mass"]["mean"] == report.prefill.mass_mean == pytest.approx(rows.mean(), abs=1e-5)
    assert figures["retained_mass"]["min"] == report.prefill.mass_min == pytest.approx(rows.min(), abs=1e-5)
    low = report.prefill.mass_low
    assert low == figures["retained_mass"]["low"]
    assert low - 1e-5 <= np.sort(rows)[int(np.ceil(0.01 * rows.size)) - 1] <= low + 1e-3 + 1e-5


def test_a_batch_counts_the_mean_of_its_rows(model: Any, tokenizer: TokenizerWrapper, seen: list[Piece]):
    with mlx_sparse.sparse(model, SAMPLE) as report:
        batch(model, tokenizer, [300] * 2)
    for layer, piece in enumerate(seen):
        density = (piece.blocks >= 0).sum(axis=(2, 3)) / pairs_of(piece)
        np.testing.assert_allclose(report.prefill.density[layer], density.mean(axis=0))


def test_the_text_sums_the_prompts_up(model: Any):
    with mlx_sparse.sparse(model, SAMPLE + "+" + SPARQ, mass=True) as report:
        generated(model, prompt_of(300))
    first, prompts, density, mass, decoding = str(report).splitlines()
    assert first.startswith(f"{SAMPLE}+{SPARQ[: SPARQ.index(',dense')]}"[:30])
    assert prompts == f"  sparse prefill calls: {LAYERS}, {BLOCK / 299:.1%} of the queries sampled"
    percent = r"\d+\.\d%"
    assert re.fullmatch(
        rf"  density: {percent}, by layer {percent} to {percent}, by call and head {percent} to {percent}", density
    )
    assert re.fullmatch(
        r"  retained mass: 0\.\d{4}, at least 0\.\d{3} for 99% of the queries and 0\.\d{4} for all", mass
    )
    assert decoding.startswith(f"  sparse calls: {LAYERS * 7}, ")


def test_without_a_prefill_method_there_are_no_figures_of_prompts(model: Any):
    with mlx_sparse.sparse(model, SPARQ, mass=True) as report:
        generated(model, prompt_of(300))
    assert report.prefill is None
    assert report.as_dict()["prefill"] is None
    assert "prefill" not in str(report)


@pytest.mark.parametrize("mass", [False, True])
def test_memory_does_not_grow_with_the_steps(mass: bool):
    # Wide keys and one layer, which mlx-lm never evaluates the output of: what it pends would hold on to every step's.
    model = build(num_hidden_layers=1, head_dim=64, num_key_value_heads=4)
    prompt = prompt_of(2000)
    with mlx_sparse.sparse(model, EVERY_BLOCK, mass=mass) as report:
        cache = process(model, prompt[:40], 40)
        active = []
        for start in range(40, 2000, 40):
            process(model, prompt[start : start + 40], 40, cache)
            own = sum(entry.nbytes for entry in cache)
            mx.synchronize()
            active.append(mx.get_active_memory() - own)
    assert report.prefill.calls == 50
    keys = cache[0].keys.nbytes
    assert active[-1] - active[0] < keys // 4


def test_figures_hold_nothing_of_what_they_were_counted_from():
    figures, layout = PrefillFigures(), Layout(64, 64, 1, 32)
    mx.synchronize()
    before = mx.get_active_memory()
    for step in range(20):
        big = mx.random.normal((1 << 20,), key=mx.random.key(step))
        mx.eval(big)
        blocks = mx.where(big.max() > 0, mx.array([[[[0, -1], [0, 1]]]]), -1)
        figures.add(0, blocks, layout)
        figures.add_mass(0, mx.full((1, 1, 64), 0.5) + 0 * big[:64])
        figures.submit()
        mx.synchronize()
    assert mx.get_active_memory() - before < 3 * big.nbytes
    assert figures.density == {0: [1.0]}
    assert (figures.mass_mean, figures.mass_low) == (0.5, 0.5)


def test_dense_sums_of_a_long_prompt_never_hold_all_scores(monkeypatch: pytest.MonkeyPatch):
    L, heads = 1024, 4
    queries, keys = (mx.random.normal((1, each, L, 16), key=mx.random.key(each)) for each in (heads, 2))
    whole = attend.dense_lse(queries, keys, scale=0.25, left_padding=None)
    mx.eval(whole)
    monkeypatch.setitem(blocks.MOST_SCORES, mx.default_device().type, 1 << 16)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    lse = attend.dense_lse(queries, keys, scale=0.25, left_padding=None)
    mx.eval(lse)
    assert mx.get_peak_memory() - before < 4 * heads * L * L / 4
    np.testing.assert_allclose(lse, whole, atol=1e-5)
