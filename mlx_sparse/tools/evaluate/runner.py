"""Run examples with dense attention and with each method, and score the model's predictions."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...api.call_report import Report
from ...checks import ConfigError
from ...core.reasons import NO_DECODE
from ...lm import sparse
from ...lm.model import native_dense
from ...model_info import logits_of, new_caches
from .journal import Journal
from .results import Outcome, Row, Trial, row_of
from .tasks import Example, Passage, digest
from .variants import DENSE, Variant

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

    from ..progress import Bar

Array = npt.NDArray[np.float64]
SLICE = 128  # positions to compare at once


def log_softmax(logits: mx.array) -> mx.array:
    """Return the log-softmax over the last axis, in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def position_scores(logp: mx.array, dense: mx.array, targets: mx.array) -> Array:
    """Compare the predictions of a method with the predictions of dense attention at each position.

    Args:
        logp, dense: log-probabilities ``(..., vocabulary)`` of the method and of dense attention.
        targets: tokens ``(...)``.

    Returns:
        float64 ``(..., 4)``. Column 0 is the negative log-likelihood of the target in nats. Column 1 is 1 if the target
        is the most likely token, else 0. Column 2 is 1 if dense attention has the same most likely token, else 0.
        Column 3 is the KL divergence from dense attention in nats.
    """
    best = logp.argmax(axis=-1)
    nats = -mx.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    # Tokens with probability 0 under dense attention add 0, even if their logit is -inf.
    kl = mx.where(mx.exp(dense) > 0, mx.exp(dense) * (dense - logp), 0.0).sum(axis=-1)
    columns = [nats, best == targets, best == dense.argmax(axis=-1), kl]
    return np.array(mx.stack([column.astype(mx.float32) for column in columns], axis=-1), np.float64)


def outcome(scores: Array, n_bytes: float, matched: float = 0.0) -> Outcome:
    """Average the scores of a text's predictions over the scored positions, and return the averages as an outcome.

    Args:
        scores: ``(scored, 4)``, from `position_scores`.
    """
    if not np.isfinite(scores).all():
        raise ConfigError("--model: expected finite logits, got infinity or NaN. Use a copy in bfloat16 or float32.")
    nats, right, agreed, kl = scores.sum(axis=0).tolist()
    n = len(scores)
    return Outcome(nats / (math.log(2) * n_bytes), right / n, agreed / n, kl / n, matched, float(right == n))


def step_outcome(scores: Array, example: Example, tokenizer: Tokenizer) -> Outcome:
    """Return the outcome of an example, given the `position_scores` ``(len(target), 4)`` of its target tokens."""
    scored = range(len(example.target)) if example.scored is None else example.scored
    wrong = next((position for position in scored if not scores[position, 1]), len(example.target))
    text: str = tokenizer.decode([example.target[position] for position in scored])
    matched = len(tokenizer.decode([example.target[position] for position in scored if position < wrong]))
    return outcome(scores[list(scored)], len(text.encode()), matched)


def prompt_outcome(logits: mx.array, dense: mx.array, targets: Sequence[int], n_bytes: float) -> Outcome:
    """Return the outcome of a prefill with ``logits (scored, vocabulary)`` at the scored positions.

    ``dense`` are the logits of dense attention at the same positions. ``targets`` are the scored tokens. The text of
    the scored tokens has ``n_bytes`` bytes.
    """
    rows = [slice(start, start + SLICE) for start in range(0, len(targets), SLICE)]
    parts = [position_scores(log_softmax(logits[r]), log_softmax(dense[r]), mx.array(list(targets[r]))) for r in rows]
    return outcome(np.concatenate(parts), n_bytes)


DENSE_STEP = 512  # tokens per chunk of a dense prefill


class Prefix:
    """The KV caches of the first tokens of a batch of prompts, after a dense prefill. Several tasks share the prompts.

    Attributes:
        length: number of tokens; 0 if the prompts of the tasks differ.
    """

    def __init__(self, model: nn.Module, tasks: Sequence[Sequence[Example]], observed: str | None = None) -> None:
        """Find the common first tokens of the prompts of ``tasks``, which are batches of equal size.

        Args:
            observed: as in `Steps`.
        """
        self.model, self.observed = model, observed
        prompts = [np.array([example.prompt for example in batch]) for batch in tasks]
        same = np.all([prompt == prompts[0] for prompt in prompts], axis=(0, 1))
        self.length = int(min(same.cumprod().sum(), len(same) - 1)) if len(prompts) > 1 else 0
        self.tokens = mx.array(prompts[0][:, : self.length])

    @cached_property
    def cache(self) -> list[Any]:
        return dense_prefill(self.model, self.tokens, new_caches(self.model), self.observed)


class Steps:
    """A batch of prompts of equal length. Teacher-forced decode steps follow each prompt.

    Attributes:
        depths: depth of the answer in each example's prompt; None if the task has no depth.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        examples: Sequence[Example],
        step: int,
        *,
        prefix: Prefix | None = None,
        observed: str | None = None,
    ) -> None:
        """Store examples that are decoded as one batch.

        Args:
            step: number of tokens per chunk in a sparse prefill.
            prefix: the caches after the first tokens of the prompts, which a dense prefill continues.
            observed: name of a decode method that must observe the dense prefill, or None. If the prefill of a variant
                is dense, the variant decodes from a copy of the filled caches.
        """
        self.model, self.tokenizer, self.examples, self.step = model, tokenizer, examples, step
        self.prefix, self.observed = prefix, observed
        self.depths = [example.depth for example in examples]
        self.digests = list(map(digest, examples))
        longest = max(len(example.target) for example in examples)
        # Shorter targets are padded to the longest target. Predictions in the padding are ignored.
        padded = [example.target + example.target[-1:] * (longest - len(example.target)) for example in examples]
        self.prompts = mx.array([example.prompt for example in examples])
        self.targets = mx.array(padded)
        self.inputs = mx.concatenate([self.prompts[:, -1:], self.targets[:, :-1]], axis=1)

    @cached_property
    def cache(self) -> list[Any]:
        """KV caches of the prompts after a dense prefill."""
        start = self.prefix.length if self.prefix else 0
        cache = copy.deepcopy(self.prefix.cache) if self.prefix and start else new_caches(self.model)
        return dense_prefill(self.model, self.prompts[:, start:-1], cache, self.observed)

    @cached_property
    def reference(self) -> mx.array:
        """Log-probabilities ``(examples, steps, vocabulary)`` of dense attention, computed in one causal call."""
        cache = copy.deepcopy(self.cache)
        with native_dense(self.model):
            logp = log_softmax(logits_of(self.model, self.inputs, cache))
        mx.eval(logp)
        return logp

    def trials(self, variant: Variant) -> list[Trial]:
        """Return the trial of ``variant`` on each example. For `DENSE`, compare `reference` with itself."""
        if variant == DENSE:
            each = zip(self.reference, self.targets, strict=True)  # one example at a time, to limit memory
            scores = [position_scores(logp, logp, tokens) for logp, tokens in each]
            return [Trial(found) for found in self._outcomes(scores)]
        reference, scores = self.reference, []
        with_prompt = variant.stages[0] is not None
        cache = None if with_prompt else copy.deepcopy(self.cache)
        if cache is not None and variant.kv_bits is not None:
            cache = [entry.to_quantized(bits=variant.kv_bits) for entry in cache]
        with sparse(self.model, variant.attn) as report:
            cache = cache or prefill(self.model, self.prompts[:, :-1], new_caches(self.model), self.step)
            for position in range(self.inputs.shape[1]):
                logp = log_softmax(logits_of(self.model, self.inputs[:, position : position + 1], cache)[:, 0])
                scores.append(position_scores(logp, reference[:, position], self.targets[:, position]))
        return [trial_of(found, report, len(self.examples)) for found in self._outcomes(np.stack(scores, axis=1))]

    def _outcomes(self, scores: Iterable[Array]) -> list[Outcome]:
        rows = zip(scores, self.examples, strict=True)
        return [step_outcome(of_one, example, self.tokenizer) for of_one, example in rows]


class Prompt:
    """A passage with tokens that are scored during the prefill. `run` uses this class in the same way as `Steps`."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, passage: Passage, step: int, *, recall: bool = False
    ) -> None:
        """Store a passage. If ``recall`` is True, `trials` also measures attention recall from all scores."""
        self.model, self.passage, self.step, self.recall = model, passage, step, recall
        self.depths: list[float | None] = [None]
        self.digests = [digest(passage)]
        first, last = passage.scored[0], passage.scored[-1]
        # A token may be a part of a character, so use the mean bytes per token between the first and last position.
        stretch = tokenizer.decode(passage.tokens[first + 1 : last + 2]).encode()
        self.n_bytes = len(stretch) * len(passage.scored) / (last + 1 - first)

    @cached_property
    def reference(self) -> mx.array:
        """Float32 logits ``(scored, vocabulary)`` of dense attention."""
        with native_dense(self.model):
            return passage_logits(self.model, self.passage, self.step)[0]

    def trials(self, variant: Variant) -> list[Trial]:
        targets = self.passage.targets
        if variant == DENSE:
            return [Trial(prompt_outcome(self.reference, self.reference, targets, self.n_bytes))]
        with sparse(self.model, variant.attn, recall=self.recall) as report:
            logits = passage_logits(self.model, self.passage, self.step)[0]
        return [trial_of(prompt_outcome(logits, self.reference, targets, self.n_bytes), report)]


@dataclass
class Run:
    """Trials of a task at one context length, with dense attention and with every variant.

    Attributes:
        prefill: True if the examples are passages.
        D: head dim that the formulas use.
        trials: lists of trials in the order of the examples.
        depths: depths of the answers in the order of the examples.
    """

    task: str
    context: int
    prefill: bool
    examples: list[Any]
    variants: Sequence[Variant]
    D: int
    trials: dict[Variant, list[Trial]] = field(init=False)
    depths: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trials = {variant: [] for variant in (DENSE, *self.variants)}

    def add(self, subject: Steps | Prompt, progress: Bar, journal: Journal[Trial]) -> None:
        """Run the next subject with dense attention and with every variant. Skip trials that are in the journal."""
        start = f"{self.task}/{'prefill' if self.prefill else 'decode'}/{self.context}"
        of_each = [f"{start}/{i}-{of_one}" for i, of_one in enumerate(subject.digests, len(self.depths))]
        self.depths += subject.depths
        for variant, trials in self.trials.items():
            names = [f"{of_one}/{variant.key}" for of_one in of_each]
            if any(name not in journal.results for name in names):
                for name, trial in zip(names, subject.trials(variant), strict=True):
                    if name not in journal.results:
                        journal.add(name, trial)
            trials += [journal.results[name] for name in names]
            progress.update(len(names))

    def rows(self) -> list[Row]:
        """Return the row of dense attention and one row for each variant."""
        about: dict[str, Any] = {"task": self.task, "context": self.context, "prefill": self.prefill}
        rows = []
        for variant, trials in self.trials.items():
            formula = None if self.prefill else variant.formula(self.context, self.D)
            own = {"method": str(variant), "budget": variant.budget, "formula": formula}
            rows.append(row_of(trials, self.trials[DENSE], self.depths, **about, **own))
        return rows


def observed_by(variants: Sequence[Variant]) -> str | None:
    """Return the name of the first decode method in ``variants`` that must observe the dense prefill, or None."""
    decode = (variant.stages[1] for variant in variants)
    return next((method.name for method in decode if method is not None and method.observes_prefill), None)


def dense_prefill(model: nn.Module, tokens: mx.array, cache: list[Any], observed: str | None) -> list[Any]:
    """Continue a dense prefill, which the decode method ``observed`` observes."""
    with sparse(model, observed) if observed else native_dense(model):
        return prefill(model, tokens, cache, DENSE_STEP)


def prefill(model: nn.Module, tokens: mx.array, cache: list[Any], step: int) -> list[Any]:
    """Process ``tokens (examples, length)`` in chunks of ``step`` tokens, and return the KV caches ``cache``."""
    for start in range(0, tokens.shape[1], step):
        model(tokens[:, start : start + step], cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def passage_logits(model: nn.Module, passage: Passage, step: int) -> tuple[mx.array, float]:
    """Return float32 logits ``(scored, vocabulary)`` at the scored positions, and the prefill time in seconds."""
    cache = new_caches(model)
    rows = []
    began = time.perf_counter()
    for start in range(0, len(passage.tokens), step):
        logits = logits_of(model, mx.array(passage.tokens[start : start + step])[None], cache)[0]
        inside = [position - start for position in passage.scored if start <= position < start + step]
        if inside:
            rows.append(logits[mx.array(inside)].astype(mx.float32))
        mx.eval(rows[-1:], [entry.state for entry in cache])
    return mx.concatenate(rows), time.perf_counter() - began


def trial_of(outcome: Outcome, report: Report, examples: int = 1) -> Trial:
    """Combine an outcome and the report of its run into a trial. ``examples`` is the batch size."""
    stats = report.prefill
    prompt: dict[str, Any] = {}
    if stats is not None and stats.calls:
        prompt = {"density": [mean(heads) for heads in stats.density.values()], "sampled": stats.sampled}
        if (recall := stats.recall) is not None:
            prompt["recall"] = [recall["min"], recall["low"], recall["mean"]]
    # Calls of layers that the method cannot serve, and of a stage without a method, do not count as fallbacks.
    reasons = Counter({reason: n for reason, n in report.dense_calls.items() if reason not in report.dense_layers})
    del reasons[NO_DECODE]
    calls = report.sparse_calls + (stats.calls if stats is not None else 0)
    moved, full = report.sparse_bytes / examples, report.dense_bytes / examples
    selectivity = report.buckets.selectivity if report.buckets is not None and report.sparse_calls else None
    counts = (calls, reasons.total(), moved, full)
    return Trial(outcome, report.attn, *counts, dict(reasons), selectivity, **prompt)
