"""Lose one of two ranks, and see whether the other one ends, how soon, and what it says.

python scripts/failure_trials.py [--trials 20] [--seconds 10] [--shard]

Two processes of `mlx_lm.benchmark --attn sparq` run a tiny random model over MLX's ring on this machine. In the middle
of it one of them is killed, or stopped; or one was started with another option; or the disk is full when they save a
context that they share. Prints a table, and exits with 1 where
a rank does not end in time or says something else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

BENCHMARK = ["--model", "model", "-p", "60", "-g", "6", "-n", "1000000", "--attn", "sparq:rank=4,top_k=4,dense_below=0"]
WORDS = " ".join(f"w{number}" for number in range(1, 90)) + " w3" * 200
FULL = "error: --prompt-cache-file: expected a file that can be written, got saved.safetensors"
BIN = Path(sys.executable).parent
# No file of more than 20,000 bytes: what a full disk answers.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
UNEQUAL = "error: --attn-report: expected the same on all ranks, got text on rank 0 and json on rank 1."


@dataclass
class Trials:
    """What came of one kind of failure.

    Attributes:
        seconds: from the failure to the end of the rank that is left; from the start, where options differ.
        said: trials in which it said the right line, and no other error.
        hung: trials in which it did not end in time.
    """

    seconds: list[float] = field(default_factory=list)
    said: int = 0
    hung: int = 0

    def row(self, name: str) -> str:
        times = sorted(self.seconds) or [float("nan")]
        middle, last = times[len(times) // 2], times[-1]
        return f"| {name} | {len(self.seconds)} | {self.said} | {self.hung} | {middle:.1f} | {last:.1f} |"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, last: list[list[str]], program: list[str] | None = None) -> list[subprocess.Popen[str]]:
    """Two ranks of a benchmark, or of another program, with these last arguments of each."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    program = program or [str(BIN / "mlx_lm.benchmark"), *BENCHMARK]
    return [
        subprocess.Popen(
            [*program, *last[rank]],
            cwd=folder,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def lose(folder: Path, how: signal.Signals, lost: int, more: list[str], seconds: float, trials: Trials) -> None:
    """Send a signal to rank ``lost`` in the middle of its work."""
    processes = start(folder, [more, more])
    try:
        assert processes[0].stdout
        while "Trial 2" not in processes[0].stdout.readline():
            assert processes[0].poll() is None, processes[0].communicate()[1]
        processes[lost].send_signal(how)
        why = "its process ended" if how == signal.SIGKILL else "it does not answer"
        finish(processes[1 - lost], f"rank {lost} ({os.uname().nodename}) was lost: {why}.", 1, seconds, trials)
    finally:
        end(processes)


def differ(folder: Path, more: list[str], seconds: float, trials: Trials) -> None:
    """Start rank 1 with another option; the time is that of the start, too."""
    refused(start(folder, [more, [*more, "--attn-report", "json"]]), UNEQUAL, seconds, trials)


def fill(folder: Path, more: list[str], seconds: float, trials: Trials) -> None:
    """Save a cache that is larger than a file may be, over one that is there; the time is that of the start, too."""
    file = folder / "saved.safetensors"
    file.write_text("before")
    save = [str(BIN / "mlx_lm.cache_prompt"), "--model", "model", "--prompt", WORDS, "--prompt-cache-file", file.name]
    refused(start(folder, [more, more], [sys.executable, "-c", LIMITED, *save]), FULL, seconds, trials)
    left = [path.name for path in folder.glob("*saved*")]
    if left != [file.name] or file.read_text() != "before":
        trials.said -= 1
        print(f"left behind: {left}", file=sys.stderr)


def refused(processes: list[subprocess.Popen[str]], said: str, seconds: float, trials: Trials) -> None:
    """Wait for both ranks to end with a line of their own."""
    try:
        kept = Trials()
        for process in processes:
            finish(process, said, 2, seconds + 50, kept)
        trials.seconds.append(max(kept.seconds))
        trials.said += kept.said == 2
        trials.hung += kept.hung > 0
    finally:
        end(processes)


def finish(process: subprocess.Popen[str], said: str, code: int, seconds: float, trials: Trials) -> None:
    """Wait for a rank to end as it should."""
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=6 * seconds)
    except subprocess.TimeoutExpired:
        trials.hung += 1
        trials.seconds.append(time.monotonic() - began)
        return
    trials.seconds.append(time.monotonic() - began)
    trials.hung += trials.seconds[-1] > seconds
    lines = [line for line in err.splitlines() if "error:" in line]
    right = len(lines) == 1 and said in lines[0] and process.returncode == code and "Traceback" not in err
    trials.said += right
    if not right:
        print(f"code {process.returncode}:\n{err}", file=sys.stderr)


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Leave nothing behind."""
    for process in processes:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--seconds", type=float, default=10.0, help="in which a rank has to end (default: 10)")
    parser.add_argument("--shard", action="store_true", help="with --shard context, and a full disk besides")
    args = parser.parse_args()
    more = ["--shard", "context"] if args.shard else []
    from tiny_models import write

    kinds = {name: Trials() for name in ("killed (SIGKILL)", "stopped (SIGSTOP)", "another option on rank 1")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "model")
        for number in range(args.trials):
            killed, stopped, other, *_ = kinds.values()
            lose(folder, signal.SIGKILL, number % 2, more, args.seconds, killed)
            lose(folder, signal.SIGSTOP, number % 2, more, args.seconds, stopped)
            differ(folder, more, args.seconds, other)
            if args.shard:
                fill(folder, more, args.seconds, kinds.setdefault("short of disk while it saves", Trials()))
    print("| a rank is | trials | one right line | not in time | median s | longest s |\n|---|---|---|---|---|---|")
    for name, trials in kinds.items():
        print(trials.row(name))
    sys.exit(any(trials.hung or trials.said < len(trials.seconds) for trials in kinds.values()))


if __name__ == "__main__":
    main()
