"""The one list of prompts that every backend of SampleAttention runs, their inputs, and how close is close enough."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from cases import Array, assert_as_good_as_plain, matmul, round_to, row_sum, ulp

from mlx_sparse import oracle
from mlx_sparse.common.block_layout import Layout

PEAK = 12.0  # logits of the keys that stand out; the others are about 0


@dataclass(frozen=True)
class SampleCase:
    """Sizes, type and settings of one piece of a prompt."""

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    D: int
    dtype: str
    block_size: int = 64
    chunks: int = 1
    alpha_column: float = 0.9
    alpha_slash: float = 0.9

    def __str__(self) -> str:
        sizes = f"B{self.B}-H{self.Hq}x{self.Hkv}-L{self.L}-S{self.S}-D{self.D}-{self.dtype}"
        return f"{sizes}-block{self.block_size}-chunks{self.chunks}-alpha{self.alpha_column}-{self.alpha_slash}"

    @property
    def layout(self) -> Layout:
        return Layout(self.L, self.S, self.chunks, self.block_size)

    @property
    def scale(self) -> float:
        return float(self.D**-0.5)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `sample_scores`."""
        return {"chunks": self.chunks, "block_size": self.block_size, "scale": self.scale}

    @property
    def parameters(self) -> dict[str, Any]:
        """Arguments of `sample_select` and `sample_attention`."""
        return {"alpha_column": self.alpha_column, "alpha_slash": self.alpha_slash, **self.sampling}

    def inputs(self, seed: int = 0) -> tuple[Array, Array, Array]:
        """Queries, keys and values, rounded to the type under test and held in float32.

        Half of the components are waves of the position, so that a query finds the key at its head's own distance; the
        other half lets a few keys, the first ones among them, stand out for all queries. Heads mix both differently.
        """
        rng = np.random.default_rng(seed)
        B, Hq, Hkv, L, S, D = self.B, self.Hq, self.Hkv, self.L, self.S, self.D
        n = D // 4  # waves
        waves = rng.uniform(0.02, 1.5, size=n)
        distance = rng.integers(0, max(S // 3, 2), size=Hq)
        distance[::2] = 0
        share = rng.uniform(0.3, 1.0, size=(2, Hq, 1, 1))
        position = np.arange(S)

        def wave(at: Array) -> Array:
            return np.concatenate([np.cos(at[..., None] * waves), np.sin(at[..., None] * waves)], axis=-1)

        queries = rng.normal(size=(B, Hq, L, D)) * 0.3
        keys = rng.normal(size=(B, Hkv, S, D)) * 0.3
        keys[..., : 2 * n] += wave(position)
        near = wave(position[S - L :] - distance[:, None])
        queries[..., : 2 * n] += share[0] * near * (PEAK * D**0.5 / n)
        direction = rng.normal(size=(Hkv, 1, D - 2 * n))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        column = (rng.random(size=(B, Hkv, S, 1)) < 2 / S) | (position < 4)[:, None]
        keys[..., 2 * n :] += column * direction * D**0.25
        queries[..., 2 * n :] += share[1] * np.repeat(direction, Hq // Hkv, axis=0) * PEAK * D**0.25
        values = rng.normal(size=(B, Hkv, S, D)) + 0.5
        return round_to(queries, self.dtype), round_to(keys, self.dtype), round_to(values, self.dtype)


SAMPLE_CASES = [
    SampleCase(1, 1, 1, 64, 64, 64, "f32", 32, chunks=2),  # every row block is sampled
    SampleCase(1, 2, 2, 300, 300, 64, "f32", 32),
    SampleCase(1, 2, 2, 300, 300, 64, "bf16", 32, chunks=3),
    SampleCase(1, 2, 1, 140, 191, 64, "f32", 32, alpha_column=0.3, alpha_slash=0.3),  # a last block but for one key
    SampleCase(1, 2, 1, 70, 202, 64, "f32", 32, chunks=3),  # regions of one block, ragged at both ends
    SampleCase(2, 3, 1, 257, 400, 64, "f32", 32, chunks=2),
    SampleCase(1, 9, 3, 320, 500, 64, "f16", 32, chunks=6),
    SampleCase(1, 4, 4, 201, 513, 80, "f32", 32, chunks=2, alpha_column=0.95, alpha_slash=0.3),
    SampleCase(1, 8, 2, 192, 640, 80, "bf16", 64, alpha_column=0.3, alpha_slash=0.95),
    SampleCase(2, 6, 2, 333, 333, 96, "f16", 32, chunks=4),
    SampleCase(1, 3, 3, 129, 700, 96, "f32", 64),
    SampleCase(1, 4, 1, 384, 768, 128, "f16", 128, alpha_column=0.6, alpha_slash=0.6),
    SampleCase(1, 7, 1, 170, 500, 128, "bf16", 32, chunks=2, alpha_column=0.8, alpha_slash=0.8),
    SampleCase(1, 4, 1, 390, 390, 128, "f32", 32, chunks=5, alpha_column=0.98, alpha_slash=0.98),
    SampleCase(1, 2, 1, 256, 512, 256, "f32", 64, chunks=1),
    SampleCase(1, 4, 4, 200, 301, 256, "f16", 32, chunks=2),
]


@cache
def selection(case: SampleCase) -> oracle.SampleSelection:
    """The oracle's."""
    q, k, _ = case.inputs()
    return oracle.sample_select(q, k, **case.parameters)


def logit_error(q: Array, k: Array, scale: float) -> float:
    """Twice the largest error of a plain float32 logit: how far a float32 logit may be off."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    plain = matmul(grouped * np.float32(scale), k.swapaxes(-1, -2))
    exact = (grouped.astype(np.float64) * scale) @ k.swapaxes(-1, -2)
    return float(2 * np.abs(plain - exact).max())


def assert_same_scores(scores: Any, expected: Array, error: float) -> None:
    """Sums of softmax weights whose logits are off by at most ``error``, and the rounding of their sums."""
    got = np.asarray(scores, dtype=np.float64)
    assert got.shape == expected.shape
    # A softmax weight is off by the error of its own logit and of its denominator.
    allowed = expected * 2 * error + 16 * ulp(expected, "f32")
    assert (np.abs(got - expected) <= allowed).all(), f"off by {np.abs(got - expected).max():.3g}"


def kept_for_sure(scores: Array, alpha: float, error: float) -> tuple[Array, Array]:
    """What `keep` keeps, and what it may keep, if every score is off by at most the share ``error``."""
    below, above = (oracle.keep(scores, min(alpha + sign * 4 * error, 1.0)) for sign in (-1, 1))
    best_left = np.where(below, 0, scores).max(axis=-1, keepdims=True)
    least_kept = np.where(above, scores, np.inf).min(axis=-1, keepdims=True)
    return below & (scores > best_left * (1 + 4 * error)), above | (scores >= least_kept * (1 - 4 * error))


def assert_same_blocks(blocks: Any, case: SampleCase, expected: oracle.SampleSelection) -> None:
    """The lists hold the oracle's blocks, but for those whose scores tie, or whose share is on the threshold."""
    got = np.asarray(blocks)
    layout = case.layout
    assert got.shape[:3] == expected.blocks.shape[:3]
    assert got.dtype == np.int32
    filled = got >= 0
    assert (filled[..., :-1] >= filled[..., 1:]).all(), "a list goes on after an empty slot"
    assert (np.diff(got, axis=-1)[filled[..., 1:]] > 0).all(), "lists are not ascending"
    q, k, _ = case.inputs()
    error = logit_error(q, k, case.scale)
    bounds = [
        kept_for_sure(scores, alpha, error)
        for scores, alpha in ((expected.column, case.alpha_column), (expected.slash, case.alpha_slash))
    ]
    sure, possible = (oracle.merge(column, slash, layout) for column, slash in zip(*bounds, strict=True))
    for block in layout.sampled_blocks:
        for mask in (sure, possible):
            mask[:, :, block - layout.first_block, : block + 1] = True
    mask = oracle.block_mask(got, layout.key_blocks)
    assert (mask >= sure).all(), "a block is missing"
    assert (mask <= possible).all(), "a block too many"
    doubtful = possible.sum() - sure.sum()
    assert doubtful <= 0.05 * mask.sum(), f"{doubtful} blocks in doubt of {mask.sum()}: the inputs decide too little"


def attended(blocks: Array, case: SampleCase) -> Array:
    """``(B, Hkv, G, L, S)`` bool: query i attends key j."""
    layout, position, key = case.layout, np.arange(case.S - case.L, case.S), np.arange(case.S)
    mask = oracle.block_mask(np.asarray(blocks), layout.key_blocks)
    mask = np.take(np.take(mask, position // case.block_size - layout.first_block, axis=2), key // case.block_size, 3)
    return (mask & (key <= position[:, None])).reshape(case.B, case.Hkv, case.Hq // case.Hkv, case.L, case.S)


def plain_blocks_attention(case: SampleCase, q: Array, k: Array, v: Array, blocks: Array) -> Array:
    """Attention over the listed blocks with every step rounded to the case's type: the yardstick for errors."""
    dtype = case.dtype
    mask = attended(blocks, case)
    grouped = round_to(q.reshape(*mask.shape[:4], case.D) * np.float32(case.scale), dtype)
    scores = round_to(matmul(grouped, k[:, :, None].swapaxes(-1, -2)), dtype)
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    exps = round_to(np.exp(round_to(scores - np.where(np.isfinite(top), top, 0), dtype)), dtype)
    total = round_to(row_sum(exps), dtype)
    weights = round_to(exps / np.where(total > 0, total, 1), dtype)
    return round_to(matmul(weights, v[:, :, None]), dtype).reshape(q.shape)


def assert_attends(out: Any, lse: Any, case: SampleCase, blocks: Array) -> None:
    """``out`` and ``lse`` are those of attention over ``blocks``; ``lse`` may be None."""
    q, k, v = case.inputs()
    expected, expected_lse = oracle.attend_blocks(q, k, v, blocks, block_size=case.block_size, scale=case.scale)
    assert_as_good_as_plain(out, expected, plain_blocks_attention(case, q, k, v, blocks), case.dtype)
    if lse is None:
        return
    got = np.asarray(lse, dtype=np.float64)
    some = np.isfinite(expected_lse)
    assert (np.isneginf(got) == ~some).all()
    allowed = logit_error(q, k, case.scale) + ulp(expected_lse[some], "f32")
    assert np.abs(got[some] - expected_lse[some]).max(initial=0) <= allowed
