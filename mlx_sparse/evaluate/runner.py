"""Run examples densely and under methods, and compare what the model predicts."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..call_report import Report
from ..config import SAAP, parse
from ..demo.store import file_hash
from ..lm import sparse
from ..lm.model import select_methods
from .journal import Journal
from .results import Outcome, Row, Trial, rows_of
from .tasks import Example, Passage

DENSE_STEP = 512  # tokens at a time of a prompt that is processed densely
SLICE = 128  # positions compared at a time


class Subject(Protocol):
    """An example that methods can be tried on."""

    def trial(self, method: str) -> Trial:
        """What ``method`` makes of it; "dense" is what the others are compared with."""
        ...


class Steps:
    """A prompt, and the steps after it: teacher-forced, one token at a time, by the model's own decode."""

    def __init__(self, model: Any, tokenizer: Any, example: Example, step: int) -> None:
        """``step`` is that of prompts which are themselves processed sparsely."""
        self.model, self.example, self.step = model, example, step
        self.inputs = [example.prompt[-1], *example.target[:-1]]
        self.n_bytes = len(tokenizer.decode(example.target).encode())

    @cached_property
    def cache(self) -> list[Any]:
        """That of the prompt, processed densely."""
        return prefill(self.model, self.example.prompt[:-1], DENSE_STEP)

    @cached_property
    def reference(self) -> mx.array:
        """Dense attention's float32 logits ``(len(inputs), vocabulary)``, of all steps in one causal block."""
        logits = self.model(mx.array(self.inputs)[None], cache=copy.deepcopy(self.cache))[0].astype(mx.float32)
        mx.eval(logits)
        result: mx.array = logits
        return result

    def trial(self, method: str) -> Trial:
        if method == "dense":
            return Trial(self._outcome(self.reference))
        with_prompt = select_methods(parse(method))[0] is not None
        cache = None if with_prompt else copy.deepcopy(self.cache)
        rows = []
        with sparse(self.model, method) as report:
            cache = cache or prefill(self.model, self.example.prompt[:-1], self.step)
            for token in self.inputs:
                row = self.model(mx.array([[token]]), cache=cache)[0].astype(mx.float32)
                mx.eval(row)
                rows.append(row)
        return trial_of(self._outcome(mx.concatenate(rows)), report)

    def _outcome(self, logits: mx.array) -> Outcome:
        return outcome(logits, self.reference, self.example.target, self.n_bytes)


class Prompt:
    """A passage run through the method's own prefill."""

    def __init__(self, model: Any, tokenizer: Any, passage: Passage, step: int, *, mass: bool = False) -> None:
        """With ``mass``, retained mass is measured too, for which every score is computed."""
        self.model, self.passage, self.step, self.mass = model, passage, step, mass
        first, last = passage.scored[0], passage.scored[-1]
        # Single tokens need not be whole characters: take the bytes per token of the stretch they come from.
        stretch = tokenizer.decode(passage.tokens[first + 1 : last + 2]).encode()
        self.n_bytes = len(stretch) * len(passage.scored) / (last + 1 - first)

    @cached_property
    def reference(self) -> mx.array:
        """Dense attention's float32 logits ``(scored, vocabulary)``."""
        return passage_logits(self.model, self.passage, self.step)[0]

    def trial(self, method: str) -> Trial:
        targets = self.passage.targets
        if method == "dense":
            return Trial(outcome(self.reference, self.reference, targets, self.n_bytes))
        with sparse(self.model, method, mass=self.mass) as report:
            logits = passage_logits(self.model, self.passage, self.step)[0]
        return trial_of(outcome(logits, self.reference, targets, self.n_bytes), report)


def run(
    task: str,
    subjects: Iterable[Subject],
    methods: Sequence[str],
    progress: Any,
    journal: Journal[Trial] | None = None,
    *,
    prefill: bool = False,
) -> list[Row]:
    """Every subject under dense attention and every method; what the journal knows is not run again."""
    journal = journal or Journal(None, "", "", Trial.read)
    trials: dict[str, list[Trial]] = {method: [] for method in ("dense", *methods)}
    names = {method: name_of(method) for method in trials}
    for i, subject in enumerate(subjects):
        for method, found in trials.items():
            name = f"{task}/{'prefill' if prefill else 'decode'}/{i}/{names[method]}"
            if name not in journal.results:
                trial = subject.trial(method)
                journal.add(name, trial, trial.as_dict())
            found.append(journal.results[name])
            progress.update()
    return rows_of(task, trials, prefill=prefill)


def name_of(method: str) -> str:
    """What results of ``method`` are kept under: with what its artefact holds, which a file name does not tell."""
    decode = None if method == "dense" else select_methods(parse(method))[1]
    if not isinstance(decode, SAAP) or decode.file is None:
        return method
    return f"{method}@{file_hash(Path(decode.file))}"


def prefill(model: Any, tokens: list[int], step: int) -> list[Any]:
    """Process ``tokens``, ``step`` at a time; return the cache."""
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, len(tokens), step):
        model(mx.array(tokens[start : start + step])[None], cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def passage_logits(model: Any, passage: Passage, step: int) -> tuple[mx.array, float]:
    """Float32 logits ``(scored, vocabulary)`` at the scored positions, and the seconds that the prompt took."""
    cache: list[Any] = make_prompt_cache(model)
    rows = []
    began = time.perf_counter()
    for start in range(0, len(passage.tokens), step):
        logits = model(mx.array(passage.tokens[start : start + step])[None], cache=cache)[0]
        inside = [position - start for position in passage.scored if start <= position < start + step]
        if inside:
            rows.append(logits[mx.array(inside)].astype(mx.float32))
        mx.eval(rows[-1:], [entry.state for entry in cache])
    return mx.concatenate(rows), time.perf_counter() - began


def outcome(logits: mx.array, reference: mx.array, target: Sequence[int], n_bytes: float) -> Outcome:
    """Compare ``logits`` with the target tokens and with dense attention's ``reference``."""
    figures = np.zeros(4)
    for start in range(0, len(target), SLICE):
        rows = slice(start, start + SLICE)
        logp, dense = (x[rows] - mx.logsumexp(x[rows], axis=-1, keepdims=True) for x in (logits, reference))
        wanted = mx.array(list(target[rows]))
        best = logp.argmax(axis=-1)
        figures += mx.stack(
            [
                -mx.take_along_axis(logp, wanted[:, None], axis=-1).sum(),
                (best == wanted).sum(),
                (best == dense.argmax(axis=-1)).sum(),
                (mx.exp(dense) * (dense - logp)).sum(),
            ]
        )
    nats, right, agreed, kl = figures.tolist()
    n = len(target)
    return Outcome(nats / (math.log(2) * n_bytes), right / n, agreed / n, kl / n)


def trial_of(outcome: Outcome, report: Report) -> Trial:
    """An outcome with what the report of its run counted."""
    figures = report.prefill
    prompt: dict[str, Any] = {}
    if figures is not None and figures.calls:
        prompt = {"density": list(figures.density.values()), "sampled": figures.sampled}
        if figures.mass_mean is not None:
            prompt["mass"] = [figures.mass_min, figures.mass_low, figures.mass_mean]
    dense_calls = sum(report.dense_calls.values())
    calls = report.sparse_calls + (figures.calls if figures is not None else 0)
    counts = (calls, dense_calls, report.sparse_bytes, report.dense_bytes)
    selectivity = report.buckets.selectivity if report.buckets is not None and report.sparse_calls else None
    return Trial(outcome, report.attn, *counts, selectivity, **prompt)
