"""Compare the SampleAttention oracle with a naive implementation and with known facts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
from naive import EPS, Array, dot, softmax
from sample_cases import SAMPLE_CASES, SampleCase, attended, selection

from mlx_sparse import oracle
from mlx_sparse.core.blocks.layout import Layout

Row = list[float]
by_case = pytest.mark.parametrize("case", SAMPLE_CASES, ids=str)


def naive_blocks(case: SampleCase, q: list[Row], k: list[Row]) -> list[set[int]]:
    """Return the selected key blocks of each row block for one head, as the paper describes the method."""
    b, L, S = case.block_size, case.L, case.S
    rows: dict[int, list[int]] = {}  # row block -> query rows
    for i in range(L):
        rows.setdefault((S - L + i) // b, []).append(i)
    touched = sorted(rows)
    R = len(touched)
    C = min(case.chunks, R)
    result: list[set[int]] = []
    for c in range(C):
        region = touched[c * R // C : (c + 1) * R // C]
        queries = [i for block in region for i in rows[block]]
        sample = queries[-b:]
        column, slash = [0.0] * (S // b + 1), [0.0] * (S // b + 1)
        for i in sample:
            p = S - L + i
            for j, weight in enumerate(softmax([case.scale * dot(q[i], k[j]) for j in range(p + 1)])):
                column[j // b] += weight
                slash[(p - j) // b] += weight
        columns, slashes = naive_keep(column, case.alpha_column), naive_keep(slash, case.alpha_slash)
        dense = {(S - L + i) // b for i in sample}
        for r in region:
            kept = {m for m in range(r + 1) if m in columns or r - m in slashes or r - m - 1 in slashes}
            result.append(set(range(r + 1)) if r in dense else kept | {0, r})
    return result


def naive_keep(scores: Row, alpha: float) -> set[int]:
    kept: set[int] = set()
    while math.fsum(scores[m] for m in kept) / math.fsum(scores) < alpha - 1e-6:
        kept.add(max((m for m in range(len(scores)) if m not in kept), key=lambda m: (scores[m], -m)))
    return kept


@pytest.mark.parametrize("case", [case for case in SAMPLE_CASES if case.L * case.S <= 250_000], ids=str)
def test_the_blocks_equal_the_naive_implementation(case: SampleCase) -> None:
    q, k, _ = case.inputs()
    blocks = selection(case).blocks
    for b, h in {(0, 0), (case.B - 1, case.Hq - 1)}:
        expected = naive_blocks(
            case, q[b, h].astype(float).tolist(), k[b, h * case.Hkv // case.Hq].astype(float).tolist()
        )
        assert [set(row[row >= 0].tolist()) for row in blocks[b, h]] == expected


@by_case
def test_attention_over_blocks_is_the_softmax_over_their_keys(case: SampleCase) -> None:
    q, k, v = case.inputs()
    blocks = selection(case).blocks
    out, lse = oracle.attend_blocks(q, k, v, blocks, block_size=case.block_size)
    mask = attended(blocks, case)
    rng = np.random.default_rng(0)
    for _ in range(20):
        b, h, i = (int(rng.integers(n)) for n in (case.B, case.Hq, case.L))
        group = case.Hq // case.Hkv
        keys = np.flatnonzero(mask[b, h // group, h % group, i])
        K, V = (x[b, h // group, keys].astype(float) for x in (k, v))
        logits = [case.scale * dot(q[b, h, i].astype(float).tolist(), row) for row in K.tolist()]
        np.testing.assert_allclose(out[b, h, i], softmax(logits) @ V, rtol=0, atol=1e4 * EPS)
        assert lse[b, h, i] == pytest.approx(math.log(math.fsum(map(math.exp, logits))), abs=1e4 * EPS)


@by_case
def test_the_kept_columns_and_bins_hold_the_share_alpha(case: SampleCase) -> None:
    """Test the share alpha, also for sampled rows that do not attend to every block."""
    q, k, v = case.inputs()
    chosen, layout = selection(case), case.layout
    nothing = np.zeros_like(chosen.column_kept)
    dense_lse = oracle.attend.dense_lse(q, k, scale=case.scale, left_padding=None)
    for kept, alpha in (
        ((chosen.column_kept, nothing), case.alpha_column),
        ((nothing, chosen.slash_kept), case.alpha_slash),
    ):
        blocks = oracle.block_lists(oracle.merge_kept(*kept, layout))
        _, lse = oracle.attend_blocks(q, k, v, blocks, block_size=case.block_size)
        for start, stop in (region.sample for region in layout.regions):
            mass = np.exp(lse - dense_lse)[..., start:stop].mean(axis=-1)
            assert (mass >= alpha - 1e-6).all()


@by_case
def test_recall_is_the_dense_weight_of_the_attended_keys(case: SampleCase) -> None:
    q, k, v = case.inputs()
    _, stats = oracle.sample_attention(q, k, v, **case.parameters, return_stats="recall")
    if case.layout.all_sampled:
        assert (stats.recall == 1).all()
        return
    exact = oracle.attend.logits(q.astype(float), k.astype(float), case.scale)
    position = np.arange(case.S - case.L, case.S)[:, None]
    weights, _ = oracle.attend.softmax_lse(exact, np.broadcast_to(np.arange(case.S) <= position, exact.shape))
    explicit = np.where(attended(selection(case).blocks, case), weights, 0).sum(axis=-1)
    np.testing.assert_allclose(stats.recall, explicit.reshape(stats.recall.shape), rtol=1e-9)


@pytest.mark.parametrize(
    ("scores", "alpha", "kept"),
    [
        # Select the fewest scores whose share reaches alpha. FlexPrefill and XAttention use other conventions.
        ([0.5, 0.3, 0.15, 0.05], 0.8, [0, 1]),
        ([0.05, 0.15, 0.3, 0.5], 0.8, [2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.80001, [0, 1, 2]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),
        ([1.0, 0.0, 0.0, 0.0], 0.99, [0]),
        ([1.0, 0.0, 0.0, 0.0], 1e-9, [0]),
        ([4.0, 2.0, 1.0, 1.0], 1.0, [0, 1, 2, 3]),
    ],
)
def test_the_fewest_largest_scores_that_reach_alpha_are_kept(scores: Row, alpha: float, kept: list[int]) -> None:
    assert np.flatnonzero(oracle.select_share(np.array(scores), alpha)).tolist() == kept


@pytest.mark.parametrize("parameter", ["alpha_column", "alpha_slash"])
@by_case
def test_an_alpha_of_one_is_dense(case: SampleCase, parameter: str) -> None:
    q, k, v = case.inputs()
    out = reference.sample_attention(q, k, v, **{**case.parameters, parameter: 1.0})
    np.testing.assert_array_equal(out, reference.dense_attention(q, k, v))


def test_chunked_prefill_equals_one_call_with_as_many_regions() -> None:
    case = SampleCase(1, 4, 2, 256, 320, 64, "f32", 32, chunks=4)
    q, k, v = case.inputs()
    at_once = reference.sample_attention(q, k, v, **case.parameters)
    for start in range(0, case.L, 64):
        stop = start + 64
        seen = case.S - case.L + stop
        step = reference.sample_attention(
            q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], **{**case.parameters, "chunks": 1}
        )
        np.testing.assert_allclose(step, at_once[:, :, start:stop], rtol=0, atol=1e3 * EPS)


def test_query_heads_that_share_keys_select_independently() -> None:
    case = SampleCase(1, 4, 1, 200, 400, 64, "f32", 32)
    q, k, _ = case.inputs()
    together = oracle.sample_selection(q, k, **case.parameters).blocks
    for h in range(case.Hq):
        alone = oracle.sample_selection(q[:, h : h + 1], k, **case.parameters).blocks[0, 0]
        assert [r[r >= 0].tolist() for r in together[0, h]] == [r[r >= 0].tolist() for r in alone]


@pytest.mark.parametrize("L", [1, 31, 32, 33, 64, 100, 129, 200])
@pytest.mark.parametrize("prefix", [0, 1, 31, 32, 40, 96])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_regions_cut_the_queries_into_whole_row_blocks(L: int, prefix: int, chunks: int) -> None:
    layout = Layout(L, prefix + L, chunks, 32)
    blocks = [block for region in layout.regions for block in range(region.first, region.stop)]
    assert blocks == sorted({(prefix + i) // 32 for i in range(L)})
    assert len(layout.regions) == min(chunks, len(blocks))
    assert [c for c, region in enumerate(layout.regions) for _ in range(region.first, region.stop)] == list(
        layout.region_of
    )
    assert layout.causal_pairs == sum(block + 1 for block in blocks)
    rows = set()
    for region in layout.regions:
        own = [i for i in range(L) if region.first <= (prefix + i) // 32 < region.stop]
        assert list(range(*region.sample)) == own[-32:]
        rows |= set(own[-32:])
    assert layout.sampled_blocks == {(prefix + i) // 32 for i in rows}
    assert layout.all_sampled == (layout.sampled_blocks == set(blocks))
    assert layout.sampled_share == len(rows) / L


@by_case
def test_elements_moved_are_counted_in_one_unit_at_any_density(case: SampleCase) -> None:
    """Count elements by (sample.10) per query head, with the keys of the sample if there is a sample."""
    layout, D = case.layout, case.D
    dense = 2 * case.L * D + 2 * case.block_size * D * layout.causal_pairs
    sampling = 0 if layout.all_sampled else len(layout.regions) * case.S * D
    qkv = tuple(np.zeros_like(array) for array in case.inputs())  # uniform attention selects almost all blocks
    for alphas, extra in (((1.0, 1.0), 0), ((1.0, 0.5), 0), ((1 - 1e-9, 1 - 1e-9), sampling)):
        options = {**case.parameters, "alpha_column": alphas[0], "alpha_slash": alphas[1]}
        _, stats = oracle.sample_attention(*qkv, **options, return_stats=True)
        assert (stats.elements, stats.dense_elements, stats.density) == (dense + extra, dense, 1)


def mask_of(call: Any, L: int, S: int, **options: Any) -> Array:
    """Return the blocks that a baseline attends to, found with one-hot values and equal keys."""
    b = options["block_size"]
    n = -(-S // b)
    values = np.eye(n)[np.arange(S) // b][None, None]
    out: Array = call(np.zeros((1, 1, L, n)), np.zeros((1, 1, S, n)), values, **options)[0, 0]
    return np.stack([(row > 0).astype(float) for row in out])


def test_streaming_attends_the_first_blocks_and_the_window() -> None:
    mask = mask_of(oracle.streaming_prefill_attention, 300, 320, sink_tokens=40, window=0.2, block_size=32)
    for i, row in enumerate(mask):
        r = (20 + i) // 32
        assert set(np.flatnonzero(row)) == {m for m in range(r + 1) if m < 2 or r - m < 2}


def test_bigbird_adds_random_blocks_that_are_the_same_in_every_run() -> None:
    options = {"window": 0.1, "global_share": 0.1, "block_size": 32}
    plain, more = (mask_of(oracle.bigbird_attention, 640, 640, random_blocks=n, **options) for n in (0, 3))
    assert 0 < (more - plain)[::32].sum() <= 3 * 20
    for i in range(640):
        r = i // 32
        near = {m for m in range(r + 1) if m < 2 or r - m < 2}
        drawn = {((8191 * r + t) * 2654435761 % 2**32 >> 8) % (r + 1) for t in range(3)}
        assert [set(np.flatnonzero(mask[i])) for mask in (plain, more)] == [near, near | drawn]


def test_minference_keeps_as_many_lines_as_its_budgets_allow() -> None:
    case = SampleCase(1, 2, 1, 300, 300, 64, "f32", 32)
    q, k, _ = case.inputs()
    column, slash = oracle.sample_scores(q, k, chunks=1, block_size=32, scale=q.shape[3] ** -0.5, rows=64)
    blocks = oracle.prefill.minference_select(
        q, k, vertical_tokens=64, slash_tokens=33, block_size=32, scale=q.shape[3] ** -0.5
    )
    for h in range(2):
        columns = set(np.argsort(-column[0, h, 0])[:2].tolist())
        slashes = set(np.argsort(-slash[0, h, 0])[:2].tolist())
        for r, row in enumerate(blocks[0, h]):
            kept = {m for m in range(r + 1) if m in columns or r - m in slashes or r - m - 1 in slashes}
            assert set(row[row >= 0].tolist()) == kept | {0, r}


def test_baselines_report_their_sample() -> None:
    qkv = SampleCase(1, 1, 1, 160, 200, 64, "f32").inputs()
    sampled = {"minference": 64 / 160, "bigbird": 0, "streaming_prefill": 0}
    for method, share in sampled.items():
        _, stats = getattr(oracle, f"{method}_attention")(*qkv, block_size=32, return_stats=True)
        assert stats.sampled == share
        dense = 2 * 160 * 64 + 2 * 32 * 64 * Layout(160, 200, 1, 32).causal_pairs
        kept = (dense - 2 * 160 * 64) * stats.density + 2 * 160 * 64
        assert (stats.elements, stats.dense_elements) == (round(kept) + (200 * 64 if share else 0), dense)
