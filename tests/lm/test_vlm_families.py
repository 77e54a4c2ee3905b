"""Test that mlx-vlm's models decode sparsely as mlx-lm's do, bit for bit, family by family."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version

import family_models
import mlx.core as mx
import models_survey
import pytest
import tier
import vlm_models
import vlm_table
from tiny_models import caches_of, call

import mlx_sparse
from mlx_sparse.core import reasons

ROWS = {row.family: row for row in vlm_table.read()}
EQUAL = [family for family, row in ROWS.items() if row.equal]
HERE = [family for family in EQUAL if family in vlm_table.families()]  # an older mlx-vlm has fewer


@pytest.mark.parametrize("family", tier.some(HERE, 24))
def test_sparse_logits_equal_those_of_mlx_lm(family: str) -> None:
    found = vlm_table.facts(family)
    assert found.equal, found
    if version("mlx-vlm") in vlm_table.FACTS.read_text(encoding="utf-8").splitlines()[0]:
        assert found == ROWS[family]


def test_the_page_has_the_saved_facts() -> None:
    page = vlm_table.PAGE.read_text(encoding="utf-8")
    for family in ROWS:
        assert f"`{family}`" in page
    assert re.search(rf"For {len(EQUAL)} families", page) and len(EQUAL) >= 20


def test_mistral4_is_sparse_in_every_layer() -> None:
    text = family_models.config_of("mistral4")
    text["v_head_dim"] = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]  # 128 of 128 in Mistral Small 4
    vision = {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "head_dim": 16}
    model = vlm_models.of_config({"model_type": "mistral3", "text_config": text, "vision_config": vision})
    mx.eval(model.parameters())
    with mlx_sparse.sparse(model, vlm_table.FEW) as report:
        models_survey.step_logits(model, family_models.prompt_of(vlm_table.PROMPT), [1])
    assert report.sparse_calls == report.served_layers == report.layers == text["num_hidden_layers"]


@pytest.mark.parametrize(
    ("family", "text", "tower"), [("kimi_vl", "deepseek_v3", "moonvit"), ("deepseek_vl_v2", "deepseek_v2", "vision")]
)
def test_values_of_another_head_dim_are_served(family: str, text: str, tower: str) -> None:
    vision = {"model_type": tower, "merge_kernel_size": [2, 2]}
    config = {"model_type": family, "text_config": family_models.config_of(text), "vision_config": vision}
    model = vlm_models.of_config({**config, "projector_config": {}})
    mx.eval(model.language_model.parameters())
    prompt = family_models.prompt_of(vlm_table.PROMPT)
    dense = models_survey.step_logits(model, prompt, [1, 2])
    for attn in (models_survey.EVERY_KEY, vlm_table.FEW):
        with mlx_sparse.sparse(model, attn) as report:
            found = models_survey.step_logits(model, prompt, [1, 2])
        assert report.sparse_calls == 2 * report.layers == 2 * report.served_layers > 0
        close = bool(mx.abs(found - dense).max() < 1e-4 * mx.abs(dense).max())
        assert close == (attn is models_survey.EVERY_KEY)
    assert mx.array_equal(models_survey.step_logits(model, prompt, [1, 2]), dense)


@pytest.mark.parametrize(("family", "layers"), [("deepseek_v3", 4), ("kimi_linear", 1)])
def test_absorbed_attention_is_sparse_for_one_query_and_dense_for_several(family: str, layers: int) -> None:
    _, model = vlm_models.any_pair(family)
    prompt, tokens = family_models.prompt_of(100)[:96], family_models.prompt_of(100)[96:]
    dense = models_survey.step_logits(model, prompt, tokens)
    every = dataclasses.replace(models_survey.EVERY_KEY, component_score="query_key")
    with mlx_sparse.sparse(model, every) as report:
        found = models_survey.step_logits(model, prompt, tokens)
        assert report.sparse_calls == 4 * layers
        cache = caches_of(model)
        call(model, [prompt], cache)
        call(model, [tokens], cache)
    assert mx.abs(found - dense).max() < 1e-4 * mx.abs(dense).max()
    assert report.dense_calls[reasons.A_FEW] == layers
    assert report.sparse_calls == 4 * layers
