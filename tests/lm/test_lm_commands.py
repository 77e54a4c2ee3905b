"""Test the real commands of mlx-lm with --attn on tiny models."""

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
from forked import BIN, Finished, Forks, start, without_blas
from json_tables import read_tables
from mlx_lm import load, stream_generate
from saap_artefacts import BUCKETS, write_artefact
from tiny_models import BACKEND, build, prompt_of, words, write

from mlx_sparse.core.reasons import UNTUNED
from mlx_sparse.lm import session
from mlx_sparse.lm.session import Session

pytestmark = pytest.mark.slow  # commands

SPARSE = ["--attn", "sparq:rank=4,top_k=4,dense_below=0"]
SAMPLE = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
BOTH = ["--attn", f"{SAMPLE}+{SPARSE[1]}"]
SAAP_WINDOW = "recent_tokens=16,merge_every=4,dense_layers=0"
SAAP = ["--attn", f"saap:artefact=model.saap.safetensors,probes={BUCKETS},{SAAP_WINDOW}"]
JSON = ["--attn-report", "json"]
COMMANDS = ["generate", "chat", "server", "benchmark", "cache_prompt", "evaluate"]
OPS = ["--attn-backend", "ops"]  # modeled crossover lengths of other backends depend on the machine
DENSE = "dense (cpu)" if BACKEND == "cpu" else "dense"  # name of dense calls in reports
PROMPT, TOKENS, LAYERS = 40, 8, 2
STEPS = TOKENS + 1  # the last prompt token is a decode step, and mlx-lm computes one token ahead

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

# By name: commands that run one after the other.
GOOD: dict[str, list[list[str]]] = {
    **{f"{name} sparse": [[*spelling, *GENERATE, *SPARSE, *JSON]] for name, spelling in SPELLINGS.items()},
    "dense": [["mlx_lm.generate", *GENERATE]],
    "without hook": [["python", "-c", WITHOUT_HOOK, *GENERATE]],
    "--attn dense": [["mlx_lm.generate", *GENERATE, "--attn", "dense"]],
    "native dense": [["mlx_lm.generate", *GENERATE, "--attn", "dense", "--attn-backend", "cpu", *JSON]],
    "no such model": [["mlx_lm.generate", "--model", "nowhere/at/all"]],
    "text report": [["mlx_lm.generate", *GENERATE, *SPARSE]],
    "full report": [["mlx_lm.generate", *GENERATE, *SPARSE, "--attn-report", "full"]],
    "short, modeled": [["mlx_lm.generate", *GENERATE, *OPS, "--attn", "sparq:rank=4", "--no-calibrate"]],
    "short, measured": [["mlx_lm.generate", *GENERATE, *OPS, "--attn", "sample:ranges=9999:0.95:0.95:1+sparq:rank=4"]],
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
    "saap": [["mlx_lm.generate", *GENERATE, *SAAP, *JSON]],
    "saap online": [
        ["mlx_lm.generate", *GENERATE, "--attn", f"saap:mode=online,buckets=8,probes=8,{SAAP_WINDOW}", *JSON]
    ],
    "saap toml": [
        ["mlx_lm.generate", *GENERATE, "--attn-config", "saap.toml", "--attn", f"saap:probes={BUCKETS}", *JSON]
    ],
    "saap, --draft-model": [["mlx_lm.generate", *GENERATE, "--draft-model", "other", *SAAP, *JSON]],
    "--lossless": [["mlx_lm.generate", *GENERATE, *SPARSE, "--lossless", *JSON]],
    "--lossless 3": [["mlx_lm.generate", *GENERATE, *SPARSE, "--lossless", "3", *JSON]],
    "--lossless 3, drawn": [["mlx_lm.generate", *GENERATE, *DRAWN, *SPARSE, "--lossless", "3"]],
    "drawn": [["mlx_lm.generate", *GENERATE, *DRAWN]],
    "chat --lossless": [[*CHATS, *SPARSE, "--lossless", "3", *JSON]],
    "chat, dense": [CHATS],
    "--prefill-step-size": [["mlx_lm.generate", *GENERATE, "--prefill-step-size", "18", *SPARSE, *JSON]],
    "--max-kv-size": [["mlx_lm.generate", *GENERATE, "--max-kv-size", "16", *SPARSE, *JSON]],
    "long": [LONG],
    "counted": [[*LONG[:4], words(prompt_of(700)), *SPARSE, "--prefill-step-size", "256"]],
    "long, sample": [[*LONG, "--attn", SAMPLE, *JSON]],
    "long, both": [[*LONG, *BOTH, "--attn-report", "json+recall"]],
    "long, both, text": [[*LONG, *BOTH, "--attn-report", "recall"]],
    "cache_prompt, sample": [
        ["mlx_lm.cache_prompt", *LONG[1:5], "--prompt-cache-file", "p.safetensors", "--attn", SAMPLE, *JSON]
    ],
    "--kv-bits": [WIDE],
    "--kv-bits, --attn dense": [[*WIDE, "--attn", "dense", *JSON]],
    "--kv-bits sparse": [[*WIDE, *SPARSE, *JSON]],
    "windows, --kv-bits": [["mlx_lm.generate", "--model", "gemma3", *GENERATE[2:], *SPARSE, "--kv-bits", "8"]],
    "saved with --kv-bits, resumed sparse": [
        ["mlx_lm.cache_prompt", "--model", "wide", *SAVE[3:], "q.safetensors", *PACKED, *SPARSE],
        [*RESUME, "q.safetensors", *PACKED, *SPARSE, *JSON],
    ],
    **{f"mlx_lm.{name} --help": [[f"mlx_lm.{name}", "--help"]] for name in COMMANDS},
    "mlx-sparse generate --help": [["mlx-sparse", "generate", "--help"]],  # the other commands share this code
}

# By name: a model whose cache mlx-lm cannot quantize, and a pattern of the error.
UNQUANTIZABLE = {
    "windows": ("gemma3", r"RotatingKVCache Quantization NYI\. Drop --kv-bits"),
    "heads that no group divides": ("llama", "quantization group size 64.* Drop --kv-bits"),
    "heads that a smaller group divides": ("wide", "quantization group size 64.* Set --kv-group-size 32, or drop"),
}

# By name: arguments after "mlx_lm.generate --model llama", and a pattern of the one-line error. With no_weights, the
# error must come before the load.
TEXTS = {"sparse": " ".join(SPARSE), "both": " ".join(BOTH), "long": "x" * 1000}
BAD = {name: (argv.format(**TEXTS).split(), error) for name, (argv, error) in read_tables(__file__).items()}
CHAT = "w1 w2 w3 w4 w5 w6 w7\nw8 w9\nr\nw3 w4 w5 w6 w7\nq\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, without_torch: Any) -> Iterator[Callable[[str], Finished]]:
    """Return the result of the last command of GOOD or BAD by name. Only those in STARTED run in a new process."""
    folder = tmp_path_factory.mktemp("commands")
    write(folder / "llama")
    write(folder / "other", seed=5)
    write(folder / "wide", head_dim=32)
    write(folder / "gemma2", "gemma2")
    write(folder / "gemma3", "gemma3_text")
    (write(folder / "no_weights", "qwen3") / "model.safetensors").write_bytes(b"")
    (folder / "good.toml").write_text("[sparq]\nrank = 4\ntop_k = 4\ndense_below = 0\n")
    artefact = write_artefact(folder / "model", build())
    write_artefact(folder / "other", build(seed=5))
    (folder / "saap.toml").write_text(
        f'[saap]\nartefact = "{artefact.name}"\nrecent_tokens = 16\nmerge_every = 4\ndense_layers = 0\n'
    )
    prompt = words(prompt_of(PROMPT))
    quantized = [*GENERATE[2:], *SPARSE, "--kv-bits", "8", "--quantized-kv-start", "0"]
    unquantizable = {
        f"unquantizable: {name}": [["mlx_lm.generate", "--model", model, *quantized]]
        for name, (model, _) in UNQUANTIZABLE.items()
    }
    bad = {f"bad: {name}": [["mlx_lm.generate", "--model", "llama", *argv]] for name, (argv, _) in BAD.items()}

    @functools.cache
    def last(name: str) -> Finished:
        stdin = CHAT if name.startswith("chat") else prompt
        run = start if name in STARTED else forks.run
        commands = {**GOOD, **unquantizable, **bad}[name]
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
    (seconds,) = report["time_to_first_token"]
    assert 0 < seconds < 60


@pytest.mark.parametrize("name", ["dense", "--attn dense"])
def test_without_a_method_the_text_equals_mlx_lms(name: str, finished: Runs):
    result = finished(name)
    assert (result.code, result.err) == (0, "")
    assert result.text == finished("without hook").text


@pytest.mark.skipif(BACKEND != "cpu", reason="expected MLX on a CPU")
def test_dense_attention_runs_native_kernels_on_request(finished: Runs):
    result = finished("native dense")
    assert result.text == finished("dense").text
    (report,) = result.reports
    assert (report["attn"], report["backend"], report["served_layers"]) == ("dense", "cpu", LAYERS)


def test_without_a_method_errors_equal_mlx_lms(finished: Runs):
    result = finished("no such model")
    assert (result.code, result.out) == (1, "")
    assert "Traceback" in result.err and "mlx_lm.generate: error: " not in result.err


def test_text_report_is_printed_on_standard_error(finished: Runs):
    opening, first, time, *rest = finished("text report").err.splitlines()
    assert re.fullmatch(rf"\[mlx-sparse\] sparq:rank=4,top_k=4,.* on {BACKEND}: 2 of 2 layers \(llama, llama\)", first)
    assert opening == f"{first}; sparse at 5 keys and longer (given)"
    assert re.fullmatch(r"  time to first token: \d+\.\d\d s", time)
    assert re.fullmatch(
        rf"  sparse calls: {LAYERS * STEPS}, [\d.]+% of the dense bytes \(.* per step, modeled for \w+\)", rest[0]
    )
    assert re.fullmatch(r"  estimated attention recall: median .*; lowest in layer [01], median [\d.]+", rest[1])
    assert re.fullmatch(r"  estimated saving: \d+% of the bytes of a decode step, with the weights", rest[2])
    assert rest[3] == f"  {DENSE} calls: {LAYERS} in prefill"
    assert len(rest) <= 6
    assert finished("text report").text == finished("mlx_lm.generate sparse").text


def test_full_report_also_lists_the_crossover_lengths(finished: Runs):
    _, first, settings, crossover, *rest = finished("full report").err.splitlines()
    assert settings.startswith("  settings: sparq:") and "component_score=" in settings
    assert first == finished("text report").err.splitlines()[1]
    assert crossover == "  sparse at 5 keys and longer (given)"
    assert rest[-1] == f"  {DENSE} calls: {LAYERS} in prefill"


def test_opening_lines_name_the_threshold_and_warn_if_nothing_is_sparse(finished: Runs):
    first, second, *_ = finished("short, modeled").err.splitlines()
    assert first == (
        "[mlx-sparse] sparq:rank=4 on ops: 2 of 2 layers (llama, llama); sparse at 2,048 keys and longer (modeled)"
    )
    longest = PROMPT + TOKENS
    assert second == (
        f"[mlx-sparse] no call will be sparse: this run has at most {longest} keys, "
        "and decode steps are sparse from 2,048 keys"
    )
    first, second, *_ = finished("short, measured").err.splitlines()
    assert (
        "; prefill sparse at 8,192 keys and longer if at most 75% of the blocks are selected (modeled; will be "
        "measured at 8,192 keys); sparse at 2,048 keys and longer (modeled; will be measured at 1,024 keys)"
    ) in first
    assert second.endswith(f"this run has at most {longest} keys, and decode steps are sparse from 1,024 keys")


def test_long_prefill_is_counted(finished: Runs, tmp_path: Path, capsys: Any, monkeypatch: Any):
    assert re.search(r"^\[mlx-sparse\] prefill: 0 of 7\d\d tokens$", finished("counted").err, re.MULTILINE)
    assert "] prefill: " not in finished("text report").err
    monkeypatch.setattr(session, "INTERVAL", 0.0)
    model, tokenizer, *_ = load(str(write(tmp_path / "llama")))
    options = {"max_tokens": 1, "prefill_step_size": 256}
    list(Session("mlx_lm.generate").stream(stream_generate, model, tokenizer, prompt_of(700), **options))
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"\d[\d.,]* tokens/s", "# tokens/s", line) for line in lines] == [
        "[mlx-sparse] prefill: 0 of 700 tokens",
        "[mlx-sparse] prefill: 256 of 700 tokens, # tokens/s",
        "[mlx-sparse] prefill: 512 of 700 tokens, # tokens/s",
        "[mlx-sparse] prefill: 699 of 700 tokens, # tokens/s",
    ]


def test_warning_names_the_reasons_of_dense_calls(finished: Runs):
    _, second, *_ = finished("short, prompts").err.splitlines()
    assert second == (
        f"[mlx-sparse] no call will be sparse: calls so far: 2 {UNTUNED}, 2 with a single query (no decode method)"
    )


def test_first_line_counts_dense_layers(finished: Runs):
    first, report, *_ = finished("windows").err.splitlines()
    served = re.fullmatch(r"(.*layers \(gemma3_text, gemma3\); dense layers: \d with a sliding window .*\)); .*", first)
    assert served
    assert report == served[1]


def test_chat_prints_the_first_line_before_the_first_question(tmp_path: Path, without_torch: Any):
    folder = write(tmp_path / "llama").parent
    argv = [str(BIN / "mlx_lm.chat"), "--model", "llama", "--attn", "sparq:rank=4", "--no-calibrate"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=folder, text=True, **pipes) as process:
        assert process.stdin and process.stderr
        clock = threading.Timer(60, process.kill)
        clock.start()
        line = next(map(without_blas, process.stderr))
        assert process.poll() is None, "no question was entered yet"
        process.stdin.write("q\n")
        process.stdin.close()
        assert process.wait(60) == 0
        clock.cancel()
    assert line.startswith(f"[mlx-sparse] sparq:rank=4 on {BACKEND}: 2 of 2 layers (llama, llama); ")


def test_the_report_can_be_turned_off(finished: Runs):
    assert finished("no report").err == ""
    assert finished("no report").text == finished("mlx_lm.generate sparse").text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_full_standard_error_changes_no_text(finished: Runs, tmp_path: Path):
    write(tmp_path / "llama")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [str(BIN / "mlx_lm.generate"), *GENERATE, *SPARSE],
            **{"cwd": tmp_path, "input": words(prompt_of(PROMPT)), "stdout": subprocess.PIPE, "stderr": full},
            text=True,
            check=False,
        )
    assert Finished(done.returncode, done.stdout, "").text == finished("mlx_lm.generate sparse").text
    assert done.returncode == 0


def test_attn_overrides_parameters_of_the_file(finished: Runs):
    assert finished("toml").text == finished("mlx_lm.generate sparse").text
    assert finished("toml").reports[0]["attn"] == finished("mlx_lm.generate sparse").reports[0]["attn"]
    assert finished("toml and attn").reports[0]["attn"].startswith("sparq:rank=2,top_k=4,")


def test_chat_decodes_every_turn_sparsely(finished: Runs):
    result = finished("chat")
    assert result.code == 0
    (report,) = result.reports
    # The second turn has two tokens, so its prefill is a decode step.
    assert report["sparse_calls"] == LAYERS * (5 + 6 + 5)


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
    assert result.text == finished("saved dense, resumed").text  # cache_prompt only processes a prompt
    assert (result.code, result.err) == (0, "")
    assert len(result.text.split()) == TOKENS
    assert finished("saved sparse, resumed sparse").reports[0]["sparse_calls"] == LAYERS * STEPS


def test_a_draft_model_drafts_sparsely_and_is_verified_densely(finished: Runs):
    result = finished("--draft-model")
    assert (result.code, result.text) == (0, finished("dense").text)
    target, draft = result.reports
    assert target["sparse_calls"] == 0
    assert target["dense_calls"]["in multi-token decode (verification step or short prompt)"] > 0
    assert draft["sparse_calls"] > 0


@pytest.mark.parametrize("name", ["saap", "saap online", "saap toml"])
def test_saap_over_every_bucket_prints_the_dense_text(name: str, finished: Runs):
    result = finished(name)
    assert result.code == 0, result.err
    assert result.text == finished("dense").text
    (report,) = result.reports
    assert (report["served_layers"], report["sparse_calls"]) == (LAYERS, LAYERS * STEPS)
    assert report["buckets"]["selectivity"] == 1


def test_a_draft_model_without_an_artefact_drafts_densely(finished: Runs):
    result = finished("saap, --draft-model")
    assert result.code == 0, result.err
    assert result.text == finished("dense").text
    (target,) = result.reports
    assert target["model"] == "llama"


@pytest.mark.parametrize("drafts", ["--lossless", "--lossless 3"])
def test_lossless_command_prints_the_dense_text(drafts: str, finished: Runs):
    result = finished(drafts)
    assert result.code == 0
    assert result.text == finished("dense").text != finished("mlx_lm.generate sparse").text
    (report,) = result.reports
    assert report["drafts"]["tokens"] >= TOKENS
    assert (report["sparse_calls"] > 0) == (report["drafts"]["drafted"] > 0)
    assert report["drafts"]["drafted"] > 0 or drafts == "--lossless"  # plain --lossless measures dense steps first


def test_same_seed_gives_the_same_text_with_drafts(finished: Runs):
    assert finished("--lossless 3, drawn").text == finished("drawn").text != finished("dense").text
    assert "accepted" in finished("--lossless 3, drawn").err
    assert "no call will be sparse" not in finished("--lossless 3, drawn").err
    lossless, dense = (re.findall(r"w\d+", finished(name).out) for name in ("chat --lossless", "chat, dense"))
    assert lossless == dense and len(dense) >= 3 * 4
    assert finished("chat --lossless").reports[0]["drafts"]["checks"] > 0


@pytest.mark.skipif(metadata.version("mlx-lm") < "0.32", reason="mlx-lm 0.31 has no such option")
def test_prefill_step_size_changes_no_text(finished: Runs):
    result = finished("--prefill-step-size")
    assert result.text == finished("mlx_lm.generate sparse").text
    assert sum(result.reports[0]["dense_calls"].values()) == LAYERS * 3  # 39 = 18 + 18 + 3


def test_prefill_method_works_alone_and_with_a_decode_method(finished: Runs):
    sample, both = finished("long, sample"), finished("long, both")
    assert (sample.code, both.code) == (0, 0)
    assert len({finished("long").text, sample.text, both.text}) == 3
    (alone,), (together,) = sample.reports, both.reports
    assert alone["dense_calls"] == {"with a single query (no decode method)": LAYERS * STEPS}
    assert together["dense_calls"] == {}
    assert together["sparse_calls"] == LAYERS * STEPS
    figures = together["prefill"]
    assert figures["calls"] == LAYERS
    assert 0 < figures["density"]["min"] <= figures["density"]["mean"] < 1
    assert 0 < figures["recall"]["min"] <= figures["recall"]["mean"] < 1
    assert "recall" not in alone["prefill"]
    assert [entry["heads"] for entry in alone["prefill"]["layers"]] == [entry["heads"] for entry in figures["layers"]]


def test_text_report_describes_prefill(finished: Runs):
    opening, first, *rest = finished("long, both, text").err.splitlines()
    assert rest.pop(0).startswith("  settings: sample:")
    assert opening == "; ".join([first, *(line.strip() for line in rest[:2])])
    assert re.fullmatch(rf"\[mlx-sparse\] sample:.*\+sparq:.* on {BACKEND}: 2 of 2 layers \(llama, llama\)", first)
    assert [line.split(":")[0] for line in rest] == [
        *("  prefill sparse at 0 keys and longer (given)", "  sparse at 5 keys and longer (given)"),
        *("  sparse prefill calls", "  density", "  attention recall", "  sparse calls"),
        "  estimated attention recall",
    ]


def test_cache_prompt_processes_prompts_sparsely(finished: Runs):
    result = finished("cache_prompt, sample")
    assert result.code == 0
    (report,) = result.reports
    assert report["prefill"]["calls"] == LAYERS


def test_max_kv_size_is_ignored_if_the_model_makes_its_caches(finished: Runs):
    assert finished("--max-kv-size").text == finished("mlx_lm.generate sparse").text


def test_decode_steps_over_a_quantized_cache_are_sparse(finished: Runs):
    result = finished("--kv-bits sparse")
    assert (result.code, result.reports[0]["sparse_calls"]) == (0, LAYERS * STEPS)
    resumed = finished("saved with --kv-bits, resumed sparse")
    assert (resumed.code, resumed.reports[0]["sparse_calls"]) == (0, LAYERS * STEPS)


def test_a_text_that_ends_before_mlx_lm_quantizes_is_answered(finished: Runs):
    result = finished("windows, --kv-bits")
    assert (result.code, result.text) == (0, finished("windows").text)


@pytest.mark.parametrize("name", UNQUANTIZABLE)
def test_a_cache_that_mlx_lm_cannot_quantize_ends_the_command_with_advice(name: str, finished: Runs):
    result = finished(f"unquantizable: {name}")
    assert result.code == 2
    beginning = r"mlx_lm\.generate: error: --kv-bits: expected caches that mlx-lm can quantize, got: "
    assert re.search(f"^{beginning}.*{UNQUANTIZABLE[name][1]}", result.err, re.MULTILINE)
    assert "Traceback" not in result.err


def test_dense_attention_over_a_quantized_cache_gives_mlx_lms_text(finished: Runs):
    result = finished("--kv-bits, --attn dense")
    assert result.text == finished("--kv-bits").text
    assert result.reports[0]["attn"] == "dense"
    assert result.reports[0]["dense_calls"] == {
        "in prefill": LAYERS,
        "with a single query (no decode method)": LAYERS * STEPS,
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
        *("--attn", "--attn-config", "--attn-backend", "--lossless", "--no-calibrate", "--attn-report")
    ]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name: str, finished: Runs):
    result = finished(f"bad: {name}")
    assert result.code == 2
    assert re.fullmatch(rf"mlx_lm\.generate: error: {BAD[name][1]}.*[.?]\n", result.err)
    assert result.out == ""
