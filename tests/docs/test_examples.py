"""Test every example with tiny models: the output matches the page except for numbers.

With --every, the commands of each page run unchanged with the real model in a copy of examples/.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tier
from absent import without
from example_pages import EXAMPLES, commands, masked, printed, shape
from packages import MINUTES, WEB, fetched, web
from require import absent, needs_triton
from servers import running
from tiny_models import prompt_of, words, write

pytestmark = pytest.mark.slow  # commands, a browser

ON_ONNXRUNTIME = ("onnx_cpp", "onnx_web")
PAGES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
ATTN = ["--attn", "sparq:rank=4,top_k=8,dense_below=0"]
QUESTIONS = [words(prompt_of(5, seed)) for seed in (2, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("examples") / "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(words(prompt_of(60)))
    return file


@pytest.fixture
def no_torch_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torch from the processes of this test: transformers would spend two seconds to import it."""
    for name, value in without("torch").items():
        monkeypatch.setenv(name, value)


def run_program(program: str, *arguments: object) -> str:
    """Run a Python program of examples/ in this process and return its output."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [program, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    finally:
        sys.argv = argv
    return out.getvalue()


def answers(out: str) -> list[str]:
    return re.findall(r"^answer: (.*)", out, re.MULTILINE)


def test_python(model: Path, text: Path) -> None:
    arguments = ["python/generate.py", model, text, QUESTIONS[0], "--max-tokens", 8]
    sparse, dense = run_program(*arguments, *ATTN), run_program(*arguments, "--attn", "sparq:rank=4,dense_below=4096")
    assert shape(sparse) == shape(printed("python", "generate.py"))
    assert "sparse calls: none" in dense
    assert answers(sparse) != answers(dense)


@pytest.mark.usefixtures("no_torch_in_processes")
def test_openai_client(model: Path, text: Path) -> None:
    with running(model, *ATTN) as server:
        server.wait_until_up()
        at = ["--server", f"http://127.0.0.1:{server.port}/v1", "--max-tokens", 6]
        out = run_program("openai_client/client.py", text, QUESTIONS[0], *at)
        assert shape(out) == shape(printed("openai_client", "client.py"))
        assert answers(out) == [server.ask(f"{text.read_text()}\n{QUESTIONS[0]}")]


def test_document_qa(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm import cache_prompt

    file = tmp_path / "cache.safetensors"
    argv = ["--model", model, "--prompt", text.read_text(), "--prompt-cache-file", file, *ATTN]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.cache_prompt", *map(str, argv)])
    cache_prompt.main()
    arguments = ["--max-tokens", 8, *ATTN]
    both = run_program("document_qa/ask.py", file, *QUESTIONS, *arguments)
    assert blocks(shape(both)) == blocks(shape(printed("document_qa", "ask.py")))
    alone = run_program("document_qa/ask.py", file, QUESTIONS[1], *arguments)
    assert answers(alone) == answers(both)[1:], "the first question must not change the cache of the document"
    assert answers(both) != answers(
        run_program("document_qa/ask.py", file, *QUESTIONS, "--attn", "dense", "--max-tokens", 8)
    )


def blocks(text: str) -> list[str]:
    """Return the first and the last paragraph; between them is one paragraph for each question."""
    first, *_, last = text.split("\n\n")
    return [first, last]


COUNT = 6  # tokens to generate with an exported model
on_onnxruntime = pytest.mark.skipif(sys.version_info < (3, 11), reason="onnxruntime needs Python 3.11")


@pytest.fixture(scope="module")
def exported_model() -> tuple[Path, str, str]:
    """Return the folder of an exported model, a prompt, and the tokens that mlx-lm generates after the prompt."""
    from exported import SPARQ, exported, tokens_of_mlx

    prompt = prompt_of(100)
    ids, answer = (" ".join(map(str, tokens)) for tokens in (prompt, tokens_of_mlx(SPARQ, prompt, COUNT)))
    return exported(SPARQ), ids, answer + "\n"


def decoded(command: list[object], prompt: str) -> str:
    argv = [str(part) for part in command]
    done = subprocess.run(argv, input=prompt, capture_output=True, text=True, timeout=MINUTES, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@on_onnxruntime
def test_cpp(exported_model: tuple[Path, str, str], tmp_path: Path) -> None:
    from mlx_sparse.onnx_export.runtime import native

    if not shutil.which("c++"):
        absent("c++", "there is no C++ compiler")
    if reason := native.unavailable():
        absent("ort", reason)
    folder, prompt, expected = exported_model
    subprocess.run(["sh", EXAMPLES / "onnx_cpp" / "build.sh", tmp_path], check=True, env=with_this_python(os.environ))
    for library in (native.library_path(), "-"):
        assert decoded([tmp_path / "decode", folder / "model.onnx", library, COUNT], prompt) == expected
    assert shape(expected) == shape(printed("onnx_cpp", "build/decode"))


def with_this_python(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with this Python first on the path."""
    return {**environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the example with the onnxruntime-web package of the other tests."""
    if not shutil.which("node"):
        absent("web", "there is no node here.")
    place = fetched(web())
    if isinstance(place, str):
        absent("web", place)
    folder = Path(shutil.copytree(EXAMPLES / "onnx_web", tmp_path_factory.mktemp("web") / "onnx_web"))
    (folder / "node_modules").symlink_to(place / "node_modules")
    return folder


@on_onnxruntime
def test_browser_page(javascript: Path, exported_model: tuple[Path, str, str]) -> None:
    """Run the page in a browser only: it executes the same code as node.mjs, and loading the model takes 4 seconds."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        absent("browser", f"there is none of {', '.join(BROWSERS)}")
    folder, prompt, expected = exported_model
    assert decoded(["node", javascript / "page.mjs", folder, COUNT, browser], prompt) == expected
    assert shape(expected) == shape(printed("onnx_web", "page.mjs"))
    assert printed("onnx_web", "page.mjs") == printed("onnx_web", "node.mjs")


def test_web_example_uses_the_tested_version() -> None:
    example, tested = (json.loads((place / "package.json").read_text()) for place in (EXAMPLES / "onnx_web", WEB))
    assert example["dependencies"] == tested["dependencies"]


def test_transformers() -> None:
    needs_triton()
    assert run_program("transformers/generate.py") == printed("transformers", "generate.py") + "\n"


@pytest.mark.usefixtures("no_torch_in_processes")
def test_notebook(model: Path, tmp_path: Path) -> None:
    import commands as fixtures
    import nbformat

    text = tmp_path / "text.txt"
    text.write_text(fixtures.text(1800))
    stored = nbformat.read(EXAMPLES / "quality_vs_bytes.ipynb", as_version=4)
    (given,) = [cell for cell in stored.cells if "parameters" in cell.metadata.get("tags", [])]
    expected = [outputs(cell) for cell in stored.cells]
    if not tier.every:
        given.source += f'\nMODEL, TEXT, SHARES = "{model}", "{text}", "1/8"'
    run = executed(stored)
    for cell, before in zip(run.cells, expected, strict=True):
        after = outputs(cell)
        if tier.every:
            assert after == before
        else:
            assert [columns(each) for each in after] == [columns(each) for each in before]


def executed(notebook: Any) -> Any:
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=2 * MINUTES, kernel_name="python3")
    return client.execute()


def outputs(cell: Any) -> list[str]:
    """Return the text outputs of a cell, with "picture" for a picture."""
    texts = []
    for output in cell.get("outputs", []):
        assert output.output_type != "error", output
        texts.append(output.get("text") or ("picture" if "image/png" in output.data else output.data["text/plain"]))
    return texts


def columns(text: str) -> set[str]:
    """Return the shapes of the lines of a table without column widths."""
    return {" ".join(shape(line).split()) for line in text.splitlines()}


@pytest.mark.skipif(not tier.every, reason="the pages with the real model run with --every")
@pytest.mark.parametrize("page", PAGES)
def test_page_commands_print_the_documented_output(page: str, tmp_path: Path) -> None:
    """Run all commands in one shell."""
    if page in ON_ONNXRUNTIME and sys.version_info < (3, 11):
        pytest.skip("onnxruntime needs Python 3.11")
    here = Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    listed = commands(page)
    lines = ["set -e", "MODEL=$(python model.py)"]
    for number, command in enumerate(listed):
        lines += [f"echo '=== {number}'", command.line]
    process = subprocess.Popen(
        ["bash", "-c", "\n".join(lines)],
        cwd=here,
        env=with_this_python(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=6 * MINUTES)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a server that a page has started
    assert process.returncode == 0, err
    parts = re.split(r"^=== \d+\n", out, flags=re.MULTILINE)[1:]
    for command, part in zip(listed, parts, strict=True):
        assert masked(part) == masked(command.output), command.line
