"""Test tests/testing/mla_stand_in.py, which converts a Llama to MLA, and the study of scripts/mla.py."""

from __future__ import annotations

import os
import subprocess
import sys

import mla
import mla_stand_in
import mlx.core as mx
import pytest
from lm_prompts import tiny_tokenizer
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import build, prompt_of


@pytest.mark.parametrize("rotate", [None, 1])
def test_a_model_whose_other_slots_do_not_rotate_is_converted_exactly(
    rotate: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", head_dim=16, rope_theta=1e24)  # frequencies 1, 1e-3, 1e-6, ...
    monkeypatch.setattr(mla_stand_in, "ROPE_DIMS", 4 * model.args.num_key_value_heads)
    monkeypatch.setattr(mla_stand_in, "CONSTANT", 1000)
    tokens = prompt_of(60)
    config, weights = mla_stand_in.convert(model, tokens, rotate)
    converted = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(config))
    converted.load_weights([(name, mx.array(value, mx.float32)) for name, value in weights.items()])
    wanted, found = model(mx.array(tokens)[None]), converted(mx.array(tokens)[None])
    assert mx.abs(found - wanted).max() < 5e-3 * mx.abs(wanted).max()
    cache = make_prompt_cache(converted)
    converted(mx.array(tokens[:-1])[None], cache=cache)
    step = converted(mx.array(tokens[-1:])[None], cache=cache)
    assert mx.abs(step[:, -1] - found[:, -1]).max() < 1e-4 * mx.abs(wanted).max()


def test_the_study_measures_every_rule_in_both_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test scripts/mla.py on a random model."""
    monkeypatch.setattr(mla, "RANKS", (2, 4))
    monkeypatch.setattr(mla, "TOP_KS", (16, 64))
    monkeypatch.setattr(mla, "STEPS", 2)
    monkeypatch.setattr(deepseek_v3, "scaled_dot_product_attention", deepseek_v3.scaled_dot_product_attention)
    found = mla.measure(build("deepseek_v3"), tiny_tokenizer(), prompt_of(2000), 512, 2)
    rules = {f"{name}:rank={rank}" for name in ("query", "query_key", "low_rank") for rank in (2, 4)}
    expected = {(basis, rule) for basis in ("pca", "rotated") for rule in rules}
    expected |= {("any", "oracle_top_k"), ("any", "bias")}
    for task in ("text", "copying"):
        assert len(found[task]) == 2
        for recalls in found[task]:
            assert set(recalls) == expected
            best = recalls["any", "oracle_top_k"]
            assert all((0 < recall).all() and (recall <= best + 1e-6).all() for recall in recalls.values())
            for rank in (2, 4):
                pair = [recalls[basis, f"low_rank:rank={rank}"] for basis in ("pca", "rotated")]
                assert abs(pair[0] - pair[1]).max() < 0.01
    assert all(0 < share <= 1 for fit in found["fit"] for share in fit.values())


HOST_TIMES = """
import mla
from tiny_models import build
mla.CHUNK, mla.HOST_STEPS = 80, 8
for attn in ("", "sparq:component_score=low_rank,rank=4,top_k=16,dense_below=0"):
    times, kernels = mla.host_times(build("deepseek_v3"), attn)
    assert len(times) == 6 and (times > 0).all()
    assert kernels == (3 if attn else 0)
"""


def test_the_time_of_python_is_measured_dense_and_sparse() -> None:
    """Run in a new process, because prepared launches stay in memory."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", HOST_TIMES], env=path, check=True)
