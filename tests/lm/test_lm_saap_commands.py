"""mlx-lm's real commands with --attn saap, as a user starts them, on tiny models."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked import Finished, Forks
from rank_processes import run_pair
from saap_artefacts import BUCKETS, write_artefact
from test_lm_server import running
from tiny_models import build, prompt_of, words, write

from mlx_sparse.api.call_report import JSON_KEY

pytestmark = pytest.mark.slow  # commands

PROMPT, TOKENS, LAYERS = 60, 8, 2
STEPS = TOKENS + 1  # mlx-lm's last prompt token is a step, and it works one token ahead
WINDOW = "recent_tokens=16,merge_every=4,dense_layers=0"
EVERY = ["--attn", f"saap:artefact=model.saap.safetensors,probes={BUCKETS},{WINDOW}"]
FEW = ["--attn", f"saap:artefact=model.saap.safetensors,probes=2,{WINDOW}"]
JSON = ["--attn-report", "json"]
GENERATE = ["mlx_lm.generate", "--model", "llama", "--prompt", "-", "--max-tokens", str(TOKENS)]
SAVE = ["mlx_lm.cache_prompt", "--model", "llama", "--prompt", "-", "--prompt-cache-file"]
RESUME = ["mlx_lm.generate", "--prompt", "w3 w4 w5", "--max-tokens", str(TOKENS), "--prompt-cache-file"]
BENCHMARK = ["mlx_lm.benchmark", "--model", "llama", "-p", "60", "-g", "6", "-n", "1"]

# Name: commands that run one after the other.
GOOD: dict[str, list[list[str]]] = {
    "dense": [GENERATE],
    "every bucket": [[*GENERATE, *EVERY, *JSON]],
    "few": [[*GENERATE, *FEW, *JSON]],
    "online": [[*GENERATE, "--attn", f"saap:mode=online,buckets=8,probes=8,{WINDOW}", *JSON]],
    "toml": [[*GENERATE, "--attn-config", "saap.toml", "--attn", f"saap:probes={BUCKETS}", *JSON]],
    "text": [[*GENERATE, *FEW]],
    "short": [[*GENERATE, "--attn", "saap:artefact=model.saap.safetensors,probes=1"]],
    "--draft-model": [[*GENERATE, "--draft-model", "other", *EVERY, *JSON]],
    "benchmark -b 2": [[*BENCHMARK, "-b", "2", *FEW, *JSON]],
    "saved dense, resumed dense": [[*SAVE, "d.safetensors"], [*RESUME, "d.safetensors"]],
    "saved dense, resumed": [[*SAVE, "e.safetensors"], [*RESUME, "e.safetensors", *EVERY, *JSON]],
    "saved, resumed dense": [[*SAVE, "s.safetensors", *FEW], [*RESUME, "s.safetensors"]],
}

# Name: what comes after GENERATE, and what the one line says.
BAD: dict[str, tuple[list[str], str]] = {
    "no artefact": (["--attn", "saap"], "artefact: expected a file that mlx-sparse train-saap wrote, got none"),
    "missing": (
        ["--attn", "saap:artefact=none.safetensors"],
        "none.safetensors: expected .*, got none that can be read",
    ),
    "truncated": (
        ["--attn", "saap:artefact=cut.saap.safetensors"],
        "cut.saap.safetensors: expected .*file not fully covered",
    ),
    "not an artefact": (["--attn", "saap:artefact=llama/model.safetensors"], "llama/model.safetensors: expected"),
    "another model": (
        ["--attn", "saap:artefact=other.saap.safetensors,probes=2"],
        "artefact: expected one trained on this model",
    ),
    "too many probes": (
        ["--attn", "saap:artefact=model.saap.safetensors"],
        r"probes: expected at most the 8 buckets of model.saap.safetensors, got 32",
    ),
    "online with a file": (["--attn", f"{FEW[1]},mode=online"], "artefact: expected none with mode=online"),
    "no layer is left": (["--attn", f"{FEW[1][:-1]}2"], "model: expected an attention layer that saap can serve"),
    "norm after rope": (
        ["--model", "hunyuan", "--attn", "saap:mode=online,dense_layers=0"],
        "model: expected .* that saap can serve, got hunyuan_v1_dense .*: 2 with a norm or another change after RoPE",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, without_torch: Any) -> Path:
    folder = tmp_path_factory.mktemp("saap")
    write(folder / "llama")
    write(folder / "other", seed=5)
    write(folder / "hunyuan", "hunyuan_v1_dense")
    file = write_artefact(folder / "model", build())
    write_artefact(folder / "other", build(seed=5))
    (folder / "cut.saap.safetensors").write_bytes(file.read_bytes()[:-7])
    toml = f'[saap]\nartefact = "{file.name}"\nrecent_tokens = 16\nmerge_every = 4\ndense_layers = 0\n'
    (folder / "saap.toml").write_text(toml)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Iterator[Callable[[str], Finished]]:
    """The last command of GOOD or BAD by name."""
    prompt = words(prompt_of(PROMPT))
    bad = {f"bad: {name}": [[*GENERATE, *argv]] for name, (argv, _) in BAD.items()}

    @functools.cache
    def last(name: str) -> Finished:
        results = [forks.run(argv, folder, prompt) for argv in {**GOOD, **bad}[name]]
        assert all(result.code == 0 for result in results[:-1]), results
        return results[-1]

    with Forks() as forks:
        yield last


Runs = Callable[[str], Finished]


@pytest.mark.parametrize("name", ["every bucket", "online", "toml"])
def test_every_bucket_gives_the_dense_text(name: str, finished: Runs):
    result = finished(name)
    assert result.code == 0, result.err
    assert result.text == finished("dense").text
    (report,) = result.reports
    assert (report["served_layers"], report["sparse_calls"]) == (LAYERS, LAYERS * STEPS)
    assert report["buckets"]["selectivity"] == 1


def test_few_probes_save_bytes(finished: Runs):
    (report,) = finished("few").reports
    assert report["sparse_calls"] == LAYERS * STEPS
    assert 0 < report["buckets"]["selectivity"] < 0.8
    assert 0 < report["sparse_bytes"]


def test_the_text_report_says_what_was_selected(finished: Runs):
    err = finished("text").err
    assert re.search(r"saap:artefact=model\.saap\.safetensors,probes=2,.* on ops: 2 of 2 layers", err)
    assert re.search(r"\n  selectivity: [\d.]+% of the keys outside the window\n", err)


def test_a_text_shorter_than_the_window_is_the_dense_text_and_says_so(finished: Runs):
    result = finished("short")
    assert result.code == 0
    assert result.text == finished("dense").text
    assert re.search(rf"{STEPS} over fewer than 1\d,\d+ keys", result.err)
    assert f"{STEPS} among the first (dense_layers)" in result.err
    assert "sparse calls: none" in result.err


def test_the_draft_model_which_has_no_artefact_drafts_densely(finished: Runs):
    result = finished("--draft-model")
    assert result.code == 0, result.err
    assert result.text == finished("dense").text
    (target,) = result.reports
    assert target["model"] == "llama"


def test_a_batch_of_a_benchmark_decodes_sparsely(finished: Runs):
    (report,) = finished("benchmark -b 2").reports
    assert report["sparse_calls"] > 0
    assert 0 < report["buckets"]["selectivity"] < 0.8


@pytest.mark.parametrize("name", ["saved dense, resumed", "saved, resumed dense"])
def test_prompt_caches_are_mlx_lms_own(name: str, finished: Runs):
    result = finished(name)
    assert result.code == 0, result.err
    assert result.text == finished("saved dense, resumed dense").text
    if name == "saved dense, resumed":
        (report,) = result.reports
        assert report["sparse_calls"] == LAYERS * STEPS


def test_parts_of_a_model_have_their_parts_of_the_artefact(folder: Path):
    first, second = run_pair(lambda rank: [*BENCHMARK, *FEW, *JSON], folder)
    assert (first.code, second.code, second.err) == (0, 0, "")
    (report,) = first.reports
    assert report["served_layers"] == LAYERS
    assert report["sparse_calls"] == 2 * LAYERS * 7  # of rank 0: warm-up and trial
    assert 0 < report["buckets"]["selectivity"] < 0.8


def test_a_part_of_another_model_is_refused_the_artefact_at_load(folder: Path):
    other = f"saap:artefact=other.saap.safetensors,probes=2,{WINDOW}"
    for done in run_pair(lambda rank: [*BENCHMARK, "--attn", other], folder):
        assert done.code == 2
        (line,) = done.err.splitlines()
        assert line.startswith("mlx_lm.benchmark: error: artefact: expected one trained on this model, got one for a ")


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line(name: str, finished: Runs):
    result = finished(f"bad: {name}")
    assert result.code == 2
    assert "Traceback" not in result.err
    errors = [line for line in result.err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert re.match(rf"mlx_lm\.generate: error: {BAD[name][1]}", errors[0])


def test_the_server_decodes_single_and_concurrent_requests(folder: Path):
    prompts = [words(prompt_of(length, seed=length)) for length in (60, 71, 48)]
    artefact = f"artefact={folder / 'model.saap.safetensors'}"
    options = ["--attn", EVERY[1].replace("artefact=model.saap.safetensors", artefact), *JSON]
    with running(folder / "llama") as dense, running(folder / "llama", *options) as sparse:
        for server in (dense, sparse):
            server.wait_until_up()
        expected = [dense.ask(prompt) for prompt in prompts]
        assert [sparse.ask(prompt) for prompt in prompts] == expected
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(sparse.ask, prompts)) == expected
        err = sparse.interrupt()
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith(f'{{"{JSON_KEY}": ')]
    (report,) = json.loads(line)[JSON_KEY]
    assert report["sparse_calls"] > 0
    assert report["buckets"]["selectivity"] == 1
    assert "with an array mask" not in report["dense_calls"]
