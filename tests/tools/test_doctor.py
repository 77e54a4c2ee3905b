"""Test `mlx-sparse` itself: doctor, matrix and errors."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from json_tables import read_tables
from mlx_lm.models.cache import KVCache
from tiny_models import write

from mlx_sparse import calibrate, cli, native
from mlx_sparse.calibrate import measurement_key, write_measurement
from mlx_sparse.core import registry
from mlx_sparse.core.reasons import UNTUNED
from mlx_sparse.methods import METHODS
from mlx_sparse.tools import doctor, measure

DATA = read_tables(__file__)

pytestmark = pytest.mark.slow  # commands

COMMANDS = DATA["commands"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a command."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        code = ended.code
    return code, *capsys.readouterr()


def test_doctor_reports_every_fact_and_no_problem(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    assert out.endswith("no problems found\n")
    assert "mlx_lm.* --attn: the start-up hook is active" in out
    assert "interfaces of mlx-lm: as expected" in out
    code, out, _ = run(capsys, "doctor", "--json")
    findings = json.loads(out)
    assert code == 0
    assert [name for name in findings if name != "seams of mlx-vlm"] == DATA["findings"]
    assert findings["version"] == metadata.version("mlx-sparse-attention")
    assert findings["packages"]["mlx-lm"] == metadata.version("mlx-lm")
    assert list(findings["backends"]) == list(registry.BACKENDS)
    assert findings["backends"]["oracle"] == findings["backends"]["ops"] == "yes"
    assert findings["seams"] == findings["problems"] == []


def test_doctor_reports_that_the_native_kernels_were_not_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "path", lambda: None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "cpu: the library of native kernels was not built: there was no C++ compiler." in out
    assert "problem: attention on the CPU uses array operations: the library of native kernels was not built" in out


@pytest.mark.usefixtures("calibration_folder")
def test_doctor_reports_the_plan_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(write(tmp_path / "tiny", "gemma3_text"))
    code, out, _ = run(capsys, "doctor", "--model", model, "--attn", "sample+sparq:rank=4", "--attn-backend", "ops")
    assert code == 0
    attn = "sparq:rank=4,reallocate=false,component_score=query_key"
    assert [line for line in out.splitlines() if "interfaces of mlx-vlm" not in line][7:] == [
        "sample+sparq:rank=4 on ops: 2 of 4 layers (gemma3_text, tiny)",
        f"  settings: sample+{attn}",
        "  dense layers: 2 with a sliding window (RotatingKVCache)",
        f"  dense {UNTUNED}",
        "  sparse at 2,048 keys and longer (modeled)",
        "  `mlx-sparse calibrate` and `--attn` replace modeled values by measurements",
        "no problems found",
    ]
    with measure.planned(model, "sparq:rank=4", "auto", calibrate.Calibration()) as plan:
        ((config, layer),) = plan.layers
        answer = {"points": [[3000, 2.0, 2.0, 2.0]]}
        write_measurement(measurement_key(config, layer), answer)
    code, out, _ = run(capsys, "doctor", "--model", model, "--attn", "sparq:rank=4", "--json")
    found = json.loads(out)["model"]
    assert (code, found["layers"], found["served_layers"]) == (0, 4, 2)
    assert found["dense_layers"] == {"with a sliding window (RotatingKVCache)": 2}
    (row,) = found["thresholds"]
    assert (row["layers"], row["value"], row["how"]) == (2, 3000, "measured on this machine")
    assert found["lines"][-1] == "sparse at 3,000 keys and longer (measured on this machine)"


@pytest.mark.usefixtures("calibration_folder")
def test_doctor_promises_no_measurement_that_calibrate_cannot_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    model = str(write(tmp_path / "tiny", "deepseek_v3", kv_lora_rank=96, **experts))
    _, out, _ = run(capsys, "doctor", "--model", model, "--attn", "sparq:component_score=low_rank")
    assert "(modeled)" in out
    assert "replace modeled values" not in out


def test_doctor_reports_why_a_model_is_unsupported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def remove_the_hook(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "meta_path", [found for found in sys.meta_path if type(found).__name__ != "CommandFinder"])


def break_mlx(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "mlx.core", None)  # importing it fails
    patch.setattr(doctor, "PACKAGES", ("mlx", "mlx-lm", "no-such-package"))


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (remove_the_hook, ["problem: the start-up hook is not active", "use 'mlx-sparse generate'"]),
        (
            lambda patch: patch.delattr(KVCache, "trim"),
            ["interfaces of mlx-lm: not as expected", "problem: mlx-lm: KVCache.trim is missing"],
        ),
        (break_mlx, ["problem: mlx does not work here: ", "no-such-package not installed"]),
    ],
    ids=["hook", "mlx-lm", "mlx"],
)
def test_doctor_names_a_problem_and_continues(
    damage: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    damage(monkeypatch)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert all(line in out for line in lines), out


def test_doctor_reports_a_conflicting_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "mlx_sparse-0.0.6.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-sparse\nVersion: 0.0.6\n")
    (other / "RECORD").write_text("mlx_sparse/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "problem: mlx-sparse also installs mlx_sparse" in out
    assert "'pip uninstall mlx-sparse'" in out


def test_matrix_prints_every_method_and_backend_as_text_and_as_json(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "matrix")
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split() == ["method", "stage", *registry.BACKENDS]
    assert [line.split()[0] for line in lines[: len(METHODS)]] == list(METHODS)
    code, out, _ = run(capsys, "matrix", "--json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert code == 0
    here = "yes" if mx.metal.is_available() else "MLX finds no Metal GPU on this machine"
    found = {name: registry.unavailable(name) or "yes" for name in ("cpu", "triton", "onnx", "ort")}
    assert rows["sparq"]["backends"] == {"oracle": "yes", "ops": "yes", "metal": here, **found}


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: mlx-sparse ")
    assert set(COMMANDS) <= set(re.findall(r"^    (\w+)", out, re.MULTILINE))


def test_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "generates")
    assert (code, out) == (2, "")
    assert all(command in err.splitlines()[-1] for command in COMMANDS)
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("matrix", "--markdown"), ("doctor", "--yaml"), ("--jsn",)])
def test_wrong_option_exits_with_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert ": error: " in err.splitlines()[-1]


def test_version(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--version") == (0, metadata.version("mlx-sparse-attention") + "\n", "")
