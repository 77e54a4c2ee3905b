"""Test prefill and decode steps of models on the Metal kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_models
import mlx.core as mx
import numpy as np
import pytest
from fixtures_msl import Launched
from lm_prompts import tiny_tokenizer
from mlx_arrays import to_mlx, to_numpy
from mlx_lm import batch_generate
from mlx_lm.models.cache import make_prompt_cache
from models_survey import EVERY_KEY, step_logits
from msl import Metal
from saap_artefacts import ONLINE, attn, write_artefact
from tiny_models import build, call, greedy, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache
from mlx_sparse.core import reasons, registry
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods import Sample

SAMPLE = Sample(block_size=32, alpha_column=0.5, alpha_slash=0.5, dense_below=0)


@pytest.mark.parametrize("make", [SparseKVCache, lambda: SparseBatchKVCache([0, 0])], ids=["cache", "batch"])
def test_prefill_of_a_cache_on_metal_equals_ops_with_whole_buffers(
    metal: Metal, make: Callable[[], Any], launched: list[Launched]
) -> None:
    rng = np.random.default_rng(3)
    cache = make()
    for L in (70, 200, 1, 130):  # the buffers have more rows than are in use
        k, v = (to_mlx(rng.normal(size=(2, 2, L, 64)), "f32") for _ in range(2))
        cache.update_and_fetch(k, v)
        if L == 1:
            continue
        queries = to_mlx(rng.standard_t(3, size=(2, 4, L, 64)), "f32")
        results = [cache.attend_prefill(queries, SAMPLE, scale=0.125, backend=backend) for backend in ("metal", "ops")]
        (out, lse, blocks), (ops_out, ops_lse, ops_blocks) = results
        assert mx.array_equal(blocks, ops_blocks)
        allowed = 64 * np.finfo(np.float32).eps * float(mx.abs(v).max())
        np.testing.assert_allclose(to_numpy(out), to_numpy(ops_out), rtol=0, atol=allowed)
        np.testing.assert_allclose(np.array(lse), np.array(ops_lse), rtol=0, atol=allowed)
    assert cache.keys.shape[2] > cache.length
    options = {"scale": 0.125, "backend": "metal"}
    chosen = cache.select_prefill(queries, SAMPLE, **options, max_density=0.999)
    in_two = cache.attend_prefill(queries, SAMPLE, **options, blocks=chosen)
    assert all(mx.array_equal(one, other) for one, other in zip(in_two, results[0], strict=True))
    inputs = [given for given, _ in launched]
    for scores, _, attended in (inputs[-3:], inputs[-6:-3]):
        assert scores["keys"] is attended["keys"] is cache.keys
        assert attended["values"] is cache.values


def test_values_of_another_head_dim_stay_dense_on_metal_with_the_reason(metal: Metal) -> None:
    model = build("deepseek_v2")
    with pytest.raises(mlx_sparse.ConfigError, match=f": 2 {reasons.OTHER_HEAD_DIMS}\\.$"):
        mlx_sparse.enable(model, "sparq:rank=4", backend="metal")
    assert registry.resolve("auto", "sparq", D=24, G=1, Dv=16) == "ops"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prefill_and_decode_on_metal_equal_ops(metal: Metal, family: str) -> None:
    model, prompt = build(family), prompt_of(200)
    generated, densities = {}, {}
    # With reallocation the kernels use float32 logits; otherwise they may round int4 scores to 1/16 nat.
    methods = f"{SAMPLE}+sparq:rank=8,top_k=16,reallocate=true,dense_below=0"
    for backend in ("ops", "metal"):
        with mlx_sparse.sparse(model, methods, backend=backend) as report:
            generated[report.backend] = greedy(model, prompt, 4)[0]
        assert (report.prefill.calls, report.dense_calls) == (2, {})
        densities[report.backend] = report.prefill.density
    assert generated["metal"] == generated["ops"]
    assert densities["metal"] == densities["ops"]
    if metal.emulated:
        names = {launched.kernel for launched in metal.launches}
        assert names >= {"sample_scores", "sample_sums", "attend_blocks", "sparq_code_scores"}


@pytest.mark.parametrize(
    "decode", ["sparq:rank=8,top_k=16,dense_below=75", f"{ONLINE},probes=2"], ids=["sparq", "saap"]
)
def test_ragged_batch_on_metal_equals_single_prompts_on_ops(metal: Metal, decode: str) -> None:
    """Test prompts that join during the second chunk of another prompt, and are padded on the left."""
    model, tokenizer = build(), tiny_tokenizer()
    prompts, options = [prompt_of(length, length) for length in (130, 66, 150)], {"max_tokens": 4}
    chunks = {"prefill_step_size": 96, "prefill_batch_size": 2, "completion_batch_size": 2}
    with mlx_sparse.sparse(model, f"{SAMPLE}+{decode}", backend="ops"):
        alone = [batch_generate(model, tokenizer, [one], **options, **chunks).texts[0] for one in prompts]
    with mlx_sparse.sparse(model, f"{SAMPLE}+{decode}", backend="metal") as report:
        assert batch_generate(model, tokenizer, prompts, **options, **chunks).texts == alone
    assert report.prefill.calls > 0
    assert report.sparse_calls > 0


PROMPT, STEPS, LAYERS = 60, 10, 2


def test_saap_on_metal_equals_ops_with_whole_buffers(metal: Metal, tmp_path: Path, launched: list[Launched]) -> None:
    model, prompt = build("qwen3"), prompt_of(PROMPT)
    file = write_artefact(tmp_path / "a", model)
    generated, figures = {}, {}
    for backend in ("ops", "metal"):
        with mlx_sparse.sparse(model, attn(file, 2, merge_every=4), backend=backend) as report:
            tokens, logits = greedy(model, prompt, STEPS)
        assert report.backend == backend
        assert report.sparse_calls == LAYERS * STEPS
        generated[backend], figures[backend] = (tokens, logits), report.buckets.as_dict()
    assert generated["metal"][0] == generated["ops"][0]
    assert float(mx.abs(generated["metal"][1] - generated["ops"][1]).max()) < 1e-3
    assert figures["metal"] == figures["ops"]
    attended = [inputs for inputs, _ in launched if "keys" in inputs]
    assert attended
    assert all(inputs["keys"].shape[2] > PROMPT + STEPS for inputs in attended)
    if metal.emulated:
        assert {report.kernel for report in metal.launches} >= {"saap_route", "saap_indices"}


FEW = "sparq:component_score=query_key,key_bits=16,rank=8,top_k=24,dense_below=0"


@pytest.mark.parametrize("attn", [FEW, replace(EVERY_KEY, component_score="low_rank", rank=3)], ids=["few", "low_rank"])
def test_latents_on_metal_equal_ops(metal: Metal, attn: Any) -> None:
    """Test multi-head latent attention. `low_rank` has 8-bit logits, so it attends to all keys here."""
    model, tokens, found = family_models.build("deepseek_v3"), family_models.prompt_of(83), {}
    for backend in ("ops", "metal"):
        with mlx_sparse.sparse(model, attn, backend=backend) as report:
            found[backend] = step_logits(model, tokens[:80], tokens[80:])
        assert (report.backend, report.sparse_calls) == (backend, 4 * 3)
    np.testing.assert_allclose(*map(np.array, found.values()), rtol=0, atol=1e-4)


def test_a_bias_for_each_head_on_metal_equals_ops(metal: Metal) -> None:
    model, embeddings, outs = build(), mx.random.normal((1, 1, 64), key=mx.random.key(3)), []
    mask = -0.5 * mx.abs(mx.arange(91) - 90)[None, None, None] * mx.array([1.0, 0.3, 0.1, 0.0])[:, None, None]
    for backend in ("ops", "metal"):
        cache = make_prompt_cache(model)
        with mlx_sparse.sparse(model, FEW, backend=backend) as report:
            call(model, [prompt_of(90)], cache)
            with Call(plan_of(model), cache):
                outs.append(np.array(model.layers[0](embeddings, mask, cache[0])))
        assert report.sparse_calls == 1
    np.testing.assert_allclose(*outs, rtol=0, atol=1e-4)
