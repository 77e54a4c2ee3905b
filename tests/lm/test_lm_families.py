"""Test sparse decoding of every family of mlx-lm, and that it equals dense decoding if every key is selected."""

from __future__ import annotations

import sys
from types import ModuleType

import family_models
import mlx.core as mx
import models_survey
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base
from tiny_models import FAMILIES, MORE, UNSERVED, EveryStepSparQ, build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.lm import seam
from mlx_sparse.methods import SparQ

SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
PROMPT, STEPS = 24, 10
WITH_SLIDING_LAYERS = {"gemma3_text": 2, "gpt_oss": 1}
WITH_QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text", "olmo2"}


def largest_difference(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())


SERVED = {**FAMILIES, "deepseek_v2": MORE["deepseek_v2"]}
EVERY_STEP = EveryStepSparQ(rank=4, top_k=64)
REALLOCATE = EveryStepSparQ(rank=16, top_k=64, reallocate=True)  # not with the sinks of gpt_oss


@pytest.mark.parametrize(
    ("family", "attn"),
    [(family, EVERY_STEP) for family in SERVED] + [(family, REALLOCATE) for family in SERVED if family != "gpt_oss"],
)
def test_the_sparse_step_over_every_key_gives_the_dense_tokens(family: str, attn: SparQ):
    model, prompt = build(family), prompt_of(PROMPT)
    tokens, logits = greedy(model, prompt, STEPS)
    with mlx_sparse.sparse(model, attn) as report:
        same_tokens, same_logits = greedy(model, prompt, STEPS)
    assert report.sparse_calls == report.served_layers * STEPS
    assert same_tokens == tokens
    # Float32 through a few layers. A wrong sink of gpt_oss, mask or scale would give a far larger difference.
    assert largest_difference(same_logits, logits) < 1e-4 * float(mx.abs(logits).max())


@pytest.mark.parametrize("family", SERVED)
def test_small_top_k_is_sparse_in_every_served_layer_until_disable_restores_the_model(family: str):
    model, prompt = build(family), prompt_of(PROMPT)
    cls, names = type(model), [name for name, _ in tree_flatten(model.parameters())]
    modules = {type(module).__module__ for _, module in model.named_modules()}
    before = {name: getattr(sys.modules[name], seam.NAME, None) for name in modules}
    tokens, logits = greedy(model, prompt, STEPS)
    with mlx_sparse.sparse(model, SPARSE) as report:
        assert [name for name, _ in tree_flatten(model.parameters())] == names
        assert isinstance(model, cls)
        other_tokens, other_logits = greedy(model, prompt, STEPS)
    assert type(model) is cls
    assert {name: getattr(sys.modules[name], seam.NAME, None) for name in modules} == before
    assert base.scaled_dot_product_attention is seam.original
    assert greedy(model, prompt, STEPS)[0] == tokens
    layers = SERVED[family].get("num_hidden_layers", 2)
    assert report.layers == layers
    assert report.served_layers == layers - WITH_SLIDING_LAYERS.get(family, 0) == layers - report.dense_layers.total()
    assert report.sparse_calls == report.served_layers * STEPS
    assert other_tokens != tokens
    assert largest_difference(other_logits[:1], logits[:1]) > 0.1, "the first step has the same inputs"
    assert report.sparse_bytes < report.dense_bytes


@pytest.mark.parametrize("family", UNSERVED)
def test_family_without_servable_layers_is_refused_by_name(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))  # olmo only checks that the package exists
    model = build(family)
    cls = type(model)
    with pytest.raises(mlx_sparse.ConfigError, match=rf"^model: expected .*, got {family}\b.*\.$"):
        mlx_sparse.enable(model, "sparq:rank=4")
    assert type(model) is cls


# Families whose values have another head dim than their keys: the layers that are sparse, KV heads, G, D and Dv.
VALUE_DIMS = {
    **dict.fromkeys(("deepseek_v2", "minicpm3", "youtu_llm"), (4, 4, 1, 24, 16)),
    "mimo_v2_flash": (1, 2, 2, 16, 8),
}


@pytest.mark.parametrize("backend", ["ops", "auto"])
@pytest.mark.parametrize("family", VALUE_DIMS)
def test_values_of_another_head_dim_are_served_and_their_bytes_are_counted(family: str, backend: str):
    layers, heads, G, D, Dv = VALUE_DIMS[family]
    model, prompt = family_models.build(family), prompt_of(PROMPT)
    dense = models_survey.step_logits(model, prompt, [5, 6])
    with mlx_sparse.sparse(model, models_survey.EVERY_KEY, backend=backend):
        every = models_survey.step_logits(model, prompt, [5, 6])
    with mlx_sparse.sparse(model, "sparq:rank=3,top_k=4,key_bits=16,dense_below=0", backend=backend) as report:
        few = models_survey.step_logits(model, prompt, [5, 6])
    largest, lengths = float(mx.abs(dense).max()), (PROMPT + 1, PROMPT + 2)
    assert largest_difference(every, dense) < 1e-4 * largest
    assert largest_difference(few, dense) > 1e-3 * largest
    assert report.sparse_calls == 2 * layers
    assert report.dense_bytes == layers * heads * 4 * sum((S + 1) * (D + Dv) for S in lengths)
    moved = sum((3 + 2 * G) * S + 4 * (D + Dv) + D + 3 * Dv for S in lengths)  # components, scores, rows, mean value
    assert report.sparse_bytes == layers * heads * 4 * moved
    assert mx.array_equal(models_survey.step_logits(model, prompt, [5, 6]), dense), "disable restores dense attention"


def test_report_counts_the_bytes_of_a_step():
    model = build()
    with mlx_sparse.sparse(model, "sparq:rank=3,top_k=4,key_bits=16") as report:
        greedy(model, prompt_of(PROMPT), 1)
    layers, kv_heads, G, S, D, size = 2, 2, 2, PROMPT + 1, 16, 4
    assert report.sparse_calls == layers
    assert report.dense_bytes == layers * kv_heads * size * (2 * S * D + 2 * D)
    scores = 2 * G * S  # written and read
    assert report.sparse_bytes == layers * kv_heads * size * (3 * S + scores + 2 * 4 * D + 4 * D)


@pytest.mark.parametrize("family", ["llama", "nanochat", *sorted(WITH_QK_NORM)])
def test_component_score_depends_on_the_qk_norm(family: str):
    """Test families with and without q/k-norm. The norm of nanochat has no weights."""
    with mlx_sparse.sparse(build(family, num_key_value_heads=4), SPARSE) as report:
        pass
    assert ("component_score=query_key" in report.attn) == (family != "llama")


def test_one_query_head_per_kv_head_uses_query_scores_and_reallocation():
    with mlx_sparse.sparse(build(num_key_value_heads=4), SPARSE) as report:
        pass
    assert "component_score=query," in report.attn and "reallocate" not in report.attn


@pytest.mark.parametrize("attn", ["flexgen", "sparq:rank=4,reallocate=true"])
def test_attention_sinks_are_refused_without_a_plain_softmax(attn: str):
    with pytest.raises(mlx_sparse.ConfigError, match=r"1 with a sliding window .*, 1 with attention sinks\.$"):
        mlx_sparse.enable(build("gpt_oss"), attn)


def test_layers_with_their_own_attention_stay_dense():
    # Every second layer of phi3small has its own block-sparse attention in mlx-lm.
    with mlx_sparse.sparse(build("phi3small", dense_attention_every_n_layers=2), "sparq:rank=4") as report:
        assert report.served_layers == 1
        assert report.dense_layers == {"with custom attention code or without attention": 1}
