"""Compare gathered prefill on every backend with the oracle, and the oracle with loops over the equations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS
from cases import Array, assert_as_good_as_plain, ulp
from mlx_arrays import to_mlx, to_numpy
from sample_cases import SampleCase, assert_same_scores, logit_error, plain_masked_attention

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.core import registry
from mlx_sparse.methods.gather import ops
from mlx_sparse.methods.gather import oracle as reference
from mlx_sparse.methods.gather.config import Chunk, GatherLayout

BACKENDS = [name for name in ADAPTERS if name.partition("-")[0] in registry.backends_of("gather")]


@dataclass(frozen=True)
class GatherCase(SampleCase):
    """A prefill chunk with settings of gathered prefill. The settings of SampleAttention are not used."""

    share: float = 0.3
    chunk: int = 64
    samples: int = 16
    exact_tail: int = 0
    neighbors: int = 0

    def __str__(self) -> str:
        sizes = super().__str__().partition("-block")[0]
        return "-".join(map(str, [sizes, *self.settings.values()]))

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("share", "chunk", "samples", "exact_tail", "neighbors")}

    @property
    def parameters(self) -> dict[str, Any]:
        return {**self.settings, "scale": self.scale}

    @property
    def layout(self) -> GatherLayout:
        return GatherLayout(self.L, self.S, 1, 1, 0, **self.settings)


CASES = [
    GatherCase(1, 2, 2, 300, 300, 64, "f32"),
    GatherCase(2, 3, 1, 257, 400, 64, "f32", share=0.5, exact_tail=100),  # dense rows in two chunks
    GatherCase(1, 9, 3, 150, 500, 64, "f16", chunk=100, samples=7),
    GatherCase(1, 4, 4, 201, 513, 80, "f32", share=0.1, exact_tail=1, neighbors=3),
    GatherCase(1, 8, 2, 192, 640, 80, "bf16", chunk=1000, neighbors=20),
    GatherCase(2, 6, 2, 200, 333, 96, "f16", samples=1, chunk=32),
    GatherCase(1, 8, 1, 170, 390, 128, "f32", samples=500, neighbors=500),  # every row is sampled
    GatherCase(1, 7, 1, 65, 500, 128, "bf16", share=0.7, chunk=17, exact_tail=30),
    GatherCase(1, 4, 1, 90, 301, 256, "f32", share=0.01, chunk=50, samples=3),
]


def chunks(case: GatherCase) -> list[tuple[Chunk, Array, Array]]:
    """Return the sparse chunks of a case with their queries and the keys up to their last query."""
    q, k, _ = case.inputs()
    pieces = [piece for piece in case.layout.pieces if piece.sparse]
    return [(one, q[:, :, one.start : one.stop], k[:, :, : one.earlier + one.stop - one.start]) for one in pieces]


def mask_of(case: GatherCase) -> Array:
    """Return the mask ``(B, Hkv, G, L, S)`` of the pairs that the oracle attends to."""
    mask = np.broadcast_to(np.tri(case.L, case.S, case.S - case.L, dtype=bool), (case.B, case.Hkv, case.L, case.S))
    mask = mask.copy()
    for piece, q, k in chunks(case):
        scores, _ = reference.gather_scores(q, k, samples=case.samples, scale=case.scale)
        kept = np.zeros(scores.shape, bool)
        np.put_along_axis(kept, reference.gather_select(scores, piece.kept, case.neighbors), True, axis=-1)
        mask[:, :, piece.start : piece.exact, : piece.earlier] = kept[:, :, None]
    return np.repeat(mask[:, :, None], case.Hq // case.Hkv, axis=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_array_operations_score_and_select_as_the_oracle(case: GatherCase) -> None:
    sinks = np.linspace(-1, 5, case.Hq).astype(np.float32)
    for (piece, q, k), extra in zip(chunks(case), (None, sinks, None, sinks, None, sinks), strict=False):
        options = {"samples": case.samples, "scale": case.scale}
        scores, count = reference.gather_scores(q, k, sinks=extra, **options)
        given = None if extra is None else mx.array(extra)
        ours, ours_count = ops.gather_scores(to_mlx(q, case.dtype), to_mlx(k, case.dtype), sinks=given, **options)
        np.testing.assert_array_equal(np.array(ours_count), count)
        assert_same_scores(ours, scores, logit_error(q, k, case.scale))
        lists = ops.gather_select(ours, piece.kept, case.neighbors)
        assert lists.dtype == mx.int32
        wanted = reference.gather_select(np.array(ours), piece.kept, case.neighbors)  # neighbors have equal scores
        np.testing.assert_array_equal(np.array(lists), wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_backend_attends_as_the_oracle(backend: Any, case: GatherCase) -> None:
    q, k, v = case.inputs()
    expected, lse, pairs, recall = reference.gather_attention(q, k, v, **case.parameters)
    found, our_pairs, our_recall = backend.gather(case)
    assert_as_good_as_plain(found.out, expected, plain_masked_attention(case, q, k, v, mask_of(case)), case.dtype)
    assert np.abs(found.lse - lse).max() <= logit_error(q, k, case.scale) + ulp(lse, "f32")
    np.testing.assert_array_equal(our_pairs, pairs)
    np.testing.assert_array_equal(pairs, mask_of(case).sum(axis=(3, 4)).reshape(pairs.shape))
    np.testing.assert_allclose(our_recall, recall, atol=2e-5)


def test_the_oracle_follows_the_equations() -> None:
    """Compute the selection of one chunk of one KV head with loops."""
    rng = np.random.default_rng(0)
    G, m, M, N, share = 2, 12, 30, 6, 0.2
    q, k = rng.normal(size=(G, m, M + m)), rng.normal(size=(M + m, M + m))
    mass, rows_of_group = np.zeros(M), 0
    for h in range(G):
        mean = sum(q[h, i] for i in range(m)) / m
        cosines = [q[h, i] @ mean / (np.linalg.norm(q[h, i]) * np.linalg.norm(mean)) for i in range(m)]
        rows = set(sorted(range(m), key=lambda i: cosines[i])[: N // 2]) | {3, 7, 11}
        rows_of_group += len(rows)
        for i in rows:
            exps = [np.exp(q[h, i] @ k[j]) for j in range(M + i + 1)]
            mass += np.array(exps[:M]) / sum(exps)
    best = sorted(range(M), key=lambda j: -mass[j])[:6]
    settings = {"share": share, "chunk": 100, "samples": N, "exact_tail": 0, "scale": 1.0}
    values = np.eye(M + m)[None, None]
    out, stats = oracle.gather_attention(q[None], k[None, None], values, return_stats=True, **settings)
    assert set(np.flatnonzero(out[0, :, 0].sum(axis=0)[:M])) == set(best)
    assert stats.density == (m * 6 + m * (m + 1) / 2) / (m * M + m * (m + 1) / 2)
    assert stats.sampled == N / m
    lost = mass.sum() - mass[best].sum()
    np.testing.assert_allclose(stats.estimated_recall, 1 - lost / rows_of_group)


@pytest.mark.parametrize("backend", ["ops", "cpu"])
def test_keeping_every_key_is_bitwise_dense(backend: str) -> None:
    q, k, v = map(mx.array, CASES[0].inputs())
    dense = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")
    if backend == "cpu":
        dense = registry.load("attend_all", "cpu")(q, k, v, scale=0.125)[0]
    for settings in ({"share": 1.0}, {"exact_tail": 300}, {"chunk": 300}):
        out, stats = mlx_sparse.gather_attention(q, k, v, backend=backend, return_stats=True, **settings)
        assert mx.array_equal(out, dense)
        assert stats.density == 1


def test_calls_that_end_at_multiples_of_chunk_select_as_one_call() -> None:
    case = CASES[0]
    q, k, v = case.inputs()
    whole = oracle.gather_attention(q, k, v, **case.parameters)
    parts = [(0, 64), (64, 256), (256, 300)]
    outs = [oracle.gather_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], **case.parameters) for a, b in parts]
    np.testing.assert_allclose(np.concatenate(outs, axis=2), whole, rtol=1e-12, atol=1e-15)  # sums may differ in order


@pytest.mark.parametrize("place", [(0, 200), (1, 10)], ids=["query", "key"])
@pytest.mark.parametrize("backend", ["oracle", "ops", "cpu"])
def test_nan_makes_the_chunk_of_its_sequence_dense(backend: str, place: tuple[int, int]) -> None:
    case = dataclasses.replace(CASES[0], B=2)
    array, row = place
    arrays = case.inputs()
    clean = oracle.gather_attention(*arrays, **case.parameters)
    arrays[array][0, :, row] = np.nan
    dense = oracle.attend.dense_attention(*arrays, scale=case.scale, left_padding=None)
    if backend == "oracle":
        out = oracle.gather_attention(*arrays, **case.parameters)
    else:
        out = to_numpy(mlx_sparse.gather_attention(*map(mx.array, arrays), backend=backend, **case.parameters))
    np.testing.assert_allclose(out[1], clean[1], atol=1e-5)
    chunk = slice(192, 256) if array == 0 else slice(0, 300)
    np.testing.assert_allclose(out[0, :, chunk], dense[0, :, chunk], atol=1e-5)
    others = np.delete(np.arange(300), chunk)
    np.testing.assert_allclose(out[0, :, others], clean[0, :, others], atol=1e-5)


def test_a_sink_with_most_of_the_mass_hides_its_head() -> None:
    q, k, _ = CASES[2].inputs()
    options = {"samples": 16, "scale": 0.125}
    sinks = np.array([0.0, 80.0, 80.0] * 3)
    scores, _ = reference.gather_scores(q, k, sinks=sinks, **options)
    alone, _ = reference.gather_scores(q[:, ::3], k, sinks=sinks[::3], **options)
    np.testing.assert_allclose(scores, alone, atol=1e-6)
