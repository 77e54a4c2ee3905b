"""Test the bytes that each program of the Triton kernels moves, counted in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import Case
from mlx_sparse.cuda_ref import interpreted, unavailable
from require import absent
from sample_cases import SampleCase

from mlx_sparse.core import stats

if not interpreted():
    absent("triton-interpreter", "on a GPU nothing is counted")
if reason := unavailable():
    absent("triton", reason)

import torch
from mlx_sparse.cuda_ref.launchers import attend, configs, saap
from torch_arrays import DTYPES, to_torch
from triton_bytes import Launch, checked_launches, shuffled
from triton_prompts import tensors

from mlx_sparse import cuda_ref

RANK, TOP_K, D, HKV, ITEM = 32, 128, 128, 2, 2


# SparQ and dense decode steps


def decode(
    S: int, G: int, *, reallocate: bool, key_bits: int = 16, order: Callable[[int], Any] | None = None
) -> tuple[Any, list[Launch]]:
    """Run one float16 decode step. Return its output and launches."""
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    keys_t = k.transpose(2, 3).contiguous() if key_bits == 16 else cuda_ref.code_keys(k)
    more = {"key_bits": key_bits, "keys_t": keys_t, "value_mean": v.float().mean(dim=2).to(DTYPES["f16"])}
    with checked_launches(order) as launches:
        out = cuda_ref.sparq_attention(q, k, v, rank=RANK, top_k=TOP_K, reallocate=reallocate, **more)
    return out, launches


@pytest.mark.parametrize("G", [4, 1])
@pytest.mark.parametrize("S", [2048, 4099])
def test_sparq_step_reads_the_bytes_of_the_paper(S: int, G: int) -> None:
    _, launches = decode(S, G, reallocate=G == 1)
    assert [launch.kernel for launch in launches] == ["sparq_scores", "top_k_select", "attend"]
    scores, select, attend = (launch.traffic for launch in launches)
    item, logits = 2, HKV * G * (S + -S % 16) * 4
    readable = S + -S % 16 if launches[0].arguments["ALIGNED"] else S
    # Each component and each selected row of a KV head is read once for the whole query group.
    assert scores["keys_t"].loaded == scores["keys_t"].distinct == HKV * RANK * readable * item
    assert attend["keys"].loaded == attend["keys"].distinct == HKV * TOP_K * D * item
    assert attend["values"].loaded == attend["values"].distinct == HKV * TOP_K * D * item
    elements = HKV * stats.sparq_elements(S, D, rank=RANK, top_k=TOP_K)
    cache = scores["keys_t"].loaded + attend["keys"].loaded + attend["values"].loaded
    assert cache <= 1.01 * elements * item
    # The score buffer is written and read once; reallocation reads the scores of the selected keys again.
    assert scores["logits"].stored == scores["logits"].distinct == logits
    assert 0.99 * logits <= select["logits"].loaded <= logits
    if G == 1:
        assert attend["logits"].loaded == HKV * G * TOP_K * 4
    # All other traffic is small: partial results, candidates and arguments that every program reads.
    small = sum(
        traffic.distinct
        for launch in launches
        for name, traffic in launch.traffic.items()
        if name not in ("keys_t", "keys", "values", "logits")
    )
    assert small <= 0.25 * elements * item


@pytest.mark.parametrize(("S", "G"), [(4099, 4), (2048, 1)])
def test_int4_step_reads_code_bytes(S: int, G: int) -> None:
    _, launches = decode(S, G, reallocate=False, key_bits=4)
    assert [launch.kernel for launch in launches] == ["sparq_code_scores", "top_k_select", "attend"]
    scores, select, _ = (launch.traffic for launch in launches)
    groups, tail = divmod(S, 64)
    for name, size in {"codes": groups * 32, "lo": 2 * groups, "step": 2 * groups, "keys": 2 * tail}.items():
        assert scores[name].loaded == scores[name].distinct == HKV * RANK * size, name
    # (sparq.23), except that keys of the unfilled group are read unquantized
    coded = sum(scores[name].loaded for name in ("codes", "lo", "step"))
    formula = stats.sparq_elements(64 * groups, D, rank=RANK, top_k=0, key_bits=4) - 4 * D
    assert coded == 2 * HKV * formula
    logits = HKV * G * (S + -S % 16)
    assert scores["logits"].stored == scores["logits"].distinct == logits
    assert 0.99 * logits <= select["logits"].loaded <= logits
    # The maximum and the sum of each head and tile are written once, and read by the selecting programs.
    assert scores["statistics"].stored <= HKV * G * 8 * (S // 128 + 1)


def test_padded_int4_step_reads_no_padding() -> None:
    S, G, padding = 2050, 4, (0, 37, 1300, 2000)
    case = Case(len(padding), HKV * G, HKV, S, D, "f16", padding)
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    more = {"key_bits": 4, "left_padding": torch.tensor(padding)}
    with checked_launches() as launches:
        cuda_ref.sparq_attention(q, k, v, rank=RANK, top_k=TOP_K, reallocate=False, **more)
    scores, select, _ = (launch.traffic for launch in launches)
    groups = sum((S - first) // 64 for first in padding)
    tail = sum((S - first) % 64 for first in padding)
    for name, size in {"codes": groups * 8 * 4, "lo": 2 * groups, "step": 2 * groups, "keys": 2 * tail}.items():
        assert scores[name].loaded == scores[name].distinct == HKV * RANK * size, name
    lines = sum(S + -S % 16 - first // 16 * 16 for first in padding)  # whole lines of memory
    assert scores["logits"].stored == scores["logits"].distinct == select["logits"].loaded == HKV * G * lines


def test_programs_read_their_share() -> None:
    S = 4096
    _, (scores, _, _) = decode(S, 4, reallocate=False)
    share = scores.arguments["blocks"] * scores.arguments["BLOCK_S"]
    assert scores.grid == (-(-S // share), HKV, 1)
    by_program = scores.traffic["keys_t"].by_program
    for program in range(int(np.prod(scores.grid))):
        split = program // HKV
        assert by_program[program] == min(share, S - split * share) * RANK * 2


@pytest.mark.parametrize("G", [4, 8])
def test_dense_attention_reads_each_row_once_per_group(G: int) -> None:
    S = 1000
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    with checked_launches() as launches:
        cuda_ref.dense_attention(q, k, v, backend="triton")
    (attend,) = launches
    assert attend.grid[0] > 1
    read = attend.traffic["keys"].loaded + attend.traffic["values"].loaded
    assert read == HKV * (stats.dense_elements(S, D) - 2 * D) * 2
    parts = HKV * attend.grid[0] * G * (D + 3) * 4
    written = sum(t.stored for name, t in attend.traffic.items() if name.startswith("part"))
    assert written == parts


# SAAP

G, HIDDEN, C, PROBES = 4, 256, 64, 4
SINKS, RECENT = 1, 63


def network(hidden: int = HIDDEN) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    shapes = [(hidden or D, C), (C,), *([(D, hidden), (hidden,)] if hidden else [])]
    made: list[Any] = [0.1 * torch.randn(HKV, *shape, dtype=torch.float16) for shape in shapes]
    return made if hidden else [*made, None, None]


def spread(S: int, visited: torch.Tensor, shares: list[float]) -> torch.Tensor:
    """Assign keys to buckets. The first visited buckets get ``shares`` of the keys, and other buckets get the rest."""
    ids = torch.empty(1, HKV, S, dtype=torch.int32)
    for h in range(HKV):
        share = torch.full((C,), (1 - sum(shares)) / (C - len(shares)), dtype=torch.float64)
        share[visited[0, h, : len(shares)].long()] = torch.tensor(shares, dtype=torch.float64)
        ends = (share.cumsum(0) * S).round().long()
        order = torch.from_numpy(np.random.default_rng(h).permutation(S))
        ids[0, h] = torch.searchsorted(ends, order, right=True).clamp(max=C - 1)
    return ids


def step(S: int, shares: list[float], order: Any = None, hidden: int = HIDDEN) -> tuple[Any, list[Launch]]:
    """Run one float16 decode step over a prepared index. Return its output and launches."""
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, k, v = (to_torch(array, "f16") for array in case.inputs())
    before = to_torch(case.inputs(seed=1)[0], "f16")
    weights = network(hidden)
    visited = saap.saap_route(before, *weights, PROBES)
    ids = spread(S, visited, shares)
    covered = S - RECENT
    offsets, key_ids = saap.saap_index(ids[..., :covered], buckets=C, sink_tokens=SINKS)
    most = int(offsets.diff(dim=2).topk(PROBES, dim=2).values.sum(dim=2).max())
    capacity = SINKS + RECENT + 256 + most  # room for more tokens
    with checked_launches(order) as launches:
        chosen = saap.saap_route(before, *weights, PROBES)
        given = q, k, v, chosen, offsets, key_ids, covered, SINKS, capacity
        out = saap.saap_decode(*given, D**-0.5, None)
    return out, launches


EQUAL = [1 / C] * PROBES


def test_saap_step_reads_network_list_and_rows() -> None:
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
    # (saap.14), which counts a list entry as one element and ignores the construction of the list
    elements = stats.saap_elements(D, round(keys / HKV), network=D * HIDDEN + HIDDEN * C)
    assert parts <= 1.15 * HKV * elements * ITEM


def test_sequences_share_the_weights() -> None:
    weights = network()
    for B, times in ((1, 1), (8, 1), (9, 2)):
        queries = torch.randn(B, HKV * G, 1, D, dtype=torch.float16)
        with checked_launches() as launches:
            saap.saap_route(queries, *weights, PROBES)
        for launch in launches:
            weight = launch.traffic["weight"]
            assert weight.loaded == times * weight.distinct, f"{B} sequences"


def longest(launch: Launch) -> int:
    """Return the bytes of keys that the busiest program reads."""
    return max(launch.traffic["keys"].by_program.values())


def test_large_buckets_are_split_between_programs() -> None:
    """Test a bucket with half of the keys, for which one program per bucket would be slow."""
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
    # The list is split as well: a program reads one number for each slot that it fills.
    assert max(half[2].traffic["key_ids"].by_program.values()) <= 4 * saap.SLOTS


def test_long_rows_get_more_programs() -> None:
    q, keys = torch.randn(1, 8, 1, D), torch.randn(1, 2, 1000, D)
    indices = torch.arange(1000, dtype=torch.int32).expand(1, 2, 1000).contiguous()
    with checked_launches() as launches:
        attend.attend_indices(q, keys, keys.clone(), indices, 0.1, torch.tensor([[1000, 30]], dtype=torch.int32))
    (launch,) = launches
    reading = [size for size in launch.traffic["values"].by_program.values() if size]
    programs = 2 * configs.processors(torch.device("cpu"))
    assert launch.grid == (programs, 1, 1)
    assert programs - 2 <= len(reading) <= programs
    block = launch.arguments["BLOCK_N"]
    assert max(reading) <= (-(-1030 // (programs - 2)) + block) * D * 4


def test_empty_slots_are_not_read() -> None:
    q, keys = torch.randn(1, 8, 1, D), torch.randn(1, 2, 100, D)
    indices = torch.full((1, 2, 5000), -1, dtype=torch.int32)
    indices[..., :70] = torch.arange(70)
    with checked_launches() as launches:
        attend.attend_indices(q, keys, keys.clone(), indices, 0.1, torch.tensor([[70, 70]], dtype=torch.int32))
    traffic = launches[0].traffic
    assert traffic["indices"].loaded == 2 * 70 * 4
    assert len(traffic["keys"].by_program) >= 4


# SampleAttention

PROMPT = SampleCase(1, 4, 2, 300, 600, 64, "f16", 64)


def launches_of(function: Any, *given: Any, **settings: Any) -> tuple[Any, list[Launch]]:
    with checked_launches(settings.pop("order", None)) as launches:
        found = function(*given, **settings)
    return found, launches


def test_attention_reads_only_listed_blocks() -> None:
    layout = PROMPT.layout
    lists = np.full((1, 4, layout.row_blocks, 6), -1, np.int32)
    for h in range(4):
        for index in range(layout.row_blocks):
            row_block = layout.first_block + index
            chosen = sorted({0, row_block, (h * 3 + index) % (row_block + 1)})
            lists[0, h, index, : len(chosen)] = chosen
    _, (launch,) = launches_of(
        cuda_ref.attend_blocks, *tensors(PROMPT), torch.tensor(lists), block_size=PROMPT.block_size, scale=PROMPT.scale
    )
    filled = lists[lists >= 0]
    keys = np.minimum((filled + 1) * PROMPT.block_size, PROMPT.S) - filled * PROMPT.block_size
    traffic = launch.traffic
    assert traffic["keys"].loaded == traffic["values"].loaded == keys.sum() * PROMPT.D * ITEM
    assert (
        traffic["queries"].loaded == traffic["queries"].distinct == traffic["out"].stored == 4 * 300 * PROMPT.D * ITEM
    )
    assert traffic["lse"].stored == 4 * 300 * 4
    assert traffic["blocks"].loaded == lists.size * 4 + filled.size * 4  # the first read finds the end of each list


def test_last_row_blocks_start_first() -> None:
    _, (launch,) = launches_of(
        torch.ops.mlx_sparse.attend_blocks, *tensors(PROMPT), None, PROMPT.block_size, PROMPT.scale
    )
    read = [launch.traffic["keys"].by_program[program] for program in range(launch.grid[0])]
    assert read == sorted(read, reverse=True)
    assert len(set(read)) == PROMPT.layout.row_blocks


def test_sampling_reads_each_key_once_per_head() -> None:
    _, (parts, sums) = launches_of(cuda_ref.sample_scores, *tensors(PROMPT)[:2], **PROMPT.sampling)
    assert (parts.kernel, sums.kernel) == ("sample_scores", "sample_sums")
    key_blocks = PROMPT.layout.key_blocks
    assert parts.traffic["keys"].loaded == PROMPT.Hq * PROMPT.S * PROMPT.D * ITEM
    assert parts.traffic["keys"].distinct == PROMPT.Hkv * PROMPT.S * PROMPT.D * ITEM
    assert parts.traffic["queries"].loaded == PROMPT.Hq * PROMPT.block_size * PROMPT.D * ITEM * parts.grid[1]
    written = PROMPT.Hq * key_blocks * 2 * PROMPT.block_size * 4  # 8 bytes per sampled query and key block
    assert parts.traffic["parts"].stored == parts.traffic["parts"].distinct == written
    assert 1.8 * written <= sums.traffic["parts"].loaded <= 2 * written
    scores = PROMPT.Hq * PROMPT.block_size * PROMPT.S * 4
    assert written <= scores * 2 / PROMPT.block_size * 1.1


def test_lists_are_built_from_one_byte_per_flag() -> None:
    _, launches = launches_of(cuda_ref.sample_select, *tensors(PROMPT)[:2], **PROMPT.parameters)
    merge = launches[-1].traffic
    causal = PROMPT.Hq * PROMPT.layout.causal_pairs
    assert merge["column_kept"].loaded == causal
    assert causal <= merge["slash_kept"].loaded <= 2 * causal
    assert merge["blocks"].stored == merge["blocks"].distinct
    assert merge["blocks"].stored == PROMPT.Hq * PROMPT.layout.row_blocks * PROMPT.layout.key_blocks * 4


def prefill(order: Any) -> tuple[Any, list[Launch]]:
    return launches_of(cuda_ref.sample_attention, *tensors(PROMPT), **PROMPT.parameters, order=order)


ORDERS = {
    "sparq": lambda order: decode(4099, 4, reallocate=True, order=order),
    "saap": lambda order: step(700, [0.2, *EQUAL[1:]], order),
    "saap-linear": lambda order: step(700, [0.2, *EQUAL[1:]], order, hidden=0),
    "sample": prefill,
}


@pytest.mark.parametrize("method", ORDERS)
def test_results_do_not_depend_on_program_order(method: str) -> None:
    given, _ = ORDERS[method](None)
    for order in (shuffled, lambda programs: np.arange(programs)[::-1]):
        other, _ = ORDERS[method](order)
        pairs = zip(given, other, strict=True) if isinstance(given, tuple) else [(given, other)]
        assert all(torch.equal(*pair) for pair in pairs)
