"""Bytes that the Metal kernels move, counted by the harness, and what the comment at the top of each says of it.

On a Mac nothing is counted, so there is nothing to assert.
"""

from __future__ import annotations

import math
from importlib import import_module
from math import prod
from pkgutil import iter_modules
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import Case
from foreign_kernels import steel_attention
from metal_facts import check, facts, moved, names
from msl import Metal, Report
from saap_cases import SaapCase
from sample_cases import SampleCase

import mlx_sparse.kernels
from mlx_sparse import oracle
from mlx_sparse.common import stats
from mlx_sparse.common.csr import saap_index
from mlx_sparse.common.packed_rows import PackedRows
from mlx_sparse.kernels import attend, attend_rows, blocks, launch, saap, sample, select, sparq
from mlx_sparse.ops.key_codes import code_keys

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="only the harness counts bytes")

RANK, TOP_K, D, HKV = 32, 128, 128, 2  # as in SIZES of metal_facts
SPARQ = ["sparq_scores", "sparq_candidates"]


def decode(
    metal: Metal,
    S: int,
    G: int,
    *,
    top_k: int = TOP_K,
    rank: int = RANK,
    key_bits: int = 16,
    row_bits: int = 16,
    reallocate: bool,
) -> list[Report]:
    """The launches of one float16 decode step.

    Rows of fewer than 16 ``row_bits`` are packed; a ``rank`` of D scores by them, any other by a copy.
    """
    case = Case(1, HKV * G, HKV, S, D, "f16")
    q, *rows = (mx.array(array).astype(mx.float16) for array in case.inputs())
    keys_t: Any = mx.contiguous(rows[0].swapaxes(-1, -2)) if rank < D else None
    if key_bits < 16:
        keys_t = code_keys(rows[0], None, key_bits=key_bits)
        mx.eval(*keys_t)
    k, v = rows if row_bits == 16 else (PackedRows.of(array, bits=row_bits) for array in rows)
    metal.clear()
    sparq.sparq_attention(
        q,
        k,
        v,
        reallocate=reallocate,
        scale=D**-0.5,
        value_mean=mx.zeros((1, HKV, D)),
        rank=rank,
        key_bits=key_bits,
        top_k=top_k,
        local_window=top_k // 4,
        group_reduce="softmax",
        component_weight=mx.ones((1, HKV, D)) if reallocate else None,
        left_padding=None,
        keys_t=keys_t,
    )
    return list(metal.launches)


@pytest.mark.parametrize("G", [4, 1])
@pytest.mark.parametrize("S", [4096, 16_384])
def test_a_step_moves_the_bytes_of_the_paper_and_a_bounded_score_buffer(metal: Metal, S: int, G: int) -> None:
    launches = decode(metal, S, G, reallocate=G == 1)
    K = HKV * S * D * 2
    assert moved(launches, "dispatch", "keys_t") <= 1.02 * RANK / D * K
    assert moved(launches, "dispatch", "keys", "values") <= 1.05 * HKV * 2 * TOP_K * D * 2
    # The score buffer: one float32 logit per key and query head, written once and read at most twice.
    buffer = HKV * S * G * 4
    assert moved(launches, "dispatch", "logits", direction="write") <= 1.01 * buffer
    assert moved(launches, "dispatch", "logits", direction="read") <= 2 * buffer
    whole = moved(launches, "dispatch")
    formula = HKV * stats.sparq_elements(S, D, rank=RANK, top_k=TOP_K) * 2
    assert whole - moved(launches, "dispatch", "logits") <= 1.10 * formula
    assert moved(launches, "threadgroup") <= 1.25 * whole


@pytest.mark.parametrize(("G", "rank", "most"), [(4, 32, 4.4), (1, 32, 3.6), (4, 64, 7.0)])
@pytest.mark.parametrize("S", [4096, 16_384 + 40])
def test_a_step_over_four_bits_moves_a_third_of_the_bytes(metal: Metal, S: int, G: int, rank: int, most: float) -> None:
    launches = decode(metal, S, G, rank=rank, key_bits=4, reallocate=False)
    coded = HKV * rank * (S // 64) * 36  # 32 bytes of codes, lo and step
    assert moved(launches, "dispatch", "codes", "lo", "step", "centre") <= 1.03 * coded + 128 * HKV * rank * 4
    assert moved(launches, "dispatch", "keys", "values") <= 1.05 * HKV * (2 * TOP_K + S % 64) * D * 2
    buffer = HKV * S * G
    for direction in ("write", "read"):
        assert moved(launches, "dispatch", "logits", direction=direction) <= 1.01 * buffer
    whole = moved(launches, "dispatch")
    # lo and step of a tile are a quarter of a line each, which its neighbours read too.
    assert moved(launches, "threadgroup") <= 1.35 * whole
    if S > 16_000:
        assert whole / HKV <= most * 1e6 / 8


# A line of each of codes, scales and biases for each row that is attended.
ATTENDED_LINES = HKV * 2 * TOP_K * 3 * 128


@pytest.mark.parametrize(("rank", "row_bits", "row_bytes"), [(D, 4, 72), (RANK, 8, 136)], ids=["rows", "copy"])
def test_a_step_over_packed_rows_reads_them_packed(metal: Metal, rank: int, row_bits: int, row_bytes: int) -> None:
    S, G = 16_384, 4
    copied = {"key_bits": 4} if rank < D else {}
    scores, _, attended = launches = decode(metal, S, G, rank=rank, row_bits=row_bits, reallocate=False, **copied)
    assert len(launches) == 3
    read = HKV * (S * row_bytes if rank == D else rank * (S // 64) * 36)
    assert moved([scores], "dispatch", direction="read") <= 1.03 * read + 10_000
    assert rank < D or moved([scores], "threadgroup") <= 1.03 * moved([scores], "dispatch")
    rows = [name for name in attended.reads if name.startswith(("key_", "value_")) and not name.endswith("_shape")]
    assert len(rows) == 6
    assert 0.8 * HKV * 2 * TOP_K * row_bytes <= moved([attended], "dispatch", *rows) <= ATTENDED_LINES
    for direction in ("write", "read"):
        assert moved(launches, "dispatch", "logits", direction=direction) <= 1.01 * HKV * S * G


@pytest.mark.parametrize("G", [4, 8])
def test_each_listed_row_is_read_once_for_the_whole_group(metal: Metal, G: int) -> None:
    launches = decode(metal, 4096, G, reallocate=False)
    for level in ("lane", "threadgroup", "dispatch"):
        assert moved(launches, level, "keys", "values") == HKV * 2 * TOP_K * D * 2


def test_a_long_list_is_read_once_however_it_is_split(metal: Metal) -> None:
    N = 20_000
    case = Case(1, 8, HKV, N, D, "f16")
    q, k, v = (mx.array(array).astype(mx.float16) for array in case.inputs())
    indices = mx.broadcast_to(mx.arange(N), (1, HKV, N)).astype(mx.int32)
    attend.attend_indices(q, k, v, indices, scale=1.0)
    assert len(metal.launches) == 2
    assert metal.launches[0].grid[0] // metal.launches[0].threadgroup[0] > 16
    for level in ("lane", "threadgroup", "dispatch"):
        assert moved(metal.launches, level, "keys", "values") == HKV * 2 * N * D * 2


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("reallocate", [False, True], ids=["attend", "reallocate"])
@pytest.mark.parametrize(("S", "top_k"), [(1000, 128), (8192, 512), (8193, 1), (65_536, 512)])
def test_a_step_takes_three_launches_and_a_fourth_to_mix_in_the_mean_of_a_long_context(
    metal: Metal, S: int, top_k: int, G: int, reallocate: bool
) -> None:
    launches = decode(metal, S, G, top_k=top_k, key_bits=4 if G == 4 else 16, reallocate=reallocate)
    assert len(launches) == (4 if reallocate and S > 8192 else 3)


# prefill

PROMPT = SampleCase(1, 4, 2, 256, 640, 128, "f16", 64)


def prefill(case: SampleCase, share: float) -> int:
    """Attend to random lists with that share of the blocks; the number of listed pairs."""
    layout = case.layout
    row = np.arange(layout.first_block, layout.key_blocks)[:, None]
    mask = np.random.default_rng(0).random((case.B, case.Hq, layout.row_blocks, layout.key_blocks)) < share
    mask &= np.arange(layout.key_blocks) <= row
    q, k, v = (mx.array(array).astype(mx.float16) for array in case.inputs())
    lists = mx.array(oracle.block_lists(mask))
    blocks.attend_lists(q, k, v, lists, block_size=case.block_size, scale=case.scale)
    return int(mask.sum())


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("L", "S"), [(96, 96), (64, 160)])
def test_attending_everything_moves_what_mlx_own_kernel_moves(metal: Metal, L: int, S: int, D: int) -> None:
    case = SampleCase(1, 2, 1, L, S, D, "f16", 32)
    prefill(case, 1.0)
    ours, theirs = metal.last("attend_blocks").reads, steel_attention("half", L, S, D, True, 0).run().reads
    for name, other in (("queries", "Q"), ("keys", "K"), ("values", "V")):
        for level in ("lane", "threadgroup", "dispatch"):
            assert getattr(ours[name], level) == getattr(theirs[other], level), (name, level)


def test_what_is_not_listed_is_not_read(metal: Metal) -> None:
    for share in (0.2, 0.6):
        pairs = prefill(PROMPT, share)
        reads = metal.last("attend_blocks").reads
        # Each of a row block's tiles reads the block's keys once, up to its own last row.
        rows, _ = blocks.tile_of(PROMPT.D, 2)
        most = pairs * PROMPT.block_size // rows * PROMPT.block_size * PROMPT.D * 2
        for name in ("keys", "values"):
            assert 0.9 * most <= reads[name].lane <= most
            assert reads[name].threadgroup == reads[name].lane


def test_scores_read_each_key_once_for_the_sample_of_a_head(metal: Metal) -> None:
    q, k, _ = (mx.array(array).astype(mx.float16) for array in PROMPT.inputs())
    sample.sample_scores(q, k, **PROMPT.sampling)
    report = metal.last("sample_scores")
    assert report.reads["keys"].dispatch == k.nbytes
    assert report.reads["keys"].lane == report.reads["keys"].threadgroup == k.nbytes * PROMPT.Hq // PROMPT.Hkv
    # Of a row's scores two numbers per key block are kept.
    scores = PROMPT.Hq * PROMPT.block_size * PROMPT.S * 4
    assert report.writes["partials"].dispatch == scores * 2 // PROMPT.block_size


# The comment at the top of a kernel


MODULES = [import_module(f"mlx_sparse.kernels.{found.name}") for found in iter_modules(mlx_sparse.kernels.__path__)]
KERNELS = {kernel for module in MODULES for kernel in vars(module).values() if isinstance(kernel, launch.Kernel)}


@pytest.mark.parametrize("kernel", sorted(KERNELS, key=str), ids=lambda kernel: kernel.name)
def test_its_comment_names_the_inputs_and_outputs_of_the_launcher(kernel: launch.Kernel) -> None:
    comment = facts(kernel.name)
    assert names(comment["inputs"]) == kernel.inputs
    assert names(comment["outputs"]) == kernel.outputs
    assert {"grid", "threadgroup", "reads", "writes"} <= set(comment)


def test_sparq_kernels_do_what_their_comments_say(metal: Metal) -> None:
    S, G = 16_384, 4
    decode(metal, S, G, top_k=256, reallocate=True)
    common = {"S": S, "G": G, "Hq": HKV * G}
    tiles, threads, slots = select.tiles_of(S, 256)
    check(metal, "sparq_scores", tiles=S // 1024, WEIGHTED=1, **common)
    check(metal, "sparq_candidates", tiles=tiles, threads=threads, slots=slots, score_tiles=S // 1024, **common)
    N = tiles * slots
    tiles, threads, slots = select.tiles_of(N, 256)
    check(metal, "top_k_candidates", N=N, tiles=tiles, threads=threads, slots=slots)
    splits = attend.splits_of(256, HKV)
    check(metal, "attend_reallocate", N=256, splits=splits, HEADS=4, SIMDGROUPS=16, O=2, **common)


def test_coded_sparq_kernels_do_what_their_comments_say(metal: Metal) -> None:
    S, G = 16_384, 4
    decode(metal, S, G, key_bits=4, reallocate=False)
    score_tiles = S // 1024 + 1  # the last for the tail
    common = {"S": S, "G": G, "Hq": HKV * G}
    check(metal, "sparq_code_scores", tiles=score_tiles, WEIGHTED=0, BITS=4, KEYS=8, O=1, **common)
    tiles, threads, slots = select.tiles_of(S, TOP_K)
    sizes = {"tiles": tiles, "threads": threads, "slots": slots, "score_tiles": score_tiles}
    check(metal, "sparq_code_candidates", **sizes, **common)
    N = tiles * slots
    check(metal, "attend_candidates", N=N, HEADS=4, SIMDGROUPS=16, SLOTS=TOP_K, **common)


def test_kernels_of_packed_rows_do_what_their_comments_say(metal: Metal) -> None:
    S, G, N = 16_384 + 40, 4, 512
    form = {"ROW_BITS": 4, "ROW_GROUP": 64, "S": S, "G": G, "Hq": HKV * G}
    tiles = S // 1024 + 1
    decode(metal, S, G, rank=D, row_bits=4, reallocate=False)
    check(metal, "sparq_row_scores", tiles=tiles, KEYS=4, O=1, **form)
    assert [report.kernel for report in metal.launches][1:] == ["sparq_code_candidates", "attend_candidates_packed"]
    decode(metal, S, G, key_bits=4, row_bits=4, reallocate=False)
    check(metal, "sparq_code_scores_packed", tiles=tiles, WEIGHTED=0, BITS=4, KEYS=8, O=1, **form)
    q, *rows = (mx.array(array).astype(mx.float16) for array in Case(1, HKV * G, HKV, N, D, "f16").inputs())
    k, v = (PackedRows.of(array, bits=4) for array in rows)
    listed = mx.broadcast_to(mx.arange(N, dtype=mx.int32), (1, HKV, N))  # side by side: lines are read whole
    sizes = {"used": N, "N": N, "splits": 1, "HEADS": 4, "SIMDGROUPS": 16, "O": 2, **form}
    attend.attend_indices(q, k, v, listed, scale=1.0)
    check(metal, "attend_indices_packed", COUNTED=0, **sizes)
    bits = mx.ones((1, HKV, N), mx.uint32)
    best = attend.attend_candidates(1, HKV * G, HKV, D, mx.float16, N, 1.0, N, (4, 64))
    best(q, *k.parts, *v.parts, bits, listed)
    check(metal, "attend_candidates_packed", SLOTS=N, **sizes)
    mean = attend.Reallocation(mx.zeros((1, HKV, N, G)), mx.ones((1, HKV, G, 2)), mx.zeros((1, HKV, D)))
    attend.attend_indices(q, k, v, listed, scale=1.0, reallocation=mean)
    check(metal, "attend_reallocate_packed", **sizes)


def test_split_attention_does_what_its_comments_say(metal: Metal) -> None:
    G, N = 4, 2048
    splits = attend.splits_of(N, HKV)
    common = {"N": N, "splits": splits, "HEADS": 4, "SIMDGROUPS": 16, "G": G, "Hq": HKV * G}
    decode(metal, 8192, G, top_k=N, reallocate=False)
    check(metal, "attend_indices", O=4, used=N, COUNTED=0, **common)
    check(metal, "merge_parts", O=2, **common)
    decode(metal, 8192, G, top_k=N, reallocate=True)
    check(metal, "merge_reallocate", O=2, **common)


@pytest.mark.parametrize("S", [640, 2100])
def test_kernels_of_many_rows_do_what_their_comments_say(metal: Metal, S: int) -> None:
    G, L = 8, 4
    q, k, v = (mx.array(array).astype(mx.float16) for array in Case(1, HKV * G, HKV, S, D, "f16").inputs(L=L))
    splits = attend_rows.splits_of(S, HKV, G * L)
    rows, staged = attend_rows.shape_of(D, 2, G * L)
    sizes = {"S": S, "L": L, "ROWS": rows, "KEYS": staged, "shares": 1, "splits": splits, "O": 2 if splits == 1 else 4}
    attend_rows.attend_rows(q, k, v, scale=1.0)
    check(metal, "attend_rows", G=G, Hq=HKV * G, **sizes)
    listed = mx.broadcast_to(mx.arange(S, dtype=mx.int32), (1, HKV, S))
    for counts in (None, mx.array([[S - 100] * HKV])):
        attend.attend_indices(q.reshape(1, HKV * G * L, 1, D), k, v, listed, scale=1.0, counts=counts)
        used = S if counts is None else S - 100
        check(metal, "attend_rows_indices", G=G * L, N=S, used=used, COUNTED=counts is not None, **sizes)


def test_top_k_scores_does_what_its_comment_says(metal: Metal) -> None:
    S = 20_000
    scores = mx.array(np.random.default_rng(0).normal(size=(1, HKV, S)).astype(np.float32))
    select.top_k_select(scores, top_k=128, local_window=0, left_padding=None)
    tiles, threads, slots = select.tiles_of(S, 128)
    check(metal, "top_k_scores", S=S, tiles=tiles, threads=threads, slots=slots)
    assert prod((tiles, slots)) < S // 8


def test_prefill_kernels_do_what_their_comments_say(metal: Metal) -> None:
    case = PROMPT
    q, k, v = (mx.array(array).astype(mx.float16) for array in case.inputs())
    _, _, lists = sample.sample_attention(q, k, v, **case.parameters)
    layout = case.layout
    sizes = {"L": case.L, "S": case.S, "D": case.D, "Hq": case.Hq, "G": 2, "C": 1, "Nk": layout.key_blocks}
    sizes |= {"BLOCK": 64, "R": layout.row_blocks, "N": lists.shape[3], "heads": HKV, "rows": 64, "ROWS": 64}
    shape = sample.shape_of(64, case.D, 2)
    splits = metal.last("sample_scores").grid[1]
    sizes |= {"ceil": math.ceil, "tiles": 1, "splits": splits, **shape}
    check(metal, "sample_scores", **sizes)
    check(metal, "sample_sums", **sizes)
    rows, staged = blocks.tile_of(case.D, 2)
    check(metal, "attend_blocks", **(sizes | {"ROWS": rows, "KEYS": staged}))


@pytest.mark.parametrize("hidden", [512, None])
def test_saap_kernels_do_what_their_comments_say(metal: Metal, hidden: int | None) -> None:
    S, G, C, probes, recent = 30_000, 4, 64, 8, 500
    case = SaapCase(Case(1, HKV * G, HKV, S, D, "f16"), "random", C, probes, hidden, 1, recent, "f16")
    q, k, v = (mx.array(array).astype(mx.float16) for array in case.inputs())
    weights = {name: mx.array(array).astype(mx.float16) for name, array in case.network().items()}
    visited = saap.saap_route(q, probes=probes, **weights)
    width, threads = saap.shape_of(G, C, *([hidden] if hidden else []))
    sizes = {"G": G, "C": C, "H": hidden or 0, "HIDDEN": hidden is not None, "W": 2, "WIDTH": width}
    check(metal, "saap_route", **sizes, threads=threads, probes=probes)
    covered = S - recent
    offsets, key_ids = saap_index(mx.array(case.bucket_ids()[..., :covered]), buckets=C, sink_tokens=1)
    steps = {"length": S, "covered": covered, "sink_tokens": 1, "capacity": S // 2}
    indices, counts = saap.saap_indices(visited, offsets, key_ids, **steps)
    used = int(np.array(counts).mean())
    tiles = -(-S // 2 // saap.LIST_TILE)
    sizes = {"SLOTS": probes, "C": C, "capacity": S // 2, "tiles": tiles, "threads": saap.LIST_THREADS}
    check(metal, "saap_indices", **sizes, bucket_keys=used - recent - 1)
    attend.attend_indices(q, k, v, indices, counts=counts, scale=1.0)
    splits = attend.splits_of(S // 2, HKV)
    sizes = {"N": S // 2, "used": used, "splits": splits, "HEADS": 4, "SIMDGROUPS": 16, "COUNTED": 1, "O": 4}
    check(metal, "attend_indices", G=G, Hq=HKV * G, **sizes)
