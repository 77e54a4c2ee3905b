"""Test which layers of mlx-lm's models support SAAP, and the reasons of dense and rejected layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from saap_artefacts import LAYERS, ONLINE, PROMPT, STEPS, attn, write_artefact
from tiny_models import build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.core import reasons
from mlx_sparse.core.base import Step
from mlx_sparse.core.decide import PROCESSORS
from mlx_sparse.lm import rope as rope_module
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods import SAAP


@pytest.fixture
def artefact(model: Any, tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "model", model)


def test_first_layers_and_layers_missing_in_the_artefact_stay_dense(tmp_path: Path):
    model = build(num_hidden_layers=5)
    file = write_artefact(tmp_path / "a", model, without=(3,))
    with mlx_sparse.sparse(model, attn(file, dense_layers=2)) as report:
        greedy(model, prompt_of(PROMPT), STEPS)
    assert (report.layers, report.served_layers) == (5, 2)
    assert report.dense_layers == {reasons.FIRST_LAYERS: 2, reasons.NOT_IN_ARTEFACT: 1}
    assert report.sparse_calls == 2 * STEPS
    assert report.dense_calls[reasons.FIRST_LAYERS] == 2 * STEPS
    assert report.dense_calls[reasons.NOT_IN_ARTEFACT] == STEPS
    assert "2 of 5 layers" in str(report)


@pytest.mark.parametrize(
    ("family", "reason"),
    [(name, reasons.CHANGED_AFTER_ROPE) for name in ("hunyuan_v1_dense", "deepseek_v2")]
    + [("nanochat", reasons.ROPE_NOT_A_MODULE)],
)
def test_layers_without_tensors_before_rope_are_refused_by_name(family: str, reason: str):
    model = build(family)
    with pytest.raises(ConfigError, match=f"2 {reason}"):
        mlx_sparse.enable(model, f"{ONLINE},probes=2")
    assert mlx_sparse.report(model) is None


def test_length_dependent_rope_is_served_with_recorded_keys(tmp_path: Path):
    model = build("internlm2", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=16)
    tokens, _ = greedy(model, prompt_of(PROMPT), STEPS)
    with pytest.raises(ConfigError, match="dynamic NTK"):
        mlx_sparse.enable(model, f"{ONLINE},probes=2")
    file = str(tmp_path / "cache.safetensors")
    with mlx_sparse.sparse(model, attn(write_artefact(tmp_path / "a", model))) as report:
        cache = make_prompt_cache(model)
        assert greedy(model, prompt_of(PROMPT), STEPS, cache)[0] == tokens
        assert report.sparse_calls == LAYERS * STEPS
        save_prompt_cache(file, cache)
        greedy(model, [5], 3, load_prompt_cache(file))
    assert report.dense_calls[reasons.ROPE_BY_LENGTH] == 4 * LAYERS
    assert report.sparse_calls == LAYERS * STEPS


def test_layer_that_reads_keys_of_another_layer_is_dense(model: Any, artefact: Path):
    """Test a layer for which no router was trained with its queries and these keys."""
    with mlx_sparse.sparse(model, attn(artefact), backend="ops") as report:
        cache = make_prompt_cache(model)
        greedy(model, prompt_of(PROMPT), 1, cache)
        queries = mx.ones((1, 4, 1, 16))
        keys, values = (rows[..., : cache[0].offset, :] for rows in (cache[0].keys, cache[0].values))
        with Call(plan_of(model), cache) as call:
            assert call.attend(queries, keys, values, cache[0], 0.25, None, None) is None
    assert report.dense_calls[reasons.NOT_WRITTEN] == 1


def test_text_shorter_than_the_window_is_dense(model: Any, artefact: Path):
    prompt = prompt_of(PROMPT)
    tokens, logits = greedy(model, prompt, STEPS)
    for config, shortest in ((attn(artefact, recent_tokens=200), 202), (attn(artefact, dense_below=150), 150)):
        with mlx_sparse.sparse(model, config, backend="ops") as report:
            same, same_logits = greedy(model, prompt, STEPS)
        assert same == tokens
        assert mx.array_equal(same_logits, logits)
        assert report.sparse_calls == 0
        assert report.dense_calls[f"over fewer than {shortest:,} keys"] == LAYERS * STEPS
        assert "sparse calls: none" in str(report)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("truncated", ArtefactError, "got none that can be read .*file not fully covered"),
        ("missing", ArtefactError, "got none that can be read"),
        ("another model", ArtefactError, "expected one trained on this model"),
        ("another family", ArtefactError, "expected one for llama, got one for qwen3"),
        ("probes", ConfigError, "probes: expected at most the 8 buckets of .*, got 9"),
        ("none", ConfigError, "artefact: expected a file that mlx-sparse train-saap wrote, got none"),
        ("no layer", ConfigError, "expected an attention layer that saap can serve"),
    ],
)
def test_bad_input_is_one_error_and_changes_nothing(
    change: str, error: type[Exception], message: str, model: Any, artefact: Path
):
    config = attn(artefact)
    if change == "truncated":
        artefact.write_bytes(artefact.read_bytes()[:-10])
    elif change == "missing":
        artefact.unlink()
    elif change == "another model":
        write_artefact(artefact, build(seed=3))
    elif change == "another family":
        write_artefact(artefact, build("qwen3"))
    elif change == "probes":
        config = attn(artefact, 9)
    elif change == "none":
        config = SAAP()
    elif change == "no layer":
        config = attn(artefact, dense_layers=2)
    cls, ropes = type(model), [type(rope) for rope in rope_module.ropes(model)]
    with pytest.raises(error, match=message) as caught:
        mlx_sparse.enable(model, config)
    assert "\n" not in str(caught.value)
    assert type(model) is cls
    assert [type(rope) for rope in rope_module.ropes(model)] == ropes
    assert mlx_sparse.report(model) is None


def test_shortest_context_of_saap():
    """Check the modeled context length at which a step saves as much time as the additional GPU kernels cost."""
    config = SAAP(mode="online", buckets=1024, probes=32)
    step = Step(heads=8, G=4, D=128, itemsize=2, device="s", buckets=1024, network=(128 * 1024 + 1024 * 1024) * 2)
    shortest = config.shortest_context(step)
    assert 2048 < shortest < 65536
    cheap = Step(heads=8, G=4, D=128, itemsize=2, device="s", buckets=1024, network=128 * 1024 * 2)
    assert config.shortest_context(cheap) < shortest
    # Array operations cost 2.5 rows per row read; ids are read for every 16th key.
    ops = Step(8, 4, 128, 2, network=512 * 100, buckets=1024)
    assert config.shortest_context(ops) == round(2.5 * (2048 + 128 + 100) / (1 - 2.5 / 16) + 0.5)
    assert config.shortest_context() == 2.5 * (2048 + 128)
    native = Step(8, 4, 128, 2, "cpu", network=512 * 100, buckets=1024)
    assert config.shortest_context(native) == round(PROCESSORS * 8 * (2048 + 128 + 100) / (1 - 8 / 16))
    assert SAAP(mode="online", buckets=160, probes=32).shortest_context(Step(8, 4, 128, 2, buckets=160)) >= 1 << 40
    assert SAAP(mode="online", recent_tokens=16, probes=2).shortest_context(step) == 18
    assert SAAP(mode="online", dense_below=5000, probes=2).shortest_context(step) == 5000
    with_everything = SAAP(mode="online", buckets=64, probes=64)
    assert with_everything.shortest_context(Step(8, 4, 128, 2, "s", 64)) >= 1 << 40
