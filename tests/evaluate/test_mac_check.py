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
from shell import OWN, ROOT, run, write_commands

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # reports

SCRIPT = ROOT / "scripts" / "mac_check.sh"
FILES = [
    "kernels/test_metal_kernels",
    "kernels/test_metal_prefill",
    "conformance/test_decode",
    "conformance/test_select",
    "conformance/test_prefill",
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


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    """A project on a machine that answers as a Mac does; its environment is this one's."""
    if sys.platform == "darwin":
        pytest.skip("on a Mac it would run the whole benchmark")
    for folder in ("scripts", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "dev.py").write_text("print('ready')")
    for script in (SCRIPT, ROOT / "scripts" / "check_report.py"):
        shutil.copy(script, tmp_path / "scripts")
    real = {"python": sys.executable, "mlx-sparse": f"{sys.executable} -m mlx_sparse.cli"}
    commands = {f"bin/{name}": body for name, body in MAC.items()}
    commands |= {f".venv/bin/{name}": f'exec {command} "$@"' for name, command in real.items()}
    write_commands(tmp_path, commands)
    return tmp_path


def check(mac: Path, *, message: str, fails: bool) -> tuple[subprocess.CompletedProcess[str], dict]:
    for name in FILES:
        path = mac / "tests" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TESTS.format(message=message, fails=fails))
    path = f"{mac / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", mac / "scripts" / "mac_check.sh", "-o", mac / "result.json", cwd=mac, PATH=path, **OWN)
    return done, json.loads((mac / "result.json").read_text())


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac")
def test_another_machine_is_refused_in_one_line() -> None:
    done = run(SCRIPT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mac_check.sh: error: expected a Mac with Apple silicon, got Linux")
    assert done.stderr.count("\n") == 1


def test_what_passes_is_reported_with_the_machine(mac: Path) -> None:
    done, found = check(mac, message="Metal GPU Validation Enabled", fails=False)
    assert {"model": "Mac14,9", "macos": "26.1", "gpu_cores": "19"}.items() <= found["machine"].items()
    assert found["machine"]["mlx"]
    for name in ("validated", "plain"):
        assert (found["tests"][name]["tests"], found["tests"][name]["failed"]) == (8, [])
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
        *(f"{module(name)}::test_kernel[{backend}]" for name in FILES[:2] for backend in ("ops", "metal")),
        *(f"{module(name)}::test_kernel[metal]" for name in FILES[2:]),
    ]
    assert found["validation"] == ["Invalid device load at offset 4096"] * 8
    assert found["problems"][:3] == [
        "8 of 8 tests (validated) failed",
        "8 of 8 tests (plain) failed",
        "Metal's validation reports 8 lines",
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
    assert capsys.readouterr().out.startswith("Wrote ")


RUN = {"tests": 9, "skipped": 0, "failed": []}
BAD = {"tests": 9, "skipped": 0, "failed": [{"test": "a", "message": "b"}]}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"tests": {"validated": RUN, "plain": RUN}, "problems": ["the benchmark did not finish"]}, []),
        ({"tests": {"validated": BAD, "plain": RUN}}, ["1 of 9 tests (validated) failed"]),
        ({"tests": {"validated": RUN, "plain": None}}, ["tests (plain) did not finish"]),
        ({"tests": {"validated": RUN, "plain": {**RUN, "skipped": 9}}}, ["no test (plain) ran"]),
        ({}, ["tests (validated) did not finish", "tests (plain) did not finish"]),
    ],
)
def test_a_workflow_asks_whether_the_tests_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: dict, said: list[str]
) -> None:
    report = tmp_path / "mac_check.json"
    if found:  # a script that was ended leaves none
        report.write_text(json.dumps(found))
    assert check_report.main(["passed", str(report)]) == bool(said)
    assert capsys.readouterr().out.splitlines() == (said or [f"{report}: nothing wrong"])


def test_a_workflow_asks_whether_the_validation_said_anything(tmp_path: Path) -> None:
    log = tmp_path / "tests.log"
    log.write_text("2026-11-23 python[1] Metal API Validation Enabled\n")
    assert check_report.main(["validation", str(log)]) == 0
    log.write_text(log.read_text() + "-[MTLDebugComputeCommandEncoder dispatch:]: failed: Invalid device load\n")
    assert check_report.main(["validation", str(log)]) == 1


@pytest.mark.parametrize(("chip", "marked"), [("Apple Paravirtual device", True), ("Apple M4 Max", False)])
def test_timings_of_a_virtual_gpu_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chip: str, marked: bool
) -> None:
    monkeypatch.setattr(check_report, "machine", lambda: {"chip": chip})
    check_report.main(["mac", str(tmp_path), str(tmp_path / "result.json")])
    found = json.loads((tmp_path / "result.json").read_text())
    assert ("timings" in found) == marked
    assert not marked or found["timings"].startswith("meaningless")
