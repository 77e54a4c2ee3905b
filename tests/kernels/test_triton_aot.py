"""Kernels compiled for GPUs that are not here, exactly as a launch would compile them, on two versions of Triton.

Every launch of `CASES` is compiled for the architectures of `configs.METHODS` in a process without the interpreter, and
its machine code is read: what Triton's interpreter cannot show, spills, tiles that do not fit, scalar loads, missing
matrix instructions and barriers, is looked for there.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from require import needs_triton
from tier import some
from triton_aot import PROCESSORS, Case, Compiled
from triton_compiled import (
    MATRIX,
    TARGETS,
    VERSIONS,
    assert_fits,
    assert_writes_before_its_ticket,
    compiled,
    count,
    itemsize,
    programs_at_once,
    running,
)

needs_triton()

SCORES = ("sparq_scores", "sparq_code_scores")
IN_FLIGHT = 26 * 1024  # bytes of a processor that keep 4.3 TB/s busy on 132 of them at a latency of 0.8 microseconds

EVERYWHERE = [  # on every version and its architectures
    Case("sparq", 0, padded=True),
    Case("dense", 0),
]
CODED = Case("sparq", 90, key_bits=4, padded=True)  # on every version
ODD = Case("sparq", 90, D=80, S=4097, odd=True)
OTHERS = [  # on the version of the environment
    # What needs most shared memory, where there is least and where there is most.
    *(Case("sparq", a, "float32", G=8, Hkv=4, D=256, rank=64, top_k=512, weighted=True) for a in (80, 90)),
    *(Case("dense", a, "float32", D=256, G=8, Hkv=4) for a in (80, 100)),
    Case("sparq", 90, "bfloat16", G=1, Hkv=32, D=64, rank=16, reallocate=True),
    Case("sparq", 80, G=16, Hkv=2, D=96, rank=128, S=4096, B=8, top_k=512, reallocate=True),
    Case("sparq", 90, "float32", G=16, Hkv=2, rank=128),
    Case("dense", 100, "bfloat16", D=80, G=1, Hkv=32, B=8, padded=True),
    Case("dense", 80, D=256, G=1, Hkv=8),
    Case("dense", 90, "float32"),
    Case("select", 90, S=500_000, top_k=4096),
    Case("sparq", 80, "bfloat16", G=16, Hkv=2, D=96, S=16385, key_bits=4),
    Case("sparq", 100, G=1, Hkv=32, rank=16, S=4096, key_bits=4, weighted=True, reallocate=True),
    Case("sparq", 90, "float32", rank=64, D=256, S=16384, key_bits=4),
]
ONCE = [*some(OTHERS, 1), ODD]


def cases(version: str) -> list[Case]:
    everywhere = [replace(case, architecture=a) for case in EVERYWHERE for a in TARGETS[version]]
    return [*everywhere, CODED, *(ONCE if VERSIONS[version] is None else [])]


ALL = [(version, case) for version in VERSIONS for case in cases(version)]
by_case = pytest.mark.parametrize(("version", "case"), ALL, ids=str)
fast = pytest.mark.parametrize(("version", "case"), [pair for pair in ALL if not pair[1].odd], ids=str)


def launches(version: str, case: Case) -> list[Compiled]:
    for other in VERSIONS:  # both at once
        running(other, tuple(cases(other)))
    found = compiled(version, tuple(cases(version)))[case]
    scores = "sparq_scores" if case.key_bits == 16 else "sparq_code_scores"
    names = {"sparq": [scores, "top_k_select", "attend"], "dense": ["attend"], "select": ["top_k_select"]}
    assert [launch.kernel for launch in found] == names[case.launcher]
    return found


def bits(launch: Compiled) -> int:
    """Of a component of a key, as the launch reads it."""
    return 4 if launch.kernel == "sparq_code_scores" else 8 * itemsize(launch.case)


def tile_bytes(launch: Compiled) -> int:
    """What a program asks for at a time: components of keys, or rows of keys and values."""
    constants = launch.constants
    if launch.kernel in SCORES:
        count = -(-constants["RANK"] // constants["BLOCK_R"]) * constants["BLOCK_R"]
        return count * constants["BLOCK_S"] * bits(launch) // 8
    return 2 * constants["BLOCK_N"] * constants["BLOCK_D"] * bits(launch) // 8


@by_case
def test_nothing_spills_and_a_program_fits_on_a_processor(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_fits(launch)


@fast
def test_keys_and_values_come_in_loads_of_16_bytes(version: str, case: Case) -> None:
    for launch in launches(version, case):
        if launch.kernel == "top_k_select" and launch.constants["TILE"]:
            assert count(launch, r"\bLDG\S*\.[US]8\b") == 0  # bytes come four at a time
            continue
        if launch.kernel == "top_k_select":
            heads = launch.constants["G"] if launch.constants["G"] <= 8 else 1  # more in a loop
            wanted = launch.constants["BLOCK"] * 4 * heads
            wide = count(launch, r"\bLDG\S*\.128\b")
        else:
            wanted = tile_bytes(launch) * launch.stages  # all but one before the loop
            wide = count(launch, r"\bLDGSTS\S*\.128\b")
        assert wide * 16 * 32 * launch.warps >= wanted, launch.kernel


def test_the_check_of_loads_sees_caches_that_are_not_aligned() -> None:
    scores, _, attend = launches("triton", ODD)
    assert count(scores, r"\bLDGSTS\S*\.128\b") == count(attend, r"\bLDGSTS\S*\.128\b") == 0


@by_case
def test_matrix_units_multiply_16_bits_and_nothing_rounds_float32(version: str, case: Case) -> None:
    for launch in launches(version, case):
        multiplies = launch.kernel != "top_k_select"
        # Codes are multiplied in float32: products rounded to 16 bits would select other keys.
        coded = launch.kernel == "sparq_code_scores"
        assert (count(launch, MATRIX) > 0) == (multiplies and itemsize(case) == 2 and not coded), launch.kernel
        assert count(launch, "TF32") == 0
        if coded:
            products = case.rank * launch.constants["BLOCK_S"] * case.G // (32 * launch.warps)  # of a thread
            assert count(launch, r"\bFFMA2?\b") >= products // 2  # which may be two
        else:
            assert count(launch, r"\bFFMA\b") >= 128 or itemsize(case) == 2 or not multiplies


@by_case
def test_all_threads_have_written_before_the_ticket_is_drawn(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_writes_before_its_ticket(launch, launch.kernel in ("top_k_select", "attend"))


@fast
def test_programs_share_what_is_read_and_keep_the_memory_busy(version: str, case: Case) -> None:
    """Bytes of each program from the parameters of the launch: together the formula of `mlx_sparse.methods.stats`."""
    for launch in launches(version, case):
        numbers, constants, rows = launch.numbers, launch.constants, prod(launch.grid[1:])
        assert rows == case.B * case.Hkv
        items = case.S
        if launch.kernel == "top_k_select":
            assert launch.grid[0] == -(-items // constants["BLOCK"])
            continue
        if launch.kernel in SCORES:
            coded = launch.kernel == "sparq_code_scores"
            items, width = case.S // 64 * 64 if coded else case.S, constants["RANK"] * bits(launch) // 8
            share, tail = numbers["blocks"] * constants["BLOCK_S"], coded and (case.S % 64 > 0 or case.padded)
        else:
            items, share, width, tail = numbers["entries"], numbers["share"], 2 * case.D * bits(launch) // 8, False
            assert items == (case.S if case.launcher == "dense" else case.top_k)
        shares = [min(share, items - first) for first in range(0, items, share)]
        assert len(shares) + tail == launch.grid[0]
        assert min(shares) > 0
        assert sum(shares) * width * rows == items * width * case.B * case.Hkv
        # Scores from codes ask for few bytes, and for all of them at once.
        asks = items == case.S and launch.kernel != "sparq_code_scores"
        if asks:
            at_once = min(programs_at_once(launch), prod(launch.grid) // PROCESSORS[case.architecture])
            assert at_once * (launch.stages - 1) * tile_bytes(launch) >= IN_FLIGHT, launch.kernel
