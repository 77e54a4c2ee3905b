"""The kernels of prompts compiled for GPUs that are not here: see test_triton_aot.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from require import needs_triton
from tier import some
from triton_aot import Case, Compiled
from triton_compiled import (
    MATRIX,
    TARGETS,
    VERSIONS,
    assert_fits,
    compiled,
    count,
    itemsize,
    running,
)

needs_triton()

EVERYWHERE = [Case("sample", 0)]  # on every version and its architectures
OTHERS = [  # on the version of the environment
    Case("blocks", 90, D=128, block_size=32),
    Case("blocks", 90, D=128, block_size=64),
    Case("blocks", 100, D=256),
    Case("blocks", 80, D=256, block_size=64),  # most shared memory of the least
    Case("blocks", 90, D=64),
    Case("sample", 80, "float32", D=256, G=1),
    Case("sample", 90, "bfloat16", D=96, block_size=64),
    Case("prompt", 100, "float32", block_size=32),
]
ONCE = some(OTHERS, 1)
ODD = Case("sample", 90, D=80, odd=True)
KERNELS = {
    "sample": ["sample_scores", "sample_sums", "merge_blocks", "attend_blocks"],
    "blocks": ["attend_blocks"],
    "prompt": ["attend_blocks"],
}


def cases(version: str) -> tuple[Case, ...]:
    everywhere = [replace(case, architecture=a) for case in EVERYWHERE for a in TARGETS[version]]
    return *everywhere, *([*ONCE, ODD] if VERSIONS[version] is None else [])


ALL = [(version, case) for version in VERSIONS for case in cases(version)]
by_case = pytest.mark.parametrize(("version", "case"), ALL, ids=str)
fast = pytest.mark.parametrize(("version", "case"), [pair for pair in ALL if not pair[1].odd], ids=str)


def launches(version: str, case: Case) -> list[Compiled]:
    for other in VERSIONS:  # both at once
        running(other, cases(other))
    found = compiled(version, cases(version))[case]
    assert list(dict.fromkeys(launch.kernel for launch in found)) == KERNELS[case.launcher]
    return found


@by_case
def test_nothing_spills_and_a_program_fits_on_a_processor(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_fits(launch)


@fast
def test_keys_and_values_come_in_loads_of_16_bytes(version: str, case: Case) -> None:
    for launch in launches(version, case):
        if launch.kernel not in ("sample_scores", "attend_blocks"):
            continue
        constants, rows = launch.constants, 2
        if launch.kernel == "sample_scores":
            rows = constants["BLOCK_SIZE"] // constants["BLOCK_N"]  # tiles of a turn of the loop; no values
        tile = constants["BLOCK_N"] * constants["BLOCK_D"] * itemsize(case)
        asynchronous = count(launch, r"\bLDGSTS\b")
        wide = count(launch, r"\bLDGSTS\S*\.128\b")
        assert asynchronous == wide, "no narrow one"
        assert wide * 16 * 32 * launch.warps >= rows * tile * (launch.stages - 1)


def test_the_check_of_loads_sees_caches_that_are_not_aligned() -> None:
    for launch in launches("triton", ODD):
        assert count(launch, r"\bLDGSTS\S*\.128\b") == 0


@by_case
def test_matrix_units_multiply_16_bits_and_nothing_rounds_float32(version: str, case: Case) -> None:
    for launch in launches(version, case):
        multiplies = launch.kernel in ("sample_scores", "attend_blocks")
        assert (count(launch, MATRIX) > 0) == (multiplies and itemsize(case) == 2), launch.kernel
        assert count(launch, "TF32") == 0
        assert count(launch, r"\bFFMA2?\b") >= 128 or itemsize(case) == 2 or not multiplies


@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_of_64_and_more_run_on_the_warpgroup_units(version: str) -> None:
    """Where sm_90 and sm_100 fall back to sm_80's instruction, they reach half of their speed."""
    for case in cases(version):
        if case.architecture >= 90 and itemsize(case) == 2 and case.block_size >= 64:
            for launch in launches(version, case):
                assert count(launch, r"\bHMMA\b") == 0, (str(case), launch.kernel)
