"""Test the machine code of the Triton kernels for GPUs that this machine does not have, on two versions of Triton.

A process without the interpreter compiles every launch of `CASES` exactly as a real launch would. The tests look for
faults that the interpreter cannot show: spills, tiles that do not fit, scalar loads, missing matrix instructions and
missing barriers.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from json_tables import read_tables
from require import needs_triton
from tier import some
from triton_aot import PROCESSORS, PROMPTS, Case, Compiled
from triton_compiled import (
    MATRIX,
    TARGETS,
    VERSIONS,
    assert_barrier_before_atomic,
    assert_fits,
    compiled,
    count,
    itemsize,
    programs_at_once,
    start_compiler,
)

pytestmark = pytest.mark.slow  # compiles for several GPUs

needs_triton()

LAYERS = ("saap_hidden", "saap_route")
SCORES = ("sparq_scores", "sparq_code_scores")
BLOCKS = ("sample_scores", "attend_blocks")
IN_FLIGHT = 26 * 1024  # bytes in flight per SM for 4.3 TB/s on 132 SMs at a latency of 0.8 microseconds

# All versions compile "everywhere" for their architectures and "coded" for sm_90. The installed version compiles all
# other cases. "decode" and "prefill" are the cases that need the most shared memory.
CASES = {group: [Case(**row) for row in rows] for group, rows in read_tables(__file__).items()}
ODD = CASES["odd"]
ONCE = [*some(CASES["decode"], 1), *some(CASES["saap"], 1), *some(CASES["prefill"], 1), *ODD]


def cases(version: str) -> tuple[Case, ...]:
    everywhere = [replace(case, architecture=a) for case in CASES["everywhere"] for a in TARGETS[version]]
    return *everywhere, *CASES["coded"], *(ONCE if VERSIONS[version] is None else [])


ALL = [(version, case) for version in VERSIONS for case in cases(version)]
by_case = pytest.mark.parametrize(("version", "case"), ALL, ids=str)
fast = pytest.mark.parametrize(("version", "case"), [pair for pair in ALL if not pair[1].odd], ids=str)


def kernels(case: Case) -> list[str]:
    """Return the kernels that a launcher starts, in order."""
    return {
        "sparq": [SCORES[case.key_bits < 16], "top_k_select", "attend"],
        "dense": ["attend"],
        "select": ["top_k_select"],
        "saap": [*LAYERS[not case.hidden :], "saap_expand", "attend"],
        "sample": ["sample_scores", "sample_sums", "merge_blocks", "attend_blocks"],
        "blocks": ["attend_blocks"],
        "prompt": ["attend_blocks"],
    }[case.launcher]


def launches(version: str, case: Case) -> list[Compiled]:
    for other in VERSIONS:  # start both processes before reading one
        start_compiler(other, cases(other))
    found = compiled(version, cases(version))[case]
    assert list(dict.fromkeys(launch.kernel for launch in found)) == kernels(case)
    return found


def bits(launch: Compiled) -> int:
    """Return the bits per key component that the launch reads."""
    return 4 if launch.kernel == "sparq_code_scores" else 8 * itemsize(launch.case)


def tile_bytes(launch: Compiled) -> int:
    """Return the bytes that a program loads per iteration: keys, keys and values, or weights."""
    constants = launch.constants
    if launch.kernel in LAYERS:
        return constants["BLOCK_K"] * constants["BLOCK_N"] * (4 if launch.case.weights == "float32" else 2)
    if launch.kernel in SCORES:
        count = -(-constants["RANK"] // constants["BLOCK_R"]) * constants["BLOCK_R"]
        return count * constants["BLOCK_S"] * bits(launch) // 8
    rows = 2 * constants["BLOCK_N"]
    if launch.kernel == "sample_scores":
        rows = constants["BLOCK_SIZE"]  # tile rows per loop iteration, keys without values
    return rows * constants["BLOCK_D"] * bits(launch) // 8


@by_case
def test_kernels_fit_without_spilling(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_fits(launch)


@fast
def test_loads_are_16_bytes_wide(version: str, case: Case) -> None:
    for launch in launches(version, case):
        wide = count(launch, r"\bLDGSTS\S*\.128\b")
        if launch.kernel in (*BLOCKS, *LAYERS):
            assert count(launch, r"\bLDGSTS\b") == wide, "all asynchronous copies are 16 bytes wide"
            short = launch.kernel in LAYERS and launch.numbers["K"] <= launch.constants["BLOCK_K"]
            wanted = tile_bytes(launch) * (1 if short else launch.stages - 1)
        elif launch.kernel in (*SCORES, "attend"):
            wanted = tile_bytes(launch) * launch.stages  # all stages but one are loaded before the loop
        elif launch.kernel == "top_k_select" and launch.constants["TILE"]:
            assert count(launch, r"\bLDG\S*\.[US]8\b") == 0  # bytes are loaded in groups of four
            continue
        elif launch.kernel == "top_k_select":
            heads = launch.constants["G"] if launch.constants["G"] <= 8 else 1  # more heads need a loop
            wanted, wide = launch.constants["BLOCK"] * 4 * heads, count(launch, r"\bLDG\S*\.128\b")
        else:
            continue
        assert wide * 16 * 32 * launch.warps >= wanted, launch.kernel


@pytest.mark.parametrize("case", ODD, ids=str)
def test_unaligned_caches_have_no_wide_loads(case: Case) -> None:
    for launch in launches("triton", case):
        if launch.kernel != "top_k_select":
            assert count(launch, r"\bLDGSTS\S*\.128\b") == 0


@by_case
def test_matrix_instructions_match_the_dtype(version: str, case: Case) -> None:
    for launch in launches(version, case):
        constants, products, name = launch.constants, count(launch, MATRIX), launch.kernel
        if name in LAYERS:  # one TF32 product would round float32 inputs; the sum of three products does not
            tiles = constants["BLOCK_M"] // 16 * constants["BLOCK_N"] // 8 * constants["BLOCK_K"] // 8
            assert products == count(launch, "TF32")
            assert products >= 3 * tiles / launch.warps
            continue
        assert count(launch, "TF32") == 0
        # int4 codes are multiplied in float32, because 16-bit products would select other keys.
        units = name in ("sparq_scores", "attend", *BLOCKS) and itemsize(case) == 2
        assert (products > 0) == units, name
        if name == "sparq_code_scores":
            least = (
                case.rank * constants["BLOCK_S"] * case.G // (32 * launch.warps) // 2
            )  # an FFMA2 is two multiplications
            assert count(launch, r"\bFFMA2?\b") >= least
        elif name in ("sparq_scores", "attend", *BLOCKS) and not units:
            assert count(launch, r"\bFFMA2?\b") >= 128


@pytest.mark.parametrize("version", VERSIONS)
def test_large_blocks_use_warpgroup_instructions(version: str) -> None:
    """Check that sm_90 and sm_100 do not use the instruction of sm_80, which would halve the speed."""
    for case in cases(version):
        wide = case.architecture >= 90 and itemsize(case) == 2 and case.block_size >= 64
        if wide and case.launcher in PROMPTS:
            for launch in launches(version, case):
                assert count(launch, r"\bHMMA\b") == 0, (str(case), launch.kernel)


@by_case
def test_stores_precede_the_atomic(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_barrier_before_atomic(launch, launch.kernel in ("top_k_select", "attend", "saap_route"))


@pytest.mark.parametrize(
    ("version", "case"), [pair for pair in ALL if pair[1].launcher in ("sparq", "dense", "select")], ids=str
)
def test_programs_split_the_reads_and_saturate_memory(version: str, case: Case) -> None:
    """Compare the bytes of all programs, from their launch parameters, with the formula of `core.stats`."""
    if case.odd:
        return
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
        # Kernels that score int4 codes read few bytes and request all of them at once.
        if items == case.S and launch.kernel != "sparq_code_scores":
            at_once = min(programs_at_once(launch), prod(launch.grid) // PROCESSORS[case.architecture])
            assert at_once * (launch.stages - 1) * tile_bytes(launch) >= IN_FLIGHT, launch.kernel


@pytest.mark.parametrize(
    ("version", "case"),
    # One sequence with 8 KV heads; small layers have too few columns to fill a GPU.
    [pair for pair in ALL if pair[1].launcher == "saap" and pair[1].B * pair[1].Hkv == 8 and pair[1].buckets >= 1024],
    ids=str,
)
def test_saap_launches_fill_the_gpu(version: str, case: Case) -> None:
    for launch in launches(version, case):
        programs, processors = prod(launch.grid), PROCESSORS[case.architecture]
        if launch.kernel != "saap_hidden" or case.hidden >= 1024:
            assert programs >= processors, launch.kernel
        if launch.kernel == "saap_route" and case.hidden >= 1024:
            at_once = min(programs_at_once(launch), programs / processors)
            assert at_once * (launch.stages - 1) * tile_bytes(launch) >= IN_FLIGHT
        if launch.kernel == "attend":
            assert programs == 2 * processors
