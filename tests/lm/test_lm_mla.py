"""Test sparse decode steps of models with multi-head latent attention (MLA), and under additive masks."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import family_models
import mlx.core as mx
import pytest
from lm_prompts import tiny_tokenizer
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from models_survey import EVERY_KEY, step_logits
from tiny_models import build, call, prompt_of, write

import mlx_sparse
from mlx_sparse.calibrate.timing import Layer, time_steps
from mlx_sparse.core import reasons
from mlx_sparse.core.base import Step
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods import SparQ, parse
from mlx_sparse.tools import advise
from mlx_sparse.tools.quality import captured_shares

FAMILIES = {  # number of layers with MLA of the tiny models
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_vl", "mistral4"), 4),
    **dict.fromkeys(("kimi_linear", "kimi_k3", "bailing_hybrid", "bailing_moe_v3"), 1),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), 8),
}
ON = "component_score=low_rank"
FEW = "sparq:rank=4,top_k=8,dense_below=0,component_score=query_key"
LOW_RANK = f"sparq:rank=2,top_k=8,dense_below=0,{ON}"
EVERY = replace(EVERY_KEY, component_score="low_rank")
KEYS = replace(EVERY, component_score="query_key")
PROMPT, STEPS = 90, 3
TOKENS = family_models.prompt_of(PROMPT + STEPS)


def logits(model: Any) -> mx.array:
    return step_logits(model, TOKENS[:PROMPT], TOKENS[PROMPT:])


def close(found: mx.array, wanted: mx.array) -> bool:
    return bool(mx.abs(found - wanted).max() < 1e-4 * mx.abs(wanted).max())


@pytest.mark.parametrize("backend", ["ops", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_selected_key_gives_dense_attention(family: str, backend: str) -> None:
    model = family_models.build(family)
    dense = logits(model)
    with mlx_sparse.sparse(model, EVERY, backend=backend) as report:
        every = logits(model)
    assert close(every, dense)
    assert report.served_layers == FAMILIES[family]
    assert report.sparse_calls == FAMILIES[family] * STEPS
    assert report.dense_calls == {reasons.PROMPT: FAMILIES[family]}
    assert reasons.LATENT not in report.dense_layers
    for attn in (FEW, LOW_RANK):
        with mlx_sparse.sparse(model, attn, backend=backend) as report:
            few = logits(model)
        assert not close(few, dense)
        assert report.sparse_calls == FAMILIES[family] * STEPS
        assert 0 < report.sparse_bytes < report.dense_bytes
    assert mx.array_equal(logits(model), dense), "disable restores dense attention"


@pytest.mark.parametrize("attn", ["sparq", "streaming", "sparq:preset=default,rank=4", f"{FEW} lossless"])
def test_mla_is_off_by_default_and_the_error_names_the_setting(attn: str) -> None:
    model, (attn, _, lossless) = build("deepseek_v3"), attn.partition(" ")
    with pytest.raises(mlx_sparse.ConfigError) as refused:
        mlx_sparse.enable(model, attn, lossless=bool(lossless))
    message = str(refused.value)
    assert f": 2 {reasons.LATENT}. With MLA, quality was measured on a converted model only." in message
    assert "`mlx-sparse advise MODEL --text FILE`" in message and f"sparq:{ON}" in message and "\n" not in message


def test_low_rank_is_refused_in_other_layers() -> None:
    with pytest.raises(
        mlx_sparse.ConfigError, match="attn: expected a layer with multi-head latent attention for sparq"
    ):
        mlx_sparse.enable(build(), LOW_RANK)


@pytest.mark.parametrize("L", [2, 16, 40])
def test_several_queries_are_dense_with_their_reason(L: int) -> None:
    model = family_models.build("deepseek_v3")
    cache, same = make_prompt_cache(model), make_prompt_cache(model)
    with mlx_sparse.sparse(model, FEW) as report:
        call(model, [TOKENS[:40]], cache)
        call(model, [TOKENS[40:41]], cache)
        before = report.dense_calls.copy()
        found = call(model, [TOKENS[41 : 41 + L]], cache)
        again = call(model, [TOKENS[41 + L : 42 + L]], cache)
        assert report.dense_calls - before == {reasons.A_FEW if L <= 16 else reasons.PROMPT: 4}
        assert report.sparse_calls == 8
    wanted = [call(model, [TOKENS[:41]], same), call(model, [TOKENS[41 : 41 + L]], same)][1]
    assert found.shape == wanted.shape and mx.isfinite(again).all()


def replayed(model: Any, tokens: list[int], cache: list[Any]) -> mx.array:
    return mx.concatenate([call(model, [[token]], cache)[:, -1] for token in tokens])


@pytest.mark.parametrize("history", ["trim", "copy", "file", "trim-to-less-than-a-group"])
def test_a_cache_with_a_history_gives_the_logits_of_a_new_cache(history: str, tmp_path: Path) -> None:
    model = build("deepseek_v3", num_hidden_layers=2)
    tokens = prompt_of(150)
    with mlx_sparse.sparse(model, FEW) as report:
        new, cache = make_prompt_cache(model), make_prompt_cache(model)
        for each in (new, cache):
            call(model, [tokens[:128]], each)
            replayed(model, tokens[128:140], each)
        wanted = replayed(model, tokens[140:], new)
        if history == "copy":
            kept, cache = cache, copy.deepcopy(cache)
            replayed(model, prompt_of(12, seed=5), kept)
        elif history == "file":
            save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
            cache = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        else:
            replayed(model, prompt_of(12, seed=5), cache)
            trim_prompt_cache(cache, 12)
        if history == "trim-to-less-than-a-group":
            trim_prompt_cache(cache, 100)
            call(model, [tokens[40:128]], cache)
            replayed(model, tokens[128:140], cache)
        calls = report.sparse_calls
        found = replayed(model, tokens[140:], cache)
        assert report.sparse_calls == calls + 20
    assert close(found, wanted)


def test_a_padded_batch_gives_the_texts_of_dense_attention() -> None:
    model, tokenizer = build("deepseek_v3"), tiny_tokenizer()
    prompts = [prompt_of(length, seed=length) for length in (24, 9, 17, 30)]
    texts = batch_generate(model, tokenizer, prompts, max_tokens=6).texts
    with mlx_sparse.sparse(model, EVERY) as report:
        assert batch_generate(model, tokenizer, prompts, max_tokens=6).texts == texts
    assert report.sparse_calls > 0
    with mlx_sparse.sparse(model, f"sparq:rank=4,top_k=6,dense_below=20,{ON}") as report:
        found = batch_generate(model, tokenizer, prompts, max_tokens=6).texts
    assert found[1] == texts[1], "the short sequence has at most 15 keys"
    assert found != texts
    assert report.dense_calls[reasons.SHORT_SEQUENCES] > 0


def test_dense_attention_and_calibration_take_latents() -> None:
    model = family_models.build("deepseek_v3")
    dense = logits(model)
    with mlx_sparse.sparse(model, "dense", backend="cpu"):
        assert mx.array_equal(logits(model), dense)
    step = Step(1, 4, 32, 4, "cpu", latent=True)
    for backend in ("ops", "cpu"):
        pairs = time_steps(
            SparQ(rank=4, top_k=8, component_score="query_key"), Layer(backend, step, mx.float32), 256, 0
        )
        assert len(pairs) >= 5
    assert Layer("cpu", step, mx.float32).row == 32 * 4


def test_advise_prints_the_captured_share_and_recommends_top_k(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    folder, text = write(tmp_path / "model", "deepseek_v3", kv_lora_rank=96, **experts), tmp_path / "text.txt"
    text.write_text(commands.text(6000))
    few = ["--passage=512", "--limit=1", "--budget=1/2", "--methods=sparq", "--context=4k"]
    assert advise.main([str(folder), "--text", str(text), *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["methods"][0]["method"] == f"sparq:{ON}" and found["methods"][0]["served"] == 2
    assert [(one["layer"], one["rank"]) for one in found["captured"]] == [(0, 32), (1, 32)]
    (tried,) = parse(found["attempts"][-1]["attn"])
    assert tried.rank == 32 and 128 < tried.top_k < 256, "the budget determines only the keys"
    assert found["attn"] == f"sparq:top_k=2048,{ON}"
    assert advise.main([str(folder), "--text", str(text), *few]) == 0
    least = min(found["captured"], key=lambda one: one["share"])
    line = f"Captured share of 32 components: least {least['share']:.2f}, in layer {least['layer']}; median 0."
    assert line in capsys.readouterr().out


def test_captured_shares_are_those_of_a_decode_step() -> None:
    model, prompt = build("deepseek_v3"), prompt_of(100)
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, LOW_RANK):
        call(model, [prompt[:-1]], cache)
        call(model, [prompt[-1:]], cache)
    fitted = [entry.aux_states["sparq"].projections[0] for entry in cache]
    for layer, projection in enumerate(fitted):
        (found,) = captured_shares(model, prompt, [layer], projection.keys.shape[3])
        assert found.share == pytest.approx(projection.share.item(), abs=1e-6)


MASK = -0.5 * mx.abs(mx.arange(PROMPT + 1) - PROMPT)[None, None, None] * mx.array([1.0, 0.3, 0.1, 0.0])[:, None, None]


@pytest.mark.parametrize("mask", [MASK, MASK[0, :1], mx.where(mx.arange(PROMPT + 1) == 5, -mx.inf, 0.0)])
@pytest.mark.parametrize("attn", [KEYS, "streaming:sink_tokens=2,recent_tokens=6", replace(KEYS, reallocate=True)])
def test_an_additive_mask_is_served_by_sparq(attn: Any, mask: mx.array) -> None:
    """Test ALiBi for each head and for all heads, and a mask that hides a key."""
    model, embeddings = build(), mx.random.normal((1, 1, 64), key=mx.random.key(3))
    cache = make_prompt_cache(model)
    dense, outs = copy.deepcopy(cache), []
    with mlx_sparse.sparse(model, attn) as report:
        call(model, [prompt_of(PROMPT)], cache)
        with Call(plan_of(model), cache):
            outs.append(model.layers[0](embeddings, mask, cache[0]))
        assert report.sparse_calls == (attn is KEYS)
        assert report.dense_calls[reasons.ARRAY_MASK] == (attn is not KEYS)
    call(model, [prompt_of(PROMPT)], dense)
    assert close(outs[0], model.layers[0](embeddings, mask, dense[0]))
