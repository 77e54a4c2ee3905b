"""Test that the memory checker of the Triton interpreter (triton_bytes.py) finds planted faults."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_sparse.cuda_ref import interpreted, unavailable
from require import absent

if not interpreted():
    absent("triton-interpreter", "on a GPU nothing is checked_launches")
if reason := unavailable():
    absent("triton", reason)

import torch
import triton
import triton.language as tl
from mlx_sparse.cuda_ref.launchers import configs
from triton_bytes import checked_launches, shuffled


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i), mask=i < count)


@triton.jit
def total(
    source, parts, out, tickets, BLOCK: tl.constexpr, PARTS: tl.constexpr, BARRIER: tl.constexpr, SEM: tl.constexpr
):
    p = tl.program_id(0)
    tl.store(parts + p, tl.sum(tl.load(source + p * BLOCK + tl.arange(0, BLOCK)), axis=0))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(tickets, 1, sem=SEM) == PARTS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, PARTS)), axis=0))


@triton.jit
def shift(data, COUNT: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(data + i, i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(data + i, tl.load(data + (i + 1) % COUNT))


@triton.jit
def scatter(target, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(target + i % SLOTS, i)


def test_out_of_bounds_accesses_are_found() -> None:
    with checked_launches():
        copy[(1,)](torch.zeros(64), torch.empty(64), 64, BLOCK=64)
    with (
        checked_launches(),
        pytest.raises(Exception, match="loads outside of its arguments: element 60 of 60 of source"),
    ):
        copy[(1,)](torch.zeros(80)[:60].clone(), torch.empty(64), 64, BLOCK=64)
    with (
        checked_launches(),
        pytest.raises(Exception, match="stores outside of its arguments: element 60 of 60 of target"),
    ):
        copy[(1,)](torch.zeros(64), torch.empty(64)[:60], 64, BLOCK=64)


def test_uninitialized_loads_are_found() -> None:
    with checked_launches(), pytest.raises(Exception, match="loads element 0 of source, which nothing has written"):
        copy[(1,)](torch.empty(64), torch.empty(64), 64, BLOCK=64)
    with checked_launches(), pytest.raises(Exception, match="loads element 48 of source, which nothing has written"):
        made = torch.empty(80, dtype=torch.uint8)
        copy[(1,)](torch.zeros(64, dtype=torch.uint8), made[:64], 64, BLOCK=64)
        copy[(1,)](made[16:], torch.empty(64, dtype=torch.uint8), 64, BLOCK=64)


def test_stores_to_inputs_are_found() -> None:
    given = torch.zeros(64)
    with checked_launches(), pytest.raises(Exception, match="stores to target, which its launcher did not allocate"):
        copy[(1,)](torch.zeros(64), given, 64, BLOCK=64)


@pytest.mark.parametrize("order", [None, shuffled])
def test_atomics_order_programs(order: Any) -> None:
    source = torch.ones(64)

    def launch(barrier: bool, sem: str) -> float:
        with checked_launches(order):
            out = torch.empty(1)
            total[(4,)](source, torch.empty(4), out, torch.zeros(1, dtype=torch.int32), 16, 4, barrier, sem)
        return out.item()

    assert launch(True, "acq_rel") == 64
    with pytest.raises(Exception, match=r"publishes its stores to parts by an atomic without tl.debug_barrier\(\)"):
        launch(False, "acq_rel")
    with pytest.raises(Exception, match=r"loads element \d of parts, unordered with program"):
        launch(True, "relaxed")


def test_missing_barriers_are_found() -> None:
    with checked_launches(), pytest.raises(Exception, match=r"loads element \d+ of data, unordered with itself"):
        shift[(1,)](torch.empty(16, dtype=torch.int32), 16, False)


def test_conflicting_stores_are_found() -> None:
    with checked_launches(), pytest.raises(Exception, match="program 0 stores an element of target twice at once"):
        scatter[(1,)](torch.empty(16, dtype=torch.int32), 16, 8)
    with (
        checked_launches(),
        pytest.raises(Exception, match="program 1 stores element 0 of target, unordered with program 0"),
    ):
        scatter[(2,)](torch.empty(16, dtype=torch.int32), 16, 16)


def test_interpreter_is_restored() -> None:
    before = (torch.empty, triton.runtime.interpreter.GridExecutor.__call__)
    with pytest.raises(Exception, match="unordered"), checked_launches():
        shift[(1,)](torch.empty(16, dtype=torch.int32), 16, False)
    assert before == (torch.empty, triton.runtime.interpreter.GridExecutor.__call__)
    assert configs.processors(torch.device("cpu")) == configs.WITHOUT_A_GPU
