"""Bytes that SAAP's Triton kernels move, counted in the interpreter, and who moves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case
from mlx_sparse.cuda_ref.availability import interpreted, unavailable
from require import absent

if not interpreted():
    absent("triton-interpreter", "on a GPU nothing is counted")
if reason := unavailable():
    absent("triton", reason)

import torch
from mlx_sparse.cuda_ref.launchers import configs, saap, torch_ops
from torch_arrays import to_torch
from triton_bytes import Launch, shuffled, watched

from mlx_sparse.common import stats

HKV, G, D, HIDDEN, C, PROBES = 2, 4, 128, 256, 64, 4
SINKS, RECENT = 1, 63
ITEM = 2


def network(hidden: int = HIDDEN) -> saap.Network:
    torch.manual_seed(1)
    shapes = [(hidden or D, C), (C,), *([(D, hidden), (hidden,)] if hidden else [])]
    return saap.Network(*(0.1 * torch.randn(HKV, *shape, dtype=torch.float16) for shape in shapes))


def spread(S: int, visited: torch.Tensor, shares: list[float]) -> torch.Tensor:
    """Keys by turns in buckets, of which the first visited ones hold ``shares`` and the others the rest."""
    ids = torch.empty(1, HKV, S, dtype=torch.int32)
    for h in range(HKV):
        share = torch.full((C,), (1 - sum(shares)) / (C - len(shares)), dtype=torch.float64)
        share[visited[0, h, : len(shares)].long()] = torch.tensor(shares, dtype=torch.float64)
        ends = (share.cumsum(0) * S).round().long()
        order = torch.from_numpy(np.random.default_rng(h).permutation(S))
        ids[0, h] = torch.searchsorted(ends, order, right=True).clamp(max=C - 1)
    return ids


def step(S: int, shares: list[float], order: Any = None, hidden: int = HIDDEN) -> tuple[Any, list[Launch]]:
    """One float16 decode step over a prepared index."""
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    before = to_torch(case.inputs(seed=1)[0], "f16")
    weights = network(hidden)
    visited = saap.saap_route(before, weights, probes=PROBES)
    ids = spread(S, visited, shares)
    window = {"sink_tokens": SINKS, "recent_tokens": RECENT}
    index = saap.Index.of(ids, buckets=C, probes=PROBES, **window)
    with watched(order) as launches:
        chosen = torch_ops.saap_route(before, *weights, PROBES)
        given = q, k, v, chosen, index.offsets, index.key_ids, index.covered, SINKS, index.capacity
        out = torch_ops.saap_decode(*given, D**-0.5, None)
    return out, launches


EQUAL = [1 / C] * PROBES


def test_a_step_reads_the_network_the_list_and_its_rows_and_nothing_else_that_is_large() -> None:
    S = 3000
    (_, _, counts), launches = step(S, EQUAL)
    hidden, route, expand, attend = (launch.traffic for launch in launches)
    weights = HKV * (D * HIDDEN + HIDDEN * C) * ITEM
    assert hidden["weight"].loaded + route["weight"].loaded == weights
    assert hidden["weight"].loaded == hidden["weight"].distinct
    assert route["weight"].loaded == route["weight"].distinct
    assert route["logits"].stored == route["logits"].loaded == HKV * G * C * 4
    keys, exact = int(counts.sum()), HKV * (SINKS + RECENT)
    assert expand["key_ids"].loaded == expand["key_ids"].distinct == 4 * (keys - exact)
    slots = launches[2].arguments["capacity"]
    assert expand["indices"].stored == expand["indices"].distinct == HKV * slots * 4
    assert attend["indices"].loaded == 4 * keys
    for name in ("keys", "values"):
        assert attend[name].loaded == attend[name].distinct == keys * D * ITEM
    large = {"weight", "key_ids", "indices", "keys", "values"}
    parts = weights + 4 * (keys - exact) + 4 * HKV * slots + keys * (2 * D * ITEM + 4)
    moved = sum(
        traffic.distinct if name not in large else traffic.loaded + traffic.stored
        for launch in launches
        for name, traffic in launch.traffic.items()
    )
    assert parts <= moved <= 1.15 * parts


def test_the_kernels_move_what_the_formula_counts() -> None:
    S = 3000
    (_, _, counts), launches = step(S, EQUAL)
    hidden, route, expand, attend = (launch.traffic for launch in launches)
    moved = sum(layer["weight"].loaded for layer in (hidden, route))
    moved += expand["key_ids"].loaded + expand["indices"].stored
    moved += sum(attend[name].loaded for name in ("keys", "values", "indices"))
    # (saap.14) counts an entry of a list as one element and its making not at all.
    elements = stats.saap_elements(D, round(float(counts.float().mean())), network=D * HIDDEN + HIDDEN * C)
    assert moved <= 1.15 * HKV * elements * ITEM


def test_sequences_share_the_weights() -> None:
    weights = network()
    for B, times in ((1, 1), (8, 1), (9, 2)):
        queries = torch.randn(B, HKV * G, 1, D, dtype=torch.float16)
        with watched() as launches:
            torch_ops.saap_route(queries, *weights, PROBES)
        for launch in launches:
            weight = launch.traffic["weight"]
            assert weight.loaded == times * weight.distinct, f"{B} sequences"


def longest(launch: Launch) -> int:
    """Bytes of keys that the busiest program reads."""
    return max(launch.traffic["keys"].by_program.values())


def test_a_bucket_of_half_the_keys_is_shared_out() -> None:
    """A program for each bucket would take as long as the largest: here half of the keys."""
    S = 4000
    (_, _, few), equal = step(S, EQUAL)
    (_, _, many), half = step(S, [0.5, *EQUAL[1:]])
    assert int(many.max()) > 5 * int(few.max())
    programs = equal[3].grid[0]
    assert half[3].grid[0] >= programs
    for counts, launches in ((few, equal), (many, half)):
        spare = launches[3].grid[0] - HKV
        block = launches[3].arguments["BLOCK_N"]
        share = -(-int(counts.sum()) // spare)
        assert longest(launches[3]) <= (share + block) * D * ITEM
    # The list too: whoever fills slots of the large bucket reads one number for each.
    assert max(half[2].traffic["key_ids"].by_program.values()) <= 4 * saap.SLOTS


def test_a_long_row_gets_the_programs_of_short_ones() -> None:
    q, keys = torch.randn(1, 8, 1, D), torch.randn(1, 2, 1000, D)
    indices = torch.arange(1000, dtype=torch.int32).expand(1, 2, 1000).contiguous()
    with watched() as launches:
        torch_ops.attend_indices(q, keys, keys.clone(), indices, 0.1, torch.tensor([[1000, 30]], dtype=torch.int32))
    (launch,) = launches
    reading = [size for size in launch.traffic["values"].by_program.values() if size]
    programs = 2 * configs.processors(torch.device("cpu"))
    assert launch.grid == (programs, 1, 1)
    assert programs - 2 <= len(reading) <= programs
    block = launch.arguments["BLOCK_N"]
    assert max(reading) <= (-(-1030 // (programs - 2)) + block) * D * 4


def test_empty_slots_cost_no_time_of_attention() -> None:
    q, keys = torch.randn(1, 8, 1, D), torch.randn(1, 2, 100, D)
    indices = torch.full((1, 2, 5000), -1, dtype=torch.int32)
    indices[..., :70] = torch.arange(70)
    with watched() as launches:
        torch_ops.attend_indices(q, keys, keys.clone(), indices, 0.1, torch.tensor([[70, 70]], dtype=torch.int32))
    traffic = launches[0].traffic
    assert traffic["indices"].loaded == 2 * 70 * 4
    assert len(traffic["keys"].by_program) >= 4


@pytest.mark.parametrize("hidden", [HIDDEN, 0])
def test_the_order_of_programs_changes_no_bit(hidden: int) -> None:
    given, _ = step(700, [0.2, *EQUAL[1:]], hidden=hidden)
    for order in (shuffled, lambda programs: np.arange(programs)[::-1]):
        other, _ = step(700, [0.2, *EQUAL[1:]], order, hidden)
        assert all(map(torch.equal, given, other))
