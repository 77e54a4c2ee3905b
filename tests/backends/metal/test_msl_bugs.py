"""Specify the harness by planted bugs. Each bug has the full message that the harness must print.

test_msl_races.py tests which barriers of which memory prevent a race.
"""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from msl import Fault, Kernel

N = 64  # floats in x and in out
SIGNATURE = """{header}
kernel void k(const device float* x [[buffer(0)]], device float* out [[buffer(1)]], constant int& zero [[buffer(2)]],
              device atomic_uint* count [[buffer(3)]], uint i [[thread_position_in_grid]],
              uint t [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
              uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {{
#line 1 "body"
{body}
}}
"""


@dataclass(frozen=True)
class Case:
    """A small kernel, its launch and, for a bug, the message of the harness.

    In ``message``, ``@2`` stands for the location of line 2 and ``~`` for "without a barrier between by".
    """

    name: str
    body: str
    message: str = ""
    thread: int | None = None
    line: int = 0
    group: int = 0
    grid: int = N
    threadgroup: int = N
    header: str = ""
    out: int = N


def run(case: Case, seed: int = 0) -> np.ndarray:
    source = SIGNATURE.format(header=case.header, body=case.body.strip("\n"))
    out = np.zeros(case.out, np.float32)
    buffers = {"x": np.arange(N, dtype=np.float32), "out": out, "zero": np.array(0, np.int32)}
    buffers["count"] = np.zeros(1, np.uint32)
    shape = {"grid": (case.grid, 1, 1), "threadgroup": (case.threadgroup, 1, 1)}
    Kernel(source, "k")(buffers, **shape, seed=seed, written=("count",))
    return out


BUGS = [
    # Bounds
    Case("read one past the end", "out[i] = x[i + 1];",
         "OUT OF BOUNDS read of 4 bytes at offset 256 of buffer x (256 bytes)", thread=63, line=1),
    Case("negative index", "out[i] = x[int(i) - 1];",
         "OUT OF BOUNDS read of 4 bytes at offset -4 of buffer x (256 bytes)", thread=0, line=1),
    Case("index far beyond everything", "out[i] = x[i + (1 << 30)];",
         "OUT OF BOUNDS read of 4 bytes at offset 4294967296 of buffer x (256 bytes)", thread=0, line=1),
    Case("write one past the end", "out[i + 1] = x[i];",
         "OUT OF BOUNDS write of 4 bytes at offset 256 of buffer out (256 bytes)", thread=63, line=1),
    Case("grid larger than the buffers", "out[i] = x[i];",
         "OUT OF BOUNDS read of 4 bytes at offset 256 of buffer x (256 bytes)",
         thread=0, line=1, group=2, grid=96, threadgroup=32),
    Case("vector read across the end", "out[i] = 0.0f;\nout[i] = reinterpret_cast<const device float4*>(x)[i / 3].x;",
         "OUT OF BOUNDS read of 16 bytes at offset 256 of buffer x (256 bytes)", thread=48, line=2),
    Case("misaligned vector", "out[i] = ((const device float4*)(x + 1))[i / 32].x;",
         "MISALIGNED read of 16 bytes at offset 4 of buffer x (256 bytes)", thread=0, line=1),
    Case("matrix loaded across the end", """
simdgroup_float8x8 m;
simdgroup_load(m, x + 8, 8);
simdgroup_store(m, out, 8);
""", "OUT OF BOUNDS read of 4 bytes at offset 256 of buffer x (256 bytes)", thread=22, line=2, grid=32, threadgroup=32),
    Case("write into an input", """
device float* y = (device float*)x;
out[i] = y[i];
y[i] = 0.0f;
""", "WRITE TO CONSTANT write of 4 bytes at offset 0 of buffer x (256 bytes)", thread=0, line=3),
    Case("threadgroup array too short", """
threadgroup float s[63];
s[t] = x[i];
out[i] = s[t];
""", "OUT OF BOUNDS index 63 of array s of type 'float[63]'", thread=63, line=2),
    Case("threadgroup array, negative index", """
threadgroup float a[64];
threadgroup float b[64];
a[t] = b[t] = x[i];
out[i] = a[t] + b[int(t) - 1];
""", "OUT OF BOUNDS index -1 of array b of type 'float[64]'", thread=0, line=4),
    Case("row of a threadgroup matrix", """
threadgroup float s[2][32];
s[sg][lane] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = s[sg][lane + 1];
""", "OUT OF BOUNDS index 32 of array s of type 'float[32]'", thread=31, line=4),
    Case("private array too short", """
float own[4] = {0.0f};
own[i / 8] = x[i];
out[i] = own[0];
""", "OUT OF BOUNDS index 4 of array own of type 'float[4]'", thread=32, line=2),
    Case("private array, negative index", "float own[4] = {0.0f};\nout[i] = own[int(t) - 1 - zero];",
         "OUT OF BOUNDS index -1 of array own of type 'float[4]'", thread=0, line=2, grid=1),
    # Never written
    Case("threadgroup memory read before any write", "threadgroup float s[64];\nout[i] = s[t];",
         "UNINITIALISED read of 4 bytes at offset 0 of threadgroup array s (256 bytes)", thread=0, line=2),
    Case("threadgroup memory written by half of the threads", """
threadgroup float s[64];
if (t < 32) {
  s[t] = x[i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = s[63 - t];
""", "UNINITIALISED read of 4 bytes at offset 252 of threadgroup array s (256 bytes)", thread=0, line=6),
    Case("output read before it is written", "out[i] += x[i];",
         "UNINITIALISED read of 4 bytes at offset 0 of buffer out (256 bytes)", thread=0, line=1),
    Case("output not covered by the grid", "out[i] = x[i];",
         "UNWRITTEN OUTPUT 4 of 256 bytes of buffer out, the first at offset 252", grid=63),
    Case("output written by some threads only", """
if (i != 7) {
  out[i] = x[i];
}
""", "UNWRITTEN OUTPUT 4 of 256 bytes of buffer out, the first at offset 28"),
    # Races in threadgroup memory
    Case("no barrier", """
threadgroup float s[64];
s[t] = x[i];

out[i] = s[t > 0 ? t - 1 : 0];
""",
         "RACE read of 4 bytes at offset 0 of threadgroup array s (256 bytes), written ~ thread (0,0,0) at @2",
         thread=1, line=4),
    Case("all write one cell", """
threadgroup float s[1];
s[0] = x[i];
out[i] = 0.0f;
""",
         "RACE write of 4 bytes at offset 0 of threadgroup array s (4 bytes), written ~ thread (0,0,0) at @2",
         thread=1, line=2),
    # Races in device memory
    Case("threadgroups write one element", "out[t] = x[i];",
         "RACE write of 4 bytes at offset 0 of buffer out (128 bytes), written by threadgroup (0,0,0) at @1",
         thread=0, line=1, group=1, threadgroup=32, out=32),
    Case("threadgroup reads what another one wrote", """
out[i] = x[i];
if (i > 31) {
  out[i] = out[0];
}
""",
         "RACE read of 4 bytes at offset 0 of buffer out (256 bytes), written by threadgroup (0,0,0) at @1",
         thread=0, line=3, group=1, threadgroup=32),
    Case("counter without atomics", "out[i] = x[i];\nout[0] = out[0] + 1.0f;",
         "RACE read of 4 bytes at offset 0 of buffer out (256 bytes), written ~ thread (0,0,0) at @2",
         thread=1, line=2),
    Case("atomic counter with a plain reader", """
atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
out[i] = float(*(device uint*)count);
""",
         "RACE write of 4 bytes at offset 0 of buffer count (4 bytes), read ~ thread (0,0,0) at @2", thread=1, line=1),
    # Divergence
    Case("barrier under a condition", """
if (t < 32) {
  threadgroup_barrier(mem_flags::mem_none);
}
out[i] = x[i];
""", "DIVERGENT BARRIER threadgroup_barrier is not reached by thread (32,0,0), which has returned", thread=0, line=2),
    Case("barrier after an early return", """
out[i] = x[i];
if (t == 5) return;
threadgroup_barrier(mem_flags::mem_none);
""", "DIVERGENT BARRIER threadgroup_barrier is not reached by thread (5,0,0), which has returned", thread=0, line=3),
    Case("two barriers for one", """
out[i] = x[i];
if (sg == 0) {
  threadgroup_barrier(mem_flags::mem_none);
} else {
  threadgroup_barrier(mem_flags::mem_none);
}
""",
         "DIVERGENT BARRIER threadgroup_barrier is not reached by thread (32,0,0), "
         "which waits in threadgroup_barrier at body:5",
         thread=0, line=3),
    Case("barrier in a loop of unequal length", """
out[i] = x[i];
for (uint r = 0; r < sg + 1; r++) {
  threadgroup_barrier(mem_flags::mem_none);
}
""", "DIVERGENT BARRIER threadgroup_barrier is not reached by thread (0,0,0), which has returned", thread=32, line=3),
    Case("simd operations on both sides of a branch", """
if (lane < 16) {
  out[i] = simd_sum(x[i]);
} else {
  out[i] = simd_sum(2.0f * x[i]);
}
""",
         "DIVERGENT SIMD OP simd_sum is not reached by thread (16,0,0), which waits in simd_sum at body:4",
         thread=0, line=2),
    Case("simd operation against a barrier", """
out[i] = x[i];
if (lane < 16) {
  out[i] = simd_max(x[i]);
}
threadgroup_barrier(mem_flags::mem_none);
""",
         "DIVERGENT SIMD OP simd_max is not reached by thread (16,0,0), which waits in threadgroup_barrier at body:5",
         thread=0, line=3),
    Case("shuffle from a lane that has returned", """
out[i] = x[i];
if (lane > 15) return;
out[i] = simd_shuffle(x[i], 31 - lane);
""", "INACTIVE LANE simd_shuffle reads from lane 31, which takes no part", thread=0, line=3),
    Case("shuffle from no lane", "out[i] = simd_shuffle(x[i], lane + 1);",
         "INACTIVE LANE simd_shuffle reads from lane 32, which takes no part", thread=31, line=1),
    Case("shuffle in a partial simdgroup", "out[i] = simd_shuffle_xor(x[i], 1);",
         "INACTIVE LANE simd_shuffle_xor reads from lane 1, which takes no part",
         thread=32, line=1, grid=33, threadgroup=33, out=33),
    # Limits and arithmetic
    Case("more than 32 KiB of threadgroup memory", """
threadgroup float s[8193];
s[t] = x[i];
out[i] = s[t];
""", "THREADGROUP MEMORY 32772 bytes with array s, 32768 is the most", thread=0, line=1),
    Case("more than 1024 threads", "out[i] = x[i % 64];",
         "TOO MANY THREADS 1025 in a threadgroup, 1024 is the most", grid=1025, threadgroup=1025, out=1025),
    Case("division by zero", "out[i] = float(int(i) / zero);", "DIVISION BY ZERO in type 'int'", thread=0, line=1),
    Case("remainder by zero", "out[i] = float(int(i) % zero);", "DIVISION BY ZERO in type 'int'", thread=0, line=1),
    Case("shift by the width", "out[i] = float(1u << (i - zero));",
         "WIDE SHIFT shift of type 'unsigned int' by 32", thread=32, line=1),
]  # fmt: skip


@pytest.mark.parametrize("case", BUGS, ids=lambda case: case.name)
def test_bug_is_named(case: Case) -> None:
    """Compare the full message: kind, bytes, buffer, thread, threadgroup, simdgroup, lane, line and source."""
    lines = case.body.strip("\n").split("\n")
    at = [f"body:{number}: `{line.strip()}`" for number, line in enumerate(lines, 1)]
    message = case.message.replace("~", "without a barrier between by")
    message = re.sub(r"@(\d+)", lambda m: at[int(m[1]) - 1], message)
    where = ""
    if (t := case.thread) is not None:
        where = f", thread ({t},0,0) of threadgroup ({case.group},0,0), simdgroup {t // 32} lane {t % 32}"
    with pytest.raises(Fault) as caught:
        run(case)
    assert str(caught.value) == f"{message} [kernel k{where}]" + (f" at {at[case.line - 1]}" if where else "")
    assert message.startswith(caught.value.kind)


SOUND = [
    Case("copy", "out[i] = x[i];"),
    Case("vector copy", "((device float4*)out)[i] = ((const device float4*)x)[i];", grid=16, threadgroup=16),
    Case("exchange", """
threadgroup float s[64];
s[t] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = s[63 - t];
"""),
    Case("neighbouring bytes of different threads", "((device uchar*)out)[i] = uchar(i & 63);", grid=256),
    Case("atomic counter in threadgroup memory", """
threadgroup atomic_uint n;
if (t == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = float(atomic_load_explicit(&n, memory_order_relaxed));
"""),
    Case("barrier under a uniform condition", """
if (zero == 0) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
out[i] = x[i];
"""),
    Case("barrier in a uniform loop", """
for (uint r = 0; r < 3; r++) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
out[i] = x[i];
"""),
    Case("simd operation of one simdgroup", """
out[i] = x[i];
if (sg == 1) {
  out[i] = simd_sum(x[i]);
}
"""),
    Case("partial simdgroup", "out[i] = simd_sum(x[i]);", grid=40, threadgroup=40, out=40),
    Case("ragged last threadgroup", "out[i] = x[i];", threadgroup=48),
    Case("early return without a barrier", "if (i >= 60) return;\nout[i] = x[i];", out=60),
    Case("shuffles", "out[i] = simd_shuffle_xor(x[i], 1) + simd_shuffle_down(x[i], 1) + simd_broadcast(x[i], 3);"),
    Case("exactly 32 KiB", """
threadgroup float s[8192];
s[t] = x[i];
out[i] = s[t];
"""),
    Case("exactly 1024 threads", """
if (i < 64) {
  out[i] = x[i];
}
""", grid=1024, threadgroup=1024),
]  # fmt: skip


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_sound_kernel_raises_nothing(case: Case) -> None:
    results = [run(case, seed) for seed in range(3)]
    assert all((out == results[0]).all() for out in results)
