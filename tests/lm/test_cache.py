"""The caches: mlx-lm's to the outside; what is kept beside them is right after any history, and cheap."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from tiny_models import build, greedy, prompt_of

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
    """An endless supply of keys and values with a large mean in some channels, as after q/k-norm."""

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


def check_side_buffers(cache: Any) -> None:
    """They are what a fresh float64 computation over the cache's own rows gives."""
    S, side = cache.length, cache.aux_states["sparq"]
    keys, values = (np.array(rows[..., :S, :]).astype(np.float64) for rows in (cache.keys, cache.values))
    first = [0] * keys.shape[0] if cache.padding is None else cache.padding.tolist()
    assert side.columns.covered == S
    np.testing.assert_array_equal(
        np.array(side.columns.keys_t[..., :S]), np.array(cache.keys[..., :S, :].swapaxes(-1, -2))
    )
    mean, variance = np.array(side.values.mean()), np.array(side.keys.deviation()) ** 2
    # Each row taken in rounds once, at the size of what is summed.
    eps = 64 * np.finfo(np.float32).eps
    for b, start in enumerate(first):
        if start < S:
            np.testing.assert_allclose(mean[b], values[b, :, start:].mean(axis=1), atol=eps * 8)
            np.testing.assert_allclose(variance[b], keys[b, :, start:].var(axis=1), atol=eps * 64)


CACHES = pytest.mark.parametrize("make", [single, padded])


@pytest.mark.parametrize("method", table.STATES)
def test_what_a_cache_begins_for_a_method_is_of_its_rows(method: str):
    cache = single()
    cache.update_and_fetch(*Rows(1)(5))
    state = cache.state_of(method)
    assert isinstance(state, State)
    assert state is cache.state_of(method) is cache.aux_states[method]
    assert state.nbytes == 0
    cache.state = cache.state
    assert not cache.aux_states, "other rows may be in it"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_without_a_row_keeps_and_does_nothing_besides(method: str):
    assert (single().state_of(method) is None) == (method not in table.STATES)
    assert (hooks_of(METHODS[method]()) is ModelHooks) == (method not in table.HOOKS)


@CACHES
def test_state_is_that_of_mlx_lms_cache(make: Any):
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
def test_nbytes_counts_what_is_kept_beside(make: Any):
    cache = make()
    cache.update_and_fetch(*Rows(batch_of(cache))(40))
    own = cache.keys.nbytes + cache.values.nbytes
    assert cache.nbytes == own
    attend(cache)
    sums = 3 * batch_of(cache) * H * D * 4  # of values, keys and squares, in float32
    assert cache.nbytes == own + cache.keys.nbytes + sums


@CACHES
def test_a_deep_copy_and_its_original_go_on_independently(make: Any):
    cache = make()
    rows = Rows(batch_of(cache))
    cache.update_and_fetch(*rows(40))
    attend(cache)
    twin = copy.deepcopy(cache)
    assert type(twin) is type(cache)
    for each in (cache, twin):
        each.trim(3)
        each.update_and_fetch(*rows(11))
    for each in (cache, twin):
        attend(each)
        check_side_buffers(each)
    assert not mx.array_equal(cache.aux_states["sparq"].columns.keys_t, twin.aux_states["sparq"].columns.keys_t)


@CACHES
def test_setting_the_state_forgets_what_was_kept_beside(make: Any):
    cache, other = make(), make()
    rows = Rows(batch_of(cache))
    for each in (cache, other):
        each.update_and_fetch(*rows(40))
        attend(each)
    cache.state = other.state
    attend(cache)
    check_side_buffers(cache)
    assert mx.array_equal(attend(cache)[0], attend(other)[0])


@CACHES
def test_a_sum_stays_right_while_nobody_reads_it(make: Any):
    cache = make()
    rows = Rows(batch_of(cache))
    cache.update_and_fetch(*rows(40))
    attend(cache)
    cache.update_and_fetch(*rows(9))
    attend(cache, SparQ(rank=4, top_k=4, component_score="query", reallocate=False))
    attend(cache)
    check_side_buffers(cache)


@pytest.mark.parametrize("moves", ["filter", "extend", "finalize"])
def test_side_buffers_are_right_after_rows_move(moves: str):
    cache = padded()
    rows = Rows(len(PADDING))
    cache.update_and_fetch(*rows(40))
    attend(cache)
    if moves == "filter":
        cache.filter(mx.array([0, 2]))  # the padding that both share goes too
        assert cache.left_padding.tolist() == [2, 0]
    elif moves == "extend":
        other = BatchKVCache([0])
        other.update_and_fetch(*Rows(1)(50))
        cache.extend(other)
        assert cache.left_padding.tolist() == [13, 10, 11, 0]
    else:
        cache.prepare(right_padding=[2, 0, 5], lengths=[6, 8, 3])
        cache.update_and_fetch(*rows(8))
        attend(cache)
        cache.finalize()
        assert cache.left_padding.tolist() == [5, 0, 6]
    attend(cache)
    check_side_buffers(cache)
    cache.update_and_fetch(*Rows(cache.keys.shape[0])(1))
    attend(cache)
    check_side_buffers(cache)


def test_extract_gives_the_rows_of_one_sequence_in_a_plain_cache():
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


def test_adopt_takes_lists_and_cache_lists_and_leaves_others_alone():
    nested, rotating = CacheList(KVCache(), RotatingKVCache(8)), RotatingKVCache(8)
    adopt([nested, (KVCache(),), rotating])
    assert isinstance(nested[0], SparseKVCache)
    assert type(nested[1]) is type(rotating) is RotatingKVCache


def test_a_saved_cache_is_mlx_lms_own_file(tmp_path: Path, without_torch: dict[str, str]):
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


def test_a_loaded_cache_goes_on_sparsely_as_the_saved_one_would(tmp_path: Path):
    file, model = str(tmp_path / "cache.safetensors"), build()
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, "sparq:rank=4,top_k=4,dense_below=0"):
        greedy(model, prompt_of(20), 5, cache)
        save_prompt_cache(file, cache)
        tokens, logits = greedy(model, [3, 4], 5, cache)
        loaded = load_prompt_cache(file)
        assert [type(each) for each in loaded] == [KVCache, KVCache]
        again, same = greedy(model, [3, 4], 5, loaded)
    assert again == tokens
    assert mx.array_equal(same, logits)


STEP = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 1, 2, 5, 100, 256])),
    st.tuples(st.just("trim"), st.integers(1, 120)),
    st.tuples(st.just("attend"), st.sampled_from([0, 1, 2, 3])),
    st.tuples(st.just("copy"), st.just(0)),
)


@CACHES
@given(history=st.lists(STEP, max_size=25), seed=st.integers(0, 9))
@example(history=[("append", 256), ("attend", 3), ("trim", 120), ("trim", 120), ("append", 1)], seed=0)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no timing assertions
def test_side_buffers_are_right_after_any_history(make: Any, history: list[tuple[str, int]], seed: int):
    cache = make()
    rows = Rows(batch_of(cache), seed)
    cache.update_and_fetch(*rows(10))
    for action, number in history:
        if action == "append":
            cache.update_and_fetch(*rows(number))
        elif action == "trim":
            cache.trim(min(number, cache.length - 4))  # 4: every sequence has a row
        elif action == "attend":
            score = "query_key" if number & 1 else "query"
            attend(cache, SparQ(rank=4, top_k=4, component_score=score, key_bits=16, reallocate=bool(number & 2)))
        else:
            twin = copy.deepcopy(cache)
            cache.update_and_fetch(*rows(3))
            cache = twin
    attend(cache)
    check_side_buffers(cache)


@pytest.mark.parametrize("kept", ["keys and values", "component-major keys too", "and every sum"])
def test_an_appended_token_copies_no_buffer(kept: str):
    S, tokens, dim = 65536, 20, 64
    cache = single()
    rows = mx.random.normal((1, H, S - 100, dim)).astype(mx.float16)
    cache.update_and_fetch(rows, rows)
    side = cache.add_state("sparq", SparQState())

    def append() -> None:
        row = mx.ones((1, H, 1, dim), mx.float16)
        cache.update_and_fetch(row, row)
        buffers = [cache.keys, cache.values]
        if kept != "keys and values":
            sums = kept == "and every sum"
            side.read(cache, ALL_BUFFERS if sums else COLUMNS, 2, whole=True)
            buffers.append(side.columns.keys_t)
            buffers += [side.values.state.sums, side.keys.state.sums] if sums else []
        mx.eval(buffers)

    append()  # the first one builds what is kept
    assert cache.keys.shape[2] == S
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(tokens):
        append()
    assert cache.keys.shape[2] == S
    assert mx.get_peak_memory() - before < 0.1 * cache.keys.nbytes
