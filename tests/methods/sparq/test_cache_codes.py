"""Test the quantized scoring keys (int4) of a cache: their values depend only on the current rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_caches import Rows, attend, batch_of, padded, single

from mlx_sparse import oracle
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.sparq.scoring_keys import GROUP, KeyCodes
from mlx_sparse.methods.sparq.state import SparQState

FEW = SparQ(rank=4, top_k=4, reallocate=False, component_score="query_key", key_bits=4, dense_below=0)
MIXED = SparQ(rank=4, top_k=4, reallocate=True, component_score="query", key_bits=4, dense_below=0)


def check_codes(cache: Any, config: SparQ = FEW) -> None:
    """Compare the quantized keys of the rows in use bitwise with the oracle."""
    S, side = cache.length, cache.aux_states["sparq"]
    rows = np.array(cache.keys[..., :S, :].astype(mx.float32))
    padding = None if cache.padding is None else np.array(cache.padding)
    assert side.codes.covered == S
    found = side.codes.read(cache.keys, whole=False)
    wanted = oracle.sparq.code_keys(rows, left_padding=padding)
    for name, array in zip(KeyCodes._fields, found, strict=True):
        bits = np.array(array.view(mx.uint8) if name == "codes" else array)
        for b, first in enumerate(cache.first_rows()):  # complete groups of a row; other entries are never read
            stop = max(0, S - first) // GROUP * bits.shape[-1] // max(1, S // GROUP)
            used = slice(None) if name == "center" else slice(stop)
            np.testing.assert_array_equal(bits[b][..., used], getattr(wanted, name)[b][..., used], err_msg=name)
    spread = side.codes.spread(cache.keys, S)
    expected = oracle.key_spread(wanted, rows, left_padding=padding)
    np.testing.assert_allclose(np.array(spread), expected, rtol=1e-4)


def test_groups_of_a_padded_row_start_at_its_first_valid_key() -> None:
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


def test_int4_keys_serve_every_setting_and_16_bit_keys_replace_them() -> None:
    cache = single()
    cache.update_and_fetch(*Rows(1)(200))
    for config in (FEW, MIXED, FEW):
        attend(cache, config)
        check_codes(cache, config)
        assert cache.aux_states["sparq"].columns is None
    attend(cache, SparQ(rank=4, top_k=4, component_score="query", key_bits=16))
    assert cache.aux_states["sparq"].codes is None
    assert cache.aux_states["sparq"].columns.covered == 200


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bytes_per_token_equal_the_specification(dim: int) -> None:
    text = (Path(__file__).parents[3] / "docs" / "spec" / "sparq.md").read_text(encoding="utf-8")
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
        state.bind(cache, config, 1, whole=True)(cache, cache.length)
        assert state.nbytes - more * heads * length == (4 * dim * heads if bits < 16 else 0)  # the center


def test_quantizing_keys_of_a_long_prompt_needs_little_memory() -> None:
    cache = single()
    rows = mx.random.normal((1, 4, 65536, 64)).astype(mx.float16)
    cache.update_and_fetch(rows, rows)
    side = cache.add_state("sparq", SparQState())
    mx.eval(cache.keys, cache.values)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(side.bind(cache, FEW, 1, whole=True)(cache, cache.length)["keys_t"])
    assert mx.get_peak_memory() - before < side.nbytes + 0.5 * cache.keys.nbytes


def test_tokens_within_a_group_leave_quantized_keys_unchanged() -> None:
    cache = single()
    rows = mx.random.normal((1, 2, 4096, 64)).astype(mx.float16)
    cache.update_and_fetch(rows, rows)
    side = cache.add_state("sparq", SparQState())
    before = side.bind(cache, FEW, 2, whole=True)(cache, cache.length)
    for _ in range(GROUP - 1):
        cache.update_and_fetch(rows[:, :, :1], rows[:, :, :1])
        again = side.bind(cache, FEW, 2, whole=True)(cache, cache.length)
        assert again["keys_t"].codes is before["keys_t"].codes
        assert again["component_weight"] is before["component_weight"]


@pytest.mark.parametrize("make", [single, padded])
def test_trimmed_groups_are_quantized_again(make: Any) -> None:
    cache = make()
    rows = Rows(batch_of(cache))
    cache.update_and_fetch(*rows(266))
    attend(cache, FEW)
    for trim, more in ((200, 60), (30, 100)):
        cache.trim(trim)
        cache.update_and_fetch(*rows(more))
        attend(cache, FEW)
        check_codes(cache)
