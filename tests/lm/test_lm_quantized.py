"""Test quantized KV caches (`--kv-bits`) with every method: outputs, state, files and dense fallbacks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from saap_artefacts import BUCKETS
from short_methods import having, short
from tiny_models import build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseQuantizedKVCache, adopt
from mlx_sparse.calibrate import measurement_key
from mlx_sparse.calibrate.timing import Layer, time_steps
from mlx_sparse.core import reasons
from mlx_sparse.core.base import Step
from mlx_sparse.lm import seam
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods import SparQ

LAYERS, PROMPT, STEPS = 2, 300, 8
QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
EVERY_KEY = {name: short(name, top_k=400) for name in having("top_k", "dense_below")}
EVERY_KEY |= {"streaming": short("streaming", recent_tokens=400), "saap": short("saap", probes=BUCKETS)}


def rows_of(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize("method", EVERY_KEY)
def test_all_keys_of_a_quantized_cache_give_mlx_lms_tokens(method: str):
    prompt, model = mx.array(prompt_of(PROMPT)), build(head_dim=32)
    expected = [token for token, _ in generate_step(prompt, build(head_dim=32), max_tokens=STEPS, **QUANTIZED)]
    with mlx_sparse.sparse(model, EVERY_KEY[method]):
        assert [token for token, _ in generate_step(prompt, model, max_tokens=STEPS, **QUANTIZED)] == expected


@pytest.mark.parametrize("method", having())
def test_every_decode_method_serves_a_cache_quantized_during_prefill(method: str):
    options = {**QUANTIZED, "quantized_kv_start": 120, "prefill_step_size": 100, "max_tokens": STEPS}
    model = build(head_dim=32)
    with mlx_sparse.sparse(model, short(method)) as report:
        assert len(list(generate_step(mx.array(prompt_of(PROMPT)), model, **options))) == STEPS
    assert report.sparse_calls >= (STEPS - 1) * report.served_layers, str(report)


def test_saved_quantized_cache_is_plain_and_continues(tmp_path: Path):
    model, file = build(head_dim=32), str(tmp_path / "cache.safetensors")
    cache = [QuantizedKVCache(group_size=32, bits=4) for _ in range(LAYERS)]
    with mlx_sparse.sparse(model, "sparq:top_k=40,rank=8,score=copy,dense_below=0"):
        model(mx.array([prompt_of(PROMPT)]), cache=cache)
        save_prompt_cache(file, cache)
        first = greedy(model, [7, 8, 9], STEPS, cache)[0]
        twin = copy.deepcopy(cache)
        trim_prompt_cache(cache, 3 + STEPS)
        assert greedy(model, [7, 8, 9], STEPS, cache)[0] == first
        trim_prompt_cache(twin, 3 + STEPS)
        assert greedy(model, [7, 8, 9], STEPS, twin)[0] == first
        assert greedy(model, [7, 8, 9], STEPS, load_prompt_cache(file))[0] == first
    assert [type(one) for one in load_prompt_cache(file)] == [QuantizedKVCache] * LAYERS


@pytest.mark.parametrize(("bits", "rows_take", "copy_takes"), [(4, 0.30, 0.43), (8, 0.55, 0.68)])
def test_nbytes_of_a_quantized_cache(bits: int, rows_take: float, copy_takes: float):
    cache: Any = QuantizedKVCache(group_size=64, bits=bits)
    rows = rows_of((1, 2, 1024, 128), 4)
    cache.update_and_fetch(rows, rows)
    half = 2 * rows.nbytes
    adopt([cache])
    assert isinstance(cache, SparseQuantizedKVCache)
    for score, most in (("rows", rows_take), ("copy", copy_takes)):
        config = SparQ(rank=32, score=score, component_score="query")
        cache.attend(rows_of((1, 8, 1, 128), 5), config, scale=0.1, backend="ops")
        assert cache.nbytes / half <= most, score


@pytest.mark.parametrize("spec", ["sparq", "sample:block_size=32,dense_below=0,dense_above=1"])
def test_prefill_over_a_quantized_cache_equals_mlx_lm(spec: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_sparse.cache.kv_cache.DEQUANTIZED_BYTES", 1)  # head by head
    # One layer, because a difference in the last bit may change a code in the cache of the next layer.
    model, dense = (build(head_dim=32, num_hidden_layers=1) for _ in range(2))
    prompt = mx.array([prompt_of(PROMPT)])
    ours, theirs = ([QuantizedKVCache(group_size=32, bits=8)] for _ in range(2))
    with mlx_sparse.sparse(model, spec) as report:
        for chunk in (prompt[:, :200], prompt[:, 200:]):
            found, expected = model(chunk, cache=ours), dense(chunk, cache=theirs)
            assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()
    if report.prefill is not None:
        assert report.prefill.calls == 2


def test_prefill_over_a_quantized_cache_allocates_no_full_score_matrix():
    cache, S = QuantizedKVCache(group_size=64, bits=4), 4096
    parts = cache.update_and_fetch(rows_of((1, 2, S, 64), 9), rows_of((1, 2, S, 64), 10))

    def relative_peak(attend: Any, L: int) -> float:
        """Return the peak memory of a call with ``L`` queries, relative to the size of all scores."""
        queries = rows_of((1, 8, L, 64), 11)
        mx.eval(queries, *parts)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(attend(queries, *parts, cache, 0.125, "causal"))
        return float(mx.get_peak_memory() - before) / (8 * L * S * 4)

    theirs = relative_peak(seam.original, 64)  # slow on a CPU
    model = build(head_dim=32)
    with mlx_sparse.sparse(model, "dense"), Call(plan_of(model), [cache]):
        ours = relative_peak(seam.scaled_dot_product_attention, 512)
    assert ours < 1 / 2 < theirs


def test_other_quantized_rows_use_mlx_lms_attention():
    model, cache = build(head_dim=32), QuantizedKVCache(group_size=32, bits=8)
    cache.update_and_fetch(rows_of((1, 2, 50, 32), 6), rows_of((1, 2, 50, 32), 7))
    keys, values = (tuple(part[:, :, :20] for part in parts) for parts in (cache.keys, cache.values))
    given, shape = (keys, values, cache, 0.2, "causal"), (1, 4, 20, 32)
    with mlx_sparse.sparse(model, "dense") as report, Call(plan_of(model), [cache]):
        found = seam.scaled_dot_product_attention(rows_of(shape, 8), *given)
    assert mx.array_equal(found, seam.original(rows_of(shape, 8), *given))  # the original scales the queries in place
    assert report.dense_calls == {reasons.OTHER_ROWS: 1}


def test_thresholds_of_quantized_caches_are_measured_separately(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    monkeypatch.setattr(SparseQuantizedKVCache, "attend", record_caches(SparseQuantizedKVCache.attend, made))
    packed, plain = (Layer("ops", Step(2, 3, 64, 2, packed=form), mx.float16, 1) for form in ((4, 32), None))
    config = SparQ(component_score="query", reallocate=False)
    assert time_steps(config, packed, 512, 0.05)
    assert {(cache.bits, cache.group_size, cache.length >= 512) for cache in made} == {(4, 32, True)}
    assert measurement_key(config, packed) != measurement_key(config, plain)
    assert packed.row == 2 * 2 * (64 // 2 + 2 * 2 * 64 // 32) < plain.row == 2 * 2 * 64 * 2


def record_caches(attend: Any, made: list[Any]) -> Any:
    def call(cache: Any, *args: Any, **how: Any) -> Any:
        made.append(cache)
        return attend(cache, *args, **how)

    return call
