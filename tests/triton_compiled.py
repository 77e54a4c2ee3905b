"""Kernels compiled by triton_aot.py, a process for each version of Triton, and what their machine code says."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from packages import Package, fetched, wheel
from require import absent
from triton_aot import Case, Compiled

from mlx_sparse.tools.assets.store import cache_directory

SCRIPT = Path(__file__).parent / "triton_aot.py"
MINUTES = 10 * 60
# What torch 2.13 is pinned to and the environment has, and what torch 2.11 is pinned to.
VERSIONS: dict[str, Package | None] = {"triton": None, "triton-3.6.0": wheel("triton==3.6.0")}
ARCHITECTURES = (80, 90, 100)
# Of one program and of all programs on a processor, in bytes; both in CUDA's guide, table "Technical Specifications".
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
PROCESSOR_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
REGISTERS, THREADS = 64 * 1024, 2048  # of a processor
MATRIX = r"\b(HMMA|HGMMA|UTC\w*MMA)\b"


@functools.cache
def running(version: str, cases: tuple[Case, ...]) -> subprocess.Popen[str] | str:
    """The process that compiles ``cases`` on a version, or why there is none."""
    package = VERSIONS[version]
    place = fetched(package) if package else ""
    if package and isinstance(place, str):
        return place
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")  # what did not change is not compiled again
    command = [sys.executable, str(SCRIPT), *([str(place)] if package else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=environment, **pipes)
    process.stdin.write(json.dumps([asdict(case) for case in cases]))
    process.stdin.close()
    process.stdin = None
    return process


@functools.cache
def compiled(version: str, cases: tuple[Case, ...]) -> dict[Case, list[Compiled]]:
    """The launches of each case. Skips where that version is not to be had."""
    process = running(version, cases)
    if isinstance(process, str):
        absent(version, process)
    out, errors = process.communicate(timeout=MINUTES)
    assert process.returncode == 0, errors
    found: dict[Case, list[Compiled]] = {}
    for line in out.splitlines():
        fields = json.loads(line)
        fields["case"] = Case(**fields["case"])
        found.setdefault(fields["case"], []).append(Compiled(**fields))
    return found


def count(launch: Compiled, pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in launch.sass)


def itemsize(case: Case) -> int:
    return 4 if case.dtype == "float32" else 2


def programs_at_once(launch: Compiled) -> int:
    """Programs that a processor holds."""
    threads = 32 * launch.warps
    shared = PROCESSOR_SHARED[launch.case.architecture] // (launch.shared + 1024)  # 1 KB each is CUDA's own
    return min(REGISTERS // (-(-launch.registers // 8) * 8 * threads), shared, THREADS // threads)
