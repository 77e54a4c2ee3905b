"""mlx-lm's real commands with --attn, as a user starts them, on tiny models."""

from __future__ import annotations

import functools
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from forked import BIN, Finished, Forks, start
from tiny_models import prompt_of, words, write

pytestmark = pytest.mark.slow  # commands

SPARSE = ["--attn", "sparq:rank=4,top_k=4,dense_below=0"]
SAMPLE = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
BOTH = ["--attn", f"{SAMPLE}+{SPARSE[1]}"]
JSON = ["--attn-report", "json"]
COMMANDS = ["generate", "chat", "server", "benchmark", "cache_prompt", "evaluate"]
PROMPT, TOKENS, LAYERS = 40, 8, 2
STEPS = TOKENS + 1  # mlx-lm's last prompt token is a step, and it works one token ahead

SPELLINGS = {
    "mlx_lm.generate": ["mlx_lm.generate"],
    "mlx_lm generate": ["mlx_lm", "generate"],
    "python -m mlx_lm generate": ["python", "-m", "mlx_lm", "generate"],
    "mlx-sparse generate": ["mlx-sparse", "generate"],
}
WITHOUT_HOOK = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'CommandFinder'];"
    "from mlx_lm.generate import main; main()"
)
STARTED = {*(f"{name} sparse" for name in SPELLINGS), "without hook"}
GENERATE = ["--model", "llama", "--prompt", "-", "--max-tokens", str(TOKENS)]
DRAWN = ["--temp", "1", "--seed", "7"]
CHATS = ["mlx_lm.chat", "--model", "llama", "--max-tokens", "4", "--temp", "0.7", "--seed", "3"]
BENCHMARK = ["mlx_lm.benchmark", "--model", "llama", "-p", "32", "-g", "6", "-n", "1", *SPARSE, *JSON]
SAVE = ["mlx_lm.cache_prompt", "--model", "llama", "--prompt", "-", "--prompt-cache-file"]
RESUME = ["mlx_lm.generate", "--prompt", "w3 w4 w5", "--max-tokens", str(TOKENS), "--prompt-cache-file"]

LONG = ["mlx_lm.generate", "--model", "llama", "--prompt", words(prompt_of(300)), "--max-tokens", str(TOKENS)]

PACKED = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]
WIDE = ["mlx_lm.generate", "--model", "wide", *GENERATE[2:], *PACKED]

# Name: commands that run one after the other.
GOOD: dict[str, list[list[str]]] = {
    **{f"{name} sparse": [[*spelling, *GENERATE, *SPARSE, *JSON]] for name, spelling in SPELLINGS.items()},
    "dense": [["mlx_lm.generate", *GENERATE]],
    "without hook": [["python", "-c", WITHOUT_HOOK, *GENERATE]],
    "--attn dense": [["mlx_lm.generate", *GENERATE, "--attn", "dense"]],
    "no such model": [["mlx_lm.generate", "--model", "nowhere/at/all"]],
    "text report": [["mlx_lm.generate", *GENERATE, *SPARSE]],
    "short, modelled": [["mlx_lm.generate", *GENERATE, "--attn", "sparq:rank=4", "--no-calibrate"]],
    "short, measured": [["mlx_lm.generate", *GENERATE, "--attn", "sample+sparq:rank=4"]],
    "short, prompts": [["mlx_lm.generate", *GENERATE, "--attn", "sample"]],
    "windows": [["mlx_lm.generate", "--model", "gemma3", *GENERATE[2:], *SPARSE]],
    "no report": [["mlx_lm.generate", *GENERATE, *SPARSE, "--attn-report", "off"]],
    "toml": [["mlx_lm.generate", *GENERATE, "--attn-config", "good.toml", *JSON]],
    "toml and attn": [["mlx_lm.generate", *GENERATE, "--attn-config", "good.toml", "--attn", "sparq:rank=2", *JSON]],
    "chat": [["mlx_lm.chat", "--model", "llama", "--max-tokens", "4", *BOTH, *JSON]],
    "benchmark": [BENCHMARK],
    "benchmark -b 2": [[*BENCHMARK, "-b", "2"]],
    "saved dense, resumed": [[*SAVE, "d.safetensors"], [*RESUME, "d.safetensors"]],
    "saved dense, resumed sparse": [[*SAVE, "e.safetensors"], [*RESUME, "e.safetensors", *SPARSE, *JSON]],
    "saved sparse, resumed": [[*SAVE, "s.safetensors", *SPARSE], [*RESUME, "s.safetensors"]],
    "saved sparse, resumed sparse": [[*SAVE, "t.safetensors", *SPARSE], [*RESUME, "t.safetensors", *SPARSE, *JSON]],
    "--draft-model": [["mlx_lm.generate", *GENERATE, "--draft-model", "other", *SPARSE, *JSON]],
    "--lossless": [["mlx_lm.generate", *GENERATE, *SPARSE, "--lossless", *JSON]],
    "--lossless 3": [["mlx_lm.generate", *GENERATE, *SPARSE, "--lossless", "3", *JSON]],
    "--lossless 3, drawn": [["mlx_lm.generate", *GENERATE, *DRAWN, *SPARSE, "--lossless", "3"]],
    "drawn": [["mlx_lm.generate", *GENERATE, *DRAWN]],
    "chat --lossless": [[*CHATS, *SPARSE, "--lossless", "3", *JSON]],
    "chat, dense": [CHATS],
    "--prefill-step-size": [["mlx_lm.generate", *GENERATE, "--prefill-step-size", "18", *SPARSE, *JSON]],
    "--max-kv-size": [["mlx_lm.generate", *GENERATE, "--max-kv-size", "16", *SPARSE, *JSON]],
    "long": [LONG],
    "long, sample": [[*LONG, "--attn", SAMPLE, *JSON]],
    "long, both": [[*LONG, *BOTH, "--attn-report", "json+mass"]],
    "long, both, text": [[*LONG, *BOTH, "--attn-report", "mass"]],
    "long, both, toml": [[*LONG, "--attn-config", "both.toml", *JSON]],
    "benchmark both -b 2": [[*BENCHMARK[:3], "-p", "300", "-g", "6", "-n", "1", "-b", "2", *BOTH, *JSON]],
    "cache_prompt, sample": [
        ["mlx_lm.cache_prompt", *LONG[1:5], "--prompt-cache-file", "p.safetensors", "--attn", SAMPLE, *JSON]
    ],
    "--kv-bits": [WIDE],
    "--kv-bits, --attn dense": [[*WIDE, "--attn", "dense", *JSON]],
    "--kv-bits sparse": [[*WIDE, *SPARSE, *JSON]],
    "saved with --kv-bits, resumed sparse": [
        ["mlx_lm.cache_prompt", "--model", "wide", *SAVE[3:], "q.safetensors", *PACKED, *SPARSE],
        [*RESUME, "q.safetensors", *PACKED, *SPARSE, *JSON],
    ],
    **{f"mlx_lm.{name} --help": [[f"mlx_lm.{name}", "--help"]] for name in COMMANDS},
    "mlx-sparse generate --help": [["mlx-sparse", "generate", "--help"]],  # as the others are made
}

# Name: what comes after "mlx_lm.generate --model llama", and what the one line says.
BAD: dict[str, tuple[list[str], str]] = {
    "unknown method": (["--attn", "flash"], "attn: expected one of .*sparq.*, got 'flash'"),
    "unknown key": (["--attn", "sparq:topk=4"], "sparq: expected one of the keys rank, top_k.*, got 'topk'"),
    "key without value": (["--attn", "sparq:rank"], "sparq: expected key=value, got 'rank'"),
    "rank 0": (["--attn", "sparq:rank=0"], "rank: expected an integer of at least 1, got 0"),
    "rank above D": (["--attn", "sparq:rank=17"], "rank: expected at most the head dim D=16, got 17"),
    "negative top_k": (["--attn", "sparq:top_k=-1"], "top_k: expected an integer of at least 1, got -1"),
    "a method that needs dense prompts": (
        ["--attn", "sample+h2o"],
        "attn: expected dense prompts for h2o .*, got sample",
    ),
    "no such backend": (
        ["--attn", "sparq", "--attn-backend", "tpu"],
        r"backend: .*got tpu \(unknown; this version",
    ),
    "a backend for torch": (
        ["--attn", "sparq", "--attn-backend", "triton"],
        r"backend: .*got triton \(it takes torch tensors: .* mlx_sparse\.cuda_ref",
    ),
    "two decode methods": (["--attn", "sparq+streaming"], "attn: expected one decode method, got sparq and streaming"),
    "two prefill methods": (
        ["--attn", "sample+bigbird"],
        "attn: expected one prefill method, got sample and bigbird",
    ),
    "alpha 0": (["--attn", "sample:alpha_column=0"], "alpha_column: expected .*, got 0"),
    "mass without a prefill method": (
        [*SPARSE, "--attn-report", "mass"],
        "--attn-report: expected text, json or off with --attn sparq, got mass",
    ),
    "malformed TOML": (["--attn-config", "bad.toml"], r"attn-config: expected valid TOML, got bad.toml \(.*\)"),
    "missing TOML": (["--attn-config", "none.toml"], "attn-config: expected a readable TOML file, got none.toml"),
    "family without the seam": (["--model", "gemma2", *SPARSE], "model: expected attention .*, got gemma2"),
    "--attn twice": ([*SPARSE, *SPARSE], "--attn: expected once, got twice"),
    "no such model": ([*SPARSE, "--model", "nowhere/at/all"], "--model: expected a model .*, got nowhere/at/all"),
    "--lossless alone": (["--lossless"], "--lossless: expected --attn METHOD, which drafts, got none"),
    "--lossless for prompts": ([*BOTH, "--lossless"], "lossless: expected a method for new tokens, got sample"),
    "--lossless 8": ([*SPARSE, "--lossless", "8"], "lossless: expected 1 to 7 drafts for each check, got 8"),
    "--lossless and a draft model": (
        [*SPARSE, "--lossless", "--draft-model", "other"],
        "--lossless: expected it without --draft-model, got both",
    ),
    "no config.json": ([*SPARSE, "--model", "."], r"--model: expected a model .*config\.json"),
    "no prompt cache": ([*SPARSE, "--prompt-cache-file", "no.safetensors"], "--prompt-cache-file: expected a file"),
    "--kv-bits of windows": (
        ["--model", "gemma3", *SPARSE, "--kv-bits", "8"],
        "--kv-bits: expected caches that mlx-lm can quantise, got: RotatingKVCache Quantization NYI",
    ),
    "--kv-bits of heads that no group divides": (
        [*SPARSE, "--kv-bits", "8"],
        "--kv-bits: expected caches that mlx-lm can quantise, got: .*divisible by the quantization group size",
    ),
    # These weights cannot be loaded, so the line has to come before.
    "--max-kv-size": (["--model", "no_weights", *SPARSE, "--max-kv-size", "8"], "--max-kv-size: .* for qwen3"),
}
CHAT = "w1 w2 w3 w4 w5 w6 w7\nw8 w9\nr\nw3 w4 w5 w6 w7\nq\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, without_torch: Any) -> Iterator[Callable[[str], Finished]]:
    """The last command of GOOD or BAD by name; only those that say how they are started are started as a shell does."""
    folder = tmp_path_factory.mktemp("commands")
    write(folder / "llama")
    write(folder / "other", seed=5)
    write(folder / "wide", head_dim=32)
    write(folder / "gemma2", "gemma2")
    write(folder / "gemma3", "gemma3_text")
    (write(folder / "no_weights", "qwen3") / "model.safetensors").write_bytes(b"")
    (folder / "good.toml").write_text("[sparq]\nrank = 4\ntop_k = 4\ndense_below = 0\n")
    toml = "[sample]\nblock_size = 32\ndense_below = 0\n[[sample.ranges]]\nup_to = 500\nalpha_column = 0.3\n"
    toml += "alpha_slash = 0.3\nchunks = 1\n[sparq]\nrank = 4\ntop_k = 4\ndense_below = 0\n"
    (folder / "both.toml").write_text(toml)
    (folder / "bad.toml").write_text("[sparq\nrank = 4\n")
    prompt = words(prompt_of(PROMPT))
    bad = {f"bad: {name}": [["mlx_lm.generate", "--model", "llama", *argv]] for name, (argv, _) in BAD.items()}

    @functools.cache
    def last(name: str) -> Finished:
        stdin = CHAT if name.startswith("chat") else prompt
        run = start if name in STARTED else forks.run
        commands = {**GOOD, **bad}[name]
        results = [run(argv, folder, stdin, XDG_CACHE_HOME=str(folder / "cache")) for argv in commands]
        assert all(result.code == 0 for result in results[:-1]), results
        return results[-1]

    with Forks() as forks:
        yield last


Runs = Callable[[str], Finished]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_decodes_sparsely(spelling: str, finished: Runs):
    result = finished(f"{spelling} sparse")
    assert result.code == 0
    assert result.text == finished("mlx_lm.generate sparse").text != finished("dense").text
    (report,) = result.reports
    assert report["attn"].startswith("sparq:rank=4,top_k=4")
    assert (report["served_layers"], report["sparse_calls"]) == (LAYERS, LAYERS * STEPS)
    assert report["dense_calls"] == {"in prefill": LAYERS}


@pytest.mark.parametrize("name", ["dense", "--attn dense"])
def test_without_a_method_the_text_is_that_of_mlx_lm_alone(name: str, finished: Runs):
    result = finished(name)
    assert (result.code, result.err) == (0, "")
    assert result.text == finished("without hook").text


def test_without_a_method_an_error_is_that_of_mlx_lm_alone(finished: Runs):
    result = finished("no such model")
    assert (result.code, result.out) == (1, "")
    assert "Traceback" in result.err and "mlx_lm.generate: error: " not in result.err


def test_the_text_report_follows_on_standard_error(finished: Runs):
    opening, first, *rest = finished("text report").err.splitlines()
    assert re.fullmatch(r"\[mlx-sparse\] sparq:rank=4,top_k=4,.* on ops: 2 of 2 layers \(llama, llama\)", first)
    assert opening == f"{first}; sparse from 5 keys on (given)"
    assert rest[0] == "  sparse from 5 keys on (given)"
    assert re.fullmatch(
        rf"  sparse calls: {LAYERS * STEPS}, [\d.]+% of the dense bytes by formula \(.* per step\)", rest[1]
    )
    assert rest[2:] == [f"  dense calls: {LAYERS} in prefill"]
    assert finished("text report").text == finished("mlx_lm.generate sparse").text


def test_the_first_line_says_who_decides_and_the_second_that_nothing_will_be_sparse(finished: Runs):
    first, second, *_ = finished("short, modelled").err.splitlines()
    assert first == (
        "[mlx-sparse] sparq:rank=4,reallocate=false,component_score=query_key on ops: 2 of 2 layers (llama, llama); "
        "sparse from 2,048 keys on (modelled); dense_below=N in --attn decides otherwise"
    )
    longest = PROMPT + TOKENS
    assert second == (
        f"[mlx-sparse] nothing will be sparse: this run has at most {longest} keys, "
        "and no step with fewer than 2,048 is"
    )
    first, second, *_ = finished("short, measured").err.splitlines()
    assert (
        "; prompts sparse from 8,192 keys on where at most 75% of the blocks are kept (modelled; the first context of "
        "8,192 keys is measured); sparse from 2,048 keys on (modelled; the first context of 1,024 keys is measured); "
    ) in first
    assert second.endswith(f"this run has at most {longest} keys, and no step with fewer than 1,024 is")


def test_calls_that_stay_dense_for_another_reason_are_named(finished: Runs):
    _, second, *_ = finished("short, prompts").err.splitlines()
    assert second == (
        "[mlx-sparse] nothing will be sparse: calls so far: 2 over fewer than 8,192 keys, 2 of a single query "
        "(no decode method)"
    )


def test_the_first_line_names_the_layers_that_stay_dense(finished: Runs):
    first, report, dense, *_ = finished("windows").err.splitlines()
    served = re.fullmatch(
        r"(.*layers \(gemma3_text, gemma3\)); (dense layers: \d with a sliding window .*\)); .*", first
    )
    assert served
    assert (report, dense) == (served[1], f"  {served[2]}")


def test_chat_says_it_before_the_first_question(tmp_path: Path, without_torch: Any):
    folder = write(tmp_path / "llama").parent
    argv = [str(BIN / "mlx_lm.chat"), "--model", "llama", "--attn", "sparq:rank=4", "--no-calibrate"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=folder, text=True, **pipes) as process:
        assert process.stdin and process.stderr
        clock = threading.Timer(60, process.kill)
        clock.start()
        line = process.stderr.readline()
        assert process.poll() is None, "nothing was asked yet"
        process.stdin.write("q\n")
        process.stdin.close()
        assert process.wait(60) == 0
        clock.cancel()
    assert line.startswith(
        "[mlx-sparse] sparq:rank=4,reallocate=false,component_score=query_key on ops: 2 of 2 layers (llama, llama); "
    )


def test_the_report_can_be_turned_off(finished: Runs):
    assert finished("no report").err == ""
    assert finished("no report").text == finished("mlx_lm.generate sparse").text


def test_parameters_come_from_a_file_and_attn_wins_over_it(finished: Runs):
    assert finished("toml").text == finished("mlx_lm.generate sparse").text
    assert finished("toml").reports[0]["attn"] == finished("mlx_lm.generate sparse").reports[0]["attn"]
    assert finished("toml and attn").reports[0]["attn"].startswith("sparq:rank=2,top_k=4,")


def test_chat_decodes_sparsely_turn_after_turn(finished: Runs):
    result = finished("chat")
    assert result.code == 0
    (report,) = result.reports
    assert report["sparse_calls"] == LAYERS * (5 + 6 + 5)  # the second turn has two tokens, so its prompt is a step too


@pytest.mark.parametrize(("name", "batch"), [("benchmark", 1), ("benchmark -b 2", 2)])
def test_benchmark_decodes_sparsely(name: str, batch: int, finished: Runs):
    result = finished(name)
    assert result.code == 0
    assert "Averages: " in result.out
    (report,) = result.reports
    assert report["sparse_calls"] == 2 * LAYERS * 7  # warm-up and trial
    assert set(report["dense_calls"]) == {"in prefill"}
    assert report["sparse_bytes"] == batch * finished("benchmark").reports[0]["sparse_bytes"]


def test_a_prompt_cache_saved_without_the_option_loads_with_it(finished: Runs):
    result = finished("saved dense, resumed sparse")
    assert result.code == 0
    assert result.reports[0]["sparse_calls"] == LAYERS * STEPS
    assert result.text != finished("saved dense, resumed").text


def test_a_prompt_cache_saved_with_the_option_loads_without_it(finished: Runs):
    result = finished("saved sparse, resumed")
    assert result.text == finished("saved dense, resumed").text  # it only processes a prompt
    assert (result.code, result.err) == (0, "")
    assert len(result.text.split()) == TOKENS
    assert finished("saved sparse, resumed sparse").reports[0]["sparse_calls"] == LAYERS * STEPS


def test_a_draft_model_drafts_sparsely_and_is_verified_densely(finished: Runs):
    result = finished("--draft-model")
    assert result.code == 0
    assert result.text == finished("dense").text
    target, draft = result.reports
    assert target["sparse_calls"] == 0
    assert target["dense_calls"]["in multi-token decode (verification step or short prompt)"] > 0
    assert draft["sparse_calls"] > 0


@pytest.mark.parametrize("drafts", ["--lossless", "--lossless 3"])
def test_a_lossless_command_says_what_it_says_densely(drafts: str, finished: Runs):
    result = finished(drafts)
    assert result.code == 0
    assert result.text == finished("dense").text != finished("mlx_lm.generate sparse").text
    (report,) = result.reports
    assert report["drafts"]["tokens"] >= TOKENS
    assert (report["sparse_calls"] > 0) == (report["drafts"]["drafted"] > 0)
    assert report["drafts"]["drafted"] > 0 or drafts == "--lossless"  # which measures dense steps first


def test_a_seed_says_the_same_with_drafts_and_turn_after_turn(finished: Runs):
    assert finished("--lossless 3, drawn").text == finished("drawn").text != finished("dense").text
    assert "accepted" in finished("--lossless 3, drawn").err
    assert "nothing will be sparse" not in finished("--lossless 3, drawn").err
    lossless, dense = (re.findall(r"w\d+", finished(name).out) for name in ("chat --lossless", "chat, dense"))
    assert lossless == dense and len(dense) >= 3 * 4
    assert finished("chat --lossless").reports[0]["drafts"]["checks"] > 0


@pytest.mark.skipif(metadata.version("mlx-lm") < "0.32", reason="mlx-lm 0.31 has no such option")
def test_prefill_step_size_composes(finished: Runs):
    result = finished("--prefill-step-size")
    assert result.text == finished("mlx_lm.generate sparse").text
    assert sum(result.reports[0]["dense_calls"].values()) == LAYERS * 3  # 39 = 18 + 18 + 3


def test_a_prompt_is_processed_sparsely_alone_and_beside_a_decode_method(finished: Runs):
    sample, both = finished("long, sample"), finished("long, both")
    assert (sample.code, both.code) == (0, 0)
    assert len({finished("long").text, sample.text, both.text}) == 3
    (alone,), (together,) = sample.reports, both.reports
    assert alone["dense_calls"] == {"of a single query (no decode method)": LAYERS * STEPS}
    assert together["dense_calls"] == {}
    assert together["sparse_calls"] == LAYERS * STEPS
    figures = together["prefill"]
    assert figures["calls"] == LAYERS
    assert 0 < figures["density"]["min"] <= figures["density"]["mean"] < 1
    assert 0 < figures["retained_mass"]["min"] <= figures["retained_mass"]["mean"] < 1
    assert "retained_mass" not in alone["prefill"]
    assert [entry["heads"] for entry in alone["prefill"]["layers"]] == [entry["heads"] for entry in figures["layers"]]


def test_settings_by_context_come_from_a_file(finished: Runs):
    assert finished("long, both, toml").text == finished("long, both").text
    (report,) = finished("long, both, toml").reports
    assert report["attn"].startswith("sample:block_size=32,dense_below=0,ranges=500:0.3:0.3:1+sparq:rank=4")


def test_the_text_report_tells_of_prompts(finished: Runs):
    opening, first, *rest = finished("long, both, text").err.splitlines()
    assert opening == "; ".join([first, *(line.strip() for line in rest[:2])])
    assert re.fullmatch(r"\[mlx-sparse\] sample:.*\+sparq:.* on ops: 2 of 2 layers \(llama, llama\)", first)
    assert [line.split(":")[0] for line in rest] == [
        *("  prompts sparse from 0 keys on (given)", "  sparse from 5 keys on (given)"),
        *("  sparse prefill calls", "  density", "  retained mass", "  sparse calls"),
    ]


def test_benchmark_processes_prompts_sparsely(finished: Runs):
    result = finished("benchmark both -b 2")
    assert result.code == 0
    (report,) = result.reports
    assert report["prefill"]["calls"] == 2 * 2 * LAYERS  # warm-up and trial, of two sequences each
    assert report["sparse_calls"] == 2 * LAYERS * 7
    assert report["dense_calls"] == {}


def test_cache_prompt_processes_prompts_sparsely(finished: Runs):
    result = finished("cache_prompt, sample")
    assert result.code == 0
    (report,) = result.reports
    assert report["prefill"]["calls"] == LAYERS


def test_max_kv_size_composes_where_the_model_makes_its_caches(finished: Runs):
    assert finished("--max-kv-size").text == finished("mlx_lm.generate sparse").text


def test_steps_over_a_quantised_cache_are_sparse(finished: Runs):
    result = finished("--kv-bits sparse")
    assert (result.code, result.reports[0]["sparse_calls"]) == (0, LAYERS * STEPS)
    resumed = finished("saved with --kv-bits, resumed sparse")
    assert (resumed.code, resumed.reports[0]["sparse_calls"]) == (0, LAYERS * STEPS)


def test_dense_attention_over_a_quantised_cache_says_what_mlx_lm_says(finished: Runs):
    result = finished("--kv-bits, --attn dense")
    assert result.text == finished("--kv-bits").text
    assert result.reports[0]["attn"] == "dense"
    assert result.reports[0]["dense_calls"] == {
        "in prefill": LAYERS,
        "of a single query (no decode method)": LAYERS * STEPS,
    }


@pytest.mark.parametrize(
    ("program", "command"), [*(("mlx_lm.", command) for command in COMMANDS), ("mlx-sparse ", "generate")]
)
def test_help_shows_the_options(program: str, command: str, finished: Runs):
    result = finished(f"{program}{command} --help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: {program}{command} ")
    group = result.out.partition("sparse attention:\n")[2]
    assert re.findall(r"^  (--[\w-]+)", group, re.MULTILINE) == [
        *("--attn", "--attn-config", "--attn-backend", "--shard", "--lossless", "--no-calibrate", "--attn-report")
    ]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name: str, finished: Runs):
    result = finished(f"bad: {name}")
    assert result.code == 2
    assert re.fullmatch(rf"mlx_lm\.generate: error: {BAD[name][1]}.*[.?]\n", result.err)
    assert result.out == ""
