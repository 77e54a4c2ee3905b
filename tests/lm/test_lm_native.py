"""Test that dense calls of an enabled model run on the native kernels, and that they equal mlx-lm's attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from require import absent
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.core import registry
from mlx_sparse.lm.dense import window_of

if reason := registry.unavailable("cpu"):
    absent("cpu", reason)

FAMILIES = {"llama": {}, "qwen3": {}, "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2}, "gpt_oss": {}}
NEVER_SPARSE = "sparq:rank=4,dense_below=100000"


def steps_of(model: Any, caches: list[Any], rows: list[list[int]]) -> list[mx.array]:
    """Return the logits of two prefill chunks and two decode steps."""
    tokens = mx.array(rows)
    return [model(tokens[:, low:high], cache=caches) for low, high in ((0, 30), (30, 57), (57, 58), (58, 59))]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_calls_run_natively_and_equal_mlx_lm(family: str):
    expected, model = build(family, **FAMILIES[family]), build(family, **FAMILIES[family])
    wanted = steps_of(expected, make_prompt_cache(expected), [prompt_of(59)])
    with mlx_sparse.sparse(model, NEVER_SPARSE) as report:
        found = steps_of(model, make_prompt_cache(model), [prompt_of(59)])
    for ours, theirs in zip(found, wanted, strict=True):
        assert mx.abs(ours - theirs).max() < 1e-4 * mx.abs(theirs).max()
    assert report.sparse_calls == 0
    assert report.native_calls == report.dense_calls.total() > 0
    assert "  dense (cpu) calls: " in str(report)


def test_dense_calls_of_a_padded_batch_run_natively():
    rows, padding = [prompt_of(59), [0] * 20 + prompt_of(39)], [0, 20]
    expected, model = build(), build()
    wanted = steps_of(expected, [BatchKVCache(padding) for _ in expected.layers], rows)
    with mlx_sparse.sparse(model, NEVER_SPARSE) as report:
        found = steps_of(model, [BatchKVCache(padding) for _ in model.layers], rows)
    for ours, theirs, low in zip(found, wanted, (20, 0, 0, 0), strict=True):
        assert mx.abs(ours - theirs)[:, low:].max() < 1e-4 * mx.abs(theirs[:, low:]).max()
    assert report.native_calls == report.dense_calls.total() > 0


@pytest.mark.parametrize("how", ["dense", "lossless", "ops"])
def test_dense_attention_of_mlx_lm_stays_its_own(how: str):
    expected, model = build(), build()
    wanted = steps_of(expected, [KVCache() for _ in expected.layers], [prompt_of(59)])
    enabled = {
        "dense": lambda: mlx_sparse.sparse(model, "dense"),
        "lossless": lambda: mlx_sparse.lossless(model, NEVER_SPARSE),
        "ops": lambda: mlx_sparse.sparse(model, NEVER_SPARSE, backend="ops"),
    }[how]
    with enabled() as report:
        found = steps_of(model, [KVCache() for _ in model.layers], [prompt_of(59)])
    assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert report.native_calls == 0


def test_only_an_exact_window_is_recognized():
    L, S, size = 5, 20, 7
    distance = mx.arange(S - L, S)[:, None] - mx.arange(S)
    mask = (distance >= 0) & (distance < size)
    assert window_of(mask, L, S) == window_of(mask[None, None], L, S) == size
    assert window_of((distance >= 0) & (distance < S), L, S) == S
    other = mx.array(mask)
    other[1, 3] = ~other[1, 3]
    for wrong in (other, mask.astype(mx.float32), mask[:, :-1], mx.zeros_like(mask)):
        assert window_of(wrong, L, S) is None


def test_an_enabled_model_has_the_gradients_of_mlx_lm():
    expected, model = build(), build()
    tokens = mx.array([prompt_of(24)])

    def gradients(model: Any) -> Any:
        return nn.value_and_grad(model, lambda model: model(tokens).square().mean())(model)[1]

    with mlx_sparse.sparse(model, NEVER_SPARSE):
        found = gradients(model)
    for (name, ours), (_, theirs) in zip(tree_flatten(found), tree_flatten(gradients(expected)), strict=True):
        assert mx.array_equal(ours, theirs), name
