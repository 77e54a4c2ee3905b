"""Drafts and checks over longer answers, over many samples, and of models that came with heads for several tokens."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import drafts_same
import family_models
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler

import mlx_sparse
from mlx_sparse.lm.drafts import steps

SPARQ = "sparq:rank=2,top_k=8,dense_below=0"


@pytest.mark.parametrize("family", drafts_same.FAMILIES)
def test_a_long_answer_to_a_long_prompt_is_that_of_dense_decoding(family: str) -> None:
    row = drafts_same.compared(family_models.build(family), SPARQ, tiny_models.prompt_of(300), 48)
    assert row["same"] == 48
    assert 0 < row["accepted"] < row["drafted"]
    assert row["apart"] < 1e-4


@pytest.mark.parametrize("drafts", [1, 2])
def test_tokens_and_pairs_are_sampled_as_often_as_dense_attention_says(drafts: int) -> None:
    """Pairs too: a number drawn twice would tie a token to the one before."""
    letters, count = 6, 150
    model, prompt = tiny_models.build(vocab_size=letters), [token % letters for token in tiny_models.prompt_of(40)]
    model.lm_head.weight = 0.5 * model.lm_head.weight  # so that all are drawn
    chances = drafts_same.exact(model, prompt, letters)
    kept = drafts_same.cached(model, prompt)
    seen = np.zeros_like(chances)
    mx.random.seed(2)
    with mlx_sparse.lossless(model, SPARQ, draft_tokens=drafts) as report:
        for _ in range(count):
            tokens, _ = drafts_same.said(
                steps.generate_step, model, prompt[-1:], kept, drafts_same.SAMPLED, sampler=make_sampler(1.0)
            )
            seen[tuple(tokens)] += 1
    assert 0 < sum(report.drafts.accepted) < 0.9 * sum(report.drafts.examined)
    chance = np.random.default_rng(0)
    for first, second in itertools.combinations(range(drafts_same.SAMPLED), 2):
        others = tuple({*range(drafts_same.SAMPLED)} - {first, second})
        p, n = drafts_same.pooled(chances.sum(axis=others).ravel(), seen.sum(axis=others).ravel())
        assert p.size > letters
        simulated = drafts_same.chi_square(chance.multinomial(count, p / p.sum(), size=2000), p)
        assert drafts_same.chi_square(n, p) < np.quantile(simulated, 0.999), (first, second)


@pytest.mark.parametrize(("family", "extra"), [("mimo", "model.mtp_layers.0."), ("qwen3_5", "mtp.layers.0.")])
def test_heads_for_several_tokens_are_left_out_as_mlx_lm_does(family: str, extra: str, tmp_path: Path) -> None:
    """mlx-lm drops their weights as it loads, so that what drafts is the method alone."""
    model = family_models.build(family)
    folder = tiny_models.write(tmp_path / family)  # for its tokenizer
    (folder / "config.json").write_text(
        json.dumps({**family_models.config_of(family), "eos_token_id": tiny_models.EOS})
    )
    weights: dict[str, Any] = dict(tree_flatten(model.parameters()))
    head = {extra + "self_attn.q_proj.weight": mx.ones((64, 64))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights | head, {"format": "mlx"})
    model, tokenizer, *_ = load(str(folder))
    prompt = tiny_models.prompt_of(80)
    expected = [response.token for response in stream_generate(model, tokenizer, prompt, max_tokens=20)]
    with mlx_sparse.lossless(model, SPARQ, draft_tokens=3) as report:
        assert [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=20)] == expected
    assert report.drafts.checks > 0
