"""Run the mathematics of the float64 oracle with the arguments of the public functions.

No argument passes through the checks of `mlx_sparse.api`, which the backends use too. Therefore a fault of these checks
cannot be on both sides of a comparison. `X_attention` returns the output only. Decode methods use dense attention if
they would attend to every key, and for several queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import Array

from mlx_sparse.core.blocks.layout import Layout
from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.oracle import SparQSelection, attend, baselines, prefill, saap, sample, sparq

DEFAULTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparq": {"rank": 32, "top_k": 128, "component_score": "query", "key_bits": 16, "reallocate": "auto"},
    "quest": {"page_size": 16, "top_k": 1024},
    "saap": {"sink_tokens": 1, "recent_tokens": 2047},
    "streaming": {"sink_tokens": 16, "recent_tokens": 112},
    "flexgen": {"top_k": 128},
    "oracle_top_k": {"top_k": 128},
    "h2o": {"top_k": 128},
    "sample": {"alpha_column": 0.95, "alpha_slash": 0.95, "chunks": 1, "block_size": 128},
    "minference": {"vertical_tokens": 1000, "slash_tokens": 6096, "block_size": 64},
    "bigbird": {"window": 0.08, "global_share": 0.08, "random_blocks": 1, "block_size": 64},
    "streaming_prefill": {"sink_tokens": 4, "window": 0.08, "block_size": 64},
    "hyperattention": {"bucket_size": 256, "sampled_keys": 256, "hash_bits": 7, "exact_rows": 4096},
    "hash_sparse": {"buckets": 16},
}
PROMPTS = ("sample", "minference", "bigbird", "streaming_prefill", "hyperattention", "hash_sparse")
MODULES = (attend, baselines, prefill, saap, sample, sparq)


def __getattr__(name: str) -> Callable[..., Any]:
    method = name.removesuffix("_attention")
    if method == name or method not in DEFAULTS:
        raise AttributeError(name)
    return lambda *arrays, **settings: run(method, *arrays, **settings)[0]


def run(method: str, q: Array, k: Array, v: Array, **settings: Any) -> tuple[Array, ...]:
    """Return the output of a method and its other results, such as the log-sum-exp."""
    given = {"scale": None, "left_padding": None, **DEFAULTS[method], **settings}
    given["scale"] = q.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
    if method in ("sparq", "oracle_top_k", "h2o"):
        given["local_window"] = _window(given)
    if _is_dense(method, q.shape[2], k.shape[2], given):
        how = {name: given[name] for name in ("scale", "left_padding")}
        return attend.dense_attention(q, k, v, **how), attend.dense_lse(q, k, **how)
    if method in PROMPTS:
        del given["left_padding"]
    if method == "sparq":
        given = _sparq_arguments(q, k, v, given)
    name = f"{method}_attention"
    function = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    found: tuple[Array, ...] = function(q, k, v, **given)
    return found


def sparq_select(q: Array, k: Array, **settings: Any) -> SparQSelection:
    """Select the keys of a decode step of SparQ."""
    given = {"scale": q.shape[3] ** -0.5, "left_padding": None, **DEFAULTS["sparq"], **settings}
    return sparq.sparq_select(q, k, _selection(k, given))


def _window(given: dict[str, Any]) -> int:
    window = given.get("local_window")
    return given["top_k"] // 4 if window is None else window


def _selection(k: Array, given: dict[str, Any]) -> Selection:
    padding, weight, coded = given["left_padding"], None, None
    if given["key_bits"] == 4:
        coded = sparq.code_keys(np.where(_valid(k, padding), k, 0), padding)
    if given["component_score"] == "query_key":
        weight = sparq.deviation(k, padding) if coded is None else sparq.key_spread(coded, k, padding)
    return Selection(
        given["rank"], given["top_k"], _window(given), given["scale"], weight, padding, coded, given.get("bias")
    )


def _valid(k: Array, padding: Any) -> Array:
    first = np.zeros(len(k), int) if padding is None else np.asarray(padding)
    return np.arange(k.shape[2])[:, None] >= first[:, None, None, None]


def _sparq_arguments(q: Array, k: Array, v: Array, given: dict[str, Any]) -> dict[str, Any]:
    mean = given.get("value_mean")
    mean = sparq.masked_mean(v, given["left_padding"]) if mean is None else mean
    mixes = q.shape[1] == k.shape[1] if given["reallocate"] == "auto" else given["reallocate"]
    return {**_selection(k, given)._asdict(), "value_mean": mean, "reallocate": mixes}


def _is_dense(method: str, L: int, S: int, given: dict[str, Any]) -> bool:
    """Return True if the public function of a method uses dense attention."""
    if method == "sample":
        alone = Layout(L, S, given["chunks"], given["block_size"]).all_sampled
        return alone or max(given["alpha_column"], given["alpha_slash"]) >= 1
    if method == "h2o" or method in PROMPTS:
        return False
    attended = given.get("top_k", given.get("sink_tokens", 0) + given.get("recent_tokens", 0))
    if method == "quest":
        attended = -(-attended // given["page_size"]) * given["page_size"]
    return method == "dense" or L > 1 or S <= attended
