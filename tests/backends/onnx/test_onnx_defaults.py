"""Check the default settings of the exporter."""

from __future__ import annotations

import pytest
from mlx_sparse.onnx_export.defaults import LANES, dense_below, lanes_for

from mlx_sparse.methods import SparQ


@pytest.mark.parametrize(
    ("length", "lanes"), [(1, 64), (64, 64), (100, 64), (4096, 4096), (4097, 256), (5000, 1024), (131072, 4096)]
)
def test_lanes_for_common_lengths(length: int, lanes: int) -> None:
    assert lanes_for(length) == lanes


@pytest.mark.parametrize("length", range(1, 70_000, 997))
def test_whole_chunks_add_at_most_a_sixteenth_or_one_small_chunk(length: int) -> None:
    added = -length % lanes_for(length)
    assert added * 16 <= length or (lanes_for(length) == LANES[-1] and added < LANES[-1])


@pytest.mark.parametrize(
    ("config", "heads", "D", "standard", "native"),
    [
        (SparQ(), 3, 64, 7281, 512),  # SmolLM2-135M
        (SparQ(rank=16), 3, 64, 6241, 512),
        (SparQ(), 4, 128, 2340, 512),
        (SparQ(key_bits=16), 8, 128, 2048, 512),  # 16 * top_k, 4 * top_k
        (SparQ(top_k=256), 8, 128, 4096, 1024),
        (SparQ(top_k=16), 8, 128, 17, 17),  # an experiment on a short text
        (SparQ(dense_below=300), 8, 128, 300, 300),
        (SparQ(dense_below=0), 8, 128, 129, 129),
    ],
)
def test_short_contexts_stay_dense_where_sparse_steps_save_too_little(
    config: SparQ, heads: int, D: int, standard: int, native: int
) -> None:
    assert dense_below(config, heads, D, native=False) == standard
    assert dense_below(config, heads, D, native=True) == native
