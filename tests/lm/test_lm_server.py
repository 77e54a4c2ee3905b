"""The real mlx_lm.server with --attn, over HTTP on this machine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import prompt_of, words, write

from mlx_sparse.common.call_report import JSON_KEY

SERVER = str(Path(sys.executable).parent / "mlx_lm.server")
SPARSE = ["--attn", "sparq:rank=4,top_k=4,dense_below=0", "--attn-report", "json"]
TOKENS, LAYERS = 6, 2
pytestmark = pytest.mark.usefixtures("without_torch")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server."""

    def __init__(self, model: Path, *options: str) -> None:
        self.port = free_port()
        argv = [SERVER, "--model", str(model), "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background jobs ignore the interrupt that ends a server, and so would their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - the child runs no thread
        )

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps({"max_tokens": TOKENS, "temperature": 0.0, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(json.load(response))

    def ask(self, prompt: str) -> str:
        answer = self.post({"messages": [{"role": "user", "content": prompt}]})
        return str(answer["choices"][0]["message"]["content"])

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except urllib.error.URLError:
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return

    def interrupt(self, signum: signal.Signals = signal.SIGINT) -> str:
        """Control-C; returns standard error. Its exit code says nothing: MLX often aborts then, without us too."""
        self.process.send_signal(signum)
        _, err = self.process.communicate(timeout=60)
        return err


def reports_in(err: str) -> list[dict[str, Any]]:
    (line,) = [line for line in err.splitlines() if line.startswith(f'{{"{JSON_KEY}": ')]
    return list(json.loads(line)[JSON_KEY])


@contextmanager
def running(model: Path, *options: str) -> Iterator[Server]:
    server = Server(model, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("server") / "llama")


def test_single_and_concurrent_requests_decode_sparsely_and_control_c_prints_the_report(model: Path):
    prompts = [words(prompt_of(length, seed=length)) for length in (20, 31, 26)]
    with running(model) as dense, running(model, *SPARSE) as sparse:
        for server in (dense, sparse):
            server.wait_until_up()
        dense_answer = dense.ask(prompts[0])
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


def test_prompts_are_processed_sparsely_and_their_figures_are_read_from_another_thread(model: Path):
    attn = f"sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0+{SPARSE[1]}"
    prompts = [words(prompt_of(300, seed)) for seed in range(3)]
    with running(model, "--attn", attn, "--attn-report", "json+mass") as server:
        server.wait_until_up()
        answers = [server.ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            answers += pool.map(server.ask, [words(prompt_of(300, seed)) for seed in range(3, 6)])
        err = server.interrupt()
    assert all(len(answer.split()) == TOKENS for answer in answers)
    assert "Traceback" not in err
    (report,) = reports_in(err)
    figures = report["prefill"]
    assert figures["calls"] >= LAYERS * 3
    assert 0 < figures["density"]["mean"] < 1
    assert 0 < figures["retained_mass"]["mean"] < 1
    assert "with an array mask" not in report["dense_calls"]


def test_sigterm_prints_the_report_too(model: Path):
    with running(model, *SPARSE) as server:
        server.wait_until_up()
        server.ask(words(prompt_of(20)))
        (report,) = reports_in(server.interrupt(signal.SIGTERM))
        assert server.process.returncode == 128 + signal.SIGTERM
    assert report["sparse_calls"] >= LAYERS * TOKENS


def test_sigterm_ends_a_command_without_methods_as_it_always_did(model: Path):
    with running(model) as server:
        server.wait_until_up()
        server.interrupt(signal.SIGTERM)
        assert server.process.returncode == -signal.SIGTERM


ONLINE = "saap:mode=online,buckets=4,probes=2,recent_tokens=8,dense_layers=0,dense_below=0"


@pytest.mark.parametrize("decode", [SPARSE[1], ONLINE])
def test_a_model_loaded_again_goes_on_in_its_report(decode: str, model: Path):
    attn = f"sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0+{decode}"
    other = write(model.parent / "other", seed=2)
    with running(model, "--attn", attn, "--attn-report", "json") as server:
        server.wait_until_up()
        for seed, path in enumerate((model, other, model)):  # a text that is known would not be processed again
            content = words(prompt_of(300, seed))
            server.post({"model": str(path), "messages": [{"role": "user", "content": content}]})
        twice, once = reports_in(server.interrupt(signal.SIGTERM))
    assert (twice["model"], once["model"]) == ("llama", "other")
    assert twice["layers"] == twice["served_layers"] == LAYERS
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
def test_a_model_that_cannot_be_served_ends_the_server_with_one_line(
    family: str, options: list[str], message: str, tmp_path: Path
):
    with running(write(tmp_path / family, family), *options) as server:
        out, err = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert out == ""
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert re.fullmatch(rf"mlx_lm\.server: error: {message}\.?", errors[0])
    assert "Traceback" not in err
