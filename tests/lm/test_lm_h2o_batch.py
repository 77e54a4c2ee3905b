"""H2O in batches: every row is what its prompt is alone, or all are dense with the reason."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from h2o_simulation import (
    H2O,
    LAYERS,
    NEXT,
    PROMPT_CALL,
    STEPS,
    close,
    run,
    simulated,
    singles,
)
from lm_prompts import tiny_tokenizer
from mlx_lm import batch_generate
from mlx_lm.models.cache import (
    BatchKVCache,
    make_prompt_cache,
)
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.methods.reasons import UNCOUNTED

LENGTHS = [24, 9, 17]
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]


@pytest.fixture
def model() -> Any:
    return build()


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
