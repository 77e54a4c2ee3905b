"""Compare HyperAttention and hash-sparse attention in array operations with the oracle, and the oracle with loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from cases import Array
from lm_prompts import causal_pairs, generated, record_prefill_calls
from mlx_arrays import to_mlx, to_numpy
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse import ConfigError, oracle
from mlx_sparse.core import registry
from mlx_sparse.methods import METHODS
from mlx_sparse.methods.patterns.lsh_spans import pieces, sampled, signs

HYPER = {"bucket_size": 16, "sampled_keys": 8, "hash_bits": 3, "exact_rows": 32}
HYPER_TEXT = f"hyperattention:{','.join(f'{k}={v}' for k, v in HYPER.items())}"
SETTINGS: dict[str, dict[str, Any]] = {"hash_sparse": {"buckets": 8}, "hyperattention": HYPER}
by_method = pytest.mark.parametrize("method", SETTINGS)


@dataclass(frozen=True)
class Prompt:
    """Sizes of a prefill chunk. Its numbers are multiples of 1/8, so that float32 sums are exact."""

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    D: int
    dtype: str = "f32"

    def inputs(self) -> list[Array]:
        rng = np.random.default_rng(self.S)
        shapes = (self.B, self.Hq, self.L, self.D), *[(self.B, self.Hkv, self.S, self.D)] * 2
        return [rng.integers(-16, 17, shape).astype(np.float32) / 8 for shape in shapes]


PROMPTS = [
    Prompt(1, 4, 2, 70, 70, 16),
    Prompt(2, 4, 1, 40, 150, 32),
    Prompt(1, 2, 2, 130, 333, 8, "bf16"),
    Prompt(1, 3, 1, 1, 90, 16, "f16"),
    Prompt(1, 2, 1, 20, 20, 64),
]


@by_method
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_array_operations_select_and_attend_as_the_oracle(method: str, prompt: Prompt) -> None:
    arrays = prompt.inputs()
    settings = SETTINGS[method]
    expected, stats = getattr(oracle, f"{method}_attention")(*arrays, **settings, return_stats="recall")
    on_mlx = [to_mlx(array, prompt.dtype) for array in arrays]
    run = registry.load(method, "ops")
    out, lse, keys = run(*on_mlx, **settings, scale=prompt.D**-0.5)
    assert out.dtype == on_mlx[0].dtype
    assert lse.dtype == mx.float32
    pairs = METHODS[method](**settings).layout(prompt.L, prompt.S).causal_pairs
    np.testing.assert_array_equal((np.array(keys) >= 0).sum(axis=(2, 3)) / pairs, stats.head_density)
    step = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[prompt.dtype]
    np.testing.assert_allclose(to_numpy(out), expected, atol=8 * step * np.abs(arrays[2]).max())
    public, found = getattr(mlx_sparse, f"{method}_attention")(*on_mlx, **settings, return_stats="recall")
    np.testing.assert_array_equal(to_numpy(public), to_numpy(out))
    np.testing.assert_allclose(np.array(found.recall), stats.recall, atol=1e-5)
    assert np.array(found.recall).max() <= 1 + 1e-5


def test_hash_sparse_attends_itself_and_the_keys_with_its_hash_up_to_it() -> None:
    L, S, buckets = 24, 40, 6
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(1, 1, L, S)), rng.normal(size=(1, 1, S, S))
    mask = reference.hash_sparse_attention(q, k, np.eye(S)[None, None], buckets=buckets)[0, 0] > 0

    def code(vector: Array) -> int:
        ends = [sign * float(vector @ direction) for sign in (1, -1) for direction in signs(S, buckets // 2).T]
        return ends.index(max(ends))

    for i in range(L):
        position = S - L + i
        for j in range(S):
            same = j <= position and code(q[0, 0, i]) == code(k[0, 0, j])
            assert mask[i, j] == (same or j == position), (i, j)


def test_hyperattention_attends_a_bucket_and_weighs_its_sample() -> None:
    """Use equal scores, so that the output is the weights divided by their sum."""
    L, S = 32, 128
    rng = np.random.default_rng(2)
    k = rng.normal(size=(1, 1, S, S))
    q = rng.normal(size=(1, 1, L, S))
    out = reference.hyperattention_attention(q, k, np.eye(S)[None, None], **HYPER, scale=0.0)[0, 0]
    M = S - L
    draws = sampled(0, M, HYPER["sampled_keys"])
    buckets = -(-M // HYPER["bucket_size"])
    rank_q, rank_k = order_of(q[0, 0]), order_of(k[0, 0, :M])
    for i in range(L):
        weights = np.zeros(S)
        weights[M : M + i + 1] = 1
        for j in range(M):
            if rank_k[j] // HYPER["bucket_size"] == rank_q[i] * buckets // L:
                weights[j] = 1
            elif j in draws:
                weights[j] = M / HYPER["sampled_keys"]
        np.testing.assert_allclose(out[i], weights / weights.sum(), atol=1e-12)


def order_of(vectors: Array) -> list[int]:
    """Return the rank of each vector by the Gray code of its signs along random directions (sample.17)."""
    directions = signs(vectors.shape[-1], HYPER["hash_bits"]).T
    codes = []
    for vector in vectors:
        parity, code = 0, 0
        for direction in directions:
            parity ^= int(vector @ direction > 0)
            code = 2 * code + parity
        codes.append(code)
    order = sorted(range(len(codes)), key=lambda index: (codes[index], index))
    return [order.index(index) for index in range(len(codes))]


def test_a_prompt_within_exact_rows_is_dense_and_longer_ones_are_halved() -> None:
    arrays = Prompt(1, 2, 1, 32, 32, 16).inputs()
    dense = reference.dense_attention(*arrays)
    np.testing.assert_allclose(reference.hyperattention_attention(*arrays, **HYPER), dense)
    cut = list(pieces(70, 100, 32))
    assert [(start, stop) for start, stop, _ in cut] == [(30, 47), (47, 65), (65, 82), (82, 100)]
    assert [(span.first, span.last) for span in cut[3][2]] == [(0, 30), (30, 65), (65, 82)]
    for start, _, spans in cut:
        covered = [key for span in spans for key in range(span.first, span.last)]
        assert covered == list(range(start)), "every key before a piece is in one of its spans"


def test_a_sample_has_one_key_per_interval() -> None:
    borders = [10 + t * 100 // 8 for t in range(9)]
    assert [sum(draw >= border for border in borders) - 1 for draw in sampled(10, 110, 8)] == list(range(8))
    assert len({*sampled(0, 1000, 256)}) == 256


@by_method
def test_a_nan_key_is_attended_by_later_queries(method: str) -> None:
    q, k, v = Prompt(1, 2, 1, 60, 150, 16).inputs()
    k[0, 0, 100, 3] = np.nan
    run = registry.load(method, "ops")
    out = np.array(run(*map(mx.array, (q, k, v)), **SETTINGS[method], scale=0.25)[0])
    expected = getattr(reference, f"{method}_attention")(q, k, v, **SETTINGS[method])
    for found in (out, expected):
        assert not np.isnan(found[:, :, :10]).any()
        assert np.isnan(found[:, :, 10:]).all()


@pytest.mark.parametrize("attn", ["hash_sparse:buckets=4", HYPER_TEXT])
def test_every_prefill_chunk_of_a_model_equals_the_oracle(attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_prefill_calls(monkeypatch)
    model = build("llama")
    with mlx_sparse.sparse(model, attn) as report:
        generated(model, prompt_of(300), prefill_step_size=128)
    assert len(seen) == report.prefill.calls > 0
    for piece in seen:
        expected, stats = piece.expected(return_stats=True)
        np.testing.assert_allclose((piece.blocks >= 0).sum(axis=(2, 3)) / causal_pairs(piece), stats.head_density)
        assert np.abs(piece.out - expected).max() < 64 * np.finfo(np.float32).eps * np.abs(piece.v).max()
    assert stats.density < 0.95


def test_hyperattention_serves_no_sinks() -> None:
    assert not METHODS["hyperattention"]().supports_sinks(1)
    assert METHODS["hash_sparse"]().supports_sinks(1)


def test_prefill_with_sinks_is_dense_although_a_decode_method_serves_the_layer() -> None:
    model = build("gpt_oss")
    with mlx_sparse.sparse(model, f"{HYPER_TEXT}+sparq:rank=4,top_k=4,dense_below=0") as report:
        generated(model, prompt_of(300), prefill_step_size=128)
    assert report.prefill.calls == 0
    assert report.sparse_calls > 0
    assert report.dense_calls["with attention sinks"] == 3


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("hash_sparse", {"buckets": 7}, "buckets: expected an even number, got 7."),
        ("hyperattention", {"hash_bits": 17}, "hash_bits: expected 1..16, got 17."),
        ("hyperattention", {"bucket_size": 0}, "bucket_size: expected an integer of at least 1, got 0."),
    ],
)
def test_a_setting_out_of_range_is_named(method: str, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        METHODS[method](**settings)
    assert str(caught.value) == message
