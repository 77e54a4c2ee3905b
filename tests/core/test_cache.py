"""Test that the caches equal mlx-lm's, and the lifetime and memory of their auxiliary state."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache, save_prompt_cache
from short_methods import short
from tiny_caches import ALL_BUFFERS, COLUMNS, PADDING, D, H, Rows, attend, batch_of, padded, single
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache, adopt
from mlx_sparse.cache.state import State
from mlx_sparse.core import reasons
from mlx_sparse.lm.hooks import ModelHooks, hooks_of
from mlx_sparse.lm.hooks.h2o import H2OHooks
from mlx_sparse.lm.hooks.saap import SAAPHooks
from mlx_sparse.methods import METHODS
from mlx_sparse.methods.sparq.state import SparQState

CACHES = pytest.mark.parametrize("make", [single, padded])


WITH_STATE = ["sparq", "h2o"]


@pytest.mark.parametrize("method", WITH_STATE)
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
def test_state_and_hooks_are_found_by_name(method: str):
    state = type(single().state_of(method)).__name__
    assert state == (f"{METHODS[method].__name__}State" if method in WITH_STATE else "NoneType")
    assert hooks_of(METHODS[method]()) is {"saap": SAAPHooks, "h2o": H2OHooks}.get(method, ModelHooks)


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


def replace_rows(cache: Any, other: Any) -> None:
    cache.keys, cache.values = other.keys, other.values


def repeat_rows(cache: Any, other: Any) -> None:
    for name in ("keys", "values", "left_padding", "offset"):
        rows = getattr(cache, name, None)
        if isinstance(rows, mx.array):
            setattr(cache, name, mx.repeat(rows, 3, axis=0))
        elif isinstance(rows, (list, tuple)):
            setattr(cache, name, [mx.repeat(part, 3, axis=0) for part in rows])


def rewrite_rows(cache: Any, other: Any) -> None:
    """Write rows below the length in place, with the length set lower meanwhile."""
    length = "_idx" if hasattr(cache, "_idx") else "offset"
    stop = getattr(cache, length)
    pairs = [(cache.keys, other.keys), (cache.values, other.values)]
    if isinstance(cache.keys, (list, tuple)):
        pairs = [*zip(cache.keys, other.keys, strict=True), *zip(cache.values, other.values, strict=True)]
    for mine, theirs in pairs:
        mine[..., stop - 30 : stop - 4, :] = theirs[..., stop - 30 : stop - 4, :]
    setattr(cache, length, stop - 4)


def replace_parts(cache: Any, other: Any) -> None:
    """Replace the arrays of a quantized cache inside its lists."""
    if isinstance(cache.keys, list):
        cache.keys[:], cache.values[:] = other.keys, other.values
    else:
        replace_rows(cache, other)


SPARQ = short("sparq", component_score="query_key", reallocate="true")
EVERY_STATE = [SPARQ, f"{SPARQ},key_bits=16", short("saap", merge_every=1), short("h2o")]


@pytest.mark.parametrize("attn", EVERY_STATE)
@pytest.mark.parametrize("write", [replace_rows, repeat_rows, rewrite_rows, replace_parts])
@pytest.mark.parametrize("kind", ["single", "batch", "quantized"])
def test_a_step_after_a_program_wrote_a_cache_equals_a_step_over_a_new_cache(attn: str, write: Callable, kind: str):
    model = build(head_dim=32)

    def filled(seed: int) -> list[Any]:
        found = make_prompt_cache(model)
        model(mx.array([prompt_of(100, seed)]), cache=found)
        if kind != "single":
            found = [cache.merge([cache]) if kind == "batch" else cache.to_quantized(32, 8) for cache in found]
        for token in (3, 4):
            model(mx.array([[token]]), cache=found)
        return found

    with mlx_sparse.sparse(model, attn) as report:
        caches, others = filled(1), filled(2)
        assert report.sparse_calls, "the caches have auxiliary state"
        for cache, other in zip(caches, others, strict=True):
            write(cache, other)
        fresh = copy.deepcopy(caches)
        for cache in fresh:
            cache.state = cache.state
        tokens = mx.array([[5]] * (3 if write is repeat_rows else 1))
        before, dense = report.sparse_calls, report.dense_calls[reasons.UNCOUNTED]
        expected = model(tokens, cache=fresh)
        assert mx.array_equal(model(tokens, cache=caches), expected)
        lost = report.dense_calls[reasons.UNCOUNTED] - dense
        assert (report.sparse_calls - before, lost) == ((0, 4) if attn.startswith("h2o") else (4, 0))


@pytest.mark.parametrize("attn", EVERY_STATE)
def test_a_model_that_wraps_its_keys_in_a_dependency_keeps_the_auxiliary_state(
    attn: str, monkeypatch: pytest.MonkeyPatch
):
    model = build()
    inner = type(model.model)
    forward = inner.__call__

    def pipelined(self: Any, inputs: mx.array, cache: Any, *more: Any) -> mx.array:  # as mlx-lm's pipeline stages
        hidden = forward(self, inputs, cache, *more)
        cache[-1].keys = mx.depends(cache[-1].keys, hidden)
        return hidden

    monkeypatch.setattr(inner, "__call__", pipelined)
    with mlx_sparse.sparse(model, attn):
        caches, states = make_prompt_cache(model), []
        for tokens in (prompt_of(100), [3], [4]):
            model(mx.array([tokens]), cache=caches)
            states.append(dict(caches[-1].aux_states))
    assert states[1]
    assert states[1] == states[2]


def test_a_batch_with_repeated_rows_but_not_padding_attends_densely():
    model = build()
    with mlx_sparse.sparse(model, SPARQ) as report:
        single = make_prompt_cache(model)
        model(mx.array([prompt_of(100)]), cache=single)
        caches = [cache.merge([cache]) for cache in single]
        for cache in caches:
            cache.keys, cache.values = (mx.repeat(rows, 3, axis=0) for rows in (cache.keys, cache.values))
        model(mx.array([[5], [6], [7]]), cache=caches)
        assert report.dense_calls[reasons.OTHER_ROWS] == 2
        assert report.sparse_calls == 0
