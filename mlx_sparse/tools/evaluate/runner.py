"""Run examples densely and under methods, and compare what the model predicts."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...api.call_report import Report
from ...lm import sparse
from ...methods.reasons import NO_DECODE
from .journal import Journal
from .results import Outcome, Row, Trial, row_of
from .score import Array, figures_of, log_softmax, prompt_outcome, step_outcome
from .tasks import Example, Passage
from .tasks.base import digest
from .variants import DENSE, Arm

DENSE_STEP = 512  # tokens at a time of a prompt that is processed densely


class Subject(Protocol):
    """Examples that methods can be tried on together.

    Attributes:
        depths: of each example, where its answer stands in the prompt; None where that is no question.
        digests: of each example (`tasks.base.digest`).
    """

    depths: list[float | None]
    digests: list[str]

    def trials(self, arm: Arm) -> list[Trial]:
        """What a method makes of each; `DENSE` is what the others are compared with."""
        ...


class Steps:
    """Prompts of one length, and the steps after them.

    They are teacher-forced: a token of each example at a time, by the model's own decode.
    """

    def __init__(
        self, model: Any, tokenizer: Any, examples: Sequence[Example], step: int, *, observed: str | None = None
    ) -> None:
        """Take examples that are decoded together.

        Args:
            step: tokens at a time of prompts that are themselves processed sparsely.
            observed: a method that has to see the dense prompts, from which all methods go on.
        """
        self.model, self.tokenizer, self.examples, self.step = model, tokenizer, examples, step
        self.observed = observed
        self.depths = [example.depth for example in examples]
        self.digests = list(map(digest, examples))
        longest = max(len(example.target) for example in examples)
        # Rows of shorter targets go on to the longest one's end; what they predict there is left out.
        padded = [example.target + example.target[-1:] * (longest - len(example.target)) for example in examples]
        self.prompts = mx.array([example.prompt for example in examples])
        self.targets = mx.array(padded)
        self.inputs = mx.concatenate([self.prompts[:, -1:], self.targets[:, :-1]], axis=1)

    @cached_property
    def cache(self) -> list[Any]:
        """That of the prompts, processed densely."""
        with sparse(self.model, self.observed) if self.observed else nullcontext():
            return prefill(self.model, self.prompts[:, :-1], DENSE_STEP)

    @cached_property
    def reference(self) -> mx.array:
        """Dense attention's log-probabilities ``(examples, steps, vocabulary)``, of all steps in one causal block."""
        logp = log_softmax(self.model(self.inputs, cache=copy.deepcopy(self.cache)))
        mx.eval(logp)
        return logp

    def trials(self, arm: Arm) -> list[Trial]:
        """What a method makes of each example's target."""
        if arm == DENSE:
            each = zip(self.reference, self.targets, strict=True)  # one at a time: a vocabulary can be large
            return [Trial(found) for found in self._outcomes([figures_of(logp, logp, tokens) for logp, tokens in each])]
        reference, figures = self.reference, []
        with_prompt = arm.stages[0] is not None
        cache = None if with_prompt else copy.deepcopy(self.cache)
        if cache is not None and arm.kv_bits is not None:
            cache = [entry.to_quantized(bits=arm.kv_bits) for entry in cache]
        with sparse(self.model, arm.attn) as report:
            cache = cache or prefill(self.model, self.prompts[:, :-1], self.step)
            for position in range(self.inputs.shape[1]):
                logp = log_softmax(self.model(self.inputs[:, position : position + 1], cache=cache)[:, 0])
                figures.append(figures_of(logp, reference[:, position], self.targets[:, position]))
        return [trial_of(found, report, len(self.examples)) for found in self._outcomes(np.stack(figures, axis=1))]

    def _outcomes(self, figures: Iterable[Array]) -> list[Outcome]:
        rows = zip(figures, self.examples, strict=True)
        return [step_outcome(of_one, example, self.tokenizer) for of_one, example in rows]


class Prompt:
    """A passage run through the method's own prefill."""

    def __init__(self, model: Any, tokenizer: Any, passage: Passage, step: int, *, mass: bool = False) -> None:
        """Take a passage; ``mass`` says whether retained mass is measured too, for which every score is computed."""
        self.model, self.passage, self.step, self.mass = model, passage, step, mass
        self.depths: list[float | None] = [None]
        self.digests = [digest(passage)]
        first, last = passage.scored[0], passage.scored[-1]
        # Single tokens need not be whole characters: take the bytes per token of the stretch they come from.
        stretch = tokenizer.decode(passage.tokens[first + 1 : last + 2]).encode()
        self.n_bytes = len(stretch) * len(passage.scored) / (last + 1 - first)

    @cached_property
    def reference(self) -> mx.array:
        """Dense attention's float32 logits ``(scored, vocabulary)``."""
        return passage_logits(self.model, self.passage, self.step)[0]

    def trials(self, arm: Arm) -> list[Trial]:
        """What a method makes of the passage: a list of one."""
        targets = self.passage.targets
        if arm == DENSE:
            return [Trial(prompt_outcome(self.reference, self.reference, targets, self.n_bytes))]
        with sparse(self.model, arm.attn, mass=self.mass) as report:
            logits = passage_logits(self.model, self.passage, self.step)[0]
        return [trial_of(prompt_outcome(logits, self.reference, targets, self.n_bytes), report)]


def run(
    task: str,
    subjects: Iterable[Subject],
    arms: Sequence[Arm],
    progress: Any,
    journal: Journal[Trial] | None = None,
    *,
    context: int,
    D: int,
    prefill: bool = False,
) -> list[Row]:
    """Every subject under dense attention and every method; what the journal knows is not run again."""
    journal = journal or Journal(None, "", "", Trial)
    found: dict[Arm, list[Trial]] = {arm: [] for arm in (DENSE, *arms)}
    keys = {arm: arm.key for arm in found}
    depths: list[float | None] = []
    for subject in subjects:
        of_each = [f"{i}-{of_one}" for i, of_one in enumerate(subject.digests, len(depths))]
        depths += subject.depths
        for arm, trials in found.items():
            names = [f"{task}/{'prefill' if prefill else 'decode'}/{context}/{one}/{keys[arm]}" for one in of_each]
            if any(name not in journal.results for name in names):
                for name, trial in zip(names, subject.trials(arm), strict=True):
                    if name not in journal.results:
                        journal.add(name, trial)
            trials += [journal.results[name] for name in names]
            progress.update(len(names))
    dense = found[DENSE]
    return [
        row_of(
            trials,
            dense,
            depths,
            task=task,
            method=str(arm),
            budget=arm.budget,
            context=context,
            formula=None if prefill else arm.formula(context, D),
            prefill=prefill,
        )
        for arm, trials in found.items()
    ]


def observed_by(arms: Sequence[Arm]) -> str | None:
    """The method that has to see the dense prompts, if one is among ``arms``: its choice begins there."""
    decode = (arm.stages[1] for arm in arms)
    return next((method.name for method in decode if method is not None and method.observes_prompts), None)


def prefill(model: Any, tokens: mx.array, step: int) -> list[Any]:
    """Process ``tokens (examples, length)``, ``step`` at a time; return the cache."""
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, tokens.shape[1], step):
        model(tokens[:, start : start + step], cache=cache)
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


def trial_of(outcome: Outcome, report: Report, examples: int = 1) -> Trial:
    """An outcome with what the report of its run counted; ``examples`` were decoded together."""
    figures = report.prefill
    prompt: dict[str, Any] = {}
    if figures is not None and figures.calls:
        prompt = {"density": list(figures.density.values()), "sampled": figures.sampled}
        if figures.mass_mean is not None:
            prompt["mass"] = [figures.mass_min, figures.mass_low, figures.mass_mean]
    # Layers that the method cannot serve, and a stage for which there is none, did not fall back.
    reasons = Counter({reason: n for reason, n in report.dense_calls.items() if reason not in report.dense_layers})
    del reasons[NO_DECODE]
    calls = report.sparse_calls + (figures.calls if figures is not None else 0)
    moved, full = report.sparse_bytes / examples, report.dense_bytes / examples
    selectivity = report.buckets.selectivity if report.buckets is not None and report.sparse_calls else None
    counts = (calls, reasons.total(), moved, full)
    return Trial(outcome, report.attn, *counts, dict(reasons), selectivity, **prompt)
