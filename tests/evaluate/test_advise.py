"""`mlx-sparse advise`: what a step reads, the pass mark, what is recommended, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import build, write

from mlx_sparse import calibrate, cli
from mlx_sparse.calibrate import Calibration
from mlx_sparse.checks import SparseAttentionError
from mlx_sparse.lm import unfit_models as families
from mlx_sparse.lm.model import disable, enable, plan_of
from mlx_sparse.methods import Method, SparQ, Streaming, parse, read_toml
from mlx_sparse.tools.advise import command, page, quality
from mlx_sparse.tools.advise.page import Page
from mlx_sparse.tools.advise.quality import COPY, TEXT, Change, Figures, Quality, Try
from mlx_sparse.tools.advise.traffic import Kept, Served, Traffic, here, kept_by, side_bytes, traffic_of, weights_read
from mlx_sparse.tools.evaluate.variants import Arm

pytestmark = pytest.mark.slow  # commands

K32, K128 = 32_768, 131_072


# Bytes

# A model of these sizes, with 4-bit weights and float16 caches: bytes of a token in its caches, active weights in GB,
# share of the caches in a step at 32k and at 128k in percent, and the best possible speed-up at 128k. Worked out by
# hand from the published sizes, every parameter at 0.5625 bytes.
TABLE = {
    "Qwen3-30B-A3B": (98_304, 1.86, 63, 87, 7.9),
    "MiniMax-M2": (253_952, 5.6, 60, 86, 6.9),
    "Llama-3.1-8B": (131_072, 4.5, 49, 79, 4.8),
    "GLM-4.5-Air": (188_416, 6.75, 48, 79, 4.7),
    "Llama-3.3-70B": (327_680, 39.7, 21, 52, 2.1),
    "Qwen3.8-27B": (65_536, 15.2, 12, 36, 1.6),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_share_of_the_caches_is_the_one_worked_out_by_hand(name: str) -> None:
    per_token, weights, short, long, best = TABLE[name]
    traffic = Traffic(int(weights * 1e9), (Kept("full", 1, per_token, per_token),))
    assert (round(100 * traffic.share(K32)), round(100 * traffic.share(K128))) == (short, long)
    assert round(1 / (1 - traffic.share(K128)), 1) == best


LLAMA_8B = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256, "rope_theta": 5e5},
    "tie_word_embeddings": False,
}
QWEN3_30B = {
    **{"hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 151936, "rope_theta": 1e6},
    **{"tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": K128},
}


@pytest.mark.parametrize(
    ("name", "family", "config"), [("Llama-3.1-8B", "llama", LLAMA_8B), ("Qwen3-30B-A3B", "qwen3_moe", QWEN3_30B)]
)
def test_models_of_these_sizes_are_counted_as_by_hand(name: str, family: str, config: dict[str, Any]) -> None:
    """Whole models in 4 bits, of which nothing is ever computed; by hand the input embedding is counted as well."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": family, **config}))
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=64, bits=4)
    before = mx.get_active_memory()
    traffic = traffic_of(model)
    assert mx.get_active_memory() - before < 1 << 20
    per_token, _, short, long, _ = TABLE[name]
    (kept,) = traffic.kept
    assert (kept.kind, kept.layers, kept.per_token) == ("full", config["num_hidden_layers"], per_token)
    by_hand = dataclasses.replace(
        traffic, weights=traffic.weights + int(0.5625 * config["vocab_size"] * config["hidden_size"])
    )
    assert (round(100 * by_hand.share(K32)), round(100 * by_hand.share(K128))) == (short, long)


def test_an_embedding_is_read_where_it_is_the_output_and_of_experts_the_active_ones() -> None:
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
def test_what_layers_keep_is_what_their_caches_take(family: str, kinds: dict[str, int]) -> None:
    model = build(family)
    kept = list(kept_by(model))
    assert {one.kind: one.layers for one in kept} == kinds
    caches: Any = make_prompt_cache(model)
    model(mx.ones((1, 12), mx.int32), cache=caches)
    rows = [array for cache in caches if hasattr(cache, "keys") for array in (cache.keys, cache.values)]
    states: Any = [tree_flatten(cache.state) for cache in caches if not hasattr(cache, "keys")]
    arrays = [array for state in states for _, array in state if array is not None]
    taken = sum(array[:, :, :12].nbytes for array in rows) + sum(array.nbytes for array in arrays)
    assert sum(one.nbytes(12) for one in kept) == taken > 0
    for one in kept:
        assert one.nbytes(1 << 20) == one.nbytes(one.window or 1 << 20)


def test_layers_that_share_a_cache_read_it_each() -> None:
    (shared,) = (one for one in kept_by(gemma4()) if one.kind == "full")
    assert (shared.layers, shared.read) == (1, 2 * shared.per_token)


def gemma4(**changes: Any) -> Any:
    return build("gemma4_text", **GEMMA4, **changes)


GEMMA4 = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 16, "sliding_window_pattern": 2},
    **{"global_head_dim": 32, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
}


def served_by(model: Any, method: str) -> list[Served]:
    enable(model, method)
    plan = plan_of(model)
    assert plan is not None
    found = [Served(config, layer, count) for (config, layer), count in plan.layers.items()]
    disable(model)
    return found


def test_the_bound_is_what_is_left_of_the_bytes() -> None:
    model = build("gemma3_text")
    served = served_by(model, "sparq:rank=4,top_k=8")
    (one,) = served
    assert one.layers == 2
    S, D, heads = 1000, 16, 2
    dense = 2 * heads * 4 * (2 * S * D + 2 * D)
    sparse = 2 * heads * 4 * (S * 4 * 9 // 32 + 2 * 8 * D + 4 * D)
    assert (one.dense_bytes(S), one.saved(S)) == (dense, dense - sparse)
    traffic = Traffic(10**6, (Kept("full", 2, 2 * heads * 2 * D * 4, 2 * heads * 2 * D * 4),))
    total = 10**6 + S * 2 * heads * 2 * D * 4
    assert traffic.bound(S, served) == pytest.approx(total / (total - dense + sparse))
    assert traffic.best(S, served) == pytest.approx(total / (total - dense))
    assert one.saved(8) == 0


def test_what_a_method_keeps_is_what_it_keeps_in_a_model() -> None:
    model, S = build("llama"), 5 * 2048
    keys = 2 * 2 * S * 16 * 4  # layers, KV heads, keys, D, float32
    moments = side_bytes(served_by(model, "sparq:rank=4,key_bits=16,component_score=query_key"), S)
    assert side_bytes(served_by(model, "sparq:rank=4,key_bits=16"), S) == keys
    coded = side_bytes(served_by(model, "sparq:rank=4,component_score=query_key"), S)
    centres = 2 * 2 * 16 * 4
    assert coded == keys * 9 // 64 + centres  # of float32: 4 bits and two numbers of 16 bits in 64 keys
    assert moments is not None
    assert keys < moments < keys + 10_000  # sums that do not grow
    assert side_bytes(served_by(model, "quest"), S) == pytest.approx(keys / 8, rel=0.01)
    assert side_bytes(served_by(model, "streaming"), S) == 0
    assert side_bytes(served_by(model, "h2o"), S) is None


def test_times_of_this_machine_are_told_where_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build("llama")
    traffic, served = traffic_of(model), served_by(model, "sparq:rank=4")
    unknown = here(traffic, served, Calibration(), 8192)
    assert (unknown.how, unknown.ratio, unknown.step) == (calibrate.MODELLED, None, None)
    points = [[S, ratio, ratio, ratio] for S, ratio in ((2048, 0.5), (4096, 1.5), (9000, 2.0))]
    answer = {"points": points, "time": 1}
    calibrate.write_answer(calibrate.question(served[0].config, served[0].layer), answer)
    known = here(traffic, served, Calibration(), 8192)
    assert (known.keys, known.how, known.ratio, known.timed) == (4096, calibrate.MEASURED, 2.0, 9000)
    total = traffic.total(8192)
    assert known.step == pytest.approx(total / (total - served[0].dense_bytes(8192) / 2))
    below = here(traffic, served, Calibration(), 2048)
    assert (below.ratio, below.step) == (0.5, 1.0)  # it stays dense there


# Quality


def figures(kl: float, agreement: float = 1.0, tokens: int = 100) -> Figures:
    return Figures(kl, 0.0, agreement, 0.9, tokens)


MARK = {COPY: figures(0.04, 0.95), TEXT: figures(0.05, 0.9)}


@pytest.mark.parametrize(
    ("copied", "text", "right"),
    [
        (figures(0.04, 0.95), figures(0.05, 0.9), True),
        (figures(0.01), figures(0.01), True),
        (figures(0.041), figures(0.01), False),  # in passages of every kind
        (figures(0.01), figures(0.051), False),
        (figures(0.01, 0.90), figures(0.01), True),  # within two standard errors of the mark
        (figures(0.01, 0.85), figures(0.01), False),
        (figures(0.01, 0.90, 10_000), figures(0.01), False),
        (figures(float("nan")), figures(0.01), False),
    ],
)
def test_the_mark_holds_for_every_kind_of_passage(copied: Figures, text: Figures, right: bool) -> None:
    assert quality.passes({COPY: copied, TEXT: text}, MARK) == right


def test_the_mark_is_the_most_that_a_harmless_change_brings() -> None:
    small, large = figures(0.001, 0.99), figures(0.02, 0.8)
    changes = [Change("a", {COPY: large, TEXT: small}), Change("b", {COPY: small, TEXT: large}), Change("c", {}, "no")]
    mark = quality.mark_of(changes)
    assert {kind: (one.kl, one.agreement) for kind, one in mark.items()} == {COPY: (0.02, 0.8), TEXT: (0.02, 0.8)}


def test_without_a_harmless_change_there_is_no_mark() -> None:
    with pytest.raises(SparseAttentionError, match="expected one with which a harmless change can be tried, got a: no"):
        quality.mark_of([Change("a", {}, "no")])


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_harmless_change_is_one_and_leaves_nothing_behind(family: str, bits: int) -> None:
    model = build(family, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, tie_word_embeddings=True)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    tokens = mx.array([commands.tokens(20)])

    def logits() -> mx.array:
        found: mx.array = model(tokens).astype(mx.float32)
        mx.eval(found)
        return found

    before, parameters = logits(), dict(tree_flatten(model.parameters()))
    contexts: list[Callable[[], Any]] = [lambda: quality.in_bits(model, 5), lambda: quality.in_bits(model, 8)]
    if family == "llama" or bits:  # MLX has no experts in bfloat16 on a CPU
        contexts.append(lambda: quality.in_type(model, mx.bfloat16))
    off = []
    for change in contexts:
        with change():
            off.append(float(mx.abs(logits() - before).max()))
        after = dict(tree_flatten(model.parameters()))
        assert after.keys() == parameters.keys()
        assert all(after[name] is array for name, array in parameters.items())
        assert mx.array_equal(logits(), before)
    assert all(size > 0 for size in off)
    assert off[0] > off[1]  # 5 bits change more than 8


def tried(attn: str, right: bool, share: float = 0.25, kl: float = 0.01) -> Try:
    return Try(Arm(attn.partition(":")[0], attn, "1/4"), share, dict.fromkeys((COPY, TEXT), figures(kl)), True, right)


def page_of(found: Quality | None, family: str = "llama", **changes: Any) -> Page:
    model = build("llama")
    traffic = traffic_of(model)
    prospects, refused = command._prospects(model, ["sparq:rank=4"], traffic, 4096)
    made = Page("m", family, "chip", "2026-01-02", 4096, [4096], None, traffic, prospects, refused, "a text", found)
    return dataclasses.replace(made, **changes)


def quality_of(oracle: list[Try], tries: list[Try]) -> Quality:
    return Quality(MARK, [Change("weights", MARK)], MARK, oracle, tries, [])


def test_it_says_do_not_use_it_where_the_best_choice_of_keys_fails() -> None:
    hopeless = page_of(quality_of([tried("oracle_top_k:top_k=511", False)], []))
    assert hopeless.advice()[0].startswith("Do not use it: even the best choice of keys (`oracle_top_k:top_k=511`)")
    assert hopeless.chosen is None
    bound = page_of(quality_of([tried("oracle_top_k:top_k=511", True)], [tried("oracle_top_k:top_k=300", True)]))
    assert bound.chosen is None  # a bound saves nothing
    # A method that passes all the same is luck.
    lucky = page_of(quality_of([tried("oracle_top_k:top_k=511", False)], [tried("sparq:rank=4,top_k=128", True)]))
    assert lucky.chosen is None
    none = page_of(quality_of([tried("oracle_top_k:top_k=511", True)], [tried("sparq:rank=4,top_k=128", False)]))
    assert none.advice()[0].startswith("Do not use it with these methods and budgets")
    dense = {kind: dataclasses.replace(one, accuracy=0.1) for kind, one in MARK.items()}
    blind = page_of(dataclasses.replace(quality_of([tried("oracle_top_k:top_k=511", True)], []), dense=dense))
    assert blind.advice()[-1].startswith("Dense attention itself hardly copies here")
    unserved = page_of(None, prospects=[])
    assert unserved.advice()[0].startswith("Do not use it: no method serves")


def test_it_recommends_the_cheapest_that_passes() -> None:
    tries = [
        tried("sparq:rank=8,top_k=256,dense_below=0", True, 0.5),
        tried("sparq:rank=4,top_k=126,dense_below=0", True, 0.25),
        tried("sparq:rank=2,top_k=62,dense_below=0", False, 0.125),
    ]
    found = page_of(quality_of([tried("oracle_top_k:top_k=511", True)], tries))
    assert str(found.chosen) == "sparq:rank=4"  # where it pays, and with no fewer keys than the default
    assert found.advice()[0].startswith('Use --attn "sparq:rank=4": `sparq:rank=4,top_k=126,dense_below=0` is the')
    text = str(found)
    assert "passes" in text and "fails" in text and "pass mark" in text
    assert json.loads(json.dumps(found.as_dict()))["attn"] == "sparq:rank=4"
    assert re.fullmatch(r"At 4,096 tokens a step gets at most \d+\.\d\d x as fast, by bytes\.", found.advice()[1])
    heavy = dataclasses.replace(found, traffic=dataclasses.replace(found.traffic, weights=10**12))
    assert heavy.advice()[1].startswith("It is hardly worth it at 4,096 tokens: by bytes a step gets at most 1.00 x")


@pytest.mark.parametrize(
    "config",
    [
        SparQ(rank=8, top_k=256, component_score="query_key", reallocate=True, local_window=16),
        SparQ(reallocate=False, dense_below=4096),
        parse("quest:page_size=32")[0],
        Streaming(recent_tokens=495),
        SparQ(),
    ],
    ids=str,
)
def test_what_is_saved_is_what_attn_config_reads(tmp_path: Path, config: Method) -> None:
    path = tmp_path / "attn.toml"
    path.write_text(page.toml(config, 'a "name"\n[h2o]', "2026-01-02", "a\ntext"))
    assert read_toml(path)[0] == {config.name: config}


# The command

WORDS = commands.text(6000)
SHORT = [
    "--passage",
    "512",
    "--limit",
    "1",
    "--context",
    "4k",
    "--methods",
    "sparq:rank=4,streaming",
    "--budget",
    "1/2,1/8",
]


def test_the_command_tries_methods_until_they_fail_and_saves_what_passes(
    tmp_path: Path, blas_environment: dict[str, str], without_torch: dict[str, str]
) -> None:
    model, text, saved = tmp_path / "model", tmp_path / "text.txt", tmp_path / "attn.toml"
    write(model)
    text.write_text(WORDS)
    arguments = ["advise", str(model), "--text", str(text), *SHORT, "--json", "--save", str(saved)]
    environment = blas_environment | without_torch | {"XDG_CACHE_HOME": str(tmp_path)}
    done = commands.run(["-m", "mlx_sparse.cli", *arguments], environment)
    found = json.loads(done.stdout)
    tries = found["quality"]["tries"]
    of_method: dict[str, list[dict[str, Any]]] = {}
    for one in tries:
        of_method.setdefault(one["attn"].partition(":")[0], []).append(one)
    assert next(iter(of_method)) == "oracle_top_k"
    for some in of_method.values():
        assert [one["budget"] for one in some] == ["1/2", "1/8"][: len(some)]
        assert all(one["passes"] for one in some[:-1]) and (len(some) == 2 or not some[0]["passes"])
        assert all(one["sparse"] for one in some)
    for change in found["quality"]["changes"]:
        assert change["note"] or 0 < change[COPY]["kl"] <= found["quality"]["mark"][COPY]["kl"]
    assert found["methods"][0]["served"] == 2
    assert done.returncode == (0 if found["attn"] else 1)
    assert saved.exists() == bool(found["attn"])
    if saved.exists():
        assert [str(config) for config in read_toml(saved)[0].values()] == [found["attn"]]


def test_where_every_key_counts_alike_no_choice_of_them_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_torch: dict[str, str]
) -> None:
    """Queries of zero attend to all keys alike, and half of the keys are not half of what they say."""
    file, text, saved = tmp_path / "model" / "model.safetensors", tmp_path / "text.txt", tmp_path / "attn.toml"
    write(tmp_path / "model")
    weights: Any = mx.load(str(file))
    flat = {name: array * ("q_proj" not in name) for name, array in weights.items()}
    mx.eval(flat)
    mx.save_safetensors(str(file), flat, {"format": "mlx"})
    text.write_text(WORDS)
    assert cli.main(["advise", str(tmp_path / "model"), "--text", str(text), *SHORT, "--save", str(saved)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"\| `oracle_top_k:top_k=255` \(a bound\) \| 1/2 \|.*\| fails \|", out)
    assert "`sparq:rank=4,top_k" not in out and "`streaming:" not in out  # nothing else was run
    assert "\nDo not use it: even the best choice of keys (`oracle_top_k:top_k=255`) changes" in out
    assert not saved.exists()


def test_a_budget_out_of_reach_and_a_short_text_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    common = ["advise", str(tmp_path / "model"), "--text", str(text), "--methods", "sparq:rank=4"]
    for more, message in (
        (["--budget", "1/100000"], "--budget: expected a share within reach at 1,024 keys, got none"),
        (["--passage", "4k"], "--limit: expected 4 x 4,"),
    ):
        assert cli.main([*common, *more]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_model_that_nothing_serves_is_told_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "model", "glm4_moe_lite")
    assert cli.main(["advise", str(tmp_path / "model"), "--methods", "sparq:rank=4"]) == 1
    out = capsys.readouterr().out
    assert "2 latent" in out
    assert (
        "`sparq:rank=4` cannot run: model: expected an attention layer that sparq can serve, got glm4_moe_lite" in out
    )
    assert "Do not use it: no method serves a layer of this model." in out


def test_without_quality_nothing_is_read_or_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "model", "gemma3_text")
    assert (
        cli.main(["advise", str(tmp_path / "model"), "--no-quality", "--context", "5k", "--methods", "sparq:rank=4"])
        == 0
    )
    out = capsys.readouterr().out
    assert "2 window of 16 tokens, 2 full" in out
    assert "`sparq:rank=4` serves 2 of 4; 2 with a sliding window (RotatingKVCache)" in out
    assert "| 5,120 |" in out
    assert "The model is made for 4,096 tokens, fewer than the 5,120 asked about." in out
    assert "pass mark" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--methods", "sparc"], "attn: expected one of"),
        (["--methods", "sample"], "--methods: expected methods that decode, such as sparq, got sample"),
        (["--methods", "dense"], "--methods: expected a method such as sparq, got none"),
        (["--budget", "2"], "--budget: expected shares such as"),
        (["--context", "long"], "--context: expected numbers such as"),
        (["--passage", "100"], "--passage: expected an integer of at least 512, got 100"),
        (["--limit", "0"], "--limit: expected an integer of at least 1, got 0"),
        (["--seed=-1"], "--seed: expected an integer of at least 0"),
        (["--save", "/nowhere/a.toml"], "--save: expected a file in a folder that exists"),
        (["--save", "a.json"], r"--save: expected a file name in \.toml, got a.json"),
        (["--save", "pyproject.toml"], "--save: expected a new file or one of advise's, got pyproject.toml"),
        (["--text", "/nowhere/text"], "--text: expected readable UTF-8 text files"),
        (["/nowhere/model"], "--model: expected a model that mlx-lm can load, got /nowhere/model"),
        (["gemma-3-270m"], "--accept-licence gemma"),
    ],
)
def test_bad_input_gets_one_line_before_anything_is_loaded(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SparseAttentionError, match=message):
        command.main(argv)


# Families


def test_families_known_to_be_unfit_are_told_in_one_line() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")
    for family in families.UNFIT:
        line = families.warning(family)
        assert line is not None and "\n" not in line and line.startswith(family)
        assert f"`{family}`" in docs
        assert importlib.import_module(f"mlx_lm.models.{family}")
    assert families.warning("llama") is None
    warned = page_of(None, "gemma4").advice()
    assert warned[0].startswith("Warning: gemma4 is known to be unfit for this: ")


def test_attn_warns_of_them_before_the_first_token(tmp_path: Path, without_torch: dict[str, str]) -> None:
    write(tmp_path / "unfit", "gemma4_text", **GEMMA4)
    write(tmp_path / "fit")
    for name, warns in (("unfit", 1), ("fit", 0)):
        arguments = ["generate", "--model", str(tmp_path / name), "--prompt", "w1 w2", "--max-tokens", "2"]
        done = commands.run(
            ["-m", "mlx_sparse.cli", *arguments, "--attn", "sparq:rank=4"], dict(os.environ) | without_torch
        )
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"\[mlx-sparse\] gemma4_text is known to be unfit", done.stderr)) == warns
