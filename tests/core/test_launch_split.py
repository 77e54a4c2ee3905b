"""Test prefill in several launches: each launch has bounded work, and the results are equal."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_sparse.core import launch_split
from mlx_sparse.core.blocks import ops
from mlx_sparse.core.blocks.layout import Layout

SIZES = {
    "a short prompt": (32, 2048, 4096, 128, 1),
    "a step at 128k": (32, 2048, 131072, 128, 8),
    "a step at 1M": (32, 2048, 1 << 20, 128, 64),
    "a prompt of 128k": (32, 131072, 131072, 128, 512),
    "a batch of 8 at 256k": (8 * 64, 4096, 1 << 18, 128, 128),
    "sizes that are not powers of two": (24, 3000, 100_000, 96, 7),
}


@pytest.mark.parametrize(("heads", "L", "S", "D", "count"), SIZES.values(), ids=SIZES)
def test_the_number_of_launches_follows_from_the_work(heads: int, L: int, S: int, D: int, count: int):
    rows = launch_split.launch_rows(heads, S, D)
    ranges = launch_split.query_ranges(L, S, rows)
    assert len(ranges) == count
    assert rows.bit_count() == 1, "a tile of the kernels is split"
    work = [2 * heads * D * (stop - start) * (S - L + stop) for start, stop in ranges]
    assert rows == launch_split.MIN_ROWS or max(work) <= launch_split.MAX_WORK


@given(S=st.integers(1, 3000), share=st.floats(0, 1), exponent=st.integers(5, 12))
def test_launches_cover_every_query_once_with_aligned_borders(S: int, share: float, exponent: int):
    L, rows = max(1, round(S * share)), 1 << exponent
    ranges = launch_split.query_ranges(L, S, rows)
    assert [query for start, stop in ranges for query in range(start, stop)] == list(range(L))
    assert all((S - L + start) % rows == 0 for start, _ in ranges[1:])
    assert all(0 < stop - start <= rows for start, stop in ranges)


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(("L", "S"), [(300, 300), (200, 333), (70, 500), (10, 500)])
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_attention_in_several_launches_equals_attention_in_one(
    L: int, S: int, block_size: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    B, Hq, Hkv, D = 2, 4, 2, 16
    monkeypatch.setattr(launch_split, "MAX_WORK", 2 * B * Hq * S * D * rows)
    rng = np.random.default_rng(0)
    queries = mx.array(rng.normal(size=(B, Hq, L, D)), mx.float32)
    keys, values = (mx.array(rng.normal(size=(B, Hkv, S, D)), mx.float32) for _ in range(2))
    layout = Layout(L, S, 1, block_size)
    kept = rng.random((B, Hq, layout.row_blocks, layout.key_blocks)) < 0.5
    lists = mx.array(np.where(kept, np.arange(layout.key_blocks), -1).astype(np.int32))
    attend = partial(ops.attend_blocks, block_size=block_size, scale=0.25)
    whole = attend(queries, keys, values, lists)
    seen: list[tuple[int, int]] = []

    def launch(chunk: mx.array, listed: mx.array, length: int) -> tuple[mx.array, mx.array]:
        seen.append((length - chunk.shape[2], length))
        return attend(chunk, keys[:, :, :length], values[:, :, :length], listed)

    out, lse = launch_split.attend_in_launches(launch, queries, lists, S=S, block_size=block_size)
    assert seen == [(S - L + start, S - L + stop) for start, stop in launch_split.query_ranges(L, S, rows)]
    np.testing.assert_allclose(out, whole[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, whole[1], rtol=0, atol=1e-5)
