"""Keys in few bits beside a cache: what they are follows from the cache's rows alone, whatever became of it before."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_cache import CACHES, PADDING, Rows, attend, batch_of, padded, single

from mlx_sparse import oracle
from mlx_sparse.cache.sparq_state import SparQState
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.scoring_keys import GROUP, KeyCodes

FEW = SparQ(rank=4, top_k=4, reallocate=False, component_score="query_key", key_bits=4, dense_below=0)
MIXED = SparQ(rank=4, top_k=4, reallocate=True, component_score="query", key_bits=4, dense_below=0)


def check_codes(cache: Any, config: SparQ = FEW) -> None:
    """They are the oracle's of the rows in use, to the last bit."""
    S, side = cache.length, cache.aux_states["sparq"]
    rows = np.array(cache.keys[..., :S, :].astype(mx.float32))
    padding = None if cache.padding is None else np.array(cache.padding)
    assert side.codes.covered == S
    found = side.codes.read(cache.keys, whole=False)
    wanted = oracle.code_keys(rows, left_padding=padding)
    for name, array in zip(KeyCodes._fields, found, strict=True):
        bits = np.array(array.view(mx.uint8) if name == "codes" else array)
        for b, first in enumerate(cache.first_rows()):  # a row's groups; what lies behind them is never read
            stop = max(0, S - first) // GROUP * bits.shape[-1] // max(1, S // GROUP)
            held = slice(None) if name == "centre" else slice(stop)
            np.testing.assert_array_equal(bits[b][..., held], getattr(wanted, name)[b][..., held], err_msg=name)
    spread = side.codes.spread(cache.keys, S)
    expected = oracle.key_spread(wanted, rows, left_padding=padding)
    np.testing.assert_allclose(np.array(spread), expected, rtol=1e-4)


def test_groups_of_a_padded_row_begin_at_its_first_valid_key() -> None:
    from mlx_lm.models.cache import BatchKVCache

    from mlx_sparse.cache.kv_cache import adopt

    cache: Any = BatchKVCache([130, 0, 64])
    adopt(cache)
    rows = Rows(3)
    for count in (100, 60, 1, 200):
        cache.update_and_fetch(*rows(count))
        attend(cache, FEW)
        check_codes(cache)
    cache.trim(250)
    attend(cache, FEW)
    check_codes(cache)


def test_codes_serve_every_setting_and_whole_keys_take_their_place() -> None:
    cache = single()
    cache.update_and_fetch(*Rows(1)(200))
    for config in (FEW, MIXED, FEW):
        attend(cache, config)
        check_codes(cache, config)
        assert cache.aux_states["sparq"].columns is None
    attend(cache, SparQ(rank=4, top_k=4, component_score="query", key_bits=16))
    assert cache.aux_states["sparq"].codes is None
    assert cache.aux_states["sparq"].columns.covered == 200


def test_a_batch_that_changes_is_coded_anew() -> None:
    cache = padded()
    rows = Rows(len(PADDING))
    cache.update_and_fetch(*rows(150))
    attend(cache, FEW)
    cache.filter(mx.array([0, 2]))
    attend(cache, FEW)
    check_codes(cache)
    other = padded()
    other.update_and_fetch(*rows(90))
    cache.extend(other)
    attend(cache, FEW)
    check_codes(cache)
    one = cache.extract(0)
    one.update_and_fetch(*Rows(1)(1))


STEP = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 1, 2, 60, 64, 100, 256])),
    st.tuples(st.just("trim"), st.integers(1, 200)),
    st.tuples(st.just("attend"), st.just(0)),
    st.tuples(st.just("copy"), st.just(0)),
)


@CACHES
@given(history=st.lists(STEP, max_size=20), seed=st.integers(0, 9))
@example(history=[("append", 256), ("attend", 0), ("trim", 200), ("append", 60), ("trim", 30), ("append", 100)], seed=0)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no timing assertions
def test_codes_are_right_after_any_history(make: Any, history: list[tuple[str, int]], seed: int) -> None:
    cache = make()
    rows = Rows(batch_of(cache), seed)
    cache.update_and_fetch(*rows(10))
    for action, number in history:
        if action == "append":
            cache.update_and_fetch(*rows(number))
        elif action == "trim":
            cache.trim(min(number, cache.length - 4))  # 4: every sequence has a row
        elif action == "attend":
            attend(cache, FEW)
        else:
            twin = copy.deepcopy(cache)
            cache.update_and_fetch(*rows(3))
            cache = twin
    attend(cache, FEW)
    check_codes(cache)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_token_takes_the_memory_that_the_specification_lists(dim: int) -> None:
    text = (Path(__file__).parents[2] / "docs" / "spec" / "sparq.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {dim} \| (\d+) \| (\d+) .*\| (\d+) .*\|$", text, re.MULTILINE)
    plain, *listed = map(int, row)
    heads, length = 2, 8192
    for bits, more in zip((4, 16), listed, strict=True):
        cache = single()
        rows = mx.zeros((1, heads, length, dim), mx.float16)
        cache.update_and_fetch(rows, rows)
        assert cache.nbytes == plain * heads * length
        config = SparQ(rank=4, top_k=4, reallocate=False, component_score="query", key_bits=bits)
        state = cache.add_state("sparq", SparQState())
        state.read(cache, config, 1, whole=True)
        assert state.nbytes - more * heads * length == (4 * dim * heads if bits < 16 else 0)  # the centre


def test_building_codes_for_a_long_prompt_takes_little_memory_besides() -> None:
    cache = single()
    rows = mx.random.normal((1, 4, 65536, 64)).astype(mx.float16)
    cache.update_and_fetch(rows, rows)
    side = cache.add_state("sparq", SparQState())
    mx.eval(cache.keys, cache.values)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(side.read(cache, FEW, 1, whole=True)["keys_t"])
    assert mx.get_peak_memory() - before < side.nbytes + 0.5 * cache.keys.nbytes


def test_most_tokens_change_nothing_that_is_coded() -> None:
    cache = single()
    rows = mx.random.normal((1, 2, 4096, 64)).astype(mx.float16)
    cache.update_and_fetch(rows, rows)
    side = cache.add_state("sparq", SparQState())
    kept = side.read(cache, FEW, 2, whole=True)
    for _ in range(GROUP - 1):
        cache.update_and_fetch(rows[:, :, :1], rows[:, :, :1])
        again = side.read(cache, FEW, 2, whole=True)
        assert again["keys_t"].codes is kept["keys_t"].codes
        assert again["component_weight"] is kept["component_weight"]
