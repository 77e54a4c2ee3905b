"""Test that decode steps attend to more keys as the context grows (`SparQ.at`)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from tiny_caches import D, H, Rows, attend, single
from tiny_models import BACKEND, build, prompt_of

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.methods import SparQ

PAPER: dict[str, Any] = {"rank": 4, "component_score": "query", "reallocate": False, "key_bits": 16}


def test_steps_on_both_sides_of_a_doubling_equal_the_oracle() -> None:
    cache, rows = single(), Rows(1)
    cache.update_and_fetch(*rows(4095))
    for S, top_k in ((4095, 128), (4096, 256), (4097, 256)):
        out, _ = attend(cache, SparQ(**PAPER))
        queries = np.array(mx.random.normal((1, 2 * H, 1, D), key=mx.random.key(7)))
        keys, values = (np.array(array[..., :S, :]) for array in (cache.keys, cache.values))
        np.testing.assert_allclose(
            np.array(out), oracle.sparq_attention(queries, keys, values, **PAPER, top_k=top_k), rtol=1e-4, atol=1e-5
        )
        cache.update_and_fetch(*rows(1))


def test_a_model_follows_the_context_while_it_generates() -> None:
    model, prompt = build(), 4091
    with mlx_sparse.sparse(model, "sparq:rank=4,dense_below=0") as report:
        for _ in generate_step(mx.array(prompt_of(prompt)), model, max_tokens=9):
            pass
    steps = range(prompt, prompt + report.sparse_calls // 2)
    assert 4096 in steps
    config = SparQ(rank=4).for_model(qk_norm=False)
    sizes: dict[str, Any] = {"itemsize": 4, "row_bytes": 64, "G": 2, "backend": BACKEND}
    expected = 2 * 2 * sum(config.step_bytes(S, 16, **sizes) for S in steps)
    assert report.modeled_bytes == pytest.approx(expected, rel=1e-5), "each step is rounded to bytes"


def test_a_step_after_a_trim_attends_to_as_many_keys_as_in_a_new_cache() -> None:
    model, tokens = build(), mx.array(prompt_of(4200))[None]
    with mlx_sparse.sparse(model, "sparq:rank=4,dense_below=0"):
        new, trimmed = make_prompt_cache(model), make_prompt_cache(model)
        for cache, S in ((new, 3000), (trimmed, 4150)):
            model(tokens[:, :S], cache=cache)
        model(tokens[:, 4150:4151], cache=trimmed)
        trim_prompt_cache(trimmed, 1151)
        logits = [model(tokens[:, 3000:3001], cache=cache) for cache in (new, trimmed)]
    np.testing.assert_allclose(*map(np.array, logits), rtol=0, atol=1e-4)
