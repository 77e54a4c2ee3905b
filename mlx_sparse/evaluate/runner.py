"""Run examples densely and sparsely through the model's own decode steps, and compare what it predicts."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..call_report import Report
from ..lm import sparse
from .tasks import Example

PREFILL_STEP = 512


@dataclass(frozen=True)
class Outcome:
    """One example under one method.

    Attributes:
        bits: negative log2-likelihood of the target per byte of its text.
        accuracy: share of target tokens that were the most likely ones.
        agreement: share of positions where the most likely token is dense attention's.
        kl: mean Kullback-Leibler divergence from dense attention's distribution, nats.
    """

    bits: float
    accuracy: float
    agreement: float
    kl: float


@dataclass(frozen=True)
class Row:
    """A task under one method: means over the examples, and standard errors of the paired differences to dense."""

    task: str
    method: str
    examples: int
    mean: Outcome
    delta: Outcome
    error: Outcome
    compression: float
    sparse_calls: int
    dense_calls: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def prefill(model: Any, tokens: list[int]) -> list[Any]:
    """Process ``tokens`` densely; return the cache."""
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, len(tokens), PREFILL_STEP):
        model(mx.array(tokens[start : start + PREFILL_STEP])[None], cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def dense_logits(model: Any, cache: list[Any], inputs: list[int]) -> mx.array:
    """Float32 logits ``(len(inputs), vocabulary)`` of all steps in one causal block: what dense decoding computes."""
    logits = model(mx.array(inputs)[None], cache=copy.deepcopy(cache))[0].astype(mx.float32)
    mx.eval(logits)
    result: mx.array = logits
    return result


def sparse_logits(model: Any, cache: list[Any], inputs: list[int], method: str) -> tuple[mx.array, Report]:
    """The same from one decode step after the other under ``method``."""
    cache = copy.deepcopy(cache)
    rows = []
    with sparse(model, method) as report:
        for token in inputs:
            row = model(mx.array([[token]]), cache=cache)[0].astype(mx.float32)
            mx.eval(row)
            rows.append(row)
    return mx.concatenate(rows), report


def outcome(logits: mx.array, reference: mx.array, target: list[int], n_bytes: int) -> Outcome:
    """Compare ``logits`` with the target tokens and with dense attention's ``reference``."""
    logp, dense = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (logits, reference))
    wanted = mx.array(target)
    best = logp.argmax(axis=-1)
    figures = mx.stack(
        [
            -mx.take_along_axis(logp, wanted[:, None], axis=-1).sum() / (math.log(2) * n_bytes),
            (best == wanted).mean(),
            (best == dense.argmax(axis=-1)).mean(),
            (mx.exp(dense) * (dense - logp)).sum(axis=-1).mean(),
        ]
    )
    bits, accuracy, agreement, kl = np.array(figures).tolist()
    return Outcome(bits, accuracy, agreement, kl)


def run(model: Any, tokenizer: Any, task: str, examples: list[Example], methods: list[str], progress: Any) -> list[Row]:
    """Every example under dense attention and every method; one prefill serves them all."""
    outcomes: dict[str, list[Outcome]] = {"dense": [], **{method: [] for method in methods}}
    reports: dict[str, list[Report]] = {method: [] for method in methods}
    for example in examples:
        inputs = [example.prompt[-1], *example.target[:-1]]
        n_bytes = len(tokenizer.decode(example.target).encode())
        cache = prefill(model, example.prompt[:-1])
        reference = dense_logits(model, cache, inputs)
        outcomes["dense"].append(outcome(reference, reference, example.target, n_bytes))
        for method in methods:
            logits, report = sparse_logits(model, cache, inputs, method)
            outcomes[method].append(outcome(logits, reference, example.target, n_bytes))
            reports[method].append(report)
            progress.update()
    return [_row(task, method, outcomes[method], outcomes["dense"], reports.get(method, [])) for method in outcomes]


def _row(task: str, method: str, outcomes: list[Outcome], dense: list[Outcome], reports: list[Report]) -> Row:
    def column(items: list[Outcome], name: str) -> list[float]:
        return [getattr(item, name) for item in items]

    means, deltas, errors = {}, {}, {}
    for name in Outcome.__annotations__:
        values = column(outcomes, name)
        differences = [a - b for a, b in zip(values, column(dense, name), strict=True)]
        means[name], deltas[name] = mean(values), mean(differences)
        errors[name] = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    moved, full = (sum(getattr(report, name) for report in reports) for name in ("sparse_bytes", "dense_bytes"))
    return Row(
        task,
        reports[0].attn if reports else method,
        len(outcomes),
        Outcome(**means),
        Outcome(**deltas),
        Outcome(**errors),
        moved / full if full else 1.0,
        sum(report.sparse_calls for report in reports),
        sum(sum(report.dense_calls.values()) for report in reports),
    )
