"""Running ``mlx_lm.generate`` as a user does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tqdm import tqdm

from ...checks import ArtefactError


def generate_command(model: str, max_tokens: int) -> list[str]:
    """``mlx_lm.generate`` of this Python with the likeliest tokens after a prompt on standard input.

    It goes by its short name if that is the one the shell would find.
    """
    script = Path(sysconfig.get_path("scripts")) / "mlx_lm.generate"
    command = [sys.executable, "-m", "mlx_lm", "generate"]
    if script.is_file():
        found = shutil.which(script.name)
        command = [script.name if found and Path(found) == script else str(script)]
    return [*command, "--model", model, "--prompt", "-", "--max-tokens", str(max_tokens), "--temp", "0"]


def run_command(name: str, command: list[str], prompt: str, environment: dict[str, str]) -> tuple[str, str]:
    """Run one command with the prompt on standard input; return its standard output and error.

    Raises:
        ArtefactError: it fails; the message has the last line of what it said.
    """
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process,
        tqdm(desc=f"{name} is running", bar_format="{desc}, {elapsed}", leave=False, delay=2, disable=None) as clock,
    ):
        given: str | None = prompt
        while True:
            try:
                out, err = process.communicate(given, timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                given = None  # the first call took the whole prompt
                clock.update()
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise ArtefactError(f"{' '.join(command[:1])}: expected it to succeed with {name}, got: {last}")
    return out, err
