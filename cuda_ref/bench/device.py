"""The device that is measured: what it is, and how steps are timed on it.

Steps go over rotating caches as CUDA graphs timed by events; on the CPU, in Triton's interpreter, as plain calls.
"""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any

import torch

from mlx_sparse.tools.bench.core import MICRO, Contender, Row, Sample
from mlx_sparse.tools.environment import memory, versions

from ..availability import interpreted

Output = tuple[torch.Tensor, ...]
Step = Callable[[int], Output]  # takes the number of the set of caches
Wrong = Callable[[Output], str | None]  # what is wrong with what a step gave; None if nothing is

COPIED = 2 << 30  # bytes of the buffer whose copy is timed
COPIES_TIMED = 9
ENOUGH = 300e-6  # seconds that the steps of one run take together, at least
LAUNCH = 5e-6  # seconds of a step beside the bytes: a guess that only sets how many steps a run has


class Device:
    """Where steps run.

    Attributes:
        facts: what it is; ``copy_bytes_per_second`` is what a copy of a large buffer reads and writes together.
    """

    def __init__(self) -> None:
        self.torch = torch.device("cpu" if interpreted() else "cuda")
        self.cuda = self.torch.type == "cuda"
        # Sums in float16, which the float32 ones of everybody else would be compared with.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.facts: dict[str, Any] = {"platform": platform.platform()} | versions(("torch", "triton"))
        self.facts |= {"device": "CPU, Triton's interpreter", "l2": 0, "memory": self.free_memory()}
        if self.cuda:
            properties = torch.cuda.get_device_properties(self.torch)
            self.facts |= {
                "device": properties.name,
                "architecture": 10 * properties.major + properties.minor,
                "processors": properties.multi_processor_count,
                "l2": properties.L2_cache_size,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            }
        self.bandwidth = self.facts["copy_bytes_per_second"] = self._copy_bandwidth()

    def free_memory(self) -> int:
        """Bytes that a case may take."""
        if not self.cuda:
            return memory()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def pool(self) -> Any:
        """Memory that the graphs of a case share."""
        return torch.cuda.graph_pool_handle() if self.cuda else None

    def record(self, step: Step, copies: int, count: int, pool: Any = None) -> Graph | Calls:
        """Prepare ``count`` steps.

        Raises:
            Exception: whatever ``step`` raises, or the capture of it.
        """
        return Graph(step, copies, count, pool) if self.cuda else Calls(step, copies, count)

    def _copy_bandwidth(self) -> float:
        source = torch.empty((COPIED if self.cuda else 1 << 24) // 4, dtype=torch.int32, device=self.torch).random_()
        target = torch.empty_like(source)

        def copy(_: int) -> Output:
            target.copy_(source)
            return ()

        run = self.record(copy, 1, 1)
        run.sample()
        return 2 * source.numel() * 4 / median(run.sample() for _ in range(COPIES_TIMED))


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
        for tensor in tensors(self.outputs):  # so that nothing old can pass for a result
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        self._graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        """Seconds of a step: of two runs back to back the second, whose start is hidden behind the first."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end)) / self.count


class Calls:
    """The same as plain calls on the CPU, under Triton's interpreter: for tests; its times say nothing of a GPU."""

    def __init__(self, step: Step, copies: int, count: int) -> None:
        self._step, self._copies, self.count = step, copies, count
        self.outputs: list[Output] = []

    def run(self) -> None:
        """Take a step on each set."""
        self.outputs = [self._step(n) for n in range(self._copies)]

    def sample(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._step(0)
        return time.perf_counter() - start


def tensors(outputs: list[Output]) -> Iterator[torch.Tensor]:
    """All of them."""
    for out in outputs:
        yield from out


class Recorded(Contender):
    """A contender whose steps are recorded.

    Args:
        make: gives the step on one set of caches, and what tells what is wrong with what it gave.
        copies: sets of caches.
    """

    def __init__(
        self,
        row: Row,
        make: Callable[[], tuple[Step, Wrong]],
        device: Device,
        *,
        ours: bool,
        copies: int = 1,
        pool: Any = None,
    ) -> None:
        super().__init__(row)
        self.ours, self._make, self._device, self._copies, self._pool = ours, make, device, copies, pool
        if "bytes" in row.details:
            row.details["floor_us"] = row.details["bytes"] / device.bandwidth / MICRO

    def prepare(self) -> None:
        step, self._wrong = self._make()
        rounds = 1
        if self._device.cuda and "bytes" in self.row.details:
            seconds = self.row.details["bytes"] / self._device.bandwidth + LAUNCH
            rounds = math.ceil(ENOUGH / (self._copies * seconds))
        self._steps = self._device.record(step, self._copies, self._copies * rounds, self._pool)

    def check(self) -> str | None:
        """What is wrong with the outputs of any set of caches; what equals the first is as right as that."""
        self._steps.run()
        first, *others = self._steps.outputs
        differing = [out for out in others if not all(map(torch.equal, out, first))]
        found = next(filter(None, map(self._wrong, [first, *differing])), None)
        self._steps.outputs.clear()  # their memory is the next one's: results may be as large as the queries
        return found

    def step(self, turn: int) -> Sample:
        return Sample(self._steps.sample())
