"""Running ``mlx_lm.generate`` as a user does."""

from __future__ import annotations

import codecs
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import IO, Any

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


def run_command(
    name: str,
    command: list[str],
    prompt: str,
    environment: dict[str, str],
    say: Callable[[str], object] | None = None,
    *,
    codes: Container[int] = (0,),
) -> tuple[str, str]:
    """Run one command with the prompt on standard input; return its standard output and error.

    Args:
        say: told all of the standard output so far, whenever there is more of it.
        codes: exit codes of success.

    Raises:
        ArtefactError: it fails; the message has the last line of what it said.
    """
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as errors:
        question.write(prompt.encode())
        question.seek(0)
        pipes: dict[str, Any] = {"stdin": question, "stdout": subprocess.PIPE, "stderr": errors}
        bar: dict[str, Any] = {"bar_format": "{desc}, {elapsed}", "leave": False, "delay": 2, "disable": None}
        with (
            subprocess.Popen(command, env=environment, **pipes) as process,
            tqdm(desc=f"{name} is running", **bar) as clock,
        ):
            assert process.stdout
            try:
                out = _listen(process.stdout, clock, say)
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        err = errors.read().decode(errors="replace")
    if process.returncode not in codes:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise ArtefactError(f"{' '.join(command[:1])}: expected it to succeed with {name}, got: {last}")
    return out, err


def _listen(stream: IO[bytes], clock: tqdm, say: Callable[[str], object] | None) -> str:
    """Return all the text of ``stream``, and update the clock meanwhile."""
    out, decoder, piece = "", codecs.getincrementaldecoder("utf-8")(errors="replace"), b" "
    while piece:
        if not select.select([stream], [], [], 0.5)[0]:
            clock.update()
            continue
        piece = os.read(stream.fileno(), 1 << 16)
        out += decoder.decode(piece, final=not piece)
        if say is not None:
            clock.clear()
            say(out)
    return out
