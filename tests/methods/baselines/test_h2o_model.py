"""Test H2O in mlx-lm's models: byte counts, dense fallbacks with their reasons, and memory.

`test_cache_histories` compares the outputs with the float64 oracle.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from lm_prompts import LAYERS
from mlx_lm import batch_generate
from mlx_lm.models.cache import BatchKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.core.reasons import A_FEW, UNCOUNTED
from mlx_sparse.core.stats import dense_elements, h2o_elements
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods.baselines.state import STATES

STEPS, TOP_K = 12, 8
H2O = f"h2o:top_k={TOP_K}"
PROMPT, NEXT = prompt_of(24), prompt_of(STEPS, seed=5)
PREFILL_CALL = "in prefill"


def run(model: Any, cache: Any, *calls: list[int]) -> mx.array:
    """Return the logits at the last position of each call."""
    rows = [model(mx.array([tokens]), cache=cache)[:, -1] for tokens in calls]
    mx.eval(rows)
    return mx.concatenate(rows)


def single_tokens(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def test_report_counts_the_bytes_of_the_paper(model: Any):
    with mlx_sparse.sparse(model, H2O) as report:
        run(model, make_prompt_cache(model), PROMPT, *single_tokens(NEXT))
    lengths, heads, D = range(len(PROMPT) + 1, len(PROMPT) + STEPS + 1), 2, 16
    assert report.sparse_bytes == LAYERS * heads * 4 * sum(h2o_elements(S, D, top_k=TOP_K) for S in lengths)
    assert report.dense_bytes == LAYERS * heads * 4 * sum(dense_elements(S, D) for S in lengths)
    assert (report.attn, report.backend) == (H2O, "ops")
    assert (report.sparse_calls, report.dense_calls) == (LAYERS * STEPS, {PREFILL_CALL: LAYERS})


def test_contexts_of_at_most_top_k_keys_are_dense(model: Any):
    with mlx_sparse.sparse(model, H2O) as report:
        run(model, make_prompt_cache(model), *single_tokens(prompt_of(TOP_K + 4)))
    assert report.sparse_calls == LAYERS * 4
    assert report.dense_calls == {f"over fewer than {TOP_K + 1} keys": LAYERS * TOP_K}


@pytest.mark.parametrize("history", ["without h2o", "from a file", "other method", "long trim"])
def test_cache_with_unknown_scores_stays_dense(history: str, model: Any, tmp_path: Path):
    cache, file = make_prompt_cache(model), str(tmp_path / "cache.safetensors")
    with mlx_sparse.sparse(model, "dense" if history == "without h2o" else H2O):
        run(model, cache, PROMPT)
        save_prompt_cache(file, cache)
        if history == "long trim":
            run(model, cache, *single_tokens(prompt_of(STATES, seed=9)))
            assert len(cache[0].aux_states["h2o"].states) == STATES
            trim_prompt_cache(cache, STATES)
    if history == "from a file":
        cache = load_prompt_cache(file)
    elif history == "other method":
        with mlx_sparse.sparse(model, "sparq:rank=4,top_k=4"):
            run(model, cache, [3])
    plain = make_prompt_cache(model)
    for layer, source in zip(plain, cache, strict=True):
        layer.state = copy.deepcopy(source.state)
    calls = [*single_tokens(NEXT), NEXT[:3], [5]]
    expected = run(model, plain, *calls)
    with mlx_sparse.sparse(model, H2O, backend="ops") as report:
        assert mx.array_equal(run(model, cache, *calls), expected)
    assert report.sparse_calls == 0
    assert report.dense_calls == {UNCOUNTED: LAYERS * (STEPS + 1), A_FEW: LAYERS}
    trim_prompt_cache(cache, cache[0].offset)
    with mlx_sparse.sparse(model, H2O) as report:
        from_empty = run(model, cache, PROMPT, *single_tokens(NEXT))
        assert mx.array_equal(from_empty, run(model, make_prompt_cache(model), PROMPT, *single_tokens(NEXT)))
    assert report.dense_calls == {PREFILL_CALL: 2 * LAYERS}


def test_call_with_an_array_mask_leaves_later_calls_dense(model: Any):
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, H2O) as report:
        run(model, cache, PROMPT)
        with Call(plan_of(model), cache):
            for layer, entry in zip(model.layers, cache, strict=True):
                layer(mx.ones((1, 1, 64)), mx.arange(len(PROMPT) + 1)[None] != 5, entry)
        run(model, cache, [3])
    assert report.dense_calls == {PREFILL_CALL: LAYERS, "with an array mask": LAYERS, UNCOUNTED: LAYERS}


def test_batch_of_mlx_lm_is_sparse_only_if_all_prompts_have_one_length(model: Any, tokenizer: TokenizerWrapper):
    prompts = [prompt_of(length, seed=length) for length in (24, 9, 17)]
    ragged = batch_generate(model, tokenizer, prompts, max_tokens=4).texts
    with mlx_sparse.sparse(model, H2O) as report:
        assert batch_generate(model, tokenizer, prompts, max_tokens=4).texts == ragged
    assert report.sparse_calls == 0
    assert report.dense_calls[UNCOUNTED] > 0
    even = [prompt_of(24, seed=seed) for seed in range(3)]
    with mlx_sparse.sparse(model, H2O) as report:
        together = batch_generate(model, tokenizer, even, max_tokens=[2, 6, 4]).texts
        for prompt, text, end in zip(even, together, [2, 6, 4], strict=True):
            assert batch_generate(model, tokenizer, [prompt], max_tokens=end).texts == [text]
    assert report.sparse_calls > 0
    assert UNCOUNTED not in report.dense_calls


def test_attention_sinks_are_refused():
    with pytest.raises(mlx_sparse.ConfigError, match=r"that h2o can serve, got gpt_oss .* with attention sinks"):
        mlx_sparse.enable(build("gpt_oss"), H2O)


def test_scores_of_a_long_prompt_need_little_memory():
    L, heads = 2048, 8
    queries, keys = mx.random.normal((1, heads, L, 16)), mx.random.normal((1, 2, L, 16))
    mx.eval(queries, keys)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(mlx_sparse.h2o_scores(queries, keys))
    all_scores = 4 * heads * L * L
    assert mx.get_peak_memory() - before < all_scores / 4


def test_nbytes_counts_only_rows_and_scores(model: Any):
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, H2O):
        run(model, cache, PROMPT)
    own = cache[0].keys.nbytes + cache[0].values.nbytes
    assert cache[0].nbytes == own + 2 * 4 * len(PROMPT)
    cache[0].state = cache[0].state
    assert cache[0].nbytes == own


def test_scores_survive_changes_of_a_batch(model: Any):
    prompts = [prompt_of(24, seed=row) for row in range(3)]
    with mlx_sparse.sparse(model, H2O):
        alone = run(model, make_prompt_cache(model), prompts[2][7:], [1], [2], [3])[-1]
    with mlx_sparse.sparse(model, H2O) as report:
        cache = [BatchKVCache([0, 15, 7]) for _ in range(LAYERS)]
        model(mx.array(prompts), cache=cache)
        model(mx.array([[1]] * 3), cache=cache)
        for layer in cache:
            layer.filter([1, 2])
        other = [BatchKVCache([0]) for _ in range(LAYERS)]
        model(mx.array([prompt_of(30)]), cache=other)
        for layer, more in zip(cache, other, strict=True):
            layer.extend(more)
        model(mx.array([[2]] * 3), cache=cache)
        one = [layer.extract(1) for layer in cache]
        twins = [layer.merge([layer, copy.deepcopy(layer)]) for layer in one]
        logits = model(mx.array([[3]] * 2), cache=twins)[:, -1]
    assert (report.sparse_calls, report.dense_calls) == (3 * LAYERS, {PREFILL_CALL: 2 * LAYERS})
    assert mx.allclose(logits, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rejected", [0, 1, 3])
def test_drafts_count_if_accepted(rejected: int, model: Any):
    with mlx_sparse.sparse(model, H2O) as report:
        cache = make_prompt_cache(model)
        run(model, cache, PROMPT, NEXT[:4])
        trim_prompt_cache(cache, rejected)
        run(model, cache, *single_tokens(NEXT[4:]))
    assert (report.sparse_calls, report.dense_calls) == (LAYERS * (STEPS - 4), {PREFILL_CALL: LAYERS, A_FEW: LAYERS})
