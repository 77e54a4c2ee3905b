"""Dense attention and the decode methods."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from ..checks import (
    ShapeError,
    check_choice,
    check_decode_step,
    check_int,
    check_local_window,
    check_rank,
    check_shape,
)
from ..common import stats
from ..methods import registry
from .call import Call, check_integers


def attend_indices(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    indices: mx.array,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[mx.array, mx.array]:
    """Exact attention of one query per head over the listed keys (sparq.7).

    Args:
        indices: ``(B, Hkv, N)`` int32, ascending; ``-1``, or any number that is no key's, = empty slot.

    Returns:
        ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``; 0 and -inf where every slot is empty.
    """
    call = Call("attend_indices", queries, keys, values, scale=scale, left_padding=None, backend=backend)
    n = call.sizes
    check_decode_step(n, "attend_indices")
    if len(indices.shape) != 3 or tuple(indices.shape[:2]) != (n.B, n.Hkv):
        raise ShapeError(f"indices: expected shape (B={n.B}, Hkv={n.Hkv}, N), got {tuple(indices.shape)}.")
    check_integers("indices", indices)
    run = registry.load("attend_indices", call.backend)
    result: tuple[mx.array, mx.array] = run(queries, keys, values, indices, scale=call.scale)
    return result


def dense_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Causal attention over all valid keys: the baseline."""
    call = Call(
        "dense",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    return call.dense()


def sparq_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    rank: int = 32,
    top_k: int = 128,
    local_window: int | None = None,
    reallocate: str | bool = "auto",
    group_reduce: str = "softmax",
    component_score: str = "query",
    scale: float | None = None,
    left_padding: mx.array | None = None,
    keys_t: mx.array | None = None,
    value_mean: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """One decode step of SparQ attention (docs/spec/sparq.md; arXiv 2312.04985, Algorithm 1).

    Args:
        rank: components r of the queries used to score every key, 1..D.
        top_k: keys attended per KV head, the local window included.
        local_window: last valid keys that are always attended; None means ``top_k // 4``.
        reallocate: mix in the mean value for the mass left out; "auto" does so for one query head per KV head.
        group_reduce: sum over the query heads of a group of the "softmax" (the paper) or of the "logits" (the
            authors' evaluation code).
        component_score: rank components by |q| ("query", the paper) or by |q| times the spread of the keys
            ("query_key").
        keys_t: ``(B, Hkv, D, S)`` keys stored component-major: without it, nothing is saved on real hardware.
            With the `metal` backend slices of larger buffers are copied on every call; a cache passes whole buffers.
        value_mean: ``(B, Hkv, D)`` mean of the valid values, the current one included; computed when absent.
    """
    call = Call(
        "sparq",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    n = call.sizes
    check_rank(rank, n.D)
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    check_choice("reallocate", reallocate, ("auto", True, False))
    check_choice("group_reduce", group_reduce, ("softmax", "logits"))
    check_choice("component_score", component_score, ("query", "query_key"))
    check_shape("keys_t", keys_t, (n.B, n.Hkv, n.D, n.S))
    check_shape("value_mean", value_mean, (n.B, n.Hkv, n.D))
    reallocates = n.G == 1 if reallocate == "auto" else bool(reallocate)
    if reallocates and value_mean is None:
        value_mean = registry.load("masked_mean", call.backend)(values, call.left_padding)
    weight = None
    if component_score == "query_key":
        weight = registry.load("deviation", call.backend)(keys, call.left_padding)
    return call.decode(
        "sparq",
        partial(stats.sparq_elements, rank=rank),
        top_k,
        top_k=top_k,
        rank=rank,
        local_window=window,
        reallocate=reallocates,
        group_reduce=group_reduce,
        component_weight=weight,
        keys_t=keys_t,
        value_mean=value_mean,
    )


def streaming_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    sink_tokens: int = 16,
    recent_tokens: int = 112,
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend the first ``sink_tokens`` and the last ``recent_tokens`` valid keys; positions stay as they are."""
    call = Call(
        "streaming",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    top_k = check_int("sink_tokens", sink_tokens, 0) + check_int("recent_tokens", recent_tokens, 1)
    return call.decode(
        "streaming", stats.streaming_elements, top_k, sink_tokens=sink_tokens, recent_tokens=recent_tokens
    )


def oracle_top_k_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    top_k: int = 128,
    local_window: int | None = None,
    group_reduce: str = "softmax",
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend the ``top_k`` keys that the exact scores choose: a bound on what SparQ can keep, not a saving."""
    call = Call(
        "oracle_top_k",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    check_choice("group_reduce", group_reduce, ("softmax", "logits"))
    return call.decode(
        "oracle_top_k", stats.oracle_top_k_elements, top_k, top_k=top_k, local_window=window, group_reduce=group_reduce
    )


def flexgen_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    top_k: int = 128,
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Softmax over all keys, values of the ``top_k`` largest group-summed weights, not renormalised."""
    call = Call(
        "flexgen",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    check_int("top_k", top_k, 1)
    return call.decode("flexgen", stats.flexgen_elements, top_k, top_k=top_k)


def h2o_scores(
    queries: mx.array,
    keys: mx.array,
    *,
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
) -> mx.array:
    """Attention each key has received from causal ``queries``: float32 ``(B, Hkv, S)``, -inf at invalid keys.

    What `h2o_attention` starts from after a dense prompt.
    """
    call = Call("h2o_scores", queries, keys, keys, scale=scale, left_padding=left_padding, backend=backend)
    run = registry.load("h2o_scores", call.backend)
    scores: mx.array = run(queries, keys, scale=call.scale, left_padding=call.left_padding)
    return scores


def h2o_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scores: mx.array,
    top_k: int = 128,
    local_window: int | None = None,
    scale: float | None = None,
    left_padding: mx.array | None = None,
    backend: str = "auto",
    return_stats: bool | str = False,
) -> Any:
    """Attend the last ``local_window`` keys and the heavy hitters, ``top_k`` together; evict the rest for good.

    Args:
        scores: ``(B, Hkv, S)`` attention received so far, 0 for the current key, -inf for evicted keys.

    Returns:
        ``out, scores``; with ``return_stats`` also a `Stats`. The new scores hold -inf for what this step evicted.
    """
    call = Call(
        "h2o",
        queries,
        keys,
        values,
        scale=scale,
        left_padding=left_padding,
        backend=backend,
        return_stats=return_stats,
    )
    n = call.sizes
    check_decode_step(n, "h2o")
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    check_shape("scores", scores, (n.B, n.Hkv, n.S))
    out, lse, updated = call.run("h2o", scores=scores, top_k=top_k, local_window=window)
    return (out, updated, call.record(lse, stats.h2o_elements, top_k)) if return_stats else (out, updated)
