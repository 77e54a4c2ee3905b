"""Trust in the Metal kernels' synchronisation: every barrier is needed, and no schedule changes a bit."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from cases import Case
from msl import Fault, Metal
from msl.mutation import barriers
from sample_cases import SampleCase
from tier import some

from mlx_sparse.kernels import attend, attend_rows, quest, saap, sample, select, sparq
from mlx_sparse.ops.csr import saap_index
from mlx_sparse.ops.key_codes import code_keys
from mlx_sparse.ops.packed_rows import PackedRows
from mlx_sparse.ops.quest import page_bounds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(mx.metal.is_available(), reason="only the harness sees races"),
]  # kernels with a barrier taken away


def arrays(case: Case) -> list[mx.array]:
    return [mx.array(array) for array in case.inputs()]


def decode(
    S: int = 700, top_k: int = 300, *, key_bits: int = 16, reallocate: bool = False, heads: int = 4
) -> list[mx.array]:
    q, k, v = arrays(Case(1, heads, 2, S, 128, "f32"))
    out, lse = sparq.sparq_attention(
        q,
        k,
        v,
        reallocate=reallocate,
        scale=0.1,
        value_mean=mx.ones((1, 2, 128)),
        rank=16,
        top_k=top_k,
        local_window=8,
        component_weight=None,
        left_padding=None,
        keys_t=mx.contiguous(k.swapaxes(-1, -2)) if key_bits == 16 else code_keys(k, None),
    )
    return [out, lse]


def pages() -> list[mx.array]:
    q, k, _ = arrays(Case(1, 8, 2, 700, 64, "f32"))
    low, high = page_bounds(k, None, page_size=5)
    given = {"top_k": 50, "left_padding": None, "page_min": low, "page_max": high}
    return [quest.quest_select(q, k, page_size=5, **given)]


def rows() -> list[mx.array]:
    q, k, _ = arrays(Case(1, 4, 2, 700, 128, "f32"))
    packed = PackedRows.of(k, bits=4)
    form = (4, packed.group_size)
    sizes = sparq.Sizes(1, 2, 2, 128, mx.float32, 700, 128, 300, 8, 0.1, False, "rows", True, True, form)
    return sparq.sparq_row_scores(sizes)(q, *packed.parts, mx.array([0]))


def choose() -> list[mx.array]:
    scores = mx.array(np.random.default_rng(1).normal(size=(1, 2, 9000)).astype(np.float32))
    return [select.top_k_select(scores, top_k=64, local_window=8, left_padding=None)]


def prefill() -> list[mx.array]:
    case = SampleCase(1, 2, 1, 70, 250, 64, "f32", 64)
    out, lse, _ = sample.sample_attention(*(mx.array(array) for array in case.inputs()), **case.parameters)
    return [out, lse, *sample.sample_scores(*(mx.array(array) for array in case.inputs()[:2]), **case.sampling)]


def many() -> list[mx.array]:
    q, k, v = (mx.array(array) for array in Case(1, 48, 2, 100, 64, "f32").inputs(L=2))
    return list(attend_rows.attend_rows(q, k, v, scale=0.1, left_padding=mx.array([7])))


def route(heads: int = 4) -> list[mx.array]:
    rng = np.random.default_rng(1)

    def weights(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    hidden, out = weights(1, 160, 300), weights(1, 300, 1032)
    return [saap.saap_route(weights(1, heads, 1, 160), hidden_weight=hidden, out_weight=out, probes=20)]


def listed() -> list[mx.array]:
    ids = mx.array(np.random.default_rng(1).integers(0, 600, size=(1, 2, 3000)))
    visited = mx.broadcast_to(mx.arange(0, 600, 2, dtype=mx.int32), (1, 2, 300))
    index = saap_index(ids, buckets=600, sink_tokens=1)
    return list(saap.saap_indices(visited, *index, length=3100, covered=3000, sink_tokens=1, capacity=2100))


# A run of each kernel that has barriers, long enough for loops to come round again. Those named
# _packed have the barriers of the ones without.
RUNS: dict[str, Callable[[], list[mx.array]]] = {
    "sparq_scores": decode,
    "sparq_candidates": decode,
    "sparq_code_scores": lambda: decode(key_bits=4),
    "sparq_row_scores": rows,
    "sparq_code_candidates": lambda: decode(key_bits=4),
    "attend_candidates": lambda: decode(9000, 200, key_bits=4),
    "attend_indices": decode,
    "attend_reallocate": lambda: decode(reallocate=True),
    "attend_rows": many,
    "top_k_scores": choose,
    "top_k_candidates": choose,
    "sample_scores": prefill,
    "sample_sums": prefill,
    "attend_blocks": prefill,
    "saap_route": route,
    "quest_scores": pages,
    "saap_indices": listed,
}


@pytest.mark.parametrize("kernel", some(list(RUNS), 5))
def test_every_barrier_that_is_taken_away_is_missed(metal: Metal, kernel: str) -> None:
    RUNS[kernel]()
    text = metal.texts[kernel]
    # Those that order no memory hold back the compiler only.
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
        assert all(mx.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("counts", [None, (1300, 40), (0, 700)], ids=str)
def test_a_split_attention_gives_the_same_bits_under_three_schedules(
    metal: Metal, counts: tuple[int, int] | None
) -> None:
    q, k, v = arrays(Case(1, 4, 2, 2000, 64, "f32"))
    indices = mx.broadcast_to(mx.arange(1500), (1, 2, 1500)).astype(mx.int32)
    used = None if counts is None else mx.array([counts])
    results = []
    for metal.seed in (0, 1, 2):
        results.append(attend.attend_indices(q, k, v, indices, scale=0.1, counts=used))
    for out, lse in results[1:]:
        assert mx.array_equal(out, results[0][0])
        assert mx.array_equal(lse, results[0][1])
