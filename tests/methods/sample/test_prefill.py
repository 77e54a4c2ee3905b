"""Compare every backend of SampleAttention with the float64 oracle over all cases."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
from adapters import backends_with
from cases import Array, covering
from sample_cases import (
    SAMPLE_CASES,
    SampleCase,
    assert_attends,
    assert_retains,
    assert_same_blocks,
    assert_same_scores,
    logit_error,
    selection,
)

from mlx_sparse import oracle
from mlx_sparse.core import registry
from mlx_sparse.core.blocks.layout import MINFERENCE_ROWS

MAX_KEYS = 520  # limit for the ONNX reference evaluator, which is slow
MAX_SCORES = 500_000  # limit for Triton's interpreter, which is slow
ATTENDING = backends_with("attend_blocks")
SMALL = SampleCase(2, 4, 2, 150, 230, 64, "f32", 32, chunks=2)
by_attending = pytest.mark.parametrize("backend", ATTENDING, indirect=True)


def on(names: Iterable[str], cases: list[SampleCase], few: tuple[int, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize with each case on each backend, but with only the cases ``few`` (if given) on slow backends."""
    found = [
        pytest.param(name, case, id=f"{name}-{case}")
        for name in names
        for n, case in enumerate(cases)
        if not few or name == "ops" or n in few
        if name != "onnx-reference" or case.S <= MAX_KEYS
        if name != "triton" or case.B * case.Hq * case.L * case.S <= MAX_SCORES
    ]
    return pytest.mark.parametrize(("backend", "case"), found, indirect=["backend"])


@on(backends_with("sample"), SAMPLE_CASES, few=(0, 3, 6, 8, 11, 13, 15))
def test_a_backend_keeps_and_attends_the_blocks_of_the_oracle(backend: Any, case: SampleCase) -> None:
    choice, out, lse = backend.sample(case)
    assert_same_blocks(choice, case, selection(case))
    assert_attends(out, lse, case, choice)


@on([name for name in registry.backends_of("sample_scores") if name != "oracle"], SAMPLE_CASES, few=(3, 8, 11))
def test_scores_equal_the_oracle(backend: Any, case: SampleCase) -> None:
    q, k, _ = case.inputs()
    for rows in (None, MINFERENCE_ROWS) if backend.name != "triton" else (None,):
        wanted = oracle.sample_scores(q, k, **case.sampling, rows=rows)
        sampled = {} if rows is None else {"rows": rows}
        for got, scores in zip(backend.sample_scores(case, **sampled), wanted, strict=True):
            assert_same_scores(got, scores, logit_error(q, k, case.scale))


def random_lists(case: SampleCase, width: int) -> Array:
    """Return unsorted lists with duplicates, empty slots, blocks above the diagonal and invalid numbers."""
    rng = np.random.default_rng(0)
    shape = (case.B, case.Hq, case.layout.row_blocks, width)
    lists = rng.integers(-3, case.layout.key_blocks + 4, size=shape).astype(np.int32)
    lists[rng.random(shape) < 0.1] = np.iinfo(np.int32).max
    lists[rng.random(shape) < 0.05] = np.iinfo(np.int32).min
    lists[:, 0, 0] = -1
    return lists


CHUNKS = [(1, 1), (1, 300), (70, 70), (31, 63), (33, 65), (130, 257), (257, 384), (100, 511)]
LISTS = [(32, 40), (64, 0), (128, 3), (32, 1)]  # block sizes and widths of lists
ANY = [
    pytest.param(name, sizes, *listed, id=f"{name}-{sizes}-{listed}")
    for name in ATTENDING
    for sizes, listed in (product(CHUNKS, LISTS) if name == "ops" else covering(CHUNKS, LISTS))
]


@pytest.mark.parametrize(("backend", "sizes", "block_size", "width"), ANY, indirect=["backend"])
def test_any_list_is_valid_at_any_chunk_position(
    backend: Any, sizes: tuple[int, int], block_size: int, width: int
) -> None:
    case = SampleCase(2, 4, 2, *sizes, 16, "f16" if block_size == 128 else "f32", block_size)
    lists = random_lists(case, width)
    if backend.name == "triton":  # Triton requires ascending lists
        lists = np.sort(lists, axis=-1)
    _, out, lse = backend.attend_blocks(case, lists)
    assert_attends(out, lse, case, lists)
    empty = np.isneginf(lse)
    assert empty[:, 0, 0].all()
    assert (out[empty] == 0).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
@by_attending
def test_lists_may_be_of_any_integer_type(backend: Any, dtype: str) -> None:
    case = SampleCase(1, 2, 1, 40, 90, 64, "f32", 32)
    none = 2**32 if dtype == "int64" else 100
    lists = np.broadcast_to([0, 1, none, none + 2], (1, 2, case.layout.row_blocks, 4))
    _, out, lse = backend.attend_blocks(case, lists, dtype=dtype)
    assert_attends(out, lse, case, lists)


@pytest.mark.parametrize("poison", [1e30, np.inf, np.nan])
@by_attending
def test_blocks_that_are_not_listed_are_not_read(backend: Any, poison: float) -> None:
    listed = (0, 2, 5)

    class Unlisted(SampleCase):
        def inputs(self, seed: int = 0) -> tuple[Array, Array, Array]:
            q, k, v = super().inputs(seed)
            rows = ~np.isin(np.arange(self.S) // 32, listed)
            k[:, :, rows] = v[:, :, rows] = poison
            return q, k, v

    sizes = (1, 4, 2, 200, 300, 64, "f32", 32)
    lists = np.broadcast_to(np.array(listed), (1, 4, SampleCase(*sizes).layout.row_blocks, 3))
    for got, wanted in zip(
        backend.attend_blocks(Unlisted(*sizes), lists)[1:],
        backend.attend_blocks(SampleCase(*sizes), lists)[1:],
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)


# The public functions of a library.


@on(ATTENDING, SAMPLE_CASES, few=(0, 2, 5))
def test_sample_attention_attends_its_blocks_and_reports_recall(backend: Any, case: SampleCase) -> None:
    out, stats = backend.public("sample_attention", case, **case.parameters, return_stats="recall")
    _, wanted = oracle.sample_attention(*case.inputs(), **case.parameters, return_stats=True)
    if case.layout.all_sampled:
        dense = backend.public("dense_attention", case, scale=case.scale)
        assert (backend.numpy(out) == backend.numpy(dense)).all()
        assert (backend.numpy(stats.recall) == 1).all()
        assert (stats.density, stats.elements) == (1.0, wanted.elements)
        return
    chosen = backend.sample(case).choice
    assert_attends(backend.numpy(out), None, case, chosen)
    density = (chosen >= 0).sum(axis=(2, 3)) / case.layout.causal_pairs
    np.testing.assert_allclose(backend.numpy(stats.head_density), density, rtol=1e-6)
    assert stats.density == pytest.approx(density.mean())
    assert (stats.sampled, stats.dense_elements) == (case.layout.sampled_share, wanted.dense_elements)
    assert stats.elements == pytest.approx(wanted.elements, rel=0.05)  # blocks with scores at the threshold
    mass = backend.numpy(stats.recall)
    assert_retains(mass, case, chosen)
    for start, stop in (region.sample for region in case.layout.regions):
        least = mass[..., start:stop].mean(axis=-1)
        assert (least >= max(case.alpha_column, case.alpha_slash)).all(), "recall of the sampled rows is too small"


@pytest.mark.parametrize("alphas", [(1, 0.5), (0.5, 1.0), (1.0, 1)], ids=str)
@on(ATTENDING, [SMALL, *SAMPLE_CASES], few=(0,))
def test_an_alpha_of_one_is_dense_attention_to_the_last_bit(
    backend: Any, case: SampleCase, alphas: tuple[float, float]
) -> None:
    given = {**case.parameters, "alpha_column": alphas[0], "alpha_slash": alphas[1], "return_stats": True}
    out, stats = backend.public("sample_attention", case, **given)
    dense = backend.public("dense_attention", case, scale=case.scale)
    assert (backend.numpy(out) == backend.numpy(dense)).all()
    assert stats.density == 1
    assert stats.elements == stats.dense_elements == oracle.sample_attention(*case.inputs(), **given)[1].elements


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("backend", ["ops", "cpu", "triton"], indirect=True)
def test_a_scale_may_be_negative_or_zero(backend: Any, scale: float) -> None:
    q, k, v = SMALL.inputs()
    settings: dict[str, Any] = {**SMALL.parameters, "scale": scale}
    if backend.name in [name for name in registry.backends_of("sample_scores") if name != "oracle"]:
        wanted = oracle.sample_scores(q, k, chunks=2, block_size=32, scale=scale)
        for got, scores in zip(backend.sample_scores(SMALL, scale=scale), wanted, strict=True):
            np.testing.assert_allclose(got, scores, rtol=1e-4, atol=1e-5)
    queries, keys, _ = backend.arrays(SMALL)
    blocks = backend.functions.sample_select(queries, keys, **settings, backend=backend.name)
    out, _ = oracle.attend_blocks(q, k, v, backend.numpy(blocks), block_size=32, scale=scale)
    found = backend.public("sample_attention", SMALL, **settings)
    np.testing.assert_allclose(backend.numpy(found), out, rtol=0, atol=1e-4)
