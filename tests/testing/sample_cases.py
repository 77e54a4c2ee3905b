"""Define the SampleAttention test cases for all backends, with their inputs and tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from cases import Array, assert_as_good_as_plain, matmul, round_to, row_sum, ulp

from mlx_sparse import oracle
from mlx_sparse.core.blocks.layout import Layout

PEAK = 12.0  # logit of matching keys; other logits are about 0


@dataclass(frozen=True)
class SampleCase:
    """Sizes, dtype and settings of one prefill chunk."""

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
    padding = None  # prefill methods take no padding

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
        """Return queries, keys and values as float32, rounded to the type of the case.

        Half of the components are sines and cosines of the position. In this half, each query matches the key at a
        distance that depends on the head. In the other half, the first four keys and a few random keys match all
        queries. Each head weights the two halves differently.
        """
        rng = np.random.default_rng(seed)
        B, Hq, Hkv, L, S, D = self.B, self.Hq, self.Hkv, self.L, self.S, self.D
        n = D // 4  # number of waves
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
    SampleCase(1, 2, 1, 140, 191, 64, "f32", 32, alpha_column=0.3, alpha_slash=0.3),  # the last block lacks one key
    SampleCase(1, 2, 1, 70, 202, 64, "f32", 32, chunks=3),  # regions of one block, incomplete blocks at both ends
    SampleCase(2, 3, 1, 257, 400, 64, "f32", 32, chunks=2),
    SampleCase(1, 9, 3, 320, 500, 64, "f16", 32, chunks=6),
    SampleCase(1, 4, 4, 201, 513, 80, "f32", 32, chunks=2, alpha_column=0.95, alpha_slash=0.3),
    SampleCase(1, 8, 2, 192, 640, 80, "bf16", 64, alpha_column=0.3, alpha_slash=0.95),
    SampleCase(2, 6, 2, 333, 333, 96, "f16", 32, chunks=4),
    SampleCase(1, 3, 3, 129, 700, 96, "f32", 64),
    SampleCase(1, 4, 1, 200, 390, 128, "f16", 128, alpha_column=0.8, alpha_slash=0.8),
    SampleCase(1, 7, 1, 170, 500, 128, "bf16", 32, chunks=2, alpha_column=0.8, alpha_slash=0.8),
    SampleCase(1, 4, 1, 390, 390, 128, "f32", 32, chunks=5, alpha_column=0.98, alpha_slash=0.98),
    SampleCase(1, 2, 1, 256, 512, 256, "f32", 64, chunks=1),
    SampleCase(1, 4, 4, 200, 301, 256, "f16", 32, chunks=2),
    SampleCase(1, 2, 2, 200, 520, 64, "f32", 128, alpha_column=0.4, alpha_slash=0.4),
    SampleCase(1, 2, 1, 130, 191, 64, "f32", 32, alpha_column=0.3, alpha_slash=0.3),  # sample from a last row
]

SPARSE_CASES = [case for case in SAMPLE_CASES if not case.layout.all_sampled]


@cache
def selection(case: SampleCase) -> oracle.SampleSelection:
    """Return the oracle's selection of key blocks for a case."""
    q, k, _ = case.inputs()
    return oracle.sample_selection(q, k, **case.parameters)


def logit_error(q: Array, k: Array, scale: float) -> float:
    """Return the tolerance for float32 logits: twice the largest error of a plain float32 computation."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    plain = matmul(grouped * np.float32(scale), k.swapaxes(-1, -2))
    exact = (grouped.astype(np.float64) * scale) @ k.swapaxes(-1, -2)
    return float(2 * np.abs(plain - exact).max())


def assert_same_scores(scores: Any, expected: Array, error: float) -> None:
    """Assert that ``scores`` are the expected sums of softmax weights. ``error`` is the allowed error of a logit."""
    got = np.asarray(scores, dtype=np.float64)
    assert got.shape == expected.shape
    # The error of a softmax weight is the error of its logit plus the error of its denominator.
    allowed = expected * 2 * error + 16 * ulp(expected, "f32")
    assert (np.abs(got - expected) <= allowed).all(), f"off by {np.abs(got - expected).max():.3g}"


def kept_bounds(scores: Array, alpha: float, error: float) -> tuple[Array, Array]:
    """Return two bool masks for a selection that reaches the share ``alpha`` of the sum of ``scores``.

    The first mask marks scores that must be selected, and the second mask marks scores that may be selected. ``error``
    is the tolerance of a logit, as returned by `logit_error`.
    """
    below, above = (oracle.select_share(scores, min(alpha + sign * 4 * error, 1.0)) for sign in (-1, 1))
    best_left = np.where(below, 0, scores).max(axis=-1, keepdims=True)
    least_kept = np.where(above, scores, np.inf).min(axis=-1, keepdims=True)
    return below & (scores > best_left * (1 + 4 * error)), above | (scores >= least_kept * (1 - 4 * error))


def assert_same_blocks(blocks: Any, case: SampleCase, expected: oracle.SampleSelection) -> None:
    """Assert that ``blocks`` are the oracle's selected blocks. Blocks that rounding may change can differ."""
    got = np.asarray(blocks)
    layout = case.layout
    assert got.shape[:3] == expected.blocks.shape[:3]
    assert got.dtype == np.int32
    filled = got >= 0
    assert (filled[..., :-1] >= filled[..., 1:]).all(), "a list continues after an empty slot"
    assert (np.diff(got, axis=-1)[filled[..., 1:]] > 0).all(), "lists are not ascending"
    q, k, _ = case.inputs()
    error = logit_error(q, k, case.scale)
    bounds = [
        kept_bounds(scores, alpha, error)
        for scores, alpha in ((expected.column, case.alpha_column), (expected.slash, case.alpha_slash))
    ]
    sure, possible = (oracle.merge_kept(column, slash, layout) for column, slash in zip(*bounds, strict=True))
    for block in layout.sampled_blocks:
        for mask in (sure, possible):
            mask[:, :, block - layout.first_block, : block + 1] = True
    mask = oracle.block_mask(got, layout.key_blocks)
    assert (mask >= sure).all(), "a block is missing"
    assert (mask <= possible).all(), "an additional block"
    doubtful = possible.sum() - sure.sum()
    assert doubtful <= 0.05 * mask.sum(), f"{doubtful} undecided blocks of {mask.sum()}: the inputs are not decisive"


@cache
def dense_lse(case: SampleCase) -> Array:
    lse: Array = oracle.attend.dense_lse(*case.inputs()[:2], scale=case.scale, left_padding=None)
    return lse


def assert_retains(mass: Any, case: SampleCase, chosen: Array) -> None:
    """Assert that ``mass`` is the attention recall of the selected blocks."""
    q, k, v = case.inputs()
    _, lse = oracle.blocks.attend_blocks(q, k, v, chosen, block_size=case.block_size, scale=case.scale)
    expected = np.exp(lse - dense_lse(case))
    # The error of two log-sum-exps. Each has the error of a logit plus its own rounding error.
    allowed = 2 * (logit_error(q, k, case.scale) + ulp(lse, "f32"))
    assert (np.abs(np.asarray(mass) - expected) <= allowed * expected).all()


def attended(blocks: Array, case: SampleCase) -> Array:
    """Return a bool mask ``(B, Hkv, G, L, S)``: True if query i attends to key j."""
    layout, position, key = case.layout, np.arange(case.S - case.L, case.S), np.arange(case.S)
    mask = oracle.block_mask(np.asarray(blocks), layout.key_blocks)
    mask = np.take(np.take(mask, position // case.block_size - layout.first_block, axis=2), key // case.block_size, 3)
    return (mask & (key <= position[:, None])).reshape(case.B, case.Hkv, case.Hq // case.Hkv, case.L, case.S)


def plain_masked_attention(case: SampleCase, q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attend where ``mask`` is True and round every step to the case's type. The result's error sets the tolerance.

    ``mask (B, Hkv, G, L, S)`` is that of `attended`.
    """
    dtype = case.dtype
    grouped = round_to(q.reshape(*mask.shape[:4], case.D) * np.float32(case.scale), dtype)
    scores = round_to(matmul(grouped, k[:, :, None].swapaxes(-1, -2)), dtype)
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    exps = round_to(np.exp(round_to(scores - np.where(np.isfinite(top), top, 0), dtype)), dtype)
    total = round_to(row_sum(exps), dtype)
    weights = round_to(exps / np.where(total > 0, total, 1), dtype)
    return round_to(matmul(weights, v[:, :, None]), dtype).reshape(q.shape)


def assert_attends(out: Any, lse: Any, case: SampleCase, blocks: Array) -> None:
    """Assert that ``out`` is the result of attention over ``blocks``. If ``lse`` is set, check it too."""
    q, k, v = case.inputs()
    expected, expected_lse = oracle.blocks.attend_blocks(q, k, v, blocks, block_size=case.block_size, scale=case.scale)
    assert_as_good_as_plain(out, expected, plain_masked_attention(case, q, k, v, attended(blocks, case)), case.dtype)
    if lse is None:
        return
    got = np.asarray(lse, dtype=np.float64)
    some = np.isfinite(expected_lse)
    assert (np.isneginf(got) == ~some).all()
    allowed = logit_error(q, k, case.scale) + ulp(expected_lse[some], "f32")
    assert np.abs(got[some] - expected_lse[some]).max(initial=0) <= allowed
