"""Test the real commands of mlx-vlm with --attn, and its server, on a tiny Qwen3-VL."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vlm_models
from require import absent
from servers import BIN, TOKENS, reports_in, running
from tiny_models import prompt_of, words

from mlx_sparse import cli

pytestmark = pytest.mark.slow  # commands

SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
JSON = ["--attn", SPARSE, "--attn-report", "json"]
PROMPT = words([1 + token % 80 for token in prompt_of(40)])
LAYERS = 2


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


def test_an_image_prompt_is_decoded_sparsely(folder: Path) -> None:
    image = ["--image", folder / "cat.png"]
    dense, sparse = generate(folder, *image), generate(folder, *image, *JSON)
    assert (dense.returncode, sparse.returncode) == (0, 0), sparse.stderr
    (report,) = reports_in(sparse.stderr)
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
    (report,) = reports_in(done.stderr)
    assert report["sparse_calls"] >= LAYERS * 3


def test_concurrent_requests_to_the_server_are_sparse(folder: Path) -> None:
    needed = ("fastapi", "uvicorn", "mlx_audio", "cv2")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        absent("mlx_vlm", f"its server needs {' and '.join(missing)}")
    prompts = [PROMPT, PROMPT[:-12], PROMPT[12:]]
    with running(folder, *JSON, program="mlx_vlm.server") as server, ThreadPoolExecutor(3) as pool:

        def ask(prompt: str) -> str:
            answer = server.post({"model": str(folder), "messages": [{"role": "user", "content": prompt}]})
            return str(answer["choices"][0]["message"]["content"])

        server.wait_until_up()
        alone = list(map(ask, prompts))
        assert list(pool.map(ask, prompts)) == alone
        (report,) = reports_in(server.interrupt())
    assert report["sparse_calls"] >= LAYERS * TOKENS * 3, report
