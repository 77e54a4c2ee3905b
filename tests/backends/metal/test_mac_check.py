"""Test scripts/mac_check.sh on a machine that is not a Mac."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_report
import pytest
from shell import OWN, ROOT, run, write_commands

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # reports

SCRIPT = ROOT / "scripts" / "mac_check.sh"
FILES = re.findall(r"tests/(\S+)\.py", SCRIPT.read_text(encoding="utf-8"))

# Output of a Mac's commands, and tests of a project that has only the parts that the script calls.
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


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    """Create a project and fake commands that print the output of a Mac's commands."""
    if sys.platform == "darwin":
        pytest.skip("this machine is a Mac, so the whole benchmark would run")
    for folder in ("scripts", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "dev.py").write_text("print('ready')")
    for script in (SCRIPT, ROOT / "scripts" / "check_steps.sh", ROOT / "scripts" / "check_report.py"):
        shutil.copy(script, tmp_path / "scripts")
    real = {"python": sys.executable, "mlx-sparse": f"{sys.executable} -m mlx_sparse.cli"}
    commands = {f"bin/{name}": body for name, body in MAC.items()}
    commands |= {f".venv/bin/{name}": f'exec {command} "$@"' for name, command in real.items()}
    write_commands(tmp_path, commands)
    return tmp_path


def check(mac: Path, *, message: str, fails: bool) -> tuple[subprocess.CompletedProcess[str], dict]:
    for name in FILES:
        path = mac / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TESTS.format(message=message, fails=fails))
    path = f"{mac / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", mac / "scripts" / "mac_check.sh", "-o", mac / "result.jsonl", cwd=mac, PATH=path, **OWN)
    return done, json.loads((mac / "result.jsonl").read_text().splitlines()[0])


def test_report_names_the_machine_and_tests(mac: Path) -> None:
    done, found = check(mac, message="Metal GPU Validation Enabled", fails=False)
    assert {"model": "Mac14,9", "macos": "26.1", "gpu_cores": "19"}.items() <= found["machine"].items()
    assert found["machine"]["mlx"]
    for name in ("validated", "plain"):
        assert (found["tests"][name]["tests"], found["tests"][name]["failed"]) == (8, [])
    assert found["validation"] == []
    # The real benchmark fails because there is no Metal GPU.
    assert found["problems"] == [
        "the benchmark of decode steps did not finish",
        "the benchmark of prefill did not finish",
    ]
    assert done.returncode == 1
    assert "expected one that has sparq here, got metal (MLX finds no Metal GPU on this machine)" in done.stderr
    assert "expected one that has sample here, got metal" in done.stderr


def module(name: str) -> str:
    """Return the JUnit name of a test module."""
    return f"tests.{name}".replace("/", ".")


def test_failures_and_validation_messages_are_reported(mac: Path) -> None:
    _, found = check(mac, message="Invalid device load at offset 4096", fails=True)
    assert [bad["test"] for bad in found["tests"]["validated"]["failed"]] == [
        # all tests of the Metal files, and the metal ones of the other files
        *(f"{module(name)}::test_kernel[{backend}]" for name in FILES[:2] for backend in ("ops", "metal")),
        *(f"{module(name)}::test_kernel[metal]" for name in FILES[2:]),
    ]
    assert found["validation"] == ["Invalid device load at offset 4096"] * 8
    assert found["problems"][:3] == [
        "8 of 8 tests (validated) failed",
        "8 of 8 tests (plain) failed",
        "Metal's validation reports 8 lines",
    ]


RUN = {"tests": 9, "skipped": 0, "failed": [], "status": 0}
BAD = {**RUN, "failed": [{"test": "a", "message": "b"}]}


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        ({"tests": {"validated": RUN, "plain": RUN}, "problems": ["the benchmark did not finish"]}, []),
        ({"tests": {"validated": BAD, "plain": RUN}}, ["1 of 9 tests (validated) failed"]),
        ({"tests": {"validated": RUN, "plain": None}}, ["the tests (plain) did not finish"]),
        ({"tests": {"validated": RUN, "plain": {**RUN, "skipped": 9}}}, ["no test (plain) ran"]),
        ({}, ["the tests (validated) did not finish", "the tests (plain) did not finish"]),
    ],
)
def test_passed_command_checks_the_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: dict, problems: list[str]
) -> None:
    report = tmp_path / "mac_check.jsonl"
    if found:  # a killed script leaves no report
        report.write_text(json.dumps(found))
    assert check_report.main(["passed", str(report)]) == bool(problems)
    assert capsys.readouterr().out.splitlines() == (problems or [f"{report}: no problems"])
