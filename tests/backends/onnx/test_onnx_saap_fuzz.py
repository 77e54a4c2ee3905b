"""Test the native SaapAttention with random sizes, contents and buckets: correct output or a one-line error.

tests/backends/onnx/test_onnx_native_fuzz.py repeats this file with a library that is built with sanitizers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import PRECISION, Array, ulp
from hypothesis import given
from hypothesis import strategies as st
from onnx_operators import DTYPES, ONE_LINE, Operator, assert_same_assignment, fuzz, windowed_attention

from mlx_sparse import oracle
from mlx_sparse.methods.saap.oracle import route_scores, saap_keys

pytestmark = pytest.mark.slow  # fuzzing


class Draw(SimpleNamespace):
    """Random sizes and contents: caches of C slots with ``start`` tokens, and L new tokens."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._rng = np.random.default_rng(self.seed)
        B, Hkv, G, L, D, N, H = self.B, self.Hkv, self.G, self.L, self.D, self.N, self.H
        self.query, self.query_before = (self._normal(B, Hkv * G, L, D) for _ in range(2))
        self.key, self.value, self.key_before = (self._normal(B, Hkv, L, D) for _ in range(3))
        self.past_key, self.past_value = (self._normal(B, Hkv, self.C, D) for _ in range(2))
        for b, (start, first) in enumerate(zip(self.start, self.padding, strict=True)):
            for array in (self.past_key, self.past_value):
                array[b, :, max(0, start) :] = self.poison
                array[b, :, : max(0, first)] = self.poison
        ids = self._rng.integers(-1, N + 1, (B, Hkv, self.C))
        strange = self._rng.choice([-(2**15), -1, N, 2**15 - 1], ids.shape)
        self.past_bucket_ids = np.where(self._rng.random(ids.shape) < 0.1, strange, ids)
        rows = H or D
        sizes = {"centroids": (N, D), "hidden_weight": (D, H), "hidden_bias": (H,)}
        sizes |= {"out_weight": (rows, N), "out_bias": (N,)}
        self.network = {n: self._normal(Hkv, *size, kind=self.weights) for n, size in sizes.items()}

    def _normal(self, *shape: int, kind: str = "") -> Array:
        return self._rng.normal(size=shape).astype(DTYPES[kind or self.dtype])

    @property
    def settings(self) -> dict[str, Any]:
        names = ("probes", "sink_tokens", "recent_tokens", "dense_below", "weights")
        return {**{name: getattr(self, name) for name in names}, "scale": self.D**-0.5}

    @property
    def inputs(self) -> dict[str, Array]:
        names = ("query", "key", "value", "query_before", "key_before", "past_key", "past_value", "past_bucket_ids")
        sizes = {"past_length": np.array(self.start), "left_padding": np.array(self.padding)}
        return {**{name: getattr(self, name) for name in names}, **sizes, **self.network}

    def fits(self) -> bool:
        return all(0 <= start <= self.C - self.L for start in self.start) and min(self.padding) >= 0

    def close(self, got: Array, expected: Array) -> None:
        """Assert equality within one rounding to the type."""
        off = ulp(expected, self.dtype) + 2e-5
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2.0 ** -PRECISION[self.dtype], atol=off)


@st.composite
def draws(draw: Any, mistakes: bool = False) -> Draw:
    B, L = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 1, 2, 20]))
    C = draw(st.integers(L, 300))
    N = draw(st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 1030])))
    room = (-1, C - L + 1) if mistakes else (0, C - L)
    most = st.one_of(st.integers(0, 40), st.integers(0, C + 5), st.just(2**63 - 1))
    return Draw(
        B=B,
        Hkv=draw(st.integers(1, 3)),
        G=draw(st.integers(1, 6)),
        L=L,
        D=draw(st.sampled_from([1, 2, 7, 8, 15, 16, 33, 64, 80])),
        C=C,
        N=N,
        H=draw(st.sampled_from([0, 0, 1, 5, 16, 31, 1025])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        weights=draw(st.sampled_from(["f16", "f32"])),
        start=draw(st.lists(st.integers(*room), min_size=B, max_size=B)),
        padding=draw(st.lists(st.integers(-1 if mistakes else 0, C + 1), min_size=B, max_size=B)),
        probes=draw(st.integers(1, N)),
        sink_tokens=draw(most),
        recent_tokens=max(1, draw(most)),
        dense_below=draw(st.sampled_from([0, 0, 0, 100, 2**63 - 1])),
        poison=draw(st.sampled_from([float("nan"), float("inf"), 1e4])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def routed(case: Draw, b: int) -> tuple[Array, Array]:
    """Return the visited buckets of a row, (1, Hkv, probes), and a mask of heads that rounding cannot change."""
    network = {name: array for name, array in case.network.items() if name != "centroids"}
    if not case.H:
        network = {name: array for name, array in network.items() if "hidden" not in name}
    queries = case.query_before[b : b + 1].astype(np.float64)
    scores = route_scores(queries, **network)
    ranked = -np.sort(-scores, axis=-1)[0]
    sure = np.full(case.Hkv, case.probes == case.N)
    if case.probes < case.N:
        # Logits of large networks are sums of many terms, so probabilities have this relative error.
        sure = ranked[:, case.probes - 1] - ranked[:, case.probes] > 1e-3 * ranked[:, case.probes - 1] + 1e-30
    return oracle.saap_route(queries, probes=case.probes, **network), sure


@given(draws())
@fuzz
def test_a_call_equals_the_oracle(case: Draw) -> None:
    got = Operator("native", "SaapAttention", case.dtype, **case.settings)(**case.inputs)
    length = np.array(case.start) + case.L
    dense = case.L > 1 or length.max() < case.dense_below
    for b, end in enumerate(length):
        start, first = case.start[b], min(case.padding[b], end)
        ids = got["present_bucket_ids"][b]
        new = slice(start, end)
        centroids = case.network["centroids"].astype(np.float64)
        assert_same_assignment(ids[None, :, new], case.key_before[b : b + 1].astype(np.float64), centroids)
        past = np.delete(case.past_bucket_ids[b], new, axis=-1)
        np.testing.assert_array_equal(np.delete(ids, new, axis=-1), past)
        k, v = (got[f"present_{name}"][b : b + 1, :, :end].astype(np.float64) for name in ("key", "value"))
        np.testing.assert_array_equal(k[0, :, new], case.key[b].astype(np.float64))
        q, valid = case.query[b : b + 1].astype(np.float64), (np.arange(end) >= first)[:, None]
        k, v = np.where(valid, k, 0), np.where(valid, v, 0)
        out = got["output"][b : b + 1]
        if dense:
            case.close(out, windowed_attention(q, k, v, np.array([first]), 10**12, case.D**-0.5))
            continue
        visited, sure = routed(case, b)
        window = min(case.sink_tokens, 10**6), min(case.recent_tokens, 10**6)
        attended = (
            saap_keys(ids[None, :, :end], visited, *window, [first])
            if first < end
            else np.zeros((1, case.Hkv, end), bool)
        )
        indices = np.where(attended, np.arange(end), -1)
        expected, _ = oracle.attend.attend_indices(q, k, v, indices, scale=case.D**-0.5)
        heads = np.repeat(sure, case.G)
        case.close(out[:, heads], expected[:, heads])


@given(draws(mistakes=True))
@fuzz
def test_only_invalid_sizes_are_refused(case: Draw) -> None:
    case.past_key[:], case.past_value[:] = 1, 1
    attend = Operator("native", "SaapAttention", case.dtype, **case.settings)
    if case.fits():
        assert np.isfinite(attend(**case.inputs)["output"].astype(np.float32)).all()
    else:
        with pytest.raises(Exception, match=ONE_LINE):
            attend(**case.inputs)
