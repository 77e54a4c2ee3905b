"""Test that every command that README and docs print runs, with a tiny model and the cheapest options."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import text
from forked import Forks
from saap_artefacts import write_artefact
from tiny_models import build, write

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
    "--farther-than 32 --hidden 128 --work work",
    "mlx-sparse bench step": "--lengths 256 --repeat 1 --budget-s 1",
    "export-onnx": "--max-length 64",
    "mlx-sparse run-onnx": "--max-tokens 2",
}
# By the start of a command: the test that runs it.
ELSEWHERE = {
    "mlx_lm.server": "tests/lm/test_lm_server.py",
    "mlx-sparse bench step --runtime onnx": "tests/backends/onnx/test_onnx_bench.py",
    "mlx-sparse doctor": "tests/tools/test_doctor.py",
}
MODEL = re.compile(r"\bMODEL\b|mlx-community/[\w.-]+|\$\(python examples/model.py\)")


def printed() -> Iterator[str]:
    """Yield each command with arguments that a page prints in a block or in a line."""
    for page in PAGES:
        blocks = re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for block, code in blocks:
            for line in re.sub(r"[\\|]\n\s*", "", block).splitlines():
                yield MODEL.sub("MODEL", re.sub(r"^\(.*\)\s*(?=mlx_lm)|\s+#.*", "", line))
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
    write_artefact(folder / "model", build(head_dim=64), buckets=64)
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
    argv = [*shlex.split(command), *cheap.split()]
    stdin = (folder / (file or "question.txt")).read_text()
    done = forks.run(argv, folder, stdin, XDG_CACHE_HOME=str(folder / "cache"))
    # Commands that judge return 1 for a negative result: the tiny model is random.
    assert done.code in ((0, 1) if "advise" in line else (0,)), done.err
    assert "error: " not in done.err and "Traceback" not in done.err
