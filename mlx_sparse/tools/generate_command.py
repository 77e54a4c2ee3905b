"""Run ``mlx_lm.generate`` in a child process and parse its output."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import ArtefactError


def generate_command(model: str, max_tokens: int) -> list[str]:
    """Return the command that runs this environment's ``mlx_lm.generate`` greedily on a prompt from standard input.

    If the script ``mlx_lm.generate`` is on PATH, the command begins with the script's name, otherwise with the script's
    path. If there is no script, the command begins with ``python -m mlx_lm generate``.
    """
    script = Path(sysconfig.get_path("scripts")) / "mlx_lm.generate"
    command = [sys.executable, "-m", "mlx_lm", "generate"]
    if script.is_file():
        found = shutil.which(script.name)
        command = [script.name if found and Path(found) == script else str(script)]
    return [*command, "--model", model, "--prompt", "-", "--max-tokens", str(max_tokens), "--temp", "0"]


def run_command(name: str, command: list[str], prompt: str, environment: dict[str, str]) -> tuple[str, str]:
    """Run ``command`` with ``prompt`` on standard input, and return its standard output and standard error.

    ``name`` describes the run in messages.

    Raises:
        ArtefactError: the command fails. The message contains the last line of standard error.
    """
    print(f"{name} is running", file=sys.stderr, flush=True)
    done = subprocess.run(command, input=prompt.encode(), env=environment, capture_output=True, check=False)
    out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    if done.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise ArtefactError(f"{command[0]}: expected success with {name}, got: {last}")
    return out, err


RULE = "=" * 10
REPORT_START = '{"mlx_sparse_report":'
SPEED = r"^{}: (\d+) tokens, ([\d.]+) tokens-per-sec$"
COUNTS = {"attn", "dense_calls", "layers", "served_layers", "sparse_calls", "sparse_bytes", "dense_bytes"}


@dataclass(frozen=True)
class Outcome:
    """Result of an ``mlx_lm.generate`` run. Speeds are in tokens per second.

    ``report`` contains the entry for the model in ``--attn-report json``. A dense run has no report.
    """

    text: str
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    report: dict[str, Any] | None = None
    peak_memory: float | None = None  # GB, as reported by MLX


def parse_outcome(output: tuple[str, str]) -> Outcome:
    """Parse the standard output and standard error of ``mlx_lm.generate``."""
    out, err = output
    head, _, tail = out.rpartition(f"\n{RULE}\n")
    _, found, text = head.partition(f"{RULE}\n")
    prompt, generation = (re.search(SPEED.format(word), tail, re.MULTILINE) for word in ("Prompt", "Generation"))
    if not (found and prompt and generation):
        raise ArtefactError("mlx_lm.generate: expected its usual output, got another. Check the version of mlx-lm.")
    speeds = int(prompt[1]), float(prompt[2]), int(generation[1]), float(generation[2])
    peak = re.search(r"^Peak memory: ([\d.]+) GB$", tail, re.MULTILINE)
    return Outcome(text, *speeds, parse_report(err), float(peak[1]) if peak else None)


def parse_report(err: str) -> dict[str, Any] | None:
    """Return the first model's entry in the last report in ``err``, or None if ``err`` contains no report."""
    lines = [line for line in err.splitlines() if line.startswith(REPORT_START)]
    if not lines:
        return None
    try:
        report: dict[str, Any] = json.loads(lines[-1])["mlx_sparse_report"][0]
        complete = report.keys() >= COUNTS
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        complete = False
    if not complete:
        raise ArtefactError(f"--attn-report: expected counts of calls and bytes, got {lines[-1][:60]!r}. Report this.")
    return report
