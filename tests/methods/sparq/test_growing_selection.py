"""Test that decode steps attend to more keys as the context grows (`SparQ.at`)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tiny_caches import D, H, Rows, single

from mlx_sparse import oracle
from mlx_sparse.methods import SparQ


@pytest.mark.parametrize("backend", ["ops", "cpu"])
def test_steps_on_both_sides_of_a_doubling_equal_the_oracle(backend: str) -> None:
    config = SparQ(rank=4, component_score="query", reallocate=False, key_bits=16)
    cache, rows = single(), Rows(1)
    cache.update_and_fetch(*rows(4095))
    step = cache.bind(config, 2, backend)
    for S, top_k in ((4095, 128), (4096, 256), (4097, 256)):
        queries = mx.random.normal((1, 2 * H, 1, D), key=mx.random.key(S))
        out, *_ = step(queries, cache, S, D**-0.5)
        keys, values = (np.array(array[..., :S, :]) for array in (cache.keys, cache.values))
        wanted = oracle.sparq_attention(np.array(queries), keys, values, rank=4, top_k=top_k, reallocate=False)
        np.testing.assert_allclose(np.array(out), wanted, rtol=1e-4, atol=1e-5)
        cache.update_and_fetch(*rows(1))
