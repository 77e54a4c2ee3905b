"""Test MLX_SPARSE_ATTN: programs load enabled models, and an error never prevents a load."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build, write

import mlx_sparse
from mlx_sparse.lm import variable

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # commands

SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
PROGRAM = """
import sys
from mlx_lm import load
model, _ = load(sys.argv[1])
import mlx_lm.utils, mlx_sparse
from mlx_lm.utils import load_model
known = "mlx_sparse.lm.variable" in sys.modules
print(mlx_sparse.report(model) is not None, hasattr(load_model, "without_variable"), known)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def model() -> Iterator[Any]:
    model = build()
    yield model
    mlx_sparse.disable(model)


def program(code: str, *arguments: object, **environment: str) -> tuple[str, str]:
    """Return standard output and standard error of a Python program."""
    known = {name: value for name, value in os.environ.items() if name != "MLX_SPARSE_ATTN"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("value", ["", "  ", None])
def test_without_the_variable_nothing_happens(value: str | None, folder: Path) -> None:
    given = {} if value is None else {"MLX_SPARSE_ATTN": value}
    out, err = program(PROGRAM, folder, **given)
    assert out == "False False False" and "mlx-sparse" not in err


def test_a_loaded_model_is_enabled_with_one_line(folder: Path) -> None:
    out, err = program(PROGRAM, folder, MLX_SPARSE_ATTN="sparq:rank=4")
    assert out == "True True True"
    (line,) = [line for line in err.splitlines() if "mlx-sparse" in line]
    assert line.startswith("[mlx-sparse] MLX_SPARSE_ATTN=sparq:rank=4: sparq:rank=4")
    assert re.search(r"2 of 2 layers \(llama\).* sparse at [\d,]+ keys and longer \(modeled\)", line)


def test_a_removed_package_leaves_the_library_as_it_was(folder: Path) -> None:
    """Run without the start-up hook, which `pip uninstall` removes."""
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'CommandFinder']\n" + PROGRAM
    )
    out, err = program(code, folder, MLX_SPARSE_ATTN=SPARSE)
    assert out == "False False False" and "MLX_SPARSE_ATTN" not in err


@pytest.mark.parametrize(
    ("attn", "family", "reason"),
    [
        ("spork", "llama", "attn: expected one of "),
        ("sparq:rank=0", "llama", "rank: expected "),
        ("sparq:rank=17", "llama", "rank: expected at most the head dim D=16, got 17."),
        ("sparq+streaming", "llama", "attn: expected one decode method"),
        ("sparq:rank=4", "gemma2", "model: expected attention through "),
    ],
)
def test_an_error_is_one_line_and_the_model_stays_dense(
    attn: str, family: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build(family)
    monkeypatch.setenv("MLX_SPARSE_ATTN", attn)
    variable.enable_loaded(model)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[mlx-sparse] MLX_SPARSE_ATTN={attn}: attention is dense: {reason}")
    assert mlx_sparse.report(model) is None


def test_any_exception_keeps_the_model(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SPARSE_ATTN", SPARSE)
    variable.enable_loaded(object())
    assert "attention is dense: " in capsys.readouterr().err
    variable.enable_loaded(model)
    variable.enable_loaded(model)  # a second load function may call the first
    assert len(capsys.readouterr().err.splitlines()) == 1
    other = build()
    variable.enable_loaded(other, sharded=True)
    assert "attention is dense: the model is sharded after its load" in capsys.readouterr().err
    assert mlx_sparse.report(other) is None


def test_hostile_values_and_a_closed_stream_keep_the_model(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SPARSE_ATTN", "sparq:foo\n\x1b[2J fake=1")
    variable.enable_loaded(model)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[mlx-sparse] MLX_SPARSE_ATTN=sparq:foo??[2J fake=1: attention is dense: ")
    monkeypatch.setenv("MLX_SPARSE_ATTN", SPARSE)
    monkeypatch.setattr("sys.stderr", None)
    variable.enable_loaded(model)
    assert mlx_sparse.report(model) is not None


@pytest.mark.parametrize("value", ["x" * 100_000, "x y " * 30_000, "sparq:rank=4," + "x" * 100_000])
def test_a_long_value_is_cut(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLX_SPARSE_ATTN", value)
    variable.enable_loaded(build())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[mlx-sparse] MLX_SPARSE_ATTN={value[:200]}...: attention is dense: ")
    assert value[:201] not in line


def test_threads_enable_models_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SPARSE_ATTN", SPARSE)
    models = [build() for _ in range(4)]
    threads = [threading.Thread(target=variable.enable_loaded, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports: list[Any] = [mlx_sparse.report(model) for model in models]
    assert [report.served_layers for report in reports] == [2] * 4
    assert [line.count("MLX_SPARSE_ATTN=") for line in capsys.readouterr().err.splitlines()] == [1] * 4
    for model in models:
        mlx_sparse.disable(model)


def test_attn_of_a_command_takes_precedence(folder: Path) -> None:
    code = "import sys; sys.argv[0] = 'mlx_lm.generate'; from mlx_lm.generate import main; main()"
    asked = ["--model", folder, "--prompt", "w3 w4", "--max-tokens", "2"]
    _, err = program(code, *asked, "--attn", "streaming:recent_tokens=8", MLX_SPARSE_ATTN=SPARSE)
    assert "MLX_SPARSE_ATTN" not in err and "[mlx-sparse] streaming" in err
    _, err = program(code, *asked, "--attn", "dense", MLX_SPARSE_ATTN=SPARSE)
    assert "mlx-sparse" not in err
    _, err = program(code, *asked, MLX_SPARSE_ATTN=SPARSE)
    assert f"MLX_SPARSE_ATTN={SPARSE}: sparq" in err


def test_doctor_reports_the_variable(folder: Path) -> None:
    code = "import sys; from mlx_sparse.cli import main; main(sys.argv[1:])"
    out, _ = program(code, "doctor", "--model", folder, MLX_SPARSE_ATTN="sparq:rank=4")
    assert "MLX_SPARSE_ATTN: sparq:rank=4, for every model" in out
    assert "sparq:rank=4" in out.split("MLX_SPARSE_ATTN")[1] and "2 of 2 layers (llama, llama)" in out
    out, _ = program(code, "doctor", MLX_SPARSE_ATTN="spork")
    assert "MLX_SPARSE_ATTN: spork, which is refused" in out
    assert "problem: MLX_SPARSE_ATTN: attn: expected one of " in out
