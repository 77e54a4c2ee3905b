"""H2O in mlx-lm's models: steps as the oracle takes them after any history, or dense with the reason."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from h2o_simulation import (
    H2O,
    LAYERS,
    NEXT,
    PROMPT,
    PROMPT_CALL,
    STEPS,
    TOP_K,
    Simulation,
    close,
    run,
    simulated,
    singles,
)
from lm_prompts import tiny_tokenizer
from mlx_lm import batch_generate
from mlx_lm.models.cache import (
    BatchKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from tiny_models import build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.cache.h2o_state import STATES
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods.reasons import A_FEW, UNCOUNTED
from mlx_sparse.methods.stats import dense_elements, h2o_elements
from mlx_sparse.model_info import leaves

GROUPS = {1: {"num_attention_heads": 2}, 3: {"num_attention_heads": 6}, 4: {"num_key_value_heads": 1}}


@pytest.fixture
def model() -> Any:
    return build()


def check_scores(cache: Any, simulation: Simulation) -> None:
    """The scores of ``cache`` are those that ``simulation`` has seen last; several sequences, several layers."""
    for layer, expected in zip(leaves(cache), simulation.scores.values(), strict=True):
        found = np.array(layer.aux_states["h2o"].states[-1].scores)
        assert found.dtype == np.float32
        assert layer.aux_states["h2o"].length == layer.length
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        kept = np.isfinite(expected)
        np.testing.assert_allclose(found[kept], expected[kept], atol=1e-4)


@pytest.mark.parametrize("local_window", [None, 0, TOP_K])
@pytest.mark.parametrize("G", GROUPS)
def test_each_step_is_the_oracles(G: int, local_window: int | None):
    model = build(**GROUPS[G])
    with simulated(model, local_window=local_window) as simulation:
        expected = run(model, make_prompt_cache(model), PROMPT, *singles(NEXT))
    dense = run(model, make_prompt_cache(model), PROMPT, *singles(NEXT))
    attn = H2O if local_window is None else f"{H2O},local_window={local_window}"
    with mlx_sparse.sparse(model, attn) as report:
        cache = make_prompt_cache(model)
        found = run(model, cache, PROMPT, *singles(NEXT))
    assert close(found, expected)
    assert not close(found, dense)
    check_scores(cache, simulation)
    for layer in cache:
        evicted = np.isinf(np.array(layer.aux_states["h2o"].states[-1].scores)).sum(axis=-1)
        assert (evicted == len(PROMPT) + STEPS - TOP_K).all()
    assert report.sparse_calls == LAYERS * STEPS
    assert report.dense_calls == {PROMPT_CALL: LAYERS}


def test_the_report_counts_the_papers_bytes(model: Any):
    with mlx_sparse.sparse(model, H2O) as report:
        run(model, make_prompt_cache(model), PROMPT, *singles(NEXT))
    lengths, heads, D = range(len(PROMPT) + 1, len(PROMPT) + STEPS + 1), 2, 16
    assert report.sparse_bytes == LAYERS * heads * 4 * sum(h2o_elements(S, D, top_k=TOP_K) for S in lengths)
    assert report.dense_bytes == LAYERS * heads * 4 * sum(dense_elements(S, D) for S in lengths)
    assert report.attn == H2O
    assert report.backend == "ops"


def test_contexts_that_fit_are_dense_and_counted(model: Any):
    tokens = prompt_of(TOP_K + 4)
    with simulated(model) as simulation:
        expected = run(model, make_prompt_cache(model), *singles(tokens))
    with mlx_sparse.sparse(model, H2O) as report:
        cache = make_prompt_cache(model)
        assert close(run(model, cache, *singles(tokens)), expected)
    check_scores(cache, simulation)
    assert report.sparse_calls == LAYERS * 4
    assert report.dense_calls == {f"over fewer than {TOP_K + 1} keys": LAYERS * TOP_K}


@pytest.mark.parametrize("pieces", [[1, 299], [250, 50], [100, 7, 1, 16, 17, 159], [299, 1]])
def test_a_prompt_in_pieces_gives_the_scores_of_one_at_once(model: Any, pieces: list[int]):
    prompt = prompt_of(sum(pieces))
    cuts = np.cumsum([0, *pieces])
    with simulated(model) as simulation:
        run(model, make_prompt_cache(model), prompt)
    with mlx_sparse.sparse(model, "h2o:top_k=1000"):  # nothing is evicted, also by pieces of one token
        cache = make_prompt_cache(model)
        run(model, cache, *(prompt[start:stop] for start, stop in itertools.pairwise(cuts)))
    check_scores(cache, simulation)


def test_copies_of_one_prompt_go_on_with_any_top_k_and_other_methods_ignore_its_scores(model: Any):
    with mlx_sparse.sparse(model, "h2o:top_k=3"):
        prompt = make_prompt_cache(model)
        run(model, prompt, PROMPT)
    for top_k in (5, 11):
        with simulated(model, top_k=top_k) as simulation:
            expected = run(model, make_prompt_cache(model), PROMPT, *singles(NEXT))
        with mlx_sparse.sparse(model, f"h2o:top_k={top_k}"):
            cache = copy.deepcopy(prompt)
            assert close(run(model, cache, *singles(NEXT)), expected[1:])
        check_scores(cache, simulation)
    for attn in ("sparq:rank=4,top_k=4", "streaming:sink_tokens=1,recent_tokens=3", None):
        rows = []
        for cache in (copy.deepcopy(prompt), make_prompt_cache(model)):
            if cache[0].empty():
                run(model, cache, PROMPT)
            if attn is None:
                rows.append(run(model, cache, *singles(NEXT)))
            else:
                with mlx_sparse.sparse(model, attn):
                    rows.append(run(model, cache, *singles(NEXT)))
        assert mx.array_equal(*rows)


@pytest.mark.parametrize("trimmed", [1, 5, STEPS])
def test_a_trim_takes_evictions_back(model: Any, trimmed: int):
    with simulated(model) as simulation:
        kept = singles(NEXT[: STEPS - trimmed])
        expected = run(model, make_prompt_cache(model), PROMPT, *kept, *singles(PROMPT[:5]))
    with mlx_sparse.sparse(model, H2O) as report:
        cache = make_prompt_cache(model)
        run(model, cache, PROMPT, *singles(NEXT))
        trim_prompt_cache(cache, trimmed)
        found = run(model, cache, *singles(PROMPT[:5]))
    assert close(found, expected[-5:])
    check_scores(cache, simulation)
    assert report.dense_calls == {PROMPT_CALL: LAYERS}


@pytest.mark.parametrize("rejected", [0, 1, 3])
def test_drafts_are_verified_densely_and_count_if_accepted(model: Any, rejected: int):
    draft, following = NEXT[4:8], singles(NEXT[8:])
    with simulated(model) as simulation:
        cache = make_prompt_cache(model)
        run(model, cache, PROMPT, *singles(NEXT[:4]))
        simulation.verifying = True
        run(model, cache, draft[: len(draft) - rejected])
        simulation.verifying = False
        expected = run(model, cache, *following)
    with mlx_sparse.sparse(model, H2O) as report:
        cache = make_prompt_cache(model)
        run(model, cache, PROMPT, *singles(NEXT[:4]), draft)
        trim_prompt_cache(cache, rejected)
        assert close(run(model, cache, *following), expected)
    check_scores(cache, simulation)
    assert report.dense_calls == {PROMPT_CALL: LAYERS, A_FEW: LAYERS}
    assert report.sparse_calls == LAYERS * (4 + len(following))


def dense_with_reason(model: Any, cache: Any, plain: Any) -> None:
    """Steps over ``cache`` are what dense attention gives over ``plain``, and the report says why."""
    expected = run(model, plain, *singles(NEXT), NEXT[:3], [5])
    with mlx_sparse.sparse(model, H2O) as report:
        found = run(model, cache, *singles(NEXT), NEXT[:3], [5])
    assert mx.array_equal(found, expected)
    assert report.sparse_calls == 0
    assert report.dense_calls == {UNCOUNTED: LAYERS * (STEPS + 1), A_FEW: LAYERS}


def test_a_cache_filled_without_h2o_stays_dense(model: Any):
    cache, plain = make_prompt_cache(model), make_prompt_cache(model)
    for each in (cache, plain):
        run(model, each, PROMPT)
    dense_with_reason(model, cache, plain)


def test_a_cache_from_a_file_stays_dense(model: Any, tmp_path: Path):
    file = str(tmp_path / "cache.safetensors")
    with mlx_sparse.sparse(model, H2O):
        cache = make_prompt_cache(model)
        run(model, cache, PROMPT)
        save_prompt_cache(file, cache)
    dense_with_reason(model, load_prompt_cache(file), load_prompt_cache(file))


def test_a_cache_that_went_on_without_h2o_stays_dense(model: Any):
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, H2O):
        run(model, cache, PROMPT)
    with mlx_sparse.sparse(model, "sparq:rank=4,top_k=4"):
        run(model, cache, [3])
    plain = make_prompt_cache(model)
    plain[0].state, plain[1].state = (copy.deepcopy(layer.state) for layer in cache)
    dense_with_reason(model, cache, plain)


def test_a_trim_behind_the_states_that_are_kept_stays_dense_and_one_to_nothing_starts_anew(model: Any):
    cache, plain = make_prompt_cache(model), make_prompt_cache(model)
    run(model, plain, PROMPT)
    with mlx_sparse.sparse(model, H2O):
        run(model, cache, PROMPT, *singles(prompt_of(STATES, seed=9)))
    assert len(cache[0].aux_states["h2o"].states) == STATES
    trim_prompt_cache(cache, STATES)
    dense_with_reason(model, copy.deepcopy(cache), plain)
    trim_prompt_cache(cache, len(PROMPT))
    with simulated(model):
        expected = run(model, make_prompt_cache(model), PROMPT, *singles(NEXT))
    with mlx_sparse.sparse(model, H2O):
        assert close(run(model, cache, PROMPT, *singles(NEXT)), expected)


def test_a_call_under_a_mask_that_cannot_be_counted_leaves_the_rest_dense(model: Any):
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, H2O) as report:
        run(model, cache, PROMPT)
        with Call(plan_of(model), cache):
            for layer, entry in zip(model.layers, cache, strict=True):
                layer(mx.ones((1, 1, 64)), mx.arange(len(PROMPT) + 1)[None] != 5, entry)
        run(model, cache, [3])
    assert report.dense_calls == {PROMPT_CALL: LAYERS, "with an array mask": LAYERS, UNCOUNTED: LAYERS}


# --- Batches ----------------------------------------------------------------------------------------------------------

LENGTHS = [24, 9, 17]
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]


def alone(model: Any, prompt: list[int], following: list[int]) -> mx.array:
    with simulated(model):
        return run(model, make_prompt_cache(model), prompt, *singles(following))


def steps(model: Any, cache: Any, rows: int, following: list[int] = NEXT) -> mx.array:
    """Logits ``(rows, steps, vocabulary)`` of the same tokens in every row."""
    found = [model(mx.array([[token]] * rows), cache=cache) for token in following]
    mx.eval(found)
    return mx.concatenate(found, axis=1)


def test_sequences_of_one_length_are_each_as_alone(model: Any):
    prompts = [prompt_of(24, seed=seed) for seed in range(3)]
    with mlx_sparse.sparse(model, H2O) as report:
        cache = make_prompt_cache(model)
        model(mx.array(prompts), cache=cache)
        together = steps(model, cache, 3)
    for row, prompt in zip(together, prompts, strict=True):
        assert close(row, alone(model, prompt, NEXT)[1:])
    assert report.sparse_calls == LAYERS * STEPS


def padded_batch(model: Any) -> list[Any]:
    """Caches of a left-padded batch, its prompts processed."""
    S = max(LENGTHS)
    cache = [BatchKVCache([S - length for length in LENGTHS]) for _ in range(LAYERS)]
    model(mx.array([[0] * (S - len(prompt)) + prompt for prompt in PROMPTS]), cache=cache)
    return cache


def test_each_row_of_a_left_padded_batch_is_that_prompt_alone(model: Any):
    with mlx_sparse.sparse(model, H2O) as report:
        together = steps(model, padded_batch(model), len(PROMPTS))
    for row, prompt in zip(together, PROMPTS, strict=True):
        assert close(row, alone(model, prompt, NEXT)[1:])
    assert report.dense_calls == {PROMPT_CALL: LAYERS}
    assert report.sparse_calls == LAYERS * STEPS


def test_rows_leave_a_batch_join_it_and_are_taken_out(model: Any):
    late = prompt_of(30, seed=30)
    with mlx_sparse.sparse(model, H2O) as report:
        cache = padded_batch(model)
        steps(model, cache, 3, NEXT[:4])
        for layer in cache:
            layer.filter([1, 2])  # and the padding that both share goes too
        assert cache[0].left_padding.tolist() == [8, 0]
        steps(model, cache, 2, NEXT[4:6])
        other = [BatchKVCache([0]) for _ in range(LAYERS)]
        model(mx.array([late]), cache=other)
        for layer, more in zip(cache, other, strict=True):
            layer.extend(more)
        together = steps(model, cache, 3, NEXT[6:9])
        one = [layer.extract(1) for layer in cache]
        again = [layer.merge([layer, copy.deepcopy(layer)]) for layer in one]
        twins = steps(model, again, 2, NEXT[9:])
    expected = [alone(model, prompt, NEXT)[1:] for prompt in PROMPTS[1:]]
    assert close(together[0], expected[0][6:9])
    assert close(together[1], expected[1][6:9])
    assert close(together[2], alone(model, late, NEXT[6:9])[1:])
    assert close(twins[0], expected[1][9:])
    assert close(twins[1], expected[1][9:])
    assert report.dense_calls == {PROMPT_CALL: 2 * LAYERS}


def test_a_batch_of_mlx_lm_is_sparse_where_its_prompts_are_of_one_length_and_else_dense(model: Any):
    tokenizer = tiny_tokenizer()
    ragged = batch_generate(model, tokenizer, PROMPTS, max_tokens=4).texts
    with mlx_sparse.sparse(model, H2O) as report:
        assert batch_generate(model, tokenizer, PROMPTS, max_tokens=4).texts == ragged
    assert report.sparse_calls == 0
    assert report.dense_calls[UNCOUNTED] > 0
    even = [prompt_of(24, seed=seed) for seed in range(3)]
    with mlx_sparse.sparse(model, H2O) as report:
        together = batch_generate(model, tokenizer, even, max_tokens=[2, 6, 4]).texts
        for prompt, text, end in zip(even, together, [2, 6, 4], strict=True):
            assert batch_generate(model, tokenizer, [prompt], max_tokens=end).texts == [text]
    assert report.sparse_calls > 0
    assert UNCOUNTED not in report.dense_calls


# --- What it cannot serve --------------------------------------------------------------------------------------------


def test_attention_sinks_are_refused():
    with pytest.raises(mlx_sparse.ConfigError, match=r"that h2o can serve, got gpt_oss .* with attention sinks"):
        mlx_sparse.enable(build("gpt_oss"), H2O)


def test_sliding_windows_stay_dense():
    model = build("gemma3_text")
    with mlx_sparse.sparse(model, H2O) as report:
        greedy(model, PROMPT, STEPS)
    assert report.served_layers == 2
    assert report.sparse_calls == 2 * STEPS
    assert report.dense_layers == {"with a sliding window (RotatingKVCache)": 2}


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_the_scores_of_a_long_prompt_take_little_memory():
    L, heads = 2048, 8
    queries, keys = mx.random.normal((1, heads, L, 16)), mx.random.normal((1, 2, L, 16))
    mx.eval(queries, keys)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(mlx_sparse.h2o_scores(queries, keys))
    at_once = 4 * heads * L * L
    assert mx.get_peak_memory() - before < at_once / 4


def test_nothing_but_scores_is_kept_of_a_prompt(model: Any):
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, H2O):
        run(model, cache, PROMPT)
    own = cache[0].keys.nbytes + cache[0].values.nbytes
    assert cache[0].nbytes == own + 2 * 4 * len(PROMPT)
    cache[0].state = cache[0].state
    assert cache[0].nbytes == own
