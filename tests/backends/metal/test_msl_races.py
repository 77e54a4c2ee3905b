"""Compare the race detector with a brute-force implementation of the memory rules on random programs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from msl import Fault, Kernel

THREADS = 64  # two SIMD groups
ACTIVE = (0, 1, 33, 34)  # threads that access memory
STEPS, CELLS = 14, 3

# Operation: memory, writes, atomic. The numbers are the cases of the kernel below.
ACCESSES = {
    1: ("threadgroup", False, False),
    2: ("threadgroup", True, False),
    3: ("threadgroup", True, True),
    4: ("threadgroup", False, True),
    5: ("device", False, False),
    6: ("device", True, False),
    7: ("device", True, True),
    8: ("device", False, True),
}
# Barrier: the memory that it orders.
THREADGROUP_BARRIERS = {10: (), 11: ("device",), 12: ("threadgroup",), 13: ("threadgroup", "device")}
SIMDGROUP_BARRIERS = {14: ("device",), 15: ("threadgroup",), 16: ()}

SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void run(
    const device int* program [[buffer(0)]], constant int& steps [[buffer(1)]],
    device atomic_uint* shared_cells [[buffer(2)]], device uint* out [[buffer(3)]],
    uint t [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup atomic_uint cells[4];
  if (t < 4) atomic_store_explicit(&cells[t], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = 0;
  for (int s = 0; s < steps; ++s) {
    const device int* step = program + ((group * steps + s) * threads + t) * 2;
    const int cell = step[1];
    switch (step[0]) {
      case 1: sum += ((threadgroup uint*)cells)[cell]; break;
      case 2: ((threadgroup uint*)cells)[cell] = sum; break;
      case 3: sum += atomic_fetch_add_explicit(&cells[cell], 1u, memory_order_relaxed); break;
      case 4: sum += atomic_load_explicit(&cells[cell], memory_order_relaxed); break;
      case 5: sum += ((device uint*)shared_cells)[cell]; break;
      case 6: ((device uint*)shared_cells)[cell] = sum; break;
      case 7: sum += atomic_fetch_add_explicit(&shared_cells[cell], 1u, memory_order_relaxed); break;
      case 8: sum += atomic_load_explicit(&shared_cells[cell], memory_order_relaxed); break;
      case 10: threadgroup_barrier(mem_flags::mem_none); break;
      case 11: threadgroup_barrier(mem_flags::mem_device); break;
      case 12: threadgroup_barrier(mem_flags::mem_threadgroup); break;
      case 13: threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); break;
      case 14: simdgroup_barrier(mem_flags::mem_device); break;
      case 15: simdgroup_barrier(mem_flags::mem_threadgroup); break;
      case 16: simdgroup_barrier(mem_flags::mem_none); break;
    }
  }
  out[group * threads + t] = sum;
}
"""


@dataclass(frozen=True)
class Access:
    """An access of one thread to one memory cell."""

    group: int
    step: int
    thread: int
    operation: int
    cell: int


def random_program(rng: random.Random) -> np.ndarray:
    """Return operations (0 for none) and memory cells of a random program, ``(groups, steps, threads, 2)``."""
    program = np.zeros((rng.choice((1, 1, 2)), rng.randint(3, STEPS), THREADS, 2), np.int32)
    plain_writes = rng.choice((0.15, 0.4))
    for step in program.reshape(-1, THREADS, 2):
        kind = rng.random()
        if kind < 0.3:
            step[:, 0] = rng.choice(list(THREADGROUP_BARRIERS))
        elif kind < 0.45:
            step[:32, 0], step[32:, 0] = (rng.choice(list(SIMDGROUP_BARRIERS)) for _ in range(2))
        else:
            for thread in rng.sample(ACTIVE, rng.choice((1, 1, 1, 2))):
                weights = (plain_writes, 0.2, 0.1, max(0.7 - plain_writes, 0.1))
                (choices,) = rng.choices(((2, 6), (3, 7), (4, 8), (1, 5)), weights)
                step[thread] = rng.choice(choices), rng.randrange(CELLS)
    return program


def ordered(program: np.ndarray, a: Access, b: Access, memory: str) -> bool:
    """Return True if a barrier for ``memory`` is between two accesses of one threadgroup."""
    first, last = sorted((a.step, b.step))
    for step in program[a.group, first + 1 : last]:
        barrier = int(step[a.thread, 0])
        same_simdgroup = a.thread // 32 == b.thread // 32
        if memory in THREADGROUP_BARRIERS.get(barrier, ()):
            return True
        if same_simdgroup and memory in SIMDGROUP_BARRIERS.get(barrier, ()):
            return True
    return False


def has_race(program: np.ndarray) -> bool:
    accesses = [Access(*map(int, at), *map(int, program[tuple(at)])) for at in np.argwhere(program[..., 0] > 0)]
    for a, b in combinations([access for access in accesses if access.operation in ACCESSES], 2):
        (memory, writes_a, atomic_a), (other, writes_b, atomic_b) = ACCESSES[a.operation], ACCESSES[b.operation]
        if (memory, a.cell) != (other, b.cell) or not (writes_a or writes_b) or (atomic_a and atomic_b):
            continue
        if a.group != b.group:
            if memory == "device":
                return True
        elif a.thread != b.thread and not ordered(program, a, b, memory):
            return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_a_race_is_reported_exactly_when_the_memory_rules_have_one(seed: int) -> None:
    kernel, rng = Kernel(SOURCE, "run"), random.Random(seed)
    outcomes = set()
    for _ in range(150):
        program = random_program(rng)
        groups, steps = program.shape[:2]
        buffers = {
            "program": program,
            "steps": steps,
            "shared_cells": np.zeros(4, np.uint32),
            "out": np.zeros(groups * THREADS, np.uint32),
        }
        found = False
        try:
            kernel(buffers, grid=(groups * THREADS,), threadgroup=(THREADS,), seed=seed, written=("shared_cells",))
        except Fault as fault:
            assert fault.kind == "RACE"
            found = True
        assert found == has_race(program), program[:, :, ACTIVE]
        outcomes.add(found)
    assert outcomes == {False, True}
