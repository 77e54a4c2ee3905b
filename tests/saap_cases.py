"""The one list of SAAP's decode steps that every backend runs, their inputs, and how close is close enough."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from cases import Array, Case, assert_as_good_as_plain, lse_tolerance, matmul, plain_attention, round_to, row_sum, ulp

from mlx_sparse import oracle

FILLINGS = ("random", "balanced", "skewed", "empty", "one")


@dataclass(frozen=True)
class SaapCase:
    """A decode step and an index over its keys.

    Attributes:
        step: sizes, type and padding of queries, keys and values.
        filling: how the keys are spread over the buckets: at "random" with some keys in no bucket, "balanced",
            "skewed" like 1/rank, into three buckets only ("empty"), or all into "one", which every other head visits.
        hidden: hidden size of the query network; None for the linear router of k-means.
        weights: type of the network's weights.
    """

    step: Case
    filling: str
    buckets: int = 16
    probes: int = 4
    hidden: int | None = 32
    sink_tokens: int = 2
    recent_tokens: int = 40
    weights: str = "f32"

    def __str__(self) -> str:
        network = "linear" if self.hidden is None else f"hidden{self.hidden}"
        index = f"{self.filling}-C{self.buckets}-probes{self.probes}"
        return f"{self.step}-{index}-{network}-{self.weights}-window{self.sink_tokens}+{self.recent_tokens}"

    @property
    def scale(self) -> float:
        return float(self.step.D**-0.5)

    @property
    def window(self) -> dict[str, int]:
        """Arguments of `saap_attention`."""
        return {"sink_tokens": self.sink_tokens, "recent_tokens": self.recent_tokens}

    @property
    def covered(self) -> int:
        """Keys in the index when nothing is pending."""
        return max(self.step.S - self.recent_tokens, 0)

    def inputs(self) -> tuple[Array, Array, Array]:
        """Queries, keys and values after RoPE."""
        return self.step.inputs()

    def queries_before(self) -> Array:
        """``(B, Hq, 1, D)`` before RoPE: all that the network sees."""
        return self.step.inputs(seed=1)[0]

    def network(self) -> dict[str, Array]:
        """Arguments of `query_network`, rounded to their type and held in float32."""
        n, rng = self.step, np.random.default_rng(2)
        rows = n.D if self.hidden is None else self.hidden
        out = {
            "out_weight": rng.normal(size=(n.Hkv, rows, self.buckets)) * rows**-0.5,
            "out_bias": rng.normal(size=(n.Hkv, self.buckets)),
        }
        if self.hidden is None:
            out.pop("out_bias")
        else:
            out["hidden_weight"] = rng.normal(size=(n.Hkv, n.D, self.hidden)) * n.D**-0.5
            out["hidden_bias"] = rng.normal(size=(n.Hkv, self.hidden)) * 0.1
        return {name: round_to(array, self.weights) for name, array in out.items()}

    def bucket_ids(self) -> Array:
        """``(B, Hkv, S)`` int32."""
        n, rng = self.step, np.random.default_rng(3)
        shape = (n.B, n.Hkv, n.S)
        if self.filling == "balanced":
            return rng.permuted(np.broadcast_to(np.arange(n.S) % self.buckets, shape), axis=-1).astype(np.int32)
        if self.filling == "skewed":
            share = 1 / np.arange(1, self.buckets + 1)
            return rng.choice(self.buckets, size=shape, p=share / share.sum()).astype(np.int32)
        if self.filling == "empty":
            return rng.choice([0, self.buckets // 2, self.buckets - 1], size=shape).astype(np.int32)
        if self.filling == "one":
            chosen = visited(self)
            other = np.array([[min(set(range(self.buckets)) - set(row), default=0) for row in rows] for rows in chosen])
            bucket = np.where(np.arange(n.Hkv) % 2 == 0, chosen[:, :, 0], other)
            return np.broadcast_to(bucket[..., None], shape).astype(np.int32)
        ids = rng.integers(0, self.buckets, size=shape)
        return np.where(rng.random(shape) < 0.05, rng.choice([-1, self.buckets, 30000], size=shape), ids).astype(
            np.int32
        )


SAAP_CASES = [
    SaapCase(Case(1, 1, 1, 30, 64, "f32"), "random"),  # all in the window
    SaapCase(Case(1, 1, 1, 43, 64, "f32"), "balanced", probes=1),  # one key outside it
    SaapCase(Case(1, 2, 2, 300, 64, "f32"), "random"),
    SaapCase(Case(1, 2, 2, 300, 64, "bf16"), "skewed", weights="bf16"),
    SaapCase(Case(1, 2, 2, 300, 64, "f16"), "one", weights="f16"),
    SaapCase(Case(2, 8, 2, 257, 64, "f16", padding=(0, 100)), "random", weights="f16"),
    SaapCase(Case(2, 9, 3, 333, 64, "f32", padding=(5, 332)), "skewed", hidden=None),
    SaapCase(Case(1, 9, 3, 1000, 64, "bf16"), "balanced", buckets=64, probes=8, hidden=128, weights="f16"),
    SaapCase(Case(1, 4, 4, 513, 80, "f32"), "empty", buckets=33, probes=5, hidden=100),
    SaapCase(Case(1, 8, 2, 300, 80, "bf16"), "one", hidden=None, recent_tokens=1, sink_tokens=0),
    SaapCase(Case(3, 3, 3, 129, 96, "f16", padding=(100, 0, 31)), "balanced", probes=16),  # every bucket
    SaapCase(Case(1, 32, 8, 1025, 128, "f16"), "skewed", buckets=128, probes=6, hidden=256, weights="f16"),
    SaapCase(Case(1, 14, 2, 511, 128, "f32"), "random", buckets=48, probes=48, hidden=None, weights="f16"),
    SaapCase(Case(2, 7, 1, 400, 128, "f16", padding=(7, 377)), "one", buckets=8, probes=1),
    SaapCase(Case(1, 8, 1, 640, 256, "bf16"), "empty", buckets=96, probes=30, hidden=512, weights="f16"),
    SaapCase(Case(1, 8, 1, 640, 256, "f32"), "balanced", buckets=1024, probes=32, hidden=64),
]


@cache
def visited(case: SaapCase) -> Array:
    """The oracle's, ``(B, Hkv, probes)``."""
    return oracle.saap_route(case.queries_before(), probes=case.probes, **case.network())


@cache
def listed(case: SaapCase) -> tuple[Array, Array]:
    """The oracle's list of the step, with nothing pending: indices ``(B, Hkv, S)`` and counts."""
    index = {"sink_tokens": case.sink_tokens, "left_padding": case.step.padding}
    offsets, key_ids = oracle.saap_index(case.bucket_ids()[..., : case.covered], buckets=case.buckets, **index)
    sizes = {"length": case.step.S, "covered": case.covered, "capacity": case.step.S}
    return oracle.saap_indices(visited(case), offsets, key_ids, **sizes, **index)


def plain_network(case: SaapCase) -> Array:
    """`query_network` with every step in float32: the yardstick for its errors."""
    n, network = case.step, case.network()
    x = case.queries_before().reshape(n.B, n.Hkv, n.Hq // n.Hkv, n.D)
    if case.hidden is not None:
        x = np.maximum(matmul(x, network["hidden_weight"]) + network["hidden_bias"][:, None, :], 0)
    logits = matmul(x, network["out_weight"])
    if "out_bias" in network:
        logits = logits + network["out_bias"][:, None, :]
    exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exps / row_sum(exps)


def assert_same_buckets(got: Any, case: SaapCase) -> None:
    """The visited buckets are the oracle's, but for those whose float64 scores tie to float32 accuracy."""
    ours, theirs = np.asarray(got), visited(case)
    assert ours.dtype == np.int32
    assert ours.shape == theirs.shape
    assert (np.diff(ours, axis=-1) > 0).all(), "buckets are not ascending"
    exact = oracle.query_network(case.queries_before(), **case.network())
    error = np.abs(plain_network(case) - exact).max() * exact.shape[2] + ulp(exact, "f32")
    scores = exact.sum(axis=2)
    for b, h in np.ndindex(ours.shape[:2]):
        swapped = [scores[b, h, bucket] for bucket in set(ours[b, h].tolist()) ^ set(theirs[b, h].tolist())]
        assert max(swapped, default=0) - min(swapped, default=0) <= 4 * error, f"other buckets in row {b}, head {h}"


def assert_same_list(indices: Any, counts: Any, expected: tuple[Array, Array]) -> None:
    """The same keys are listed, each once, packed, with empty slots behind them only. Their order is free."""
    got, used = np.asarray(indices), np.asarray(counts)
    assert (got.dtype, used.dtype) == (np.int32, np.int32)
    assert (used == expected[1]).all()
    for b, h in np.ndindex(used.shape):
        n = used[b, h]
        assert (got[b, h, n:] == -1).all(), "a list goes on after its count"
        assert sorted(got[b, h, :n]) == sorted(expected[0][b, h, :n])


def assert_attends(out: Any, lse: Any, case: SaapCase) -> None:
    """``out`` and ``lse`` are those of attention over the oracle's list; ``lse`` may be None."""
    q, k, v = case.inputs()
    indices = listed(case)[0]
    expected, expected_lse = oracle.attend_indices(q, k, v, indices, scale=case.scale)
    plain = plain_attention(q, k, v, indices, case.scale, case.step.dtype)
    assert_as_good_as_plain(out, expected, plain, case.step.dtype)
    if lse is not None:
        allowed = lse_tolerance(q, k, indices, case.scale, expected_lse)
        np.testing.assert_allclose(np.asarray(lse, np.float64), expected_lse, rtol=0, atol=allowed)
