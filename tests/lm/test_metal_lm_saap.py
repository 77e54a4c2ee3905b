"""SAAP's decode steps of models by the Metal kernels, from mlx-lm's caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from fixtures_msl import Launched
from lm_prompts import tiny_tokenizer
from mlx_lm import batch_generate
from msl import Metal
from saap_artefacts import write_artefact
from tiny_models import build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.methods import SAAP

PROMPT, STEPS, LAYERS = 60, 10, 2


def attn(path: Path, **changes: Any) -> SAAP:
    values: dict[str, Any] = {"probes": 2, "recent_tokens": 16, "fold_every": 4, "dense_layers": 0, "dense_below": 0}
    return SAAP(artefact=str(path), **{**values, **changes})


def test_a_model_decodes_on_metal_as_on_ops_and_hands_over_whole_buffers(
    metal: Metal, tmp_path: Path, launched: list[Launched]
) -> None:
    model, prompt = build("qwen3"), prompt_of(PROMPT)
    file = write_artefact(tmp_path / "a", model)
    generated, figures = {}, {}
    for backend in ("ops", "metal"):
        with mlx_sparse.sparse(model, attn(file), backend=backend) as report:
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


def test_every_bucket_gives_the_dense_tokens_of_a_ragged_batch(metal: Metal, tmp_path: Path) -> None:
    model, tokenizer = build(), tiny_tokenizer()
    prompts = [prompt_of(length, length) for length in (50, 41)]
    file = write_artefact(tmp_path / "a", model)
    dense = list(batch_generate(model, tokenizer, prompts, max_tokens=STEPS).texts)
    with mlx_sparse.sparse(model, attn(file, probes=8), backend="metal") as report:
        assert list(batch_generate(model, tokenizer, prompts, max_tokens=STEPS).texts) == dense
    assert report.sparse_calls > 0
    assert report.buckets.selectivity == 1
