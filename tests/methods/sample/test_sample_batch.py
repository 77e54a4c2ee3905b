"""Test sparse prefill of batches, and the reasons of dense calls."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from lm_prompts import LAYERS, SAMPLE, batch, process
from mlx_lm import batch_generate
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache
from mlx_sparse.core.reasons import UNKNOWN_PADDING
from mlx_sparse.lm import seam
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of

TOO_FULL = "with too many selected key blocks"


def alone(model: Any, tokenizer: TokenizerWrapper, lengths: list[int], **options: Any) -> list[str]:
    """Return the texts of the prompts of `batch`, generated one by one."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    return [batch_generate(model, tokenizer, [one], max_tokens=6, **options).texts[0] for one in prompts]


def test_short_prompt_of_a_batch_is_dense(model: Any, tokenizer: TokenizerWrapper):
    attn = SAMPLE.replace("dense_below=0", "dense_below=250")
    with mlx_sparse.sparse(model, attn) as report:
        together = batch(model, tokenizer, [300, 200, 280])
        assert (report.prefill.calls, report.dense_calls["over fewer than 250 keys"]) == (2 * LAYERS, LAYERS)
        assert alone(model, tokenizer, [300, 200, 280]) == together


def test_batch_of_dense_prompts_equals_mlx_lm(model: Any, tokenizer: TokenizerWrapper):
    dense = batch(model, tokenizer, [300, 280])
    with mlx_sparse.sparse(model, SAMPLE.replace("dense_below=0", "dense_below=400")) as report:
        assert batch(model, tokenizer, [300, 280]) == dense
    assert report.prefill.calls == 0
    assert report.dense_calls["over fewer than 400 keys"] == 2 * LAYERS


def test_dense_above_is_decided_per_prompt(model: Any, tokenizer: TokenizerWrapper):
    """Test that the decision for a prompt does not depend on requests that join or leave the batch."""
    lengths, options = [640, 300, 500, 420], {"prefill_step_size": 96, "prefill_batch_size": 3}
    with mlx_sparse.sparse(model, SAMPLE) as report:
        batch(model, tokenizer, lengths, **options)
    densities = [sum(heads) / len(heads) for heads in report.prefill.density.values()]
    attn = f"{SAMPLE},dense_above={sum(densities) / len(densities)}"
    counts = []
    for run in (batch, alone):
        with mlx_sparse.sparse(model, attn) as report:
            texts = run(model, tokenizer, lengths, **options)
        counts.append((texts, report.prefill.calls, report.dense_calls[TOO_FULL], report.prefill.density))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0
    assert counts[0][2] > 0


@pytest.mark.parametrize("sinks", [None, mx.array([1.0, -2.0, 0.5, 3.0])], ids=["", "sinks"])
def test_padding_on_both_sides_is_ignored(sinks: mx.array | None, model: Any):
    """Compare a batch in mlx-lm's layout, with poisoned padding, with each sequence in its own cache."""
    B, S, L, padding, lengths = 4, 400, 200, [0, 30, 0, 320], [200, 150, 1, 0]
    cache = SparseBatchKVCache(padding)
    keys, values, queries = (mx.random.normal((B, H, S, 16), key=mx.random.key(n)) for n, H in ((1, 2), (2, 2), (3, 4)))
    row = mx.arange(S)[:, None]
    with mlx_sparse.sparse(model, SAMPLE) as report:
        plan = plan_of(model)
        for start, stop in ((0, S - L), (S - L, S)):
            if start:
                cache.prepare(lengths=lengths, right_padding=[L - length for length in lengths])
            ends = [S - L + length for length in lengths]
            valid = mx.stack([(row >= first) & (row < end) for first, end in zip(padding, ends, strict=True)])[:, None]
            poisoned = [mx.where(valid, rows, 1e3)[:, :, start:stop] for rows in (keys, values)]
            mask = cache.make_mask(stop - start)
            asked = mx.where(valid, queries, 1e3)[:, :, start:stop] if start else queries[:, :, :stop]
            with Call(plan, [cache]) as call:
                cached = cache.update_and_fetch(*poisoned)
                out = call.attend(asked, *cached, cache, 0.25, mask, sinks)
        outs = [
            _alone(plan, queries, keys, values, sequence, first, S - L, length, sinks)
            for sequence, (first, length) in enumerate(zip(padding, lengths, strict=True))
        ]
    assert report.prefill.calls > 0
    for sequence, (expected, length) in enumerate(zip(outs, lengths, strict=True)):
        assert mx.allclose(out[sequence, :, :length], expected, rtol=1e-5, atol=1e-5)


def _alone(
    plan: Any,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    sequence: int,
    first: int,
    before: int,
    length: int,
    sinks: mx.array | None,
) -> mx.array:
    """Return the output of the last ``length`` queries of one sequence in its own cache."""
    stop = before + length
    if length == 0:
        return mx.zeros((queries.shape[1], 0, 16))
    cache = SparseKVCache()
    q, k, v = (array[sequence : sequence + 1, :, first:stop] for array in (queries, keys, values))
    q, mask = q[:, :, -length:], "causal" if length > 1 else None
    with Call(plan, [cache]) as call:
        cached = cache.update_and_fetch(k, v)
        out = call.attend(q, *cached, cache, 0.25, mask, sinks)
    if out is None:
        out = seam.original(q, *cached, cache=cache, scale=0.25, mask=mask, sinks=sinks)
    return out[0]


def test_padding_is_read_once_for_all_layers_until_rows_move():
    rows = mx.ones((3, 2, 8, 4))
    caches = [SparseBatchKVCache([2, 0, 1]) for _ in range(3)]
    for cache in caches:
        cache.update_and_fetch(rows, rows)

    def known() -> list[list[int] | None]:
        return [cache._first for cache in caches]

    assert caches[0].extents([KVCache(), *caches]) == [(2, 8), (0, 8), (1, 8)]
    assert known() == [[2, 0, 1]] * 3
    for cache in caches[:2]:
        cache.update_and_fetch(rows, rows)
    assert known() == [[2, 0, 1]] * 3
    caches[0].filter([1])
    assert known() == [None, [2, 0, 1], [2, 0, 1]]
    assert caches[0].extents(caches) == [(0, 16)]
    caches[1].extend(caches[2])
    assert known() == [[0], None, [2, 0, 1]]
    assert caches[1].extents([]) == [(2, 16), (0, 16), (1, 16), (10, 16), (8, 16), (9, 16)]
    caches[0].prepare(right_padding=[1])
    assert caches[0].extents([]) is None
    seam.LIBRARIES["mlx_lm"].prepare_and_store_ends(caches[0], lengths=[7], right_padding=[1])
    caches[0].update_and_fetch(rows[:1], rows[:1])
    assert caches[0].extents([]) == [(0, 23)]
    caches[0].finalize()
    assert caches[0].extents([]) == [(1, 24)]
    loaded = SparseBatchKVCache.__new__(SparseBatchKVCache)  # like mlx-lm's loader
    loaded.state = caches[0].state
    assert loaded.extents([]) == [(1, 24)]


def test_padding_on_the_right_by_an_unknown_number_is_dense_and_counted(model: Any):
    merged = [type(layer[0]).merge(list(layer)) for layer in zip(*[process(model, [5], 1)] * 2, strict=True)]
    for cache in merged:
        cache.prepare(right_padding=[0, 100])
    with mlx_sparse.sparse(model, SAMPLE) as report:
        model(mx.array([prompt_of(300)] * 2), cache=merged)
    assert report.dense_calls == {UNKNOWN_PADDING: LAYERS}


def test_dense_calls_have_a_reason(model: Any):
    queries = mx.random.normal((1, 200, 64), key=mx.random.key(3))

    def layer(mask: Any, cache: Any) -> mx.array:
        out: mx.array = model.layers[0](queries, mask, cache)
        return out

    masks = [None, mx.tril(mx.ones((200, 200), mx.bool_)), "causal"]
    dense = [layer(mask, KVCache()) for mask in masks]
    with mlx_sparse.sparse(model, SAMPLE, backend="ops") as report:
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
