"""Ask one mlx_lm.server with many clients at temperature 0, and compare each answer with the same prompt alone.

python scripts/soak_server.py --attn sample+sparq:top_k=32,dense_below=0 [--clients 16] [--minutes 5] [--json]

The prompts are excerpts of Python's own documentation, of many lengths. The same server answers each of them alone
first. Then the clients ask in random order until the time is over. It exits with 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from mlx_sparse.api.call_report import JSON_KEY
from mlx_sparse.files import cache_directory
from mlx_sparse.tools.assets import blas
from mlx_sparse.tools.assets.models import find_model

SERVER = str(Path(sys.executable).parent / "mlx_lm.server")


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and by how many nats each was more probable than the next best."""

    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Difference:
    """An answer that is not what the prompt gives alone.

    Attributes:
        place: of the first token that differs.
        margin: that the other token had there, alone: near 0 it was a tie that rounding decides.
    """

    prompt: int
    place: int
    margin: float


class Server:
    """A running server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], max_tokens: int) -> None:
        self.port, self.process, self.max_tokens = port, process, max_tokens

    def ask(self, prompt: str) -> Answer:
        body = {
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=3600) as response:
                found = json.load(response)["choices"][0]["logprobs"]["content"]
        except ConnectionResetError:
            # By the kernel: the server's queue of connections holds five.
            if self.process.poll() is not None:
                raise
            return self.ask(prompt)
        best = [sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True) for token in found]
        return Answer([token["id"] for token in found], [first - second for first, second in best])

    def wait_until_up(self) -> None:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except urllib.error.URLError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{SERVER} ended with {self.process.returncode}") from None
                time.sleep(0.2)
            else:
                return


@contextmanager
def running(args: argparse.Namespace, errors: Path) -> Iterator[Server]:
    """A server, interrupted at the end; ``errors`` is its standard error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    cache = cache_directory(args.cache_dir)
    # Without a prompt cache: what it keeps, and so where a prompt is cut into pieces, depends on who asked before.
    command = [SERVER, "--model", find_model(args.model, cache), "--port", str(port), "--prompt-cache-size", "0"]
    command += ["--prefill-step-size", str(args.step), "--log-level", "WARNING"]
    if args.attn != "dense":
        command += ["--attn", args.attn, "--attn-report", "json"]
    environment = blas.environment(cache) if args.fast_blas else None
    with errors.open("wb") as err:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=environment)
        try:
            server = Server(port, process, args.max_tokens)
            server.wait_until_up()
            yield server
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        finally:
            if (code := process.poll()) is not None and code < 0 and code != -signal.SIGINT:
                print(f"{SERVER} died of {signal.Signals(-code).name}", file=sys.stderr)
            process.kill()
            process.wait()


def prompts_of(count: int, shortest: int, longest: int) -> list[str]:
    """Excerpts of different texts, ``shortest`` to ``longest`` characters long, that begin differently."""
    texts = [text for name in sorted(topics) if len(text := topics[name]) > 200]
    found = []
    for number in range(count):
        length = shortest + (longest - shortest) * number // max(count - 1, 1)
        following = "\n\n".join(texts[(number * 7 + place) % len(texts)] for place in range(len(texts)))
        found.append(f"{number}. {following[:length]}")
    return found


def compare(prompt: int, alone: Answer, answer: Answer) -> Difference | None:
    """Where the answer first differs; None if it is the same."""
    if answer.tokens == alone.tokens:
        return None
    pairs = zip(alone.tokens, answer.tokens, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), min(map(len, (alone.tokens, answer.tokens))))
    margin = alone.margins[place] if place < len(alone.margins) else float("nan")
    return Difference(prompt, place, margin)


def soak(server: Server, prompts: list[str], args: argparse.Namespace) -> tuple[int, list[Difference]]:
    """Answers given under load, and those that differ from the prompt alone."""
    alone = [server.ask(prompt) for prompt in prompts]
    print(f"alone: {len(alone)} answers", file=sys.stderr, flush=True)
    deadline = time.monotonic() + 60 * args.minutes
    found: list[Difference | None] = []
    errors: list[BaseException] = []

    def client(number: int) -> None:
        order = random.Random(number)
        try:
            while time.monotonic() < deadline:
                index = order.randrange(len(prompts))
                found.append(compare(index, alone[index], server.ask(prompts[index])))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(found), [difference for difference in found if difference is not None]


def read_report(errors: Path) -> dict[str, Any]:
    """What the server said about its calls; empty for a dense one."""
    lines = [line for line in errors.read_text().splitlines() if line.startswith(f'{{"{JSON_KEY}": ')]
    return dict(json.loads(lines[0])[JSON_KEY][0]) if lines else {}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attn", metavar="TEXT", required=True, help="as mlx_lm.server takes it; dense for none")
    parser.add_argument("--model", metavar="MODEL", help="model of mlx-lm (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--clients", metavar="N", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--minutes", metavar="M", type=float, default=5.0, help="default: %(default)s")
    parser.add_argument("--prompts", metavar="N", type=int, default=24, help="different prompts (default: %(default)s)")
    parser.add_argument("--characters", metavar="N", type=int, nargs=2, default=(600, 5000), help="of them")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=24, help="of an answer (default: %(default)s)")
    parser.add_argument("--step", metavar="N", type=int, default=512, help="--prefill-step-size (default: %(default)s)")
    parser.add_argument("--fast-blas", action="store_true", help="fetch OpenBLAS for MLX on a CPU, as the demo does")
    parser.add_argument("--cache-dir", metavar="DIR", help="where downloads and the model go (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    prompts = prompts_of(args.prompts, *args.characters)
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        try:
            with running(args, errors) as server:
                answers, differences = soak(server, prompts, args)
        except BaseException:
            print(errors.read_text()[-4000:] if errors.exists() else "", file=sys.stderr)
            raise
        report = read_report(errors)
    if args.json:
        listed = [vars(difference) for difference in differences]
        print(json.dumps({"attn": args.attn, "answers": answers, "differ": listed, "report": report}))
        return bool(differences)
    print(f"{args.attn}: answers {answers}, differ {len(differences)}")
    for one in sorted(differences, key=lambda one: (one.prompt, one.place)):
        print(f"  prompt {one.prompt}, token {one.place}: {one.margin:.2g} nats ahead alone")
    if report:
        print(f"  sparse steps: {report['sparse_calls']:,}, prompts: {(report.get('prefill') or {}).get('calls', 0):,}")
        for reason, count in report["dense_calls"].items():
            print(f"  dense: {count:,} {reason}")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
