"""The kernels of SAAP compiled for GPUs that are not here: see test_triton_aot.py."""

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
    programs_at_once,
    running,
)

needs_triton()

IN_FLIGHT = 26 * 1024  # bytes of a processor that keep 4.3 TB/s busy on 132 of them at a latency of 0.8 microseconds
PAPER = Case("saap", 0, S=131072)
EVERYWHERE = [PAPER]  # on every version and its architectures
OTHERS = [  # on the version of the environment
    Case("saap", 90, "bfloat16", hidden=0, buckets=256, padded=True),
    Case("saap", 80, "bfloat16", G=16, Hkv=2, buckets=4096, probes=128, weights="float16"),
    Case("saap", 90, "float32", buckets=4096, weights="float32"),
    Case("saap", 100, B=64, D=64, weights="float32"),
]
ONCE = some(OTHERS, 1)
LAYERS = ("saap_hidden", "saap_route")


def cases(version: str) -> tuple[Case, ...]:
    everywhere = [replace(case, architecture=a) for case in EVERYWHERE for a in TARGETS[version]]
    return *everywhere, *(ONCE if VERSIONS[version] is None else [])


ALL = [(version, case) for version in VERSIONS for case in cases(version)]
by_case = pytest.mark.parametrize(("version", "case"), ALL, ids=str)


def launches(version: str, case: Case) -> list[Compiled]:
    for other in VERSIONS:  # both at once
        running(other, cases(other))
    found = compiled(version, cases(version))[case]
    layers = LAYERS if case.hidden else LAYERS[1:]
    assert [launch.kernel for launch in found] == [*layers, "saap_expand", "attend"]
    return found


def weight_bytes(launch: Compiled) -> int:
    """What a program has of a layer's weights at a time."""
    item = 4 if launch.case.weights == "float32" else 2
    return launch.constants["BLOCK_K"] * launch.constants["BLOCK_N"] * item


@by_case
def test_nothing_spills_and_a_program_fits_on_a_processor(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_fits(launch)


@by_case
def test_weights_keys_and_values_come_in_loads_of_16_bytes(version: str, case: Case) -> None:
    for launch in launches(version, case):
        wide = count(launch, r"\bLDGSTS\S*\.128\b")
        if launch.kernel in LAYERS:
            assert count(launch, r"\bLDGSTS\b") == wide, "no narrow one"
            before = 1 if launch.numbers["K"] <= launch.constants["BLOCK_K"] else launch.stages - 1
            assert wide * 16 * 32 * launch.warps >= before * weight_bytes(launch), launch.kernel
        elif launch.kernel == "attend":
            item = 4 if case.dtype == "float32" else 2
            tiles = 2 * launch.constants["BLOCK_N"] * launch.constants["BLOCK_D"] * item
            assert wide * 16 * 32 * launch.warps >= tiles * launch.stages


@by_case
def test_layers_multiply_three_times_and_attention_as_ever(version: str, case: Case) -> None:
    """A product of TF32 numbers alone would round what is not of 16 bits; the sum of three does not."""
    for launch in launches(version, case):
        products = count(launch, MATRIX)
        if launch.kernel in LAYERS:
            constants = launch.constants
            tiles = constants["BLOCK_M"] // 16 * constants["BLOCK_N"] // 8 * constants["BLOCK_K"] // 8
            assert products == count(launch, "TF32")
            assert products >= 3 * tiles / launch.warps
        else:
            expected = launch.kernel == "attend" and case.dtype != "float32"
            assert (products > 0, count(launch, "TF32")) == (expected, 0)


@by_case
def test_all_threads_have_written_before_the_ticket_is_drawn(version: str, case: Case) -> None:
    for launch in launches(version, case):
        assert_writes_before_its_ticket(launch, launch.kernel in ("saap_route", "attend"))


@by_case
def test_every_launch_uses_the_whole_gpu_whose_memory_is_kept_busy(version: str, case: Case) -> None:
    """At one sequence of 8 KV heads; a small layer has too few columns."""
    if case.B * case.Hkv != 8 or case.buckets < 1024:
        return
    for launch in launches(version, case):
        programs = prod(launch.grid)
        processors = PROCESSORS[case.architecture]
        if launch.kernel != "saap_hidden" or case.hidden >= 1024:
            assert programs >= processors, launch.kernel
        if launch.kernel == "saap_route" and case.hidden >= 1024:
            at_once = min(programs_at_once(launch), programs / processors)
            assert at_once * (launch.stages - 1) * weight_bytes(launch) >= IN_FLIGHT
        if launch.kernel == "attend":
            assert programs == 2 * processors
