"""Test the real commands of mlx-vlm with --attn, and its server, on a tiny Qwen3-VL."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import vlm_models
from require import absent
from test_lm_server import free_port
from tiny_models import prompt_of, words

from mlx_sparse import cli
from mlx_sparse.api.call_report import JSON_KEY

pytestmark = pytest.mark.slow  # commands

BIN = Path(sys.executable).parent
SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
JSON = ["--attn", SPARSE, "--attn-report", "json"]
PROMPT = words([1 + token % 80 for token in prompt_of(40)])
TOKENS, LAYERS = 6, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vlm_models.write_qwen3_vl(tmp_path_factory.mktemp("models") / "qwen3_vl")


def command(name: str, *options: object, variable: str = "", given: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLX_SPARSE_ATTN": variable}
    argv = [BIN / f"mlx_vlm.{name}", *map(str, options)]
    return subprocess.run(argv, env=environment, input=given, capture_output=True, text=True, check=False)


def generate(folder: Path, *options: object, variable: str = "") -> subprocess.CompletedProcess[str]:
    asked = ["--model", folder, "--prompt", PROMPT, "--max-tokens", TOKENS, "--temperature", 0]
    return command("generate", *asked, *options, variable=variable)


def test_advise_and_doctor_load_a_family_that_only_mlx_vlm_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = str(vlm_models.write_glm4v(tmp_path / "glm4v")), tmp_path / "text.txt"
    text.write_text(" ".join(f"w{1 + token % 80}" for token in prompt_of(6000)))
    short = ["--text", str(text), "--passage", "512", "--limit", "1", "--budget", "1/2", "--methods", "sparq:rank=4"]
    assert cli.main(["advise", model, *short, "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["family"].startswith("glm4v") and found["methods"][0]["served"] == LAYERS and found["attempts"]
    assert cli.main(["doctor", "--model", model, "--attn", SPARSE]) == 0
    assert "2 of 2 layers" in capsys.readouterr().out
    assert cli.main(["try", "--model", model]) == 2
    assert "glm4v not supported" in capsys.readouterr().err.splitlines()[-1]


def reports(stderr: str) -> list[dict[str, Any]]:
    (line,) = [line for line in stderr.splitlines() if line.startswith(f'{{"{JSON_KEY}"')]
    return list(json.loads(line)[JSON_KEY])


def test_an_image_prompt_is_decoded_sparsely(folder: Path) -> None:
    image = ["--image", folder / "cat.png"]
    dense, sparse = generate(folder, *image), generate(folder, *image, *JSON)
    assert (dense.returncode, sparse.returncode) == (0, 0), sparse.stderr
    (report,) = reports(sparse.stderr)
    assert report["sparse_calls"] >= LAYERS * TOKENS and report["served_layers"] == LAYERS
    assert sparse.stdout != dense.stdout != generate(folder).stdout, "the image and the method change the answer"
    variable = generate(folder, *image, variable=SPARSE)
    assert variable.stdout == sparse.stdout
    assert variable.stderr.count("MLX_SPARSE_ATTN=") == 1 and "2 of 2 layers (qwen3_vl_text)" in variable.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--attn", "spork"], "attn: expected one of "),
        (["--attn", "sparq", "--lossless"], "--lossless: expected mlx-lm, got mlx_vlm.generate."),
        (["--attn", "sparq:rank=17"], "rank: expected at most the head dim D=16, got 17."),
    ],
)
def test_a_mistake_is_a_one_line_error(options: list[str], error: str, folder: Path) -> None:
    done = generate(folder, *options)
    assert done.returncode == 2
    assert f"error: {error}" in done.stderr.splitlines()[-1]


def test_chat_is_sparse(folder: Path) -> None:
    done = command("chat", "--model", folder, "--max-tokens", 4, *JSON, given=f"{PROMPT}\n/exit\n")
    assert done.returncode == 0, done.stderr
    (report,) = reports(done.stderr)
    assert report["sparse_calls"] >= LAYERS * 3


def ask(port: int, model: Path, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": str(model), "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_concurrent_requests_to_the_server_are_sparse(folder: Path) -> None:
    needed = ("fastapi", "uvicorn", "mlx_audio", "cv2")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        absent("mlx_vlm", f"its server needs {' and '.join(missing)}")
    port = free_port()
    argv = [BIN / "mlx_vlm.server", "--model", folder, "--host", "127.0.0.1", "--port", port, *JSON]
    process = subprocess.Popen(
        list(map(str, argv)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - the child runs no thread
    )
    try:
        deadline, prompts = time.monotonic() + 120, [PROMPT, PROMPT[:-12], PROMPT[12:]]
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        alone = [ask(port, folder, prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda prompt: ask(port, folder, prompt), prompts))
    finally:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert together == alone
    (report,) = reports(stderr)
    assert report["sparse_calls"] >= LAYERS * TOKENS * 3, report
