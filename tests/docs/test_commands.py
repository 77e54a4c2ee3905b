"""Test that every command that README and docs print runs, with a tiny model and the cheapest options.

The printed reports match except for numbers.
"""

from __future__ import annotations

import html
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest
from commands import text
from example_pages import shape
from forked import Forks
from saap_artefacts import write_artefact
from tiny_models import BACKEND, build, write

from mlx_sparse.tools import advise, tune

pytestmark = pytest.mark.slow  # commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = ("mlx_lm.", "mlx-sparse ", "export-onnx ")
# By the start of a command: cheaper options.
CHEAP = {
    "mlx_lm.generate": "--max-tokens 2",
    "mlx-sparse try": "--context 300 --max-tokens 2",
    "mlx-sparse advise": "--passage 512 --limit 1 --budget 1/2 --methods streaming",
    "mlx-sparse eval": "--context 512 --limit 1 --tasks copying --text notes.txt",
    "mlx-sparse calibrate": "--seconds 0.1",
    "mlx-sparse tune": "--lengths 512 --examples 1 --alpha-column 1 --alpha-slash 1 --chunks 1 --share 0.5 "
    "--min-accuracy 0 --text notes.txt",
    "mlx-sparse train-saap": "--context 512 --windows 2 --queries 64 --buckets 32 --steps 1 --recent-tokens 63 "
    "--farther-than 32 --hidden 128 --work work --held-out notes.txt --text book1.txt",
    "mlx-sparse bench generate": "--lengths 256 --max-tokens 2 --repeat 1 --text notes.txt",
    "mlx-sparse bench prefill": "--shapes 4x2x64 --lengths 256 --repeat 1",
    "mlx-sparse bench step": "--shapes 4x2x64 --lengths 256 --repeat 1 --budget-s 1",
    "export-onnx": "--max-length 64",
    "mlx-sparse run-onnx": "--max-tokens 2",
}
MODELED = ("mlx-sparse eval", "mlx-sparse bench generate", "mlx-sparse train-saap")  # with a default model to fetch
# By the start of a command: the test that runs it.
ELSEWHERE = {
    "mlx_lm.server": "tests/lm/test_lm_server.py",
    "mlx-sparse bench step --runtime onnx": "tests/backends/onnx/test_onnx_bench.py",
    "mlx-sparse bench generate --runtime onnx": "tests/backends/onnx/test_onnx_bench.py",
    "mlx_lm.evaluate": "tests/lm/test_lm_evaluate.py",
    "mlx-sparse doctor": "tests/tools/test_doctor.py",
}
MODEL = re.compile(
    r"\bMODEL\b|mlx-community/[\w.-]+|\$\(python examples/model.py\)|gemma-3-270m --accept-license gemma"
)


def printed() -> Iterator[str]:
    """Yield each command with arguments that a page prints in a block or in a line."""
    for page in PAGES:
        text = re.sub(r"^((    .*\n)+)", r"```\n\1```\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        blocks = re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", text, re.DOTALL | re.MULTILINE)
        for block, code in blocks:
            variables = dict(re.findall(r"^ *([A-Z])=(.*)", block, re.MULTILINE))
            for line in re.sub(r"[\\|]\n\s*", "", block).splitlines():
                command = re.sub(r"^\(.*\)\s*(?=mlx_lm)|\s+#.*| > .*", "", line.strip())
                yield MODEL.sub("MODEL", Template(command).safe_substitute(variables))
            if re.search(r" \S+ ", code) or code in ("mlx-sparse matrix",):
                yield code


COMMANDS = sorted(
    {line for line in printed() if line.startswith(OURS) and ("--model" in line or not line.startswith("mlx_lm"))}
)
HERE = [line for line in COMMANDS if not line.startswith(tuple(ELSEWHERE))]


def test_pages_print_many_commands_and_the_other_tests_exist() -> None:
    assert len(HERE) > 15
    for start, path in ELSEWHERE.items():
        assert any(line.startswith(start) for line in COMMANDS), start
        assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    write(folder / "MODEL", head_dim=64)
    for basis in ("pca", "rotated"):
        write(folder / f"smollm2-mla-{basis}", "glm4_moe_lite", kv_lora_rank=64)
    for name in ("model", "trained", "kmeans"):
        made = write_artefact(folder / name, build(head_dim=64), buckets=64)
        shutil.copy(made, folder / f"{name}.safetensors")
    for name in ("notes", "question", "long", "book1", "book2"):
        (folder / f"{name}.txt").write_text(text(40 if name == "question" else 3000))
    (folder / "attn.toml").write_text(f"{advise.FIRST_LINE}\n[sparq]\nrank = 4\n")
    (folder / "prefill.toml").write_text(f"{tune.FIRST_LINE}\n[gather]\nshare = 0.5\n")
    return folder


@pytest.fixture(scope="module")
def forks(without_torch: Any) -> Iterator[Forks]:
    with Forks() as made:
        yield made


@pytest.mark.parametrize("line", HERE)
def test_printed_command_runs(line: str, folder: Path, forks: Forks) -> None:
    command, _, file = line.replace(" FILE", " notes.txt").partition(" < ")
    cheap = next((more for start, more in CHEAP.items() if line.startswith(start)), "")
    if "onnx" in line and sys.version_info < (3, 11):
        pytest.skip("onnxruntime needs Python 3.11")
    model = "--model MODEL" if line.startswith(MODELED) and not re.search("MODEL|--model", line) else ""
    argv = [*shlex.split(command), *cheap.split(), *model.split()]
    stdin = (folder / (file or "question.txt")).read_text()
    done = forks.run(argv, folder, stdin, XDG_CACHE_HOME=str(folder / "cache"))
    # Commands that judge return 1 for a negative result: the tiny model is random.
    assert done.code in ((0, 1) if "advise" in line else (0,)), done.err
    assert "error: " not in done.err and "Traceback" not in done.err


@pytest.mark.skipif(BACKEND != "cpu", reason="the printed reports are from a CPU")
@pytest.mark.parametrize(
    ("page", "options"), [("README.md", ""), ("docs/lossless.md", "--lossless 4 --attn-report full")]
)
def test_printed_report_matches_except_for_numbers(page: str, options: str, folder: Path, forks: Forks) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (report,) = (block for block in blocks if re.match(r"\[mlx-sparse\]|  \w+: ", block))
    command = f"mlx_lm.generate --model MODEL --prompt - --attn sparq:top_k=64,dense_below=0 {options}"
    done = forks.run(shlex.split(command), folder, (folder / "long.txt").read_text())
    lines = [shape(line) for line in done.err.splitlines()[2:] if "without drafts: " not in line]
    assert "\n".join(map(shape, report.splitlines())) in "\n".join(lines)


@pytest.mark.skipif(BACKEND != "cpu", reason="the picture is from a CPU")
def test_the_demos_picture_has_the_rows_of_try(folder: Path, forks: Forks) -> None:
    picture = html.unescape(re.sub(r"<[^>]*>", "\n", (ROOT / "docs/demo.svg").read_text(encoding="utf-8")))
    command = "mlx-sparse try MODEL --text notes.txt --question w3 --context 300 --max-tokens 2"
    done = forks.run([*command.split(), "--attn", "sparq:top_k=64,dense_below=0"], folder, "")
    rows = re.compile(r"^(\w[\w/ ]*?) {2,}\S", re.MULTILINE)
    assert rows.findall(done.out) == rows.findall(picture.replace("\xa0", " "))
