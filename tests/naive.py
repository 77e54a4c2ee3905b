"""A second reading of the papers, deliberately naive: lists and loops, and what the oracle's tests share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlx_sparse.oracle import (
    dense_attention,
    flexgen_attention,
    oracle_top_k_attention,
    sparq_attention,
    streaming_attention,
)

Array = npt.NDArray[np.float64]
Row = list[float]
EPS = float(np.finfo(np.float64).eps)


def make(
    *, B: int = 1, Hkv: int = 2, G: int = 1, S: int = 40, D: int = 16, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one decode step: normal, so no two scores are equal."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((B, Hkv * G, 1, D)),
        rng.standard_normal((B, Hkv, S, D)),
        rng.standard_normal((B, Hkv, S, D)),
    )


def assert_same(actual: Array, expected: Array, keys: Array) -> None:
    """Equal up to the rounding of one multiplication and one addition for each of the ``S D`` numbers read."""
    S, D = keys.shape[2:]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2 * S * D * EPS * np.abs(expected).max())


# --- The second reading ----------------------------------------------------------------------------------------------
# One KV head at a time: q holds G rows, K and V one row per valid key. Written from the text of the papers only.


def dot(a: Row, b: Row) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(x: Row) -> Row:
    exps = [math.exp(xi - max(x)) for xi in x]
    return [e / math.fsum(exps) for e in exps]


def argtopk(x: Row, k: int) -> list[int]:
    return sorted(sorted(range(len(x)), key=lambda i: -x[i])[:k])


def mix(weights: Row, rows: list[Row]) -> Row:
    return [math.fsum(w * row[i] for w, row in zip(weights, rows, strict=True)) for i in range(len(rows[0]))]


def approximate(q: list[Row], K: list[Row], r: int) -> list[Row]:
    """Step 1 with its GQA paragraph: approximate logits of every query head."""
    d = len(K[0])
    i1 = argtopk([sum(abs(head[i]) for head in q) for i in range(d)], r)
    logits = []
    for head in q:
        tau = math.sqrt(d * sum(abs(head[i]) for i in i1) / sum(abs(x) for x in head))
        logits.append([dot([head[i] for i in i1], [key[i] for i in i1]) / tau for key in K])
    return logits


def attention(head: Row, K: list[Row], V: list[Row], i2: list[int]) -> Row:
    return mix(softmax([dot(head, K[j]) / math.sqrt(len(head)) for j in i2]), [V[j] for j in i2])


def interpolate(y: Row, alpha: float, V: list[Row]) -> Row:
    mean = mix([1 / len(V)] * len(V), V)
    return [alpha * a + (1 - alpha) * b for a, b in zip(y, mean, strict=True)]


def paper(q: list[Row], K: list[Row], V: list[Row], r: int, k: int, local: int) -> list[Row]:
    """Algorithm 1. Its local mask adds 1, which forces local keys for one head; for a group it takes more."""
    bonus = 1.0 if len(q) == 1 else math.inf
    s_hat = [softmax(logits) for logits in approximate(q, K, r)]
    m = [bonus if j >= len(K) - local else 0.0 for j in range(len(K))]
    i2 = argtopk([sum(s[j] for s in s_hat) + m[j] for j in range(len(K))], k)
    y = [attention(head, K, V, i2) for head in q]
    if len(q) == 1 and len(K) > k:
        return [interpolate(y[0], math.fsum(s_hat[0][j] for j in i2), V)]
    return y


def appendix_b(q: list[Row], K: list[Row], V: list[Row], r: int, k: int, local: int) -> list[Row]:
    """The listing: no local window, the mean value for every group size."""
    assert local == 0
    s_hat = [softmax(logits) for logits in approximate(q, K, r)]
    i2 = argtopk([sum(column) for column in zip(*s_hat, strict=True)], k)
    alpha = [math.fsum(s[j] for j in i2) for s in s_hat]
    return [interpolate(attention(head, K, V, i2), a, V) for head, a in zip(q, alpha, strict=True)]


def evaluation(q: list[Row], K: list[Row], V: list[Row], r: int, k: int, local: int) -> list[Row]:
    """The authors' evaluation code with k - 1 and local - 1, as its current token is free; groups do not reallocate."""
    s = approximate(q, K, r)
    forced = [[math.inf if len(K) - 1 - j < local else x for j, x in enumerate(head)] for head in s]
    i2 = argtopk([sum(column) for column in zip(*forced, strict=True)], min(k, len(K)))
    y = [attention(head, K, V, i2) for head in q]
    if len(q) == 1 and len(K) > k:
        return [interpolate(y[0], math.fsum(softmax(s[0])[j] for j in i2), V)]
    return y


def apply(reading: Callable[..., list[Row]], qkv: tuple[Array, Array, Array], padding: list[int], *args: Any) -> Array:
    """A reading over batch and KV heads; invalid keys are cut off before it sees them."""
    q, k, v = qkv
    Hkv = k.shape[1]
    out = np.empty_like(q)
    for b, h in np.ndindex(k.shape[:2]):
        heads = slice(h * q.shape[1] // Hkv, (h + 1) * q.shape[1] // Hkv)
        valid = slice(padding[b], None)
        out[b, heads, 0] = reading(q[b, heads, 0].tolist(), k[b, h, valid].tolist(), v[b, h, valid].tolist(), *args)
    return out


METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (dense_attention, {}),
    "sparq": (sparq_attention, {"rank": 4, "top_k": 9, "reallocate": True}),
    "sparq-query_key": (sparq_attention, {"rank": 4, "top_k": 9, "component_score": "query_key"}),
    "sparq-logits": (sparq_attention, {"rank": 4, "top_k": 9, "group_reduce": "logits"}),
    "streaming": (streaming_attention, {"sink_tokens": 2, "recent_tokens": 7}),
    "flexgen": (flexgen_attention, {"top_k": 9}),
    "oracle_top_k": (oracle_top_k_attention, {"top_k": 9}),
}
every_method = pytest.mark.parametrize(("method", "options"), METHODS.values(), ids=METHODS)
