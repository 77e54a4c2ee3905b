"""Running ``mlx_lm.generate`` as a user does."""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

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
    name: str, command: list[str], prompt: str, environment: dict[str, str], say: Callable[[str], object] | None = None
) -> tuple[str, str]:
    """Run one command with the prompt on standard input; return its standard output and error.

    Args:
        say: told all of the standard output so far, whenever there is more of it.

    Raises:
        ArtefactError: it fails; the message has the last line of what it said.
    """
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process,
        tqdm(desc=f"{name} is running", bar_format="{desc}, {elapsed}", leave=False, delay=2, disable=None) as clock,
    ):
        assert process.stdin and process.stdout and process.stderr
        pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        errors: list[bytes] = []
        streams = (
            partial(_write, process.stdin, prompt.encode()),
            partial(_read, process.stdout, pieces.put),
            partial(_read, process.stderr, errors.append),
        )
        threads = [threading.Thread(target=stream, daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        try:
            out = _listen(pieces, clock, say)
            for thread in threads:
                thread.join()
            process.wait()
        except BaseException:
            process.kill()
            raise
    err = b"".join(errors).decode(errors="replace")
    if process.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise ArtefactError(f"{' '.join(command[:1])}: expected it to succeed with {name}, got: {last}")
    return out, err


def _write(stream: IO[bytes], text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), stream:  # a command that failed has not read it
        stream.write(text)


def _read(stream: IO[bytes], take: Callable[[bytes], object]) -> None:
    """All of ``stream`` in pieces, and an empty one at its end."""
    while piece := os.read(stream.fileno(), 1 << 16):
        take(piece)
    take(b"")


def _listen(pieces: queue.SimpleQueue[bytes], clock: tqdm, say: Callable[[str], object] | None) -> str:
    """The text that the pieces make up; meanwhile the clock goes on."""
    out, decoder, piece = "", codecs.getincrementaldecoder("utf-8")(errors="replace"), b" "
    while piece:
        try:
            piece = pieces.get(timeout=0.5)
        except queue.Empty:
            clock.update()
            continue
        out += decoder.decode(piece, final=not piece)
        if say is not None:
            clock.clear()
            say(out)
    return out
