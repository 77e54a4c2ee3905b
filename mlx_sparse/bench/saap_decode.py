"""Time of one decode step of SAAP against MLX's dense attention, interleaved in one run.

As `mlx_sparse.bench.decode` does it: route, list and attend in every layer, and its share of listing keys anew.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from .. import registry
from ..buckets import BucketIndex, Router, fold, kmeans_network
from ..cache import SparseKVCache
from ..checks import check_int
from ..config import SAAP, Step
from ..machine import memory
from ..oracle.saap import route_scores
from . import decode
from .dense import Shape
from .launches import Router as Network
from .saap_roofline import BUCKETS, ROUTERS, UNEVEN, router_of

FOLDS = 3  # that are timed; their median counts
FAVOUR = 100.0  # the logit by which buckets are sure to be visited


@dataclass(frozen=True)
class Row(decode.Row):
    """One shape, type, network and length.

    Attributes:
        hidden: units of the query network; 0 for centroids that route.
        advised: keys from which ``dense_below=auto`` attends sparsely.
    """

    hidden: int = 0
    advised: int = 0


@dataclass(frozen=True)
class _Unrotated:
    """Random keys need no RoPE."""

    irreversible: None = None

    def before(self, recorder: Any, rows: mx.array, offset: int | mx.array) -> mx.array:
        return rows

    def turned_back(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        return rows


def measure(shape: Shape, S: int, dtype: str, config: SAAP, hidden: str, backend: str, repeat: int) -> Row:
    """Check the method's result, then time it.

    Args:
        hidden: one of `networks`.
    """
    kind = getattr(mx, dtype)
    C = config.fitted_buckets if config.mode == "online" else BUCKETS
    check_int("probes", config.probes, 1, C - 1)  # there have to be buckets that are not visited
    backend = registry.resolve(backend, "saap_route", D=shape.D, G=shape.G)
    size = 2 * shape.Hkv * S * shape.D * kind.size
    layers = max(1, min(decode.MOST_LAYERS, decode.WORKING_SET // size))
    network = Network(C, router_of(shape, hidden).hidden if config.mode == "trained" else 0)
    gpu = registry.gpu_kind() if backend == "metal" else ""
    item = 2 if network.hidden else kind.size
    step = Step(shape.Hkv, shape.G, shape.D, kind.size, gpu, C, network.weights(shape.D) * item)
    advised = config.shortest_context(step)
    row = partial(Row, dtype, shape, S, str(config), backend, layers, hidden=network.hidden, advised=advised)
    if config.attended >= S:
        return row(note=f"dense: all of {S} keys are attended")
    if (needed := 1.5 * size * layers) > decode.LARGEST_SHARE * memory():
        return row(note=f"needs {needed / 1e9:.0f} GB of this machine's {memory() / 1e9:.0f} GB")
    queries = decode.normal(shape.Hq, 1, shape.D, kind)
    caches = [_cache(shape, S, config, network, kind) for _ in range(layers)]
    listing = median(_seconds_to_fold(caches, S, config) for _ in range(FOLDS))
    wrong = parity(queries, caches[0], config, backend)
    gc.collect()
    if wrong:
        return row(note=wrong, failed=True)
    dense, sparse = decode.in_turns(
        queries, caches, lambda out, cache: sparse_attention(out, cache, config, backend), repeat
    )
    share = 1e6 * listing / layers / config.fold_every
    return row(dense=dense, sparse=tuple(time + share for time in sparse))


def networks(config: SAAP) -> list[str]:
    """The networks to measure: those of `ROUTERS`, or one without a name where centroids route."""
    return list(ROUTERS) if config.mode == "trained" else [""]


def sparse_attention(queries: mx.array, cache: SparseKVCache, config: SAAP, backend: str) -> mx.array:
    """A step as an enabled model takes it, between two folds."""
    index, S = cache.index, cache.length
    assert index is not None
    indices, counts = index.lists(queries, S, config, None, backend)
    keys, values, length = cache.rows(backend)
    attend = registry.load("attend_indices", backend)
    scale = queries.shape[-1] ** -0.5
    out: mx.array = attend(queries, keys, values, indices, scale=scale, counts=counts, **length)[0]
    return out


def parity(queries: mx.array, cache: SparseKVCache, config: SAAP, backend: str) -> str | None:
    """What is wrong with the method's result; None if nothing is.

    The buckets must be among the best of the oracle, and the result attention over the keys of those buckets and of the
    window: as close to float64's as MLX's own attention over the same rows.
    """
    index = cache.index
    assert index is not None
    assert index.ids is not None
    network = dict(index.network or {})
    visited = np.array(registry.load("saap_route", backend)(queries, probes=config.probes, **network))
    scores = route_scores(decode.double(queries), **{name: decode.double(w) for name, w in network.items()})
    missed = scores.copy()
    np.put_along_axis(missed, visited.astype(np.int64), -np.inf, axis=-1)
    chosen = np.take_along_axis(scores, visited.astype(np.int64), axis=-1)
    if (missed.max(axis=-1) - chosen.min(axis=-1) > 1e-4 * scores.max(axis=-1)).any():
        return "wrong result: other buckets"
    out = decode.double(sparse_attention(queries, cache, config, backend))[0, :, 0]
    ids, position = np.array(index.ids)[0], np.arange(cache.length)
    exact = (position < config.sink_tokens) | (position >= cache.length - config.recent_tokens)
    G = len(out) // len(ids)
    expected, dense = np.empty_like(out), np.empty_like(out)
    for head, own in enumerate(ids):
        rows = mx.array(np.flatnonzero(exact | np.isin(own, visited[0, head])))
        keys, values = (array[:, head : head + 1][:, :, rows] for array in (cache.keys, cache.values))
        group = slice(head * G, head * G + G)
        q = queries[:, group]
        attended = decode.plain(*(decode.double(array)[0] for array in (q.swapaxes(1, 2), keys, values)))
        expected[group] = attended[0]
        same = mx.fast.scaled_dot_product_attention(q, keys, values, scale=q.shape[-1] ** -0.5)
        dense[group] = decode.double(same)[0, :, 0]
    allowed = 2 * np.abs(dense - expected).max() + mx.finfo(queries.dtype).eps * np.abs(expected).max()
    found = np.abs(out - expected).max()
    return None if found <= allowed else f"wrong result: error {found:.1e}, allowed {allowed:.1e}"


def table(rows: Sequence[Row]) -> str:
    """The rows for people; times are per layer, medians with quartiles."""
    columns = ["type", "query heads", "KV heads", "D", "hidden units", "S", "sparse by default from"]
    columns += ["dense, us", "saap, us", "dense / saap"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row.dtype, row.shape.Hq, row.shape.Hkv, row.shape.D, row.hidden, row.S, row.advised]
        if row.dense and row.sparse:
            ratio = f"{row.dense[1] / row.sparse[1]:.2f}"
            cells += [decode.spread_of(row.dense), decode.spread_of(row.sparse), ratio]
        else:
            cells += [row.note, "", ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _cache(shape: Shape, S: int, config: SAAP, network: Network, dtype: mx.Dtype) -> SparseKVCache:
    """A cache with a router of random weights, whose biases send every query to the same buckets.

    These hold `UNEVEN` times their share of the keys.
    """
    C, H, scale = network.buckets, network.hidden, shape.D**-0.5
    chosen = np.stack([np.random.default_rng(h).permutation(C)[: config.probes] for h in range(shape.Hkv)])
    bias = np.zeros((shape.Hkv, C), np.float16)
    np.put_along_axis(bias, chosen, FAVOUR, axis=1)
    centroids = decode.normal(shape.Hkv, C, shape.D, dtype)[0]
    weights = kmeans_network(centroids, scale)
    if H:
        weights = {
            "hidden_weight": decode.normal(shape.Hkv, shape.D, H, mx.float16)[0] * scale,
            "hidden_bias": decode.normal(1, shape.Hkv, H, mx.float16)[0, 0],
            "out_weight": decode.normal(shape.Hkv, H, C, mx.float16)[0] * H**-0.5,
        }
    weights["out_bias"] = mx.array(bias)
    mx.eval(weights)
    cache = decode.cache_of(*(decode.normal(shape.Hkv, S, shape.D, dtype) for _ in "kv"))
    index = cache.index = BucketIndex(Router(_Unrotated(), scale, C, centroids, weights))
    every = max(C // (UNEVEN * config.probes), 2)
    ids, key = np.empty((1, shape.Hkv, S), np.int16), np.arange(S)
    for row, own in zip(ids[0], chosen, strict=True):
        others = np.setdiff1d(np.arange(C), own)
        row[:] = np.where(key % every == 1, own[key // every % len(own)], others[key % len(others)])
    index.ids = mx.array(ids)
    return cache


def _seconds_to_fold(caches: list[SparseKVCache], S: int, config: SAAP) -> float:
    start = time.perf_counter()
    fold(list(caches), S, config)
    return time.perf_counter() - start
