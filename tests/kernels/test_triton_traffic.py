"""Bytes that the Triton kernels move, counted in the interpreter, and what the guard of all its tests finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import Case
from mlx_sparse.cuda_ref.availability import interpreted, unavailable
from require import absent

from mlx_sparse.methods import stats

if not interpreted():
    absent("triton-interpreter", "on a GPU nothing is counted")
if reason := unavailable():
    absent("triton", reason)

import torch
import triton
import triton.language as tl
from mlx_sparse.cuda_ref.launchers import configs
from torch_arrays import DTYPES, to_torch
from triton_bytes import Launch, shuffled, watched

from mlx_sparse import cuda_ref

RANK, TOP_K, D, HKV = 32, 128, 128, 2


def decode(
    S: int, G: int, *, reallocate: bool, key_bits: int = 16, order: Callable[[int], Any] | None = None
) -> tuple[Any, list[Launch]]:
    """One float16 decode step."""
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    keys_t = k.transpose(2, 3).contiguous() if key_bits == 16 else cuda_ref.code_keys(k)
    more = {"key_bits": key_bits, "keys_t": keys_t, "value_mean": v.float().mean(dim=2).to(DTYPES["f16"])}
    with watched(order) as launches:
        out = cuda_ref.sparq_attention(q, k, v, rank=RANK, top_k=TOP_K, reallocate=reallocate, **more)
    return out, launches


@pytest.mark.parametrize("G", [4, 1])
@pytest.mark.parametrize("S", [2048, 4099])
def test_a_step_reads_the_bytes_of_the_paper_and_a_bounded_score_buffer(S: int, G: int) -> None:
    _, launches = decode(S, G, reallocate=G == 1)
    assert [launch.kernel for launch in launches] == ["sparq_scores", "top_k_select", "attend"]
    scores, select, attend = (launch.traffic for launch in launches)
    item, logits = 2, HKV * G * (S + -S % 16) * 4
    readable = S + -S % 16 if launches[0].arguments["ALIGNED"] else S
    # One component of a KV head is read once, for the whole group; so is each chosen row.
    assert scores["keys_t"].loaded == scores["keys_t"].distinct == HKV * RANK * readable * item
    assert attend["keys"].loaded == attend["keys"].distinct == HKV * TOP_K * D * item
    assert attend["values"].loaded == attend["values"].distinct == HKV * TOP_K * D * item
    elements = HKV * stats.sparq_elements(S, D, rank=RANK, top_k=TOP_K)
    cache = scores["keys_t"].loaded + attend["keys"].loaded + attend["values"].loaded
    assert cache <= 1.01 * elements * item
    # The score buffer is written once and read once; reallocation reads what it gives to the chosen keys.
    assert scores["logits"].stored == scores["logits"].distinct == logits
    assert 0.99 * logits <= select["logits"].loaded <= logits
    if G == 1:
        assert attend["logits"].loaded == HKV * G * TOP_K * 4
    # Nothing else is large: neither parts and candidates, nor what every program reads for itself.
    small = sum(
        traffic.distinct
        for launch in launches
        for name, traffic in launch.traffic.items()
        if name not in ("keys_t", "keys", "values", "logits")
    )
    assert small <= 0.25 * elements * item


@pytest.mark.parametrize(("S", "G"), [(4099, 4), (2048, 1)])
def test_a_step_with_codes_reads_their_bytes_and_a_score_buffer_of_bytes(S: int, G: int) -> None:
    _, launches = decode(S, G, reallocate=False, key_bits=4)
    assert [launch.kernel for launch in launches] == ["sparq_code_scores", "top_k_select", "attend"]
    scores, select, _ = (launch.traffic for launch in launches)
    groups, tail = divmod(S, 64)
    for name, size in {"codes": groups * 32, "lo": 2 * groups, "step": 2 * groups, "keys": 2 * tail}.items():
        assert scores[name].loaded == scores[name].distinct == HKV * RANK * size, name
    # (sparq.23), but that keys of the tail are read as they are
    coded = sum(scores[name].loaded for name in ("codes", "lo", "step"))
    formula = stats.sparq_elements(64 * groups, D, rank=RANK, top_k=0, key_bits=4) - 4 * D
    assert coded == 2 * HKV * formula
    logits = HKV * G * (S + -S % 16)
    assert scores["logits"].stored == scores["logits"].distinct == logits
    assert 0.99 * logits <= select["logits"].loaded <= logits
    # Of each tile largest and sum of each head are written once, and read by the programs that choose.
    assert scores["statistics"].stored <= HKV * G * 8 * (S // 128 + 1)


def test_a_padded_step_with_codes_reads_no_byte_of_the_padding() -> None:
    S, G, padding = 2050, 4, (0, 37, 1300, 2000)
    case = Case(len(padding), HKV * G, HKV, S, D, "f16", padding)
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    more = {"key_bits": 4, "left_padding": torch.tensor(padding)}
    with watched() as launches:
        cuda_ref.sparq_attention(q, k, v, rank=RANK, top_k=TOP_K, reallocate=False, **more)
    scores, select, _ = (launch.traffic for launch in launches)
    groups = sum((S - first) // 64 for first in padding)
    tail = sum((S - first) % 64 for first in padding)
    for name, size in {"codes": groups * 8 * 4, "lo": 2 * groups, "step": 2 * groups, "keys": 2 * tail}.items():
        assert scores[name].loaded == scores[name].distinct == HKV * RANK * size, name
    lines = sum(S + -S % 16 - first // 16 * 16 for first in padding)  # which go through memory whole
    assert scores["logits"].stored == scores["logits"].distinct == select["logits"].loaded == HKV * G * lines


def test_programs_read_what_the_parameters_of_their_launch_say() -> None:
    S = 4096
    _, (scores, _, _) = decode(S, 4, reallocate=False)
    share = scores.arguments["blocks"] * scores.arguments["BLOCK_S"]
    assert scores.grid == (-(-S // share), HKV, 1)
    by_program = scores.traffic["keys_t"].by_program
    for program in range(int(np.prod(scores.grid))):
        split = program // HKV
        assert by_program[program] == min(share, S - split * share) * RANK * 2


@pytest.mark.parametrize("G", [4, 8])
def test_dense_attention_reads_each_row_once_for_the_group(G: int) -> None:
    S = 1000
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    with watched() as launches:
        cuda_ref.dense_attention(q, k, v, backend="triton")
    (attend,) = launches
    assert attend.grid[0] > 1
    read = attend.traffic["keys"].loaded + attend.traffic["values"].loaded
    assert read == HKV * (stats.dense_elements(S, D) - 2 * D) * 2
    parts = HKV * attend.grid[0] * G * (D + 3) * 4
    written = sum(t.stored for name, t in attend.traffic.items() if name.startswith("part"))
    assert written == parts


def test_the_order_of_programs_changes_no_bit() -> None:
    given, _ = decode(4099, 4, reallocate=True)
    for order in (shuffled, lambda programs: np.arange(programs)[::-1]):
        other, _ = decode(4099, 4, reallocate=True, order=order)
        assert torch.equal(given, other)


# What the guard finds


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


def test_an_address_outside_is_found() -> None:
    with watched():
        copy[(1,)](torch.zeros(64), torch.empty(64), 64, BLOCK=64)
    with (
        watched(),
        pytest.raises(Exception, match="loads outside of its arguments: element 60 of 60 of source"),
    ):
        copy[(1,)](torch.zeros(80)[:60].clone(), torch.empty(64), 64, BLOCK=64)
    with watched(), pytest.raises(Exception, match="stores outside of its arguments: element 60 of 60 of target"):
        copy[(1,)](torch.zeros(64), torch.empty(64)[:60], 64, BLOCK=64)


def test_memory_that_nothing_has_written_is_found() -> None:
    with watched(), pytest.raises(Exception, match="loads element 0 of source, which nothing has written"):
        copy[(1,)](torch.empty(64), torch.empty(64), 64, BLOCK=64)


def test_bytes_that_nothing_has_written_are_found() -> None:
    with watched(), pytest.raises(Exception, match="loads element 48 of source, which nothing has written"):
        made = torch.empty(80, dtype=torch.uint8)
        copy[(1,)](torch.zeros(64, dtype=torch.uint8), made[:64], 64, BLOCK=64)
        copy[(1,)](made[16:], torch.empty(64, dtype=torch.uint8), 64, BLOCK=64)


def test_a_store_to_an_argument_of_the_user_is_found() -> None:
    given = torch.zeros(64)
    with watched(), pytest.raises(Exception, match="stores to target, which its launcher did not allocate"):
        copy[(1,)](torch.zeros(64), given, 64, BLOCK=64)


@pytest.mark.parametrize("order", [None, shuffled])
def test_a_ticket_orders_programs(order: Any) -> None:
    source = torch.ones(64)

    def launch(barrier: bool, sem: str) -> float:
        with watched(order):
            out = torch.empty(1)
            total[(4,)](source, torch.empty(4), out, torch.zeros(1, dtype=torch.int32), 16, 4, barrier, sem)
        return out.item()

    assert launch(True, "acq_rel") == 64
    with pytest.raises(Exception, match=r"publishes its stores to parts by an atomic without tl.debug_barrier\(\)"):
        launch(False, "acq_rel")
    with pytest.raises(Exception, match=r"loads element \d of parts, unordered with program"):
        launch(True, "relaxed")


def test_threads_of_one_program_need_a_barrier() -> None:
    with watched(), pytest.raises(Exception, match=r"loads element \d+ of data, unordered with itself"):
        shift[(1,)](torch.empty(16, dtype=torch.int32), 16, False)


def test_two_programs_and_two_lanes_that_store_to_one_address_are_found() -> None:
    with watched(), pytest.raises(Exception, match="program 0 stores an element of target twice at once"):
        scatter[(1,)](torch.empty(16, dtype=torch.int32), 16, 8)
    with watched(), pytest.raises(Exception, match="program 1 stores element 0 of target, unordered with program 0"):
        scatter[(2,)](torch.empty(16, dtype=torch.int32), 16, 16)


def test_the_interpreter_is_left_as_it_was() -> None:
    before = (torch.empty, triton.runtime.interpreter.GridExecutor.__call__)
    with pytest.raises(Exception, match="unordered"), watched():
        shift[(1,)](torch.empty(16, dtype=torch.int32), 16, False)
    assert before == (torch.empty, triton.runtime.interpreter.GridExecutor.__call__)
    assert configs.processors(torch.device("cpu")) == configs.WITHOUT_A_GPU
