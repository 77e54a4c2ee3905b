"""Test scripts/gpu_check.sh on a machine without an NVIDIA GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_report
import pytest
from shell import OWN, ROOT, run, write_commands

pytestmark = pytest.mark.slow  # reports

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
TESTS = re.findall(r"tests/(\S+)\.py", SCRIPT.read_text(encoding="utf-8"))
UNFINISHED = [f"the benchmark of {what} did not finish" for what in ("decode steps", "SAAP's steps", "prefill")]
# A python3 that reports a GPU and no xdist, and otherwise calls the Python of this test.
PYTHON = """case "$*" in
  *cuda.is_available*) echo True ;;
  *"find_spec('xdist')"*) exit 1 ;;
  *) exec {python} "$@" ;;
esac
"""
# Replaces the time limits: either all commands are in time, or none.
TIMEOUT = {"in time": 'shift 3\nexec "$@"', "expired": "exit 124"}
NVIDIA_SMI = """case "$1" in *=name) echo "NVIDIA H200" ;; *) echo 580.159.04 ;; esac
"""
TEST = """
import os
import mlx_sparse.cuda_ref
def test_triton_kernel():
    assert os.environ["TRITON_INTERPRET"] == "0"
    assert not {fails}, "two lines\\nof it"
"""


def machine(folder: Path, *, fails: bool = False, limits: str = "in time") -> Path:
    """Create a copy of the project with other tests and with commands that report a GPU."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU, so the whole benchmark would run")
    for name in ("scripts", "tests"):
        (folder / name).mkdir()
    for name in ("mlx_sparse", "cuda_ref", "docs", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for script in (SCRIPT, ROOT / "scripts" / "check_steps.sh", ROOT / "scripts" / "check_report.py"):
        shutil.copy(script, folder / "scripts")
    for name in TESTS:
        path = folder / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST.format(fails=fails))
    commands = {"python3": PYTHON.format(python=sys.executable), "nvidia-smi": NVIDIA_SMI, "timeout": TIMEOUT[limits]}
    write_commands(folder, {f"bin/{name}": body for name, body in commands.items()})
    return folder


def check(folder: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]], str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", folder / "scripts" / "gpu_check.sh", "-o", folder / "result.jsonl", cwd=folder, PATH=path, **OWN)
    lines = (folder / "result.jsonl").read_text().splitlines()
    return done, [json.loads(line) for line in lines], (folder / "result.md").read_text()


def test_listed_tests_exist() -> None:
    assert len(TESTS) == 10 and all((ROOT / "tests" / f"{name}.py").is_file() for name in TESTS)


def test_report_names_the_machine_and_tests(tmp_path: Path) -> None:
    done, lines, markdown = check(machine(tmp_path))
    found = lines[0]
    assert {"gpu": "NVIDIA H200", "driver": "580.159.04"}.items() <= found["machine"].items()
    assert (found["tests"]["tests"]["tests"], found["tests"]["tests"]["failed"]) == (len(TESTS), [])
    # The real benchmark fails because there is no GPU.
    assert "expected an NVIDIA GPU with torch and triton, got none" in done.stderr
    assert found["problems"] == UNFINISHED
    assert done.returncode == 1
    assert markdown.startswith(f"`scripts/gpu_check.sh`: {'; '.join(UNFINISHED)}.\n\ngpu NVIDIA H200, driver ")


def test_failing_tests_do_not_stop_the_benchmark(tmp_path: Path) -> None:
    done, lines, markdown = check(machine(tmp_path, fails=True))
    assert lines[0]["problems"] == [f"{len(TESTS)} of {len(TESTS)} tests failed", *UNFINISHED]
    assert "expected an NVIDIA GPU" in done.stderr
    assert "test_triton_kernels::test_triton_kernel: AssertionError: two lines\n" in markdown
    assert done.returncode == 1


def test_timeouts_are_reported(tmp_path: Path) -> None:
    done, lines, markdown = check(machine(tmp_path, limits="expired"))
    assert "status: 124" in done.stdout
    assert done.stdout.count("ended with status 124.") == 3
    assert lines[0]["problems"] == ["the tests did not finish", *UNFINISHED]
    assert markdown.count("did not finish; the other file has what it measured.") == 3
    assert done.returncode == 1


ROW = {"kind": "row", "failed": False, "turns": 9}
END = {"kind": "end", "right": True, "text": "| table |", "run": {"command": "mlx-sparse bench step"}}


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ([ROW, END], []),
        ([ROW], UNFINISHED[:1]),
        ([ROW, {**ROW, "failed": True, "turns": 0}, END], ["1 results of the benchmark of decode steps are wrong"]),
        ([{**ROW, "turns": 0}, END], ["the benchmark of decode steps measured nothing"]),
    ],
    ids=["right", "ended", "wrong", "nothing"],
)
def test_benchmark_rows_decide_the_result(rows: list[dict[str, Any]], problems: list[str], tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text('<testsuites><testsuite tests="2" skipped="1" time="3.5"/></testsuites>')
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "ro')
    for other in ("saap", "prefill"):
        (tmp_path / f"{other}.jsonl").write_text(json.dumps(END) + "\n")
    target = tmp_path / "result.jsonl"
    assert check_report.main(["gpu", str(tmp_path), str(target)]) == bool(problems)
    found, *copied = [json.loads(line) for line in target.read_text().splitlines()]
    assert found["problems"] == problems
    assert copied == [*rows, END, END]
    tables = target.with_suffix(".md").read_text().count("    mlx-sparse bench step\n\n| table |")
    assert tables == 2 + (END in rows)


def test_interrupted_tests_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text('<testsuites><testsuite tests="2" skipped="1" time="3.5"/></testsuites>')
    (tmp_path / "tests_status.txt").write_text("status: 124\n")
    for name in check_report.BENCHMARKS["gpu"]:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (ROW, END)))
    assert check_report.main(["gpu", str(tmp_path), str(tmp_path / "result.jsonl")]) == 1
    found = json.loads((tmp_path / "result.jsonl").read_text().splitlines()[0])
    assert found["problems"] == ["the tests were ended after 2 of them (status 124)"]
