"""How well SparQ's approximate scores select keys, by component score and rank (SparQ paper, figure E2)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ... import oracle
from ...checks import ConfigError, check_int
from ...lm.rope import Recorder
from ...lm.tracing import Seen, observe
from ...model_info import leaves
from .journal import Journal
from .tasks.base import starts

Array = npt.NDArray[np.float64]
RANKS, SCORES, TOP_K = (4, 8, 16, 32, 48), ("query", "query_key"), 128
QUERIES = 64  # the last ones of a text: each is the query of a decode step
STEP = 512  # tokens that the model processes at a time


@dataclass(frozen=True)
class Figures:
    """Means over layers, heads and queries, of a selection without a local window.

    Attributes:
        agreement: share of the keys with the largest group-summed attention (the exact selection) that SparQ selects.
        recall, exact_recall: attention recall of the selected keys and of the exact selection.
        alpha_gap: absolute difference of ``recall`` and SparQ's estimate of it (sparq.8), by query head.
    """

    agreement: float
    recall: float
    exact_recall: float
    alpha_gap: float


@dataclass(frozen=True)
class SelectionRow:
    """SparQ's selection in ``layers`` layers: means over ``examples`` texts, and standard errors (NaN with one)."""

    component_score: str
    rank: int
    head_dim: int
    top_k: int
    context: int
    layers: int
    examples: int
    mean: Figures
    error: Figures


@dataclass(frozen=True)
class OfText:
    """The figures of one text for each selection, in layers with plain KV caches, whose smallest head dim is ``D``."""

    D: int
    layers: int
    figures: list[Figures]


def run(
    model: Any,
    tokens: list[int],
    journal: Journal[OfText],
    *,
    context: int,
    limit: int,
    seed: int,
    opening: Sequence[int] = (),
) -> list[SelectionRow]:
    """Compare SparQ's selections with the exact one at the last `QUERIES` tokens of ``limit`` parts of a text.

    Args:
        context: tokens of each part, with ``opening``, the tokens that the model expects first.

    Raises:
        ConfigError: there is too little text, the context is too short, no layer has a plain KV cache, or attention is
            not finite.
    """
    check_int("--context", context, TOP_K + QUERIES)
    found = []
    for start in starts(tokens, context - len(opening), limit, random.Random(seed)):
        text = [*opening, *tokens[start : start + context - len(opening)]]
        name = f"{context}/{start}/{[*opening]}"
        if name not in journal.results:
            journal.add(name, _measure(model, text))
        found.append(journal.results[name])
    first, rows = found[0], []
    for i, selection in enumerate(_selections(first.D)):
        each = np.array([astuple(text.figures[i]) for text in found])
        error = each.std(axis=0, ddof=1) / math.sqrt(limit) if limit > 1 else np.full(each.shape[1], math.nan)
        sizes = first.D, TOP_K, context, first.layers, limit
        rows.append(SelectionRow(*selection, *sizes, Figures(*each.mean(axis=0).tolist()), Figures(*error.tolist())))
    return rows


def _selections(D: int) -> list[tuple[str, int]]:
    return [(score, rank) for score in SCORES for rank in RANKS if rank <= D]


def _measure(model: Any, text: Sequence[int]) -> OfText:
    """Process one text densely, and compare the selections of its last queries in every layer with a plain KV cache."""
    caches = make_prompt_cache(model)
    first = len(text) - QUERIES
    for start in range(0, first, STEP):
        model(mx.array([text[start : min(start + STEP, first)]]), cache=caches)
        mx.eval([leaf.state for leaf in leaves(caches)])
    dims: list[int] = []
    sums: dict[tuple[str, int], Array] = {}

    def visit(seen: Seen) -> None:
        if seen.keys is None or not isinstance(leaves(caches)[seen.layer], KVCache):
            return
        cache: Any = leaves(caches)[seen.layer]
        keys, values = cache.keys[:, :, : len(text)], cache.values
        if seen.queries.shape[3] == keys.shape[3] == values.shape[3]:
            dims.append(keys.shape[3])
            q, k = (np.array(rows.astype(mx.float32), np.float64) for rows in (seen.queries, keys))
            selections = _selections(dims[-1])
            for selection, figures in zip(selections, compare(q, k, seen.scale, selections, TOP_K), strict=True):
                sums[selection] = sums.get(selection, 0.0) + figures

    with Recorder(model) as recorder:
        observe(model, mx.array([text[first:]]), caches, visit, recorder)
    if not dims:
        raise ConfigError("--model: expected an attention layer with a plain KV cache, got none.")
    D = min(dims)
    return OfText(D, len(dims), [Figures(*(sums[one] / len(dims)).tolist()) for one in _selections(D)])


def compare(q: Array, k: Array, scale: float, selections: Sequence[tuple[str, int]], top_k: int) -> Array:
    """Return `Figures` of each selection as an array: means over ``n`` decode steps, whose queries are the last ones.

    Args:
        q, k: queries ``(1, Hq, n, D)`` and keys ``(1, Hkv, S, D)``.

    Raises:
        ConfigError: attention is not finite.
    """
    (_, Hkv, S, D), n = k.shape, q.shape[2]
    total = np.zeros((len(selections), 4))
    for i in range(n):
        query, keys = q[:, :, i : i + 1], k[:, :, : S - n + 1 + i]
        logits = np.einsum("hgd,hsd->hgs", query.reshape(Hkv, -1, D), keys[0]) * scale
        if not np.isfinite(logits).all():
            raise ConfigError("--model: expected attention of finite numbers, got others.")
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        exact = np.argsort(-weights.sum(axis=1), axis=-1, kind="stable")[:, :top_k]
        best = _captured(weights, exact)
        options: dict[str, Any] = {"top_k": top_k, "local_window": 0, "scale": scale}
        for j, (score, rank) in enumerate(selections):
            chosen = oracle.sparq_select(query, keys, rank=rank, component_score=score, **options)
            recall = _captured(weights, chosen.indices[0])
            agreement = [
                np.isin(ours, best_keys).mean() for ours, best_keys in zip(chosen.indices[0], exact, strict=True)
            ]
            gap = np.abs(chosen.alpha.reshape(recall.shape) - recall)
            total[j] += [np.mean(agreement), recall.mean(), best.mean(), gap.mean()]
    mean: Array = total / n
    return mean


def _captured(weights: Array, indices: npt.NDArray[Any]) -> Array:
    """Sum the ``weights (Hkv, G, S)`` at ``indices (Hkv, k)``."""
    found: Array = np.take_along_axis(weights, indices[:, None, :], axis=-1).sum(axis=-1)
    return found
