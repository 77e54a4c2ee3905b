"""Lose one of two ranks, and see whether the other one ends, how soon, and what it says.

python scripts/failure_trials.py [--trials 20] [--seconds 10]

Two processes of `mlx_lm.benchmark --attn sparq` run a tiny random model over MLX's ring on this machine. In the middle
of it one of them is killed, or stopped; or one was started with another option. Prints a table, and exits with 1 where
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


def start(folder: Path, last: list[list[str]]) -> list[subprocess.Popen[str]]:
    """Two ranks with these last arguments of each."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    program = str(Path(sys.executable).parent / "mlx_lm.benchmark")
    return [
        subprocess.Popen(
            [program, *BENCHMARK, *last[rank]],
            cwd=folder,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def lose(folder: Path, how: signal.Signals, lost: int, seconds: float, trials: Trials) -> None:
    """Send a signal to rank ``lost`` in the middle of its work."""
    processes = start(folder, [[], []])
    try:
        assert processes[0].stdout
        while "Trial 2" not in processes[0].stdout.readline():
            assert processes[0].poll() is None, processes[0].communicate()[1]
        processes[lost].send_signal(how)
        why = "its process ended" if how == signal.SIGKILL else "it does not answer"
        finish(processes[1 - lost], f"rank {lost} ({os.uname().nodename}) was lost: {why}.", 1, seconds, trials)
    finally:
        end(processes)


def differ(folder: Path, seconds: float, trials: Trials) -> None:
    """Start rank 1 with another option; the time is that of the start, too."""
    processes = start(folder, [[], ["--attn-report", "json"]])
    try:
        kept = Trials()
        for process in processes:
            finish(process, UNEQUAL, 2, seconds + 50, kept)
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
    right = len(lines) == 1 and lines[0].endswith(said) and process.returncode == code and "Traceback" not in err
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
    args = parser.parse_args()
    from tiny_models import write

    kinds = {name: Trials() for name in ("killed (SIGKILL)", "stopped (SIGSTOP)", "another option on rank 1")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "model")
        for number in range(args.trials):
            killed, stopped, other = kinds.values()
            lose(folder, signal.SIGKILL, number % 2, args.seconds, killed)
            lose(folder, signal.SIGSTOP, number % 2, args.seconds, stopped)
            differ(folder, args.seconds, other)
    print("| a rank is | trials | one right line | not in time | median s | longest s |\n|---|---|---|---|---|---|")
    for name, trials in kinds.items():
        print(trials.row(name))
    sys.exit(any(trials.hung or trials.said < len(trials.seconds) for trials in kinds.values()))


if __name__ == "__main__":
    main()
