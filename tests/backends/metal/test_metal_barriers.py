"""Test the synchronization of the Metal kernels: all barriers are needed, and every schedule gives equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS
from cases import Case, every_parameter
from msl import Fault, Metal
from msl.mutation import barriers
from quantized_cases import PackedCase, PackedMlx
from saap_cases import SaapCase
from sample_cases import SampleCase
from tier import some

from mlx_sparse.core.attend import metal as attend
from mlx_sparse.core.attend import metal_rows as attend_rows
from mlx_sparse.core.select import metal as select

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(mx.metal.is_available(), reason="only the harness sees races"),
]  # kernels with one barrier removed


METAL = ADAPTERS["metal"]


def decode(S: int = 700, **settings: Any) -> Any:
    case = Case(1, 4, 2, S, 128, "f32")
    given = {"reallocate": False, "top_k": 300, "local_window": 8, **settings}
    return METAL.sparq(case, {**every_parameter(case, "paper"), **given})


def biased(**settings: Any) -> Any:
    bias = mx.where(mx.arange(700) % 3 > 0, mx.zeros((1, 4, 1, 700)), -mx.inf)
    return decode(bias=bias, local_window=290, **settings)


def packed() -> Any:
    case = PackedCase(1, 4, 2, 700, 128, "f32", bits=4)
    return PackedMlx("metal").sparq(case, {**every_parameter(case, "rank-D"), "top_k": 300})


def top_k() -> Any:
    bits = mx.array(np.random.default_rng(1).permutation(18_000).reshape(1, 2, 9000), mx.uint32)
    return select.merge(bits, mx.broadcast_to(mx.arange(9000), bits.shape).astype(mx.int32), 64)


def sample() -> Any:
    case = SampleCase(1, 2, 1, 70, 250, 64, "f32", 64)
    return [*METAL.sample(case), *METAL.sample_scores(case)]


def verify() -> Any:
    q, k, v = (mx.array(array) for array in Case(1, 48, 2, 100, 64, "f32").inputs(L=2))
    return attend_rows.attend_rows(q, k, v, scale=0.1, left_padding=mx.array([7]))


def route() -> Any:
    return [METAL.route(SaapCase(Case(1, 4, 1, 1, 160, "f32"), "random", buckets=1032, probes=20, hidden=300))]


def lists() -> Any:
    case = SaapCase(Case(1, 2, 2, 3100, 8, "f32"), "random", buckets=600)
    return METAL.lists(case, np.broadcast_to(np.arange(0, 600, 2), (1, 2, 300)), 3000, 2100)[1]


# One run of each kernel with barriers, long enough for a second iteration of each loop. The kernels named _packed have
# the bodies of the kernels without this suffix.
RUNS: dict[str, Callable[[], Any]] = {
    "sparq_scores": decode,
    "sparq_candidates": biased,
    "sparq_code_scores": lambda: decode(key_bits=4),
    "sparq_row_scores": packed,
    "sparq_code_candidates": lambda: biased(key_bits=4),
    "attend_candidates": lambda: decode(9000, top_k=200, key_bits=4),
    "attend_indices": decode,
    "attend_reallocate": lambda: decode(reallocate=True),
    "attend_rows": verify,
    "top_k_candidates": top_k,
    "sample_scores": sample,
    "sample_sums": sample,
    "attend_blocks": sample,
    "saap_route": route,
    "saap_indices": lists,
}


@pytest.mark.parametrize("kernel", some(list(RUNS), 5))
def test_every_deleted_barrier_causes_a_fault(metal: Metal, kernel: str) -> None:
    RUNS[kernel]()
    text = metal.texts[kernel]
    # Barriers that order no memory only restrict the compiler.
    mutants = [mutant for mutant in barriers(text) if mutant.count("mem_none") == text.count("mem_none")]
    assert mutants
    unnoticed = []
    for number, mutant in enumerate(mutants):
        metal.replaced = {text: mutant}
        try:
            RUNS[kernel]()
        except Fault as fault:
            assert fault.kind in ("RACE", "UNINITIALISED")
            assert fault.kernel == kernel
        else:
            unnoticed.append(number)
    metal.replaced = {}
    assert not unnoticed


@pytest.mark.parametrize("kernel", some(list(RUNS), 5))
def test_three_schedules_give_the_same_bits(metal: Metal, kernel: str) -> None:
    results = []
    for metal.seed in (0, 1, 2):
        results.append(RUNS[kernel]())
    for other in results[1:]:
        for one, array in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(np.array(one), np.array(array))


@pytest.mark.parametrize("counts", [None, (1300, 40), (0, 700)], ids=str)
def test_a_split_attention_gives_the_same_bits_under_three_schedules(
    metal: Metal, counts: tuple[int, int] | None
) -> None:
    q, k, v = METAL.arrays(Case(1, 4, 2, 2000, 64, "f32"))
    indices = mx.broadcast_to(mx.arange(1500), (1, 2, 1500)).astype(mx.int32)
    used = None if counts is None else mx.array([counts])
    results = []
    for metal.seed in (0, 1, 2):
        results.append(attend.attend_indices(q, k, v, indices, scale=0.1, counts=used))
    for out, lse in results[1:]:
        assert mx.array_equal(out, results[0][0])
        assert mx.array_equal(lse, results[0][1])
