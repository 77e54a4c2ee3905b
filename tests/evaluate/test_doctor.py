"""`mlx-sparse` itself: doctor, matrix, and what it says to a mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tiny_models import write

from mlx_sparse import calibrate, cli
from mlx_sparse.methods import METHODS, registry, table
from mlx_sparse.tools import doctor, matrix, measure

pytestmark = pytest.mark.slow  # commands

COMMANDS = [
    "demo",
    "generate",
    "chat",
    "server",
    "benchmark",
    "cache_prompt",
    "matrix",
    "doctor",
    "bench",
    "eval",
    "report",
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        code = ended.code
    return code, *capsys.readouterr()


def test_doctor_finds_no_problem_here(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    assert out.endswith("no problems found\n")
    assert "mlx_lm.* --attn: the start-up hook is active" in out
    assert "mlx-lm's interfaces: as expected" in out


def test_doctor_json_has_every_fact(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "doctor", "--json")
    findings = json.loads(out)
    assert code == 0
    assert set(findings) == {
        *("version", "python", "platform", "packages", "device", "backends", "hook", "seams", "problems")
    }
    assert findings["version"] == metadata.version("mlx-sparse-attention")
    assert findings["packages"]["mlx-lm"] == metadata.version("mlx-lm")
    assert list(findings["backends"]) == ["oracle", "ops", "metal", "triton", "onnx", "ort"]
    assert findings["backends"]["oracle"] == findings["backends"]["ops"] == "yes"
    assert findings["seams"] == findings["problems"] == []


@pytest.mark.usefixtures("calibration_folder")
def test_doctor_says_what_attn_would_do_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(write(tmp_path / "tiny", "gemma3_text"))
    code, out, _ = run(capsys, "doctor", "--model", model, "--attn", "sample+sparq:rank=4", "--attn-backend", "ops")
    assert code == 0
    attn = "sparq:rank=4,reallocate=false,component_score=query_key"
    assert out.splitlines()[6:] == [
        f"sample+{attn} on ops: 2 of 4 layers (gemma3_text, tiny)",
        "  dense layers: 2 with a sliding window (RotatingKVCache)",
        "  prompts sparse from 8,192 keys on where at most 75% of the blocks are kept (modelled)",
        "  sparse from 2,048 keys on (modelled)",
        "  mlx-sparse calibrate measures what is modelled, and so does --attn",
        "no problems found",
    ]
    with measure.planned(model, "sparq:rank=4", "auto", calibrate.Calibration()) as plan:
        ((config, layer),) = plan.layers
        answer = {"points": [[3000, 2.0, 2.0, 2.0]], "time": 1}
        calibrate.write_answer(calibrate.question(config, layer), answer)
    code, out, _ = run(capsys, "doctor", "--model", model, "--attn", "sparq:rank=4", "--json")
    found = json.loads(out)["model"]
    assert (code, found["layers"], found["served_layers"]) == (0, 4, 2)
    assert found["dense_layers"] == {"with a sliding window (RotatingKVCache)": 2}
    (row,) = found["thresholds"]
    assert (row["layers"], row["value"], row["how"]) == (2, 3000, "measured on this machine")
    assert found["lines"][-1] == "sparse from 3,000 keys on (measured on this machine)"


def test_doctor_says_what_keeps_a_model_from_it_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(write(tmp_path / "gemma2", "gemma2"))
    for arguments, problem in (
        (["--model", model], "model: expected attention through "),
        (["--model", str(tmp_path)], "--model: expected a model that mlx-lm can load, got "),
        (["--model", model, "--attn", "spork"], "attn: expected one of "),
    ):
        code, out, err = run(capsys, "doctor", *arguments)
        assert (code, err) == (1, "")
        assert out.splitlines()[-1].startswith(f"problem: {problem}")
        assert "default device: " in out
    assert run(capsys, "doctor", "--attn", "sparq")[0] == 2


def test_doctor_works_as_an_installed_command():
    command = Path(sys.executable).parent / "mlx-sparse"
    done = subprocess.run([command, "doctor", "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["problems"] == []


def test_doctor_tells_that_the_hook_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    others = [finder for finder in sys.meta_path if type(finder).__name__ != "CommandFinder"]
    monkeypatch.setattr(sys, "meta_path", others)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "problem: the start-up hook is not active" in out
    assert "use 'mlx-sparse generate'" in out


def test_doctor_tells_that_mlx_lm_has_moved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delattr(KVCache, "trim")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "mlx-lm's interfaces: not as expected" in out
    assert "problem: mlx-lm: KVCache.trim is gone" in out


def test_doctor_tells_that_another_distribution_owns_the_import_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "mlx_sparse-0.0.6.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-sparse\nVersion: 0.0.6\n")
    (other / "RECORD").write_text("mlx_sparse/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "problem: mlx-sparse owns the import name mlx_sparse too" in out
    assert "'pip uninstall mlx-sparse'" in out


def test_doctor_goes_on_when_a_package_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "mlx.core", None)  # importing it fails
    monkeypatch.setattr(doctor, "PACKAGES", ("mlx", "mlx-lm", "no-such-package"))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "problem: mlx does not work here: " in out
    assert "no-such-package not installed" in out


def test_matrix_lists_every_method_and_backend(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "matrix")
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split() == ["method", "stage", *table.BACKENDS]
    assert [line.split()[0] for line in lines[: len(METHODS)]] == list(METHODS)


def test_matrix_markdown_is_a_table_of_what_has_more_than_two_backends(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "matrix", "--markdown")
    assert code == 0
    assert out == matrix.markdown() + "\n"
    lines = [line.strip("|").split("|") for line in out.splitlines() if line.startswith("|")]
    assert {len(cells) for cells in lines} == {1 + len(table.BACKENDS)}
    assert [cells[0].strip() for cells in lines[2:]] == [
        f"`{name}`" for name in METHODS if len(table.FUNCTIONS[name]) > 2
    ]


def test_matrix_json_says_what_runs_here(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "matrix", "--json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert code == 0
    here = "yes" if mx.metal.is_available() else "MLX finds no Metal GPU on this machine"
    found = {name: registry.unavailable(name) or "yes" for name in ("triton", "onnx", "ort")}
    assert rows["sparq"]["backends"] == {"oracle": "yes", "ops": "yes", "metal": here, **found}


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: mlx-sparse ")
    assert set(COMMANDS) <= set(re.findall(r"^    (\w+)", out, re.MULTILINE))


def test_an_unknown_command_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "generates")
    assert (code, out) == (2, "")
    assert all(command in err.splitlines()[-1] for command in COMMANDS)
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("matrix", "--markdown", "--json"), ("doctor", "--yaml"), ("--jsn",)])
def test_a_wrong_option_is_an_error_with_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert ": error: " in err.splitlines()[-1]


def test_version(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--version") == (0, metadata.version("mlx-sparse-attention") + "\n", "")
