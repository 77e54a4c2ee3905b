"""Test the real mlx_lm.server with --attn over HTTP."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from example_pages import shape
from forked import without_blas
from repository_paths import ROOT
from servers import TOKENS, reports_in, running
from tiny_models import BACKEND, prompt_of, words, write

SPARSE = ["--attn", "sparq:rank=4,top_k=4,dense_below=0", "--attn-report", "json"]
LAYERS = 2
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # commands


def test_control_c_ends_a_calibration(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with running(model, "--attn", "sparq:rank=4") as server:
        server.wait_for("calibrating")  # a loaded machine may be up only after the calibration
        err = server.interrupt()
    assert "it took" not in err and "Traceback" not in err, "the calibration ended before the server"
    assert "[mlx-sparse] sparq:rank=4" in err, "the report"
    assert not list(tmp_path.rglob("*.json"))


def test_the_crossover_length_is_measured_before_the_first_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # mlx-lm's /v1/models needs the folder
    with running(model, "--attn", "sparq:rank=4") as server:
        server.wait_until_up()
        server.wait_for("(measured on this machine")
        server.ask(words(prompt_of(1100)))
        models = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models", timeout=60)
        assert json.load(models)["object"] == "list"
        err = server.interrupt()
    assert "calibrating: finding" not in err
    assert (tmp_path / "hub").is_dir()


def requests_in(err: str) -> list[str]:
    """Return the lines in ``err`` about requests."""
    return [line.partition("[mlx-sparse] ")[2] for line in err.splitlines() if "[mlx-sparse] prompt of" in line]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("server") / "llama")


def test_single_and_concurrent_requests_decode_sparsely_and_control_c_prints_the_report(model: Path):
    prompts = [words(prompt_of(length, seed=length)) for length in (20, 31, 26)]
    lossless_options = [*SPARSE, "--lossless", "2"]
    with running(model) as dense, running(model, *SPARSE) as sparse, running(model, *lossless_options) as lossless:
        for server in (dense, sparse, lossless):
            server.wait_until_up()
        dense_answer = dense.ask(prompts[0])
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lossless.ask, prompts[:2] * 2)) == [dense_answer, dense.ask(prompts[1])] * 2
        (report,) = reports_in(lossless.interrupt())
        assert report["drafts"]["checks"] > 0
        answer = sparse.ask(prompts[0])
        assert len(answer.split()) == len(dense_answer.split()) == TOKENS
        assert answer != dense_answer
        alone = [sparse.ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(sparse.ask, prompts)) == alone
        assert alone[0] == answer, "the prompt cache of the first request was reused"
        err = sparse.interrupt()
    assert "Traceback" not in err
    (report,) = reports_in(err)
    assert report["served_layers"] == LAYERS
    assert report["sparse_calls"] >= LAYERS * TOKENS * 5
    assert "with an array mask" not in report["dense_calls"]


def test_quantized_caches_are_reused_between_requests(tmp_path: Path):
    packed = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    prompt = words(prompt_of(40))
    with running(write(tmp_path / "wide", head_dim=32), *SPARSE, *packed) as server:
        server.wait_until_up()
        first = server.ask(prompt)
        assert server.ask(prompt) == first, "from the reused cache"
        (report,) = reports_in(server.interrupt())
    assert report["sparse_calls"] >= LAYERS * TOKENS * 2
    assert not [reason for reason in report["dense_calls"] if "cache" in reason]


def test_each_request_has_a_line(model: Path):
    steps = LAYERS * (TOKENS + 1)  # mlx-lm computes one token ahead
    attn = ["--attn", "sparq:rank=4,top_k=4,dense_below=64", "--attn-report", "json"]
    with running(model, *attn) as server:
        server.wait_until_up()
        server.ask(words(prompt_of(20)))
        list(server.stream(prompt=words(prompt_of(100)), max_tokens=TOKENS))
        server.ask(words(prompt_of(20)))
        err = server.interrupt()
    below = "over fewer than 64 keys"
    prompts = "in prefill"
    (report,) = reports_in(err)
    assert (report["sparse_calls"], report["crossovers"]) == (steps, ["sparse at 64 keys and longer (given)"])
    assert requests_in(err) == [
        f"prompt of 20 tokens, {TOKENS} generated; calls: 0 sparse, {steps + LAYERS} dense "
        f"({steps} {below}, {LAYERS} {prompts})",
        f"prompt of 100 tokens, {TOKENS} generated; calls: {steps} sparse, {LAYERS} dense ({LAYERS} {prompts})",
        f"prompt of 20 tokens (19 cached), {TOKENS} generated; calls: 0 sparse, {steps} dense ({steps} {below})",
    ]
    (printed,) = requests_in((ROOT / "docs/servers.md").read_text())
    assert shape(printed).replace(" (# cached)", "") in map(shape, requests_in(err))


def test_disconnected_and_concurrent_requests_have_lines(model: Path):
    attn = f"sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0+{SPARSE[1]}"
    with running(model, "--attn", attn) as server:
        server.wait_until_up()
        answer = server.stream(prompt=words(prompt_of(20)), max_tokens=10**6)
        next(answer)
        server.ask(words(prompt_of(300)))
        answer.close()
        time.sleep(1)  # until mlx-lm writes to the closed connection
        server.ask(words(prompt_of(300, seed=7)))
        err = server.interrupt()
    first, *_, report_line = (line for line in without_blas(err).splitlines() if line.startswith("[mlx-sparse] "))
    assert first.startswith(f"[mlx-sparse] {attn.partition(',')[0]},")
    crossovers = "; prefill sparse at 0 keys and longer (given); sparse at 5 keys and longer (given)"
    assert first == f"{report_line}{crossovers}"
    assert first.endswith(f" on {BACKEND}: 2 of 2 layers (llama, llama){crossovers}")
    other, gone, last = requests_in(err)
    assert re.match(r"prompt of 300 tokens, 6 generated; calls of up to 2 concurrent requests: \d+ sparse", other)
    assert re.match(r"prompt of 20 tokens, \d+ generated; calls of up to 2 concurrent requests", gone)
    assert f"6 generated; calls: {LAYERS * (TOKENS + 1)} sparse, {LAYERS} sparse in prefill, 0 dense" in last


ONLINE = "saap:mode=online,buckets=4,probes=2,recent_tokens=8,dense_layers=0,dense_below=0"


def crossovers_of(decode: str) -> list[str]:
    return [
        "prefill sparse at 0 keys and longer (given)",
        f"sparse at {10 if decode == ONLINE else 5} keys and longer (given)",
    ]


@pytest.mark.parametrize("decode", [SPARSE[1], ONLINE])
def test_reloaded_model_continues_its_report(decode: str, model: Path):
    attn = f"sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0+{decode}"
    other = write(model.parent / "other", seed=2)
    with running(model, "--attn", attn, "--attn-report", "json") as server:
        server.wait_until_up()
        for seed, path in enumerate((model, other, model)):  # a repeated text would use the prompt cache
            content = words(prompt_of(300, seed))
            server.post({"model": str(path), "messages": [{"role": "user", "content": content}]})
        twice, once = reports_in(server.interrupt())
    assert (twice["model"], once["model"]) == ("llama", "other")
    assert twice["layers"] == twice["served_layers"] == LAYERS
    assert twice["crossovers"] == once["crossovers"] == crossovers_of(decode)
    assert (twice["prefill"]["calls"], once["prefill"]["calls"]) == (2 * LAYERS, LAYERS)
    assert twice["sparse_calls"] == 2 * once["sparse_calls"] > 0
    assert twice["dense_calls"] == {reason: 2 * count for reason, count in once["dense_calls"].items()}
    assert twice["buckets"] is None or twice["buckets"]["keys"] == 2 * once["buckets"]["keys"] > 0


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma2", SPARSE, "model: expected attention through .*, got gemma2, .*"),
        ("llama", ["--attn", "sparq:rank=99"], "rank: expected at most the head dim D=16, got 99"),
    ],
)
def test_unservable_model_ends_the_server_with_one_line(family: str, options: list[str], message: str, tmp_path: Path):
    with running(write(tmp_path / family, family), *options) as server:
        out, err = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert out == ""
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert re.fullmatch(rf"mlx_lm\.server: error: {message}\.?", errors[0])
    assert "Traceback" not in err
