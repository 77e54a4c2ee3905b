"""Runs of decode steps over rotating caches: CUDA graphs timed by events; on the CPU, for tests, plain calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any

import torch

Output = tuple[torch.Tensor, ...]
Step = Callable[[int], Output]  # takes the number of the set of caches

COPIED = 2 << 30  # bytes of the buffer whose copy is timed
COPIES_TIMED = 9


@cache
def side_stream() -> Any:
    """One for all captures: what a graph has given back to the pool is there for others on the same stream only."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Graph:
    """Steps captured as one CUDA graph: ``count`` of them, on sets 0, 1, ... ``copies - 1``, 0, 1, ...

    Attributes:
        outputs: what the first step on each set writes.
    """

    def __init__(self, step: Step, copies: int, count: int, pool: Any) -> None:
        self.count = count
        self.outputs: list[Output] = []
        stream = side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        # The outer context gives the stream back too when a capture ends in an error.
        with torch.cuda.stream(stream):
            step(0)  # compiles, and loads what must not be loaded during a capture
            step(copies - 1)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                for n in range(count):
                    out = step(n % copies)
                    if n < copies:
                        self.outputs.append(out)
        torch.cuda.current_stream().wait_stream(stream)

    def run(self) -> None:
        """Take the steps, into outputs that hold nothing before."""
        poison(self.outputs)
        self._graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        """Microseconds of a step: of two runs back to back the second, whose start is hidden behind the first."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / self.count


class Calls:
    """The same as plain calls on the CPU, under Triton's interpreter: for tests; its times say nothing of a GPU."""

    def __init__(self, step: Step, copies: int, count: int, pool: Any) -> None:
        del pool
        self._step, self._copies, self.count = step, copies, count
        self.outputs: list[Output] = []

    def run(self) -> None:
        """Take a step on each set."""
        self.outputs = [self._step(n) for n in range(self._copies)]

    def sample(self) -> float:
        """Microseconds of one step."""
        start = time.perf_counter()
        self._step(0)
        return 1e6 * (time.perf_counter() - start)


Run = Graph | Calls


def record(step: Step, copies: int, count: int, device: torch.device, pool: Any) -> Run:
    """Prepare a run of steps.

    Raises:
        Exception: whatever ``step`` raises, or the capture of it.
    """
    return (Graph if device.type == "cuda" else Calls)(step, copies, count, pool)


def poison(outputs: list[Output]) -> None:
    """Fill with NaN, or with -1, so that nothing old can pass for a result."""
    for tensor in tensors(outputs):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def tensors(outputs: list[Output]) -> Iterator[torch.Tensor]:
    """All of them."""
    for out in outputs:
        yield from out


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of a large buffer reads and writes together."""
    cuda = device.type == "cuda"
    source = torch.empty((COPIED if cuda else 1 << 24) // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)

    def copy(_: int) -> Output:
        target.copy_(source)
        return ()

    run = record(copy, 1, 1, device, None)
    run.sample()
    seconds = median(run.sample() for _ in range(COPIES_TIMED)) / 1e6
    return 2 * source.numel() * 4 / seconds
