"""Test that the caches equal mlx-lm's, and the lifetime and memory of their auxiliary state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
)
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache, adopt
from mlx_sparse.cache.sparq_state import SparQState
from mlx_sparse.cache.state import State
from mlx_sparse.lm.hooks import ModelHooks, hooks_of
from mlx_sparse.methods import METHODS, SparQ, table

H, D = 2, 8
ALL_BUFFERS = SparQ(rank=4, top_k=4, reallocate=True, component_score="query_key", key_bits=16, dense_below=0)
COLUMNS = SparQ(rank=4, top_k=4, reallocate=False, component_score="query", key_bits=16, dense_below=0)
PADDING = [3, 0, 1]


class Rows:
    """Random keys and values with a large mean in some channels, as after q/k-norm."""

    def __init__(self, B: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> None:
        self.B, self.dtype, self.random = B, dtype, np.random.default_rng(seed)
        self.mean = np.linspace(-30, 30, D)

    def __call__(self, count: int) -> tuple[mx.array, mx.array]:
        shape = (self.B, H, count, D)
        keys = mx.array(self.random.normal(self.mean, 1, shape), self.dtype)
        return keys, mx.array(self.random.normal(2, 1, shape), self.dtype)


def single() -> SparseKVCache:
    cache = KVCache()
    adopt(cache)
    assert isinstance(cache, SparseKVCache)
    return cache


def padded() -> SparseBatchKVCache:
    cache = BatchKVCache(PADDING)
    adopt(cache)
    assert isinstance(cache, SparseBatchKVCache)
    return cache


def batch_of(cache: Any) -> int:
    return 1 if isinstance(cache, KVCache) else len(PADDING)


def attend(cache: Any, config: SparQ = ALL_BUFFERS, heads: int = 2 * H) -> tuple[mx.array, mx.array]:
    queries = mx.random.normal((cache.keys.shape[0], heads, 1, D), key=mx.random.key(7)).astype(cache.keys.dtype)
    out, lse = cache.attend(queries, config, scale=D**-0.5, backend="ops")
    mx.eval(out, lse)
    return out, lse


CACHES = pytest.mark.parametrize("make", [single, padded])


@pytest.mark.parametrize("method", table.STATES)
def test_setting_the_cache_state_discards_auxiliary_state(method: str):
    cache = single()
    cache.update_and_fetch(*Rows(1)(5))
    state = cache.state_of(method)
    assert isinstance(state, State)
    assert state is cache.state_of(method) is cache.aux_states[method]
    assert state.nbytes == 0
    cache.state = cache.state
    assert not cache.aux_states, "the new rows may differ"


@pytest.mark.parametrize("method", METHODS)
def test_only_methods_of_the_table_have_state_or_hooks(method: str):
    assert (single().state_of(method) is None) == (method not in table.STATES)
    assert (hooks_of(METHODS[method]()) is ModelHooks) == (method not in table.HOOKS)


@CACHES
def test_state_equals_the_state_of_mlx_lms_cache(make: Any):
    cache, plain = make(), KVCache() if make is single else BatchKVCache(PADDING)
    rows = Rows(batch_of(cache))(40)
    for each in (cache, plain):
        each.update_and_fetch(*rows)
    attend(cache)
    assert type(cache.state) is type(plain.state) is tuple
    for ours, theirs in zip(cache.state, plain.state, strict=True):
        assert mx.array_equal(ours, theirs) if isinstance(ours, mx.array) else ours == theirs
    assert cache.size() == plain.size()
    assert type(cache).__name__ == type(plain).__name__


@CACHES
def test_nbytes_counts_auxiliary_state(make: Any):
    cache = make()
    cache.update_and_fetch(*Rows(batch_of(cache))(40))
    own = cache.keys.nbytes + cache.values.nbytes
    assert cache.nbytes == own
    attend(cache)
    sums = 3 * batch_of(cache) * H * D * 4  # sums of values, keys and squares, in float32
    assert cache.nbytes == own + cache.keys.nbytes + sums


def test_extract_returns_a_plain_cache_of_one_sequence():
    cache = padded()
    cache.update_and_fetch(*Rows(len(PADDING))(40))
    attend(cache)
    one = cache.extract(0)
    assert type(one) is KVCache
    assert one.offset == 40 - PADDING[0]
    assert mx.array_equal(one.keys, cache.keys[:1, :, PADDING[0] : 40])


def test_merged_caches_are_plain_until_the_next_call_of_the_model():
    model, prompts = build(), [prompt_of(20, 1), prompt_of(13, 2)]
    with mlx_sparse.sparse(model, "sparq:rank=4,top_k=4,dense_below=0") as report:
        caches = [make_prompt_cache(model) for _ in prompts]
        for cache, prompt in zip(caches, prompts, strict=True):
            model(mx.array([prompt]), cache=cache)
        merged = [type(pair[0]).merge(list(pair)) for pair in zip(*caches, strict=True)]
        assert [type(cache) for cache in merged] == [BatchKVCache, BatchKVCache]
        model(mx.array([[5], [6]]), cache=merged)
        assert [type(cache) for cache in merged] == [SparseBatchKVCache, SparseBatchKVCache]
        assert report.sparse_calls == 2


def test_adopt_converts_lists_and_cache_lists_only():
    nested, rotating = CacheList(KVCache(), RotatingKVCache(8)), RotatingKVCache(8)
    adopt([nested, (KVCache(),), rotating])
    assert isinstance(nested[0], SparseKVCache)
    assert type(nested[1]) is type(rotating) is RotatingKVCache


def test_saved_cache_is_a_plain_mlx_lm_file(tmp_path: Path, without_torch: dict[str, str]):
    file, again = str(tmp_path / "cache.safetensors"), str(tmp_path / "again.safetensors")
    cache = single()
    cache.update_and_fetch(*Rows(1)(40))
    attend(cache)
    save_prompt_cache(file, [cache])
    code = f"""
import sys, mlx_lm  # past the start-up hook
sys.modules["mlx_sparse"] = None  # importing it fails
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
cache = load_prompt_cache({file!r})
save_prompt_cache({again!r}, cache)
print(type(cache[0]).__module__, type(cache[0]).__qualname__, cache[0].offset)
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["mlx_lm.models.cache", "KVCache", "40"]
    assert Path(again).read_bytes() == Path(file).read_bytes()


@pytest.mark.parametrize("state", ["keys and values", "component-major keys too", "and every sum"])
def test_an_appended_token_copies_no_buffer(state: str):
    S, tokens, dim = 65536, 20, 64
    cache = single()
    rows = mx.random.normal((1, H, S - 100, dim)).astype(mx.float16)
    cache.update_and_fetch(rows, rows)
    side = cache.add_state("sparq", SparQState())

    def append() -> None:
        row = mx.ones((1, H, 1, dim), mx.float16)
        cache.update_and_fetch(row, row)
        buffers = [cache.keys, cache.values]
        if state != "keys and values":
            sums = state == "and every sum"
            side.bind(cache, ALL_BUFFERS if sums else COLUMNS, 2, whole=True)(cache, cache.length)
            buffers.append(side.columns.keys_t)
            buffers += [side.values.state.sums, side.keys.state.sums] if sums else []
        mx.eval(buffers)

    append()  # the first call builds the auxiliary state
    assert cache.keys.shape[2] == S
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(tokens):
        append()
    assert cache.keys.shape[2] == S
    assert mx.get_peak_memory() - before < 0.1 * cache.keys.nbytes
