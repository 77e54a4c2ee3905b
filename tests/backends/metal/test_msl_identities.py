"""Compare byte counts of the harness with hand counts for simple kernels."""

import numpy as np
import pytest
from msl import Kernel, Report, Traffic

COPY = """#include <metal_stdlib>
using namespace metal;
kernel void copy(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 constant uint& step [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = x[i * step];
}
kernel void again(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  float first = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = first + x[i];
}
kernel void shared_by_all(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
                          uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  out[i] = x[t];
}
kernel void bytes(const device uchar* x [[buffer(0)]], device uchar4* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] = uchar4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}
"""
N, GROUP = 4096, 256


def run(kernel: str, step: int = 1, line: int = 128, start: int = 0, **sizes: int) -> Report:
    x = np.arange(sizes.get("x", N * step) + start, dtype=np.float32)
    buffers = {"x": x[start:], "out": np.empty(N, np.float32)}
    if kernel == "copy":
        buffers["step"] = np.array(step, np.uint32)
    report = Kernel(COPY, kernel)(buffers, grid=(N, 1, 1), threadgroup=(GROUP, 1, 1), line=line)
    if kernel == "copy":
        assert (buffers["out"] == x[start::step][:N]).all()
    return report


@pytest.mark.parametrize("line", [32, 64, 128])
def test_copy_moves_its_bytes_once_at_every_level(line: int) -> None:
    report = run("copy", line=line)
    once = Traffic(4 * N, 4 * N, 4 * N, 4 * N)
    assert report.reads["x"] == once
    assert report.writes["out"] == once
    assert report.unwritten == 0
    assert report.threadgroup_memory == 0


@pytest.mark.parametrize("line", [32, 64, 128])
@pytest.mark.parametrize("step", [2, 8, 32, 100])
def test_a_strided_copy_moves_whole_lines(line: int, step: int) -> None:
    lines = min(line, 4 * step) * N  # floats may share a cache line
    read = run("copy", step=step, line=line).reads["x"]
    assert read.lane == 4 * N
    if (4 * step) % line == 0 or line % (4 * step) == 0:
        assert read.dispatch == read.threadgroup == read.interval == lines
    else:
        assert read.dispatch == len(np.unique(np.arange(N) * 4 * step // line)) * line


def test_reading_again_after_a_barrier_counts_again_per_interval_only() -> None:
    assert run("again").reads["x"] == Traffic(8 * N, 8 * N, 4 * N, 4 * N)


def test_data_read_by_all_threadgroups_counts_once_per_dispatch() -> None:
    assert run("shared_by_all", x=GROUP).reads["x"] == Traffic(4 * N, 4 * N, 4 * N, 4 * GROUP)


def test_bytes_of_narrow_and_wide_accesses_add_up() -> None:
    x, out = np.arange(4 * N, dtype=np.uint8), np.empty((N, 4), np.uint8)
    report = Kernel(COPY, "bytes")({"x": x, "out": out}, grid=(N, 1, 1), threadgroup=(GROUP, 1, 1))
    assert report.reads["x"] == report.writes["out"] == Traffic(4 * N, 4 * N, 4 * N, 4 * N)
    assert (out.ravel() == x).all()


def test_ragged_grid_runs_each_thread_once() -> None:
    x, out = np.arange(1000, dtype=np.float32), np.empty(1000, np.float32)
    buffers = {"x": x, "out": out, "step": np.array(1, np.uint32)}
    report = Kernel(COPY, "copy")(buffers, grid=(1000, 1, 1), threadgroup=(GROUP, 1, 1))
    assert report.reads["x"] == Traffic(4000, 4096, 4096, 4096)
    assert (out == x).all()
