"""Run servers of mlx-lm and mlx-vlm in processes, and read their answers and reports."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_sparse.api.call_report import JSON_KEY

BIN = Path(sys.executable).parent
TOKENS = 6


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process of the command ``program``."""

    def __init__(self, model: Path, *options: str, program: str = "mlx_lm.server") -> None:
        self.port = free_port()
        argv = [str(BIN / program), "--model", str(model), "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps({"max_tokens": TOKENS, "temperature": 0.0, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(json.load(response))

    def stream(self, **body: Any) -> Iterator[bytes]:
        """Yield the lines of an answer as they arrive."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({"temperature": 0.0, "stream": True, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            yield from response

    def ask(self, prompt: str) -> str:
        answer = self.post({"messages": [{"role": "user", "content": prompt}]})
        return str(answer["choices"][0]["message"]["content"])

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except OSError:
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return

    def wait_for(self, text: str) -> None:
        """Read standard error until a line with ``text``. `interrupt` may miss a few lines after it."""
        assert self.process.stderr
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"the server ended without {text!r}")

    def interrupt(self) -> str:
        """Send SIGINT and return standard error. The exit code is ignored, because MLX often aborts at exit."""
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=60)
        return err


@contextmanager
def running(model: Path, *options: str, program: str = "mlx_lm.server") -> Iterator[Server]:
    server = Server(model, *options, program=program)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def reports_in(err: str) -> list[dict[str, Any]]:
    (line,) = [line for line in err.splitlines() if line.startswith(f'{{"{JSON_KEY}": ')]
    return list(json.loads(line)[JSON_KEY])
