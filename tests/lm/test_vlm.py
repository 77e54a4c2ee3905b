"""Test enabled models of mlx-vlm, with other caches, and dense again afterwards."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest
import tiny_models
import vlm_models
from mlx import nn
from mlx_lm.models import cache as lm_caches
from mlx_vlm import apc
from mlx_vlm.models import base
from mlx_vlm.models import cache as vlm_caches
from mlx_vlm.turboquant import TurboQuantKVCache
from tiny_models import caches_of, call, greedy, prompt_of

import mlx_sparse
from mlx_sparse.cache import kv_cache
from mlx_sparse.core import reasons
from mlx_sparse.lm import seam

SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
PROMPT, STEPS = 24, 6


def close(a: mx.array, b: mx.array) -> bool:
    """Compare float32 logits after a few layers."""
    return float(mx.abs(a - b).max()) < 1e-4 * float(mx.abs(b).max())


@pytest.fixture(scope="module")
def model() -> Any:
    return vlm_models.pair("llama")[1]


@pytest.fixture(scope="module")
def image_model() -> Any:
    return vlm_models.qwen3_vl()


def test_disable_restores_the_classes_the_functions_and_the_stored_positions(image_model: Any) -> None:
    text = image_model.language_model
    cls, module = type(text), sys.modules[type(text).__module__]
    kept = vlm_caches.BatchKVCache.prepare, vlm_caches.KVCache.__dict__["merge"], module.scaled_dot_product_attention
    positions = text._position_ids, text._rope_deltas
    report = mlx_sparse.enable(image_model, SPARSE)
    assert (text._position_ids, text._rope_deltas) == positions
    assert mlx_sparse.report(image_model) is mlx_sparse.report(text) is report
    assert type(text) is not cls and module.scaled_dot_product_attention is not kept[2]
    with pytest.raises(mlx_sparse.ConfigError, match="not enabled"):
        mlx_sparse.enable(text, SPARSE)
    mlx_sparse.disable(image_model)
    found = vlm_caches.BatchKVCache.prepare, vlm_caches.KVCache.__dict__["merge"], module.scaled_dot_product_attention
    assert found == kept == (*kept[:2], base.scaled_dot_product_attention)
    assert type(text) is cls and mlx_sparse.report(text) is None


def batch(model: Any, prompts: list[list[int]], steps: int, attn: Any) -> tuple[mx.array, Any]:
    """Return the logits of decode steps after a left-padded batch in mlx-lm's caches, and the report."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    layers = len(caches_of(model))
    caches = [lm_caches.BatchKVCache(padding) for _ in range(layers)]
    tokens = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
    out = []

    def positions(start: int, stop: int) -> mx.array:
        rows = mx.maximum(mx.arange(start, stop) - mx.array(padding)[:, None], 0)
        return mx.broadcast_to(rows, (3, *rows.shape))

    with mlx_sparse.sparse(model, attn) as report:
        logits = call(model, tokens, caches, position_ids=positions(0, longest))[:, -1]
        for step in range(longest, longest + steps):
            token = mx.argmax(logits, axis=-1)[:, None].tolist()
            logits = call(model, token, caches, position_ids=positions(step, step + 1))[:, -1]
            out.append(logits)
    return mx.stack(out, axis=1), report


@pytest.mark.parametrize("name", ["model", "image_model"])  # the image model passes a slice of the mask
def test_sequences_of_a_batch_in_caches_of_mlx_lm_decode_as_if_alone(name: str, request: pytest.FixtureRequest) -> None:
    """Test the caches that vllm-mlx and rapid-mlx use for models of mlx-vlm."""
    model = request.getfixturevalue(name)
    prompts = [prompt_of(PROMPT, 1), prompt_of(PROMPT - 5, 2), prompt_of(PROMPT - 1, 3)]
    logits, report = batch(model, prompts, STEPS, SPARSE)
    assert report.sparse_calls == report.served_layers * STEPS
    for row, prompt in zip(logits, prompts, strict=True):
        with mlx_sparse.sparse(model, SPARSE):
            assert close(row, greedy(model, prompt, STEPS)[1])
    dense, _ = batch(model, prompts, STEPS, "dense")
    assert not close(logits, dense)


def test_another_mask_of_the_same_shape_stays_dense(model: Any) -> None:
    caches = [vlm_caches.BatchKVCache([0, 3]) for _ in caches_of(model)]
    with mlx_sparse.sparse(model, SPARSE):
        call(model, [prompt_of(PROMPT)] * 2, caches)
    own = caches[0].make_mask(1)
    assert kv_cache.is_padding_mask(own[..., : own.shape[-1]], caches)
    assert not kv_cache.is_padding_mask(mx.array(own), caches)
    assert not kv_cache.is_padding_mask("left_padded_decode", caches)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("BatchQuantizedKVCache", lambda: vlm_caches.BatchQuantizedKVCache([0], group_size=32, bits=8)),
        ("TurboQuantKVCache", lambda: TurboQuantKVCache(bits=4)),
        ("RotatingKVCache", lambda: vlm_caches.RotatingKVCache(max_size=64)),
    ],
)
def test_other_caches_stay_dense_with_the_reason(name: str, make: Any) -> None:
    model = vlm_models.pair("llama", head_dim=64)[1]

    def run() -> mx.array:
        caches = [make() for _ in caches_of(model)]
        call(model, [prompt_of(PROMPT)], caches)
        return call(model, [[5]], caches)

    dense = run()
    with mlx_sparse.sparse(model, SPARSE) as report:
        assert mx.array_equal(run(), dense)
    assert report.sparse_calls == 0
    assert all(name in reason for reason in report.dense_calls)


def test_sparse_caches_keep_the_module_that_the_prefix_cache_on_disk_accepts(model: Any) -> None:
    with mlx_sparse.sparse(model, SPARSE):
        for cls in (vlm_caches.KVCache, vlm_caches.QuantizedKVCache, vlm_caches.BatchKVCache):
            assert kv_cache.SPARSE_CLASSES[cls].__module__ == cls.__module__


def test_the_prefix_cache_stores_plain_caches(model: Any) -> None:
    with mlx_sparse.sparse(model, SPARSE):
        caches = caches_of(model)
        call(model, [prompt_of(PROMPT)], caches)
        call(model, [[5]], caches)
        stored: Any = apc._clone_prompt_cache_for_apc(caches)
        if hasattr(apc, "_dense_checkpoint_trimmable"):  # mlx-vlm 0.7 compares classes, 0.6 uses isinstance
            assert {type(cache) for cache in stored} == {vlm_caches.KVCache}
            assert apc._dense_checkpoint_trimmable(stored, PROMPT + 1)


def test_calls_that_bypass_the_function_are_reported(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlx_sparse.sparse(model, SPARSE) as report:
        module = sys.modules[type(model.language_model).__module__]
        monkeypatch.setattr(module, seam.NAME, base.scaled_dot_product_attention)
        greedy(model, prompt_of(PROMPT), 1)
        monkeypatch.undo()
    assert report.dense_calls == {reasons.OWN_KERNEL: 2 * report.served_layers}


def test_options_of_mlx_lm_alone_are_refused(model: Any) -> None:
    with pytest.raises(mlx_sparse.ConfigError, match=r"^model: expected a model of mlx-lm, got .*-vlm\."):
        mlx_sparse.enable(model, SPARSE, lossless=True)
    assert mlx_sparse.report(model) is None


def test_a_changed_interface_raises_with_the_version(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vlm_caches.BatchKVCache, "prepare")
    with pytest.raises(mlx_sparse.BackendUnavailable, match=r"^mlx-vlm: .* 0\.6\.5 to 0\.7.*prepare is missing"):
        mlx_sparse.enable(model)


def test_two_libraries_in_one_process_are_independent(model: Any) -> None:
    other = tiny_models.build()
    expected = greedy(other, prompt_of(PROMPT), STEPS)[0]
    with mlx_sparse.sparse(model, SPARSE) as report:
        assert greedy(other, prompt_of(PROMPT), STEPS)[0] == expected
        with mlx_sparse.sparse(other, SPARSE) as second:
            greedy(other, prompt_of(PROMPT), STEPS)
    assert report.sparse_calls == 0 < second.sparse_calls


def test_a_wrapped_model_of_mlx_lm_is_served_with_the_caches_of_mlx_vlm(model: Any) -> None:
    """mlx-vlm 0.6 wraps models of mlx-lm for families of its own that are missing."""

    class LanguageModel(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self._model = inner
            self.layers = inner.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
            return base.LanguageModelOutput(logits=self._model(inputs, cache=cache))

    LanguageModel.__module__ = base.__name__
    wrapped, inner = LanguageModel(tiny_models.build()), tiny_models.build()
    with mlx_sparse.sparse(model, SPARSE), mlx_sparse.sparse(inner, SPARSE):
        expected = greedy(inner, prompt_of(PROMPT), STEPS)[1]
    with mlx_sparse.sparse(wrapped, SPARSE) as report:
        assert mx.array_equal(greedy(wrapped, prompt_of(PROMPT), STEPS)[1], expected)
    assert report.sparse_calls == report.served_layers * STEPS
