"""The one list of cases that every backend runs, their inputs, and how close is close enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Bits of the significand after the leading one.
PRECISION = {"f32": 23, "f16": 10, "bf16": 7}


@dataclass(frozen=True)
class Case:
    """Sizes and type of one decode step; ``padding`` lists the first valid key of each row."""

    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    dtype: str
    padding: tuple[int, ...] | None = None

    def __str__(self) -> str:
        padded = "-padded" if self.padding else ""
        return f"B{self.B}-H{self.Hq}x{self.Hkv}-S{self.S}-D{self.D}-{self.dtype}{padded}"

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        """Queries, keys and values, rounded to the type under test and held in float32. Queries are heavy-tailed."""
        rng = np.random.default_rng(seed)
        queries = rng.standard_t(3, size=(self.B, self.Hq, L, self.D))
        keys = rng.normal(size=(self.B, self.Hkv, self.S, self.D)) + rng.normal(size=(1, self.Hkv, 1, self.D))
        values = rng.normal(size=(self.B, self.Hkv, self.S, self.D)) + 0.5
        return round_to(queries, self.dtype), round_to(keys, self.dtype), round_to(values, self.dtype)


CASES = [
    Case(1, 1, 1, 1, 64, "f32"),
    Case(1, 2, 2, 65, 64, "f32"),
    Case(1, 2, 2, 65, 64, "bf16"),
    Case(2, 8, 2, 127, 64, "f16", padding=(0, 100)),
    Case(1, 8, 2, 300, 80, "bf16"),
    Case(2, 9, 3, 257, 64, "f32", padding=(5, 256)),
    Case(1, 9, 3, 1000, 64, "bf16"),
    Case(1, 4, 4, 513, 80, "f32"),
    Case(3, 3, 3, 129, 96, "f16", padding=(128, 0, 31)),
    Case(1, 6, 2, 200, 96, "f32"),
    Case(1, 32, 8, 1025, 128, "f16"),
    Case(2, 32, 8, 333, 128, "bf16"),
    Case(1, 14, 2, 511, 128, "f32"),
    Case(2, 7, 1, 400, 128, "f16", padding=(399, 17)),
    Case(1, 8, 1, 640, 256, "f32"),
    Case(1, 8, 1, 640, 256, "bf16"),
    Case(2, 4, 4, 96, 256, "f16"),
]


# Settings of SparQ that every backend with the method runs; "rank": None is all components.
SPARQ: dict[str, dict[str, Any]] = {
    "paper": {},
    "appendix_b": {"local_window": 0, "reallocate": True},
    "eval": {"group_reduce": "logits", "top_k": 33, "local_window": 9},
    "robust": {"component_score": "query_key"},
    "reallocate": {"reallocate": True, "component_score": "query_key"},
    "no-reallocate": {"reallocate": False},
    "rank-D": {"rank": None},
    "own-scale": {"scale": 0.3},
    "k1": {"top_k": 1, "rank": 1},
}


def parameters(case: Case, setting: str) -> dict[str, Any]:
    """Arguments of `sparq_attention` for one of the settings."""
    chosen = {"rank": 16, "top_k": 32, **SPARQ[setting]}
    return {**chosen, "rank": chosen["rank"] or case.D}


def every_parameter(case: Case, setting: str) -> dict[str, Any]:
    """The same with none left to a default."""
    chosen = parameters(case, setting)
    given = {"scale": case.D**-0.5, "reallocate": case.Hq == case.Hkv, "local_window": chosen["top_k"] // 4}
    return {"group_reduce": "softmax", "component_score": "query", **given, **chosen}


def round_to(array: npt.ArrayLike, dtype: str) -> Array:
    """Round to the nearest number of ``dtype``, held in float32."""
    rounded = np.asarray(array, dtype=np.float32)
    if dtype == "f16":
        return rounded.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = rounded.view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def matmul(left: Array, right: Array) -> Array:
    """``left (..., n, m) @ right (..., m, p)`` as a plain loop adds it up: one float32 sum from left to right.

    BLAS sums in blocks, several times more accurately than a textbook loop or most kernels.
    """
    m = left.shape[-1]
    total = np.zeros(np.broadcast_shapes((*left.shape[:-1], 1), (*right.shape[:-2], 1, right.shape[-1])), np.float32)
    for i in range(m):
        total += left[..., :, i, None] * right[..., None, i, :]
    return total


def row_sum(array: Array) -> Array:
    """Sum over the last axis, kept, from left to right in float32."""
    return np.add.accumulate(array, axis=-1, dtype=np.float32)[..., -1:]


def plain_scores(queries: Array, keys: Array, indices: Array, scale: float, dtype: str) -> tuple[Array, Array]:
    """Logits ``(B, Hkv, G, N)`` of listed keys, -inf in empty slots, rounded to ``dtype``; and their maxima, or 0."""
    B, Hq, _, D = queries.shape
    Hkv = keys.shape[1]
    keys_n = np.take_along_axis(keys, np.maximum(indices, 0)[..., None], axis=2)
    grouped = round_to(queries.reshape(B, Hkv, Hq // Hkv, D) * np.float32(scale), dtype)
    scores = round_to(matmul(grouped, keys_n.swapaxes(-1, -2)), dtype)
    scores = np.where((indices >= 0)[:, :, None, :], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    return scores, np.where(np.isfinite(top), top, 0)


def plain_attention(queries: Array, keys: Array, values: Array, indices: Array, scale: float, dtype: str) -> Array:
    """Attention over the listed keys with every step rounded to ``dtype``: the yardstick for errors."""

    def rounded(array: npt.ArrayLike) -> Array:
        return round_to(array, dtype)

    filled = (indices >= 0)[..., None]
    values_n = np.where(filled, np.take_along_axis(values, np.maximum(indices, 0)[..., None], axis=2), 0)
    scores, top = plain_scores(queries, keys, indices, scale, dtype)
    exps = np.where(filled[..., 0][:, :, None], rounded(np.exp(rounded(scores - top))), 0)
    total = rounded(row_sum(exps))
    weights = rounded(exps / np.where(total > 0, total, 1))
    return rounded(matmul(weights, values_n)).reshape(queries.shape)


def lse_tolerance(queries: Array, keys: Array, indices: Array, scale: float, expected: Array) -> float:
    """How far a float32 log-sum-exp may be off: twice as far as a plain float32 logit is, as it passes on the error of
    the logits undiminished, and one ulp.
    """
    plain, _ = plain_scores(queries, keys, indices, scale, "f32")
    B, _, _, D = queries.shape
    grouped = queries.astype(np.float64).reshape(B, keys.shape[1], -1, D) * scale
    exact = grouped @ np.take_along_axis(keys, np.maximum(indices, 0)[..., None], axis=2).swapaxes(-1, -2)
    off = np.abs(np.where(np.isfinite(plain), plain - exact, 0)).max(initial=0)
    return float(2 * off + ulp(expected[np.isfinite(expected)], "f32"))


def plain_reallocation(
    out: Array, queries: Array, keys: Array, values: Array, indices: Array, *, rank: int, padding: Any, **settings: Any
) -> Array:
    """``alpha * out + (1 - alpha) * mean(values)`` with every step in float32: the yardstick for reallocation."""
    B, Hq, _, D = queries.shape
    Hkv, S = keys.shape[1:3]
    G = Hq // Hkv
    valid = np.arange(S) >= np.zeros((B, 1)) if padding is None else np.arange(S) >= np.array(padding)[:, None]
    count = np.maximum(valid.sum(axis=1), 1).astype(np.float32)[:, None, None]
    rows = valid[:, None, :, None]
    q = queries.reshape(B, Hkv, G, D)
    component = np.abs(q).sum(axis=2)
    weighted = settings.get("component_score") == "query_key"
    if weighted:
        centred = np.where(rows, keys - (np.where(rows, keys, 0).sum(axis=2) / count)[:, :, None], 0)
        component = component * np.sqrt((centred**2).sum(axis=2) / count)
    i1 = np.argsort(-component, axis=-1, kind="stable")[..., None, :rank]
    q_r, k_r = np.take_along_axis(q, i1, axis=-1), np.take_along_axis(keys, i1, axis=-1)
    factor = np.float32(settings.get("scale", D**-0.5))
    if not weighted:
        covered = np.abs(q_r).sum(axis=-1)
        factor = factor / np.sqrt(np.where(covered > 0, covered / np.abs(q).sum(axis=-1), 1))[..., None]
    logits = matmul(q_r, k_r.swapaxes(-1, -2)) * factor
    logits = np.where(valid[:, None, None, :], logits, -np.inf)
    s_hat = np.exp(logits - logits.max(axis=-1, keepdims=True))
    s_hat = s_hat / row_sum(s_hat)
    chosen = np.take_along_axis(s_hat, np.maximum(indices, 0)[:, :, None], axis=-1)
    alpha = row_sum(np.where(indices[:, :, None] >= 0, chosen, 0)).reshape(B, Hq, 1, 1)
    mean = np.repeat(np.where(rows, values, 0).sum(axis=2) / count, G, axis=1)[:, :, None]
    mixed: Array = alpha * out + (1 - alpha) * mean
    assert mixed.dtype == np.float32
    return mixed


def plain_sparq(case: Case, params: dict[str, Any], q: Array, k: Array, v: Array, indices: Array) -> Array:
    """Both: the yardstick for a decode step of SparQ that attends to these keys."""
    plain = plain_attention(q, k, v, indices, params.get("scale", case.D**-0.5), case.dtype)
    if params.get("reallocate", case.Hq == case.Hkv) and case.S > params["top_k"]:
        plain = plain_reallocation(plain, q, k, v, indices, padding=case.padding, **params)
    return round_to(plain, case.dtype)


def ulp(array: npt.ArrayLike, dtype: str) -> float:
    """Distance between neighbouring numbers of ``dtype`` at the largest magnitude in ``array``."""
    largest = float(np.max(np.abs(array), initial=0.0))
    return 2.0 ** (np.floor(np.log2(largest)) - PRECISION[dtype]) if largest > 0 else 0.0


def assert_as_good_as_plain(out: npt.ArrayLike, expected: Array, plain: Array, dtype: str) -> None:
    """The error of ``out`` is at most twice that of the plain computation in its type, plus one ulp."""
    got = np.asarray(out, dtype=np.float64)
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    allowed = 2 * np.abs(plain - expected).max() + ulp(expected, dtype)
    error = np.abs(got - expected).max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def assert_same_choice(indices: npt.ArrayLike, expected: Array, scores: Array) -> None:
    """Two index lists hold the same keys, but for keys whose float64 ``scores`` tie to float32 accuracy."""
    got = np.asarray(indices)
    assert got.shape == expected.shape
    assert ((got >= 0).sum(axis=-1) == (expected >= 0).sum(axis=-1)).all()
    for b, h in np.ndindex(got.shape[:2]):
        ours, theirs = (set(row[row >= 0].tolist()) for row in (got[b, h], expected[b, h]))
        row = got[b, h][got[b, h] >= 0]
        assert (np.diff(row) > 0).all(), "indices are not ascending"
        swapped = [scores[b, h, key] for key in ours ^ theirs]
        if swapped:
            spread = max(swapped) - min(swapped)
            assert spread <= 16 * ulp(scores[b, h], "f32"), f"keys {ours ^ theirs} differ by {spread:.3g}"
