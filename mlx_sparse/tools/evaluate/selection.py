"""How well SparQ's approximate scores choose keys, by rank (SparQ's Fig. E2): in a dense run, layer by layer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...checks import ConfigError, check_int
from ...lm.rope import Recorder
from ...lm.tracing import Seen, observe
from ...methods.sparq import Selection
from ...model_info import leaves
from ...ops.baselines import exact_weights
from ...ops.select import top_k_select
from ...ops.sparq import deviation, sparq_select
from .. import formats
from .journal import Journal
from .table import plus_minus
from .tasks.base import starts

Array = npt.NDArray[np.float64]

RANKS = (4, 8, 16, 32, 48)
SCORES = ("query", "query_key")
QUERIES = 64  # the last ones of a text: each is the query of a decode step
STEP = 512  # tokens that the model sees at a time
CHUNK = 1 << 24  # elements of the keys that queries are compared with at a time
FIGURES = 4  # what is measured of a choice, along the last axis
AGREEMENT, MASS, EXACT_MASS, ALPHA_GAP = range(FIGURES)
KEPT = "choices.jsonl"


@dataclass(frozen=True)
class SelectionRow:
    """SparQ's choice of keys with one component score and rank: means over layers, heads and queries.

    Attributes:
        component_score, rank: of the choice. There is no local window: it is part of every choice.
        head_dim, layers: of the model; layers with a sliding window are left out.
        top_k: keys that are chosen.
        context, examples: tokens of a text, and texts.
        agreement: share of the exact choice's keys, those with the largest group-summed attention, that are chosen.
        worst, worst_layer: the agreement of the layer where it is smallest, and the position of its cache.
        mass: attention on the chosen keys.
        exact_mass: attention on those of the exact choice.
        alpha_gap: difference, without its sign, of ``mass`` and SparQ's estimate of it (sparq.8), by query head.
        agreement_error, mass_error, alpha_gap_error: standard errors over the texts; NaN with one text.
    """

    component_score: str
    rank: int
    head_dim: int
    top_k: int
    context: int
    layers: int
    examples: int
    agreement: float
    agreement_error: float
    worst: float
    worst_layer: int
    mass: float
    mass_error: float
    exact_mass: float
    alpha_gap: float
    alpha_gap_error: float


@dataclass(frozen=True)
class OfText:
    """The ``figures`` of one text, by layer and choice, as a file keeps them."""

    figures: list[list[list[float]]]


def run(
    model: Any,
    tokens: list[int],
    *,
    context: int,
    limit: int,
    seed: int,
    ranks: Sequence[int] = RANKS,
    top_k: int = 128,
    opening: Sequence[int] = (),
    out: Path | None = None,
    key: str = "",
) -> list[SelectionRow]:
    """Compare SparQ's choices with the exact one at the last `QUERIES` tokens of ``limit`` texts.

    Args:
        model: loaded by mlx-lm and not enabled.
        tokens: of a text, from whose parts the texts are taken.
        context: tokens of each, with ``opening``.
        ranks: those above the model's head dim are left out.
        opening: tokens that the model expects before a text.
        out: the folder whose `KEPT` keeps the figures of every text as they come; ``key`` stands for model and text.

    Raises:
        ConfigError: there is too little text, the context is too short, no layer has a plain KV cache, or attention is
            not finite.
        ArtefactError: `KEPT` is damaged, or another command's.
    """
    from tqdm import tqdm

    check_int("top_k", top_k, 1)
    if context < top_k + QUERIES:
        raise ConfigError(f"context: expected at least top_k + {QUERIES} = {top_k + QUERIES}, got {context}.")
    sizes = _plain_layers(model)
    layers, head_dim = sorted(sizes), min(sizes.values())
    choices = [(score, rank) for score in SCORES for rank in ranks if rank <= head_dim]
    places = starts(tokens, context - len(opening), limit, random.Random(seed))
    journal, figures = Journal(out and out / KEPT, "eval top_k_agreement", key, OfText), []
    with tqdm(total=limit * context, unit="token", desc="top_k_agreement", delay=2, disable=None) as progress:
        for start in places:
            text = [*opening, *tokens[start : start + context - len(opening)]]
            name = f"{context}/{start}/{[*opening]}/{top_k}/{choices}"
            if name not in journal.results:
                found = _measure(model, text, layers, choices, top_k, progress)
                of_text = np.array([found[layer] for layer in layers])
                if not np.isfinite(of_text).all():
                    raise ConfigError("--model: expected attention of finite numbers, got others.")
                journal.add(name, OfText(of_text.tolist()))
            figures.append(journal.results[name].figures)
    # (texts, layers, choices, figures)
    return _rows(np.array(figures), choices, layers, head_dim=head_dim, top_k=top_k, context=context)


def _rows(
    figures: Array, choices: Sequence[tuple[str, int]], layers: Sequence[int], **common: int
) -> list[SelectionRow]:
    limit, rows = len(figures), []
    texts, by_layer = figures.mean(axis=1), figures.mean(axis=0)[..., AGREEMENT]
    error = texts.std(axis=0, ddof=1) / math.sqrt(limit) if limit > 1 else np.full(texts.shape[1:], math.nan)
    for choice, (score, rank) in enumerate(choices):
        mean, worst = texts[:, choice].mean(axis=0), int(by_layer[:, choice].argmin())
        row = SelectionRow(
            component_score=score,
            rank=rank,
            layers=len(layers),
            examples=limit,
            agreement=float(mean[AGREEMENT]),
            agreement_error=float(error[choice, AGREEMENT]),
            worst=float(by_layer[worst, choice]),
            worst_layer=layers[worst],
            mass=float(mean[MASS]),
            mass_error=float(error[choice, MASS]),
            exact_mass=float(mean[EXACT_MASS]),
            alpha_gap=float(mean[ALPHA_GAP]),
            alpha_gap_error=float(error[choice, ALPHA_GAP]),
            **common,
        )
        rows.append(row)
    return rows


def _plain_layers(model: Any) -> dict[int, int]:
    """The head dim of every layer that attends over a plain KV cache of its own, by the position of the cache.

    Raises:
        ConfigError: there is none.
    """
    caches, sizes = make_prompt_cache(model), {}

    def visit(seen: Seen) -> None:
        if seen.keys is not None and isinstance(leaves(caches)[seen.layer], KVCache):
            D = seen.keys.shape[3]
            if seen.queries.shape[3] == D == leaves(caches)[seen.layer].values.shape[3]:
                sizes[seen.layer] = D

    with Recorder(model) as recorder:
        observe(model, mx.array([[0]]), caches, visit, recorder)
    if not sizes:
        raise ConfigError("--model: expected an attention layer with a plain KV cache, got none.")
    return sizes


def _measure(
    model: Any,
    text: Sequence[int],
    layers: Sequence[int],
    choices: Sequence[tuple[str, int]],
    top_k: int,
    progress: Any,
) -> dict[int, Array]:
    """The figures ``(choices, figures)`` by layer: means over the last queries of one text, which runs densely."""
    caches = make_prompt_cache(model)
    found = {layer: np.zeros((len(choices), FIGURES)) for layer in layers}

    def visit(seen: Seen) -> None:
        if seen.layer not in found:
            return
        S = seen.position + seen.queries.shape[2]
        wanted = min(S - (len(text) - QUERIES), seen.queries.shape[2])
        if wanted > 0:
            keys, queries = leaves(caches)[seen.layer].keys[:, :, :S], seen.queries[:, :, -wanted:]
            found[seen.layer] += _compare(queries, keys, seen.scale, choices, top_k) / QUERIES

    with Recorder(model) as recorder:
        for start in range(0, len(text), STEP):
            chunk = text[start : start + STEP]
            observe(model, mx.array([chunk]), caches, visit, recorder)
            mx.eval([leaf.state for leaf in leaves(caches)])
            progress.update(len(chunk))
    return found


def _compare(queries: mx.array, keys: mx.array, scale: float, choices: Sequence[tuple[str, int]], top_k: int) -> Array:
    """Figures of the last ``n`` queries ``(1, Hq, n, D)`` over ``keys (1, Hkv, S, D)``, summed over the queries."""
    n, S = queries.shape[2], keys.shape[2]
    total = np.zeros((len(choices), FIGURES))
    step = max(1, CHUNK // keys.size)
    for first in range(0, n, step):
        # A batch of decode steps, each over the keys up to its own, which come last.
        padding = mx.arange(n - 1 - first, max(n - 1 - first - step, -1), -1)
        rows = mx.maximum(mx.arange(S) - padding[:, None], 0)
        seen = keys[0][:, rows].swapaxes(0, 1)
        asked = queries[0, :, first : first + step].swapaxes(0, 1)[:, :, None]
        total += _compare_steps(asked, seen, scale, choices, top_k, padding)
    return total


def _compare_steps(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    choices: Sequence[tuple[str, int]],
    top_k: int,
    padding: mx.array,
) -> Array:
    """Figures of a batch of decode steps, ``(B, Hq, 1, D)`` over ``(B, Hkv, S, D)``, summed over the batch."""
    options: dict[str, Any] = {"top_k": top_k, "local_window": 0, "left_padding": padding}
    weights, _ = exact_weights(queries, keys, scale=scale, left_padding=padding)
    exact = top_k_select(weights.sum(axis=2), **options)
    keys_t, spread = mx.contiguous(keys.swapaxes(-1, -2)), deviation(keys, padding)
    best, figures = _captured(weights, exact), []
    for score, rank in choices:
        weight = spread if score == "query_key" else None
        how = Selection(rank, scale=scale, component_weight=weight, keys_t=keys_t, **options)
        chosen, alpha = sparq_select(queries, keys, how)
        agreed = (chosen[..., :, None] == exact[..., None, :]).any(axis=-1).mean(axis=(1, 2))
        mass = _captured(weights, chosen)
        gap = mx.abs(alpha.reshape(mass.shape) - mass)
        by_step = [agreed, *(figure.mean(axis=(1, 2)) for figure in (mass, best, gap))]
        figures.append(mx.stack(by_step).sum(axis=1))
        mx.eval(figures[-1])
    return np.array(mx.stack(figures), np.float64)


def _captured(weights: mx.array, indices: mx.array) -> mx.array:
    """The sum ``(B, Hkv, G)`` of the ``weights (B, Hkv, G, S)`` at ``indices (B, Hkv, k)``."""
    return mx.take_along_axis(weights, indices[:, :, None, :], axis=-1).sum(axis=-1)


def table(rows: Sequence[SelectionRow]) -> str:
    """The rows as a Markdown table."""
    header = ["component score", "rank", "context", "n", "agreement", "worst layer", "mass", "exact choice"]
    lines = []
    for row in rows:
        cells = [f"`{row.component_score}`", f"{row.rank} of {row.head_dim}", f"{row.context:,}", str(row.examples)]
        cells += [plus_minus(row.agreement, row.agreement_error, 3), f"{row.worst:.3f} ({row.worst_layer})"]
        cells += [plus_minus(row.mass, row.mass_error, 3), f"{row.exact_mass:.3f}"]
        lines.append([*cells, plus_minus(row.alpha_gap, row.alpha_gap_error, 3)])
    return formats.table([*header, "alpha off by"], lines)
