"""Test `mlx-sparse advise`: bytes of a decode step, thresholds, the recommendation and errors."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import commands
import mlx.core as mx
import pytest
from json_tables import read_tables
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from report_rows import row
from tiny_models import build, write

from mlx_sparse import cli
from mlx_sparse.core.base import Method
from mlx_sparse.lm import loading
from mlx_sparse.lm.model import disable, enable, plan_of
from mlx_sparse.methods import Gather, Sample, SparQ, Streaming, read_toml
from mlx_sparse.tools import advise
from mlx_sparse.tools.advise import Page
from mlx_sparse.tools.decode_traffic import LayerCache, Served, Traffic, layer_caches, traffic_of, weights_read
from mlx_sparse.tools.evaluate.variants import Variant
from mlx_sparse.tools.quality import Attempt, Quality
from mlx_sparse.tools.terminal import WIDTH
from mlx_sparse.tools.tune.results import Measured, Tuned
from mlx_sparse.tools.verdict import COPY, TEXT

DATA = read_tables(__file__)

pytestmark = pytest.mark.slow  # commands

K32, K128 = 32_768, 131_072


# Bytes


@pytest.mark.parametrize(
    ("family", "config", "per_token", "short", "long"),
    [("llama", DATA["llama"], 131_072, 49, 79), ("qwen3_moe", DATA["qwen3_moe"], 98_304, 63, 87)],
)
def test_bytes_of_large_models_match_hand_counts(
    family: str, config: dict[str, Any], per_token: int, short: int, long: int
) -> None:
    """Compare the share of float16 KV caches in percent at 32k and 128k tokens, for 4-bit models that never run."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": family, **config}))
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=64, bits=4)
    before = mx.get_active_memory()
    traffic = traffic_of(model)
    assert mx.get_active_memory() - before < 1 << 20
    layers = config["num_hidden_layers"]
    assert set(traffic.caches) == {LayerCache("full", per_token // layers)} and len(traffic.caches) == layers
    # The hand count includes the input embedding, with 0.5625 bytes for each parameter.
    weights = traffic.weights + int(0.5625 * config["vocab_size"] * config["hidden_size"])
    by_hand = dataclasses.replace(traffic, weights=weights)
    assert (round(100 * by_hand.share(K32)), round(100 * by_hand.share(K128))) == (short, long)


def test_weights_read_count_tied_embeddings_and_active_experts() -> None:
    def nbytes(model: Any, name: str = "") -> int:
        parameters: Any = tree_flatten(model.parameters())
        return sum(array.nbytes for path, array in parameters if name in path)

    apart, tied, mixed = build("llama"), build("llama", tie_word_embeddings=True), build("qwen3_moe")
    assert weights_read(apart) == nbytes(apart) - nbytes(apart, "embed_tokens")
    assert weights_read(tied) == nbytes(tied)
    experts = nbytes(mixed, "switch_mlp")
    assert experts > 0
    assert weights_read(mixed) == nbytes(mixed) - nbytes(mixed, "embed_tokens") - experts // 2  # 2 of 4


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"full": 2}),
        ("gemma3_text", {"window": 2, "full": 2}),
        ("deepseek_v3", {"latent": 2}),
        ("mamba", {"linear": 2}),
    ],
)
def test_cache_bytes_per_layer_match_real_caches(family: str, kinds: dict[str, int]) -> None:
    model = build(family)
    kept = layer_caches(model)
    assert Counter(one.kind for one in kept) == kinds
    caches: Any = make_prompt_cache(model)
    model(mx.ones((1, 12), mx.int32), cache=caches)
    rows = [array for cache in caches if hasattr(cache, "keys") for array in (cache.keys, cache.values)]
    states: Any = [tree_flatten(cache.state) for cache in caches if not hasattr(cache, "keys")]
    arrays = [array for state in states for _, array in state if array is not None]
    taken = sum(array[:, :, :12].nbytes for array in rows) + sum(array.nbytes for array in arrays)
    assert sum(one.nbytes(12) for one in kept) == taken > 0
    for one in kept:
        assert one.nbytes(1 << 20) == one.nbytes(one.window or 1 << 20)


def test_shared_caches_count_once_per_reader() -> None:
    (shared,) = (one for one in layer_caches(build("gemma4_text", **GEMMA4)) if one.kind == "full")
    assert shared.readers == 2
    assert Traffic(0, (shared,)).kv(9) == 2 * shared.nbytes(9)


GEMMA4 = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 16, "sliding_window_pattern": 2},
    **{"global_head_dim": 32, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
}


def test_speedup_bound_is_the_ratio_of_bytes() -> None:
    model = build("gemma3_text")
    enable(model, "sparq:rank=4,top_k=8")
    plan = plan_of(model)
    assert plan is not None
    (one,) = [Served(config, layer, count) for (config, layer), count in plan.layers.items()]
    disable(model)
    assert one.layers == 2
    S, D, heads = 1000, 16, 2
    dense = 2 * heads * 4 * (2 * S * D + 2 * D)
    sparse = 2 * heads * 4 * (S * 4 * 9 // 32 + 2 * 8 * D + 4 * D)
    assert (one.dense_bytes(S), one.saved(S)) == (dense, dense - sparse)
    traffic = Traffic(10**6, (LayerCache("full", 2 * heads * 2 * D * 4),))
    total = 10**6 + S * 2 * heads * 2 * D * 4
    assert traffic.bound(S, [one]) == pytest.approx(total / (total - dense + sparse))
    assert one.saved(8) == 0


# Quality


def attempt(
    attn: str, share: float = 0.25, *, kl: float = 0.01, agreement: float = 1.0, text: float = 1.0, calls: int = 9
) -> Attempt:
    rows = [row(attn, task=task, sparse_calls=calls) for task in (COPY, TEXT)]
    for i, value in enumerate((agreement, text)):
        mean = dataclasses.replace(rows[i].mean, kl=kl, agreement=value)
        rows[i] = dataclasses.replace(rows[i], mean=mean)
    return Attempt(Variant(attn.partition(":")[0], attn, "1/4"), share, rows)


@pytest.mark.parametrize(
    ("figures", "right"),
    [
        ({"kl": 0.05, "agreement": 0.9, "text": 0.8}, True),
        ({"kl": 0.051}, False),
        ({"kl": float("nan")}, False),
        ({"agreement": 0.88}, True),  # within two standard errors of the threshold for 400 tokens
        ({"agreement": 0.86}, False),
        ({"text": 0.75}, False),  # in both tasks
        ({"calls": 0}, False),
    ],
)
def test_attempt_passes_within_both_task_thresholds(figures: dict[str, float], right: bool) -> None:
    assert attempt("sparq", **figures).passes == right


def page_of(found: Quality | None, family: str = "llama", **changes: Any) -> Page:
    model = build("llama")
    traffic = traffic_of(model)
    candidates, refused = advise._candidates(model, ["sparq:rank=4"])
    made = Page("m", family, "chip", "2026-01-02", 4096, None, traffic, candidates, refused, "a text", found)
    return dataclasses.replace(made, **changes)


def quality_of(oracle: list[Attempt], attempts: list[Attempt], accuracy: float = 0.9) -> Quality:
    return Quality([row("dense", accuracy, task=task) for task in (COPY, TEXT)], oracle, attempts, [])


def test_advice_is_negative_if_oracle_selection_fails() -> None:
    bad, good = attempt("oracle_top_k:top_k=511", kl=1), attempt("oracle_top_k:top_k=511")
    oracle_fails = page_of(quality_of([bad], []))
    assert oracle_fails.advice()[-2].startswith("Not safe for this model, see the numbers: on this text, even the best")
    # If the oracle fails, a method that passes does so by chance.
    assert page_of(quality_of([bad], [attempt("sparq:rank=4,top_k=128")])).chosen is None is oracle_fails.chosen
    assert page_of(quality_of([good], [attempt("oracle_top_k:top_k=300")])).chosen is None
    none = page_of(quality_of([good], [attempt("sparq:rank=4,top_k=128", kl=1)]))
    assert none.advice()[-2].startswith("Not safe for this model, see the numbers: none of these methods passes")
    assert none.advice()[-1].startswith("Stay with dense attention: mlx_lm.generate --model m")
    blind = page_of(quality_of([good], [], accuracy=0.1))
    assert blind.advice()[0].startswith("Dense attention copies this text badly")
    assert page_of(None, candidates=[]).advice()[0].startswith("Not worth it on this machine: no method can serve")


def test_cheapest_passing_method_is_recommended() -> None:
    attempts = [
        attempt("sparq:rank=8,top_k=256,dense_below=0", 0.5),
        attempt("sparq:rank=4,top_k=126,dense_below=0", 0.25),
        attempt("sparq:rank=2,top_k=62,dense_below=0", 0.125, kl=1),
    ]
    found = page_of(quality_of([attempt("oracle_top_k:top_k=511")], attempts), crossover=900)
    assert (
        str(found.chosen) == "sparq:rank=4"
    )  # sparse at the crossover length and longer, with at least the default number of keys
    assert found.advice()[0].startswith("`sparq:rank=4,top_k=126,dense_below=0` is the cheapest")
    use = "mlx_lm.generate --model m --attn sparq:rank=4"
    assert found.advice()[2:] == [f"Use it from 900 tokens on: {use}"] and str(found).endswith(use)
    below = page_of(found.quality, crossover=5000).advice()[2:]
    reason = "Not worth it on this machine below 5,000 tokens; --context is 4,096."
    assert below == [reason, f"For longer prompts: {use}"]
    assert max(map(len, str(found).splitlines())) <= WIDTH
    assert "passes" in str(found) and "fails" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["attn"] == "sparq:rank=4"
    assert re.fullmatch(r"At 4,096 tokens, a decode step is at most \d+\.\d\d x faster, by bytes\.", found.advice()[1])
    heavy = dataclasses.replace(found, traffic=dataclasses.replace(found.traffic, weights=10**12))
    assert heavy.advice()[1].startswith("At 4,096 tokens, a decode step is at most 1.00 x")


@pytest.mark.parametrize(
    ("accuracy", "dense", "seconds", "recommended"),
    [(0.892, 0.9, 0.9, True), (0.88, 0.9, 0.9, False), (0.9, 0.9, 1.1, False), (0.4, 0.4, 0.9, False)],
    ids=["good", "inaccurate", "slow", "unsolved"],
)
def test_prefill_method_is_recommended_if_it_is_faster_and_keeps_the_accuracy(
    accuracy: float, dense: float, seconds: float, recommended: bool, tmp_path: Path
) -> None:
    rows = [
        Measured(config, {"needle": right, "copying": right}, density, 0.1, time)
        for config, right, density, time in ((None, dense, 1.0, 1.0), (Gather(share=0.4), accuracy, 0.5, seconds))
    ]
    quality = quality_of([attempt("oracle_top_k:top_k=511")], [attempt("sparq:rank=4,top_k=126,dense_below=0")])
    found = page_of(quality, tuned=[Tuned(4097, (4096,), rows[0], rows[1:], rows[1], rows[1])])
    attn = "gather:share=0.4+sparq:rank=4" if recommended else "sparq:rank=4"
    assert found.advice()[-1].endswith(f" --attn {attn}")
    stay = "stay dense: no method is faster and keeps 99% of an accuracy of at least 0.5"
    assert f"For prefill, {'use `gather:share=0.4`' if recommended else stay}. " in " ".join(str(found).split())
    data = found.as_dict()
    assert (data["attn"], [row["method"] for row in data["prefill"]]) == (attn, ["dense", "gather:share=0.4"])
    path = tmp_path / "attn.toml"
    path.write_text(advise.toml(found.recommended, "m", "2026-01-02", ""))
    assert "+".join(map(str, read_toml(path)[0].values())) == attn


def test_saved_ranges_load(tmp_path: Path) -> None:
    config = Sample(ranges="16384:0.9:0.95:2/32768:0.8:0.9:1")
    path = tmp_path / "attn.toml"
    path.write_text(advise.toml([config], "m", "2026-01-02", ""))
    assert read_toml(path)[0] == {"sample": config}


@pytest.mark.parametrize(
    "config",
    [
        SparQ(rank=8, top_k=256, component_score="query_key", reallocate=True, local_window=16),
        SparQ(reallocate=False, dense_below=4096),
        Streaming(recent_tokens=495),
        SparQ(),
    ],
    ids=str,
)
def test_saved_file_loads_as_attn_config(tmp_path: Path, config: Method) -> None:
    path = tmp_path / "attn.toml"
    path.write_text(advise.toml([config], 'a "name"\n[h2o]', "2026-01-02", "a\ntext"))
    assert read_toml(path)[0] == {config.name: config}


# The command

WORDS = commands.text(6000)
SHORT = ["--passage=512", "--limit=1", "--context=4k", "--methods=sparq:rank=4,streaming", "--budget=1/2,1/8"]


def test_command_stops_at_a_failing_budget_and_saves(tmp_path: Path, without_torch: dict[str, str]) -> None:
    model, text, saved = tmp_path / "model", tmp_path / "text.txt", tmp_path / "attn.toml"
    write(model)
    text.write_text(WORDS)
    # All components select as the exact scores do.
    methods = "--methods=sparq:rank=16,streaming,gather:chunk=128,dense_below=0,gather:chunk=128"
    arguments = ["advise", str(model), "--text", str(text), *SHORT, methods, "--json", "--save", str(saved)]
    environment = os.environ | without_torch | {"XDG_CACHE_HOME": str(tmp_path)}
    done = commands.run(["-m", "mlx_sparse.cli", *arguments], environment)
    found = json.loads(done.stdout)
    tries = [(one["attn"].partition(":")[0], one["budget"], one["passes"]) for one in found["attempts"]]
    oracle = [("oracle_top_k", "1/2", True), ("oracle_top_k", "1/8", False)]
    assert tries == [*oracle, ("sparq", "1/2", True), ("streaming", "1/2", False)]  # SparQ cannot meet one eighth
    assert all(one_row["sparse_calls"] for one in found["attempts"] for one_row in one["rows"])
    assert found["methods"][0]["served"] == 2
    assert [row["density"] for row in found["prefill"]] == [1, 1, pytest.approx(0.55, abs=0.1)]
    assert done.returncode == 0 and found["attn"].startswith("sparq:rank=16")
    assert [str(config) for config in read_toml(saved)[0].values()] == [found["attn"]]


def test_uniform_attention_fails_every_selection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_torch: dict[str, str]
) -> None:
    """Zero the queries, so that all keys have the same weight and every selection loses information."""
    file, text, saved = tmp_path / "model" / "model.safetensors", tmp_path / "text.txt", tmp_path / "attn.toml"
    write(tmp_path / "model")
    weights: Any = mx.load(str(file))
    flat = {name: array * ("q_proj" not in name) for name, array in weights.items()}
    mx.eval(flat)
    mx.save_safetensors(str(file), flat, {"format": "mlx"})
    text.write_text(WORDS)
    assert cli.main(["advise", str(tmp_path / "model"), "--text", str(text), *SHORT, "--save", str(saved)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^oracle_top_k: +1/2 +copying .* fails$", out, re.MULTILINE)
    assert "\nsparq:rank=4,top_k" not in out and "\nstreaming:" not in out  # nothing else was run
    assert "\nNot safe for this model, see the numbers: on this text, even the best" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= WIDTH
    assert not saved.exists()


def test_unreachable_budget_and_short_text_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    common = ["advise", str(tmp_path / "model"), "--text", str(text), "--methods", "sparq:rank=4"]
    for more, message in (
        (["--budget", "1/100000"], "--budget: expected a share that can be met at 1,024 keys, got none"),
        (["--passage", "4k"], "--limit: expected 4 x 4,"),
        (["--methods", "sparq:rank=4,gather", "--context", "4k"], "--limit: expected 4 x 4,096 tokens of text"),
    ):
        assert cli.main([*common, *more]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_unsupported_model_reports_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "model", "gemma2")
    assert cli.main(["advise", str(tmp_path / "model"), "--methods", "sparq:rank=4"]) == 1
    out = capsys.readouterr().out
    attention = "mlx_lm.models.base.scaled_dot_product_attention"
    reason = f"`sparq:rank=4` cannot run: model: expected attention through {attention}, got gemma2, which never calls"
    assert reason in " ".join(out.split())
    assert "Not worth it on this machine: no method can serve a layer of this model." in out


def test_no_quality_reads_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "model", "gemma3_text")
    assert (
        cli.main(["advise", str(tmp_path / "model"), "--no-quality", "--context", "5k", "--methods", "sparq:rank=4"])
        == 0
    )
    out = capsys.readouterr().out
    assert "2 window of 16 tokens, 2 full" in out
    out = " ".join(out.split())
    assert "`sparq:rank=4` serves 2 of 4; 2 with a sliding window (RotatingKVCache); sparse at" in out
    assert " 5,120 " in out
    assert "The model's context length, 4,096, is less than --context 5,120." in out
    assert "KL" not in out


def test_save_without_quality_is_refused_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["advise", str(tmp_path / "missing"), "--no-quality", "--save", str(tmp_path / "attn.toml")]
    assert cli.main(arguments) == 2
    assert "--save: expected none with --no-quality, which recommends no method, got " in capsys.readouterr().err


# Families


def test_unfit_families_get_a_warning() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")
    for family in loading.UNFIT:
        line = loading.unfit_warning(family)
        assert line is not None and "\n" not in line and line.startswith(family)
        assert f"`{family}`" in docs
        assert importlib.import_module(f"mlx_lm.models.{family}")
    assert loading.unfit_warning("llama") is None
    warned = page_of(None, "gemma4").advice()
    assert warned[0].startswith("Warning: gemma4 is known to be unfit for sparse attention: ")


def test_attn_warns_before_the_first_token(tmp_path: Path, without_torch: dict[str, str]) -> None:
    write(tmp_path / "unfit", "gemma4_text", **GEMMA4)
    write(tmp_path / "fit")
    for name, warns in (("unfit", 1), ("fit", 0)):
        arguments = ["generate", "--model", str(tmp_path / name), "--prompt", "w1 w2", "--max-tokens", "2"]
        done = commands.run(
            ["-m", "mlx_sparse.cli", *arguments, "--attn", "sparq:rank=4"], dict(os.environ) | without_torch
        )
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"\[mlx-sparse\] gemma4_text is known to be unfit", done.stderr)) == warns
