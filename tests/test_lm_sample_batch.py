"""Batches of prompts by a sparse method, and calls that stay dense, which say why."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_prompts import LAYERS, PADDED, SAMPLE, SPARQ, Piece, batch, process, record_pieces, tiny_tokenizer
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.cache import SparseBatchKVCache, any_padded
from mlx_sparse.lm.model import plan_of
from mlx_sparse.lm.plan import Call


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return tiny_tokenizer()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    return record_pieces(monkeypatch)


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
        outs = []
        for mask, cache in zip(masks, caches, strict=True):
            with Call(plan_of(model), cache):
                outs.append(layer(mask, cache[0]))
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
