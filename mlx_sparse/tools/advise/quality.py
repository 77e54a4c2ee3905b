"""Measure how far methods are from dense attention on a model and a text, with the evaluation.

The thresholds are what rounding the weights to 5 bits changed on two models (docs/results/quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ...checks import ConfigError
from ..evaluate.journal import Journal
from ..evaluate.results import Row, Trial
from ..evaluate.runner import DENSE_STEP, Steps, observed_by, run
from ..evaluate.tasks import TASKS
from ..evaluate.variants import Variant, variants_of

COPY, TEXT = "repetition", "bits_per_byte"  # the tasks: copy an excerpt of the prompt, continue the text
STEPS = 20  # tokens of an example that are predicted
MOST_KL = 0.05  # nats, in both tasks
LEAST_AGREEMENT = {COPY: 0.9, TEXT: 0.8}  # share of tokens with dense attention's most likely token
SLACK = 2.0  # standard errors by which the agreement may be lower
ORACLE = "oracle_top_k"  # the best selection of keys: where it fails, no selection is good enough


@dataclass(frozen=True)
class Attempt:
    """A variant and its rows, one for each task.

    Attributes:
        share: of dense attention's transfers that it reads, by its formula.
    """

    variant: Variant
    share: float | None
    rows: list[Row]

    @property
    def sparse(self) -> bool:
        """True if any call was sparse."""
        return any(row.sparse_calls for row in self.rows)

    @property
    def passes(self) -> bool:
        """True if the variant ran sparsely and is within the thresholds in both tasks."""
        return self.sparse and all(map(passes, self.rows))


def passes(row: Row) -> bool:
    """Return True if the KL is at most `MOST_KL` and the agreement is not clearly below `LEAST_AGREEMENT`."""
    tokens = row.examples * STEPS
    error = (row.mean.agreement * (1 - row.mean.agreement) / tokens) ** 0.5
    return row.mean.kl <= MOST_KL and row.mean.agreement + SLACK * error >= LEAST_AGREEMENT[row.task]


@dataclass(frozen=True)
class Quality:
    """The rows of dense attention, the attempts with the best selection of keys and with methods, and lines about rest.

    Attributes:
        left_out: why budgets could not be run with a method.
    """

    dense: list[Row]
    oracle: list[Attempt]
    attempts: list[Attempt]
    left_out: list[str]

    @property
    def hopeless(self) -> bool:
        """True if even the best selection of keys fails at the largest budget."""
        return not any(attempt.passes for attempt in self.oracle)

    @property
    def best(self) -> Attempt | None:
        """The passing attempt that reads least; None if there is none. `ORACLE` is a bound and saves nothing."""
        passing = [one for one in self.attempts if one.passes and one.share and one.variant.method != ORACLE]
        return None if self.hopeless else min(passing, key=lambda one: one.share or 0, default=None)


def measure(
    model: Any,
    tokenizer: Any,
    tokens: list[int],
    methods: Sequence[str],
    budgets: Sequence[Fraction],
    *,
    context: int,
    limit: int,
    seed: int,
    D: int,
) -> Quality:
    """Run the best selection of keys and then the methods, each from the largest budget down until it fails.

    Args:
        tokens: of the text.
        methods: decode methods as text.
        context: tokens of each prompt.
        limit: examples of each task.
        D: head dim of the layers.

    Raises:
        ConfigError: there is too little text, or no budget is within reach.
    """
    from tqdm import tqdm

    wanted = [ORACLE, *(method for method in methods if method != ORACLE)]
    variants, left_out = variants_of(wanted, sorted(budgets, reverse=True), context, D)
    if not any(variant.method == ORACLE for variant in variants):
        raise ConfigError(f"--budget: expected a share within reach at {context:,} keys, got none. Name a larger one.")
    observed, subjects = observed_by(variants), {}
    for task in (COPY, TEXT):
        made = TASKS[task](tokens, tokenizer, context=context, limit=limit, seed=seed)
        examples = [replace(example, target=example.target[:STEPS]) for example in made]
        subjects[task] = Steps(model, tokenizer, examples, DENSE_STEP, observed=observed)
    journal: Journal[Trial] = Journal(None, "", "", Trial)  # so that dense attention runs once
    found: dict[str, list[Attempt]] = {ORACLE: []}
    dense: list[Row] = []
    with tqdm(variants, unit="run", desc="quality", disable=None) as progress:
        for variant in progress:
            before = found.setdefault(variant.method, [])
            hopeless = variant.method != ORACLE and not any(one.passes for one in found[ORACLE])
            if hopeless or not all(one.passes for one in before):
                continue
            about: dict[str, Any] = {"context": context, "D": D}
            pairs = [run(task, [one], [variant], _Silent(), journal, **about) for task, one in subjects.items()]
            dense = [of_dense for of_dense, _ in pairs]
            before.append(Attempt(variant, variant.formula(context, D), [row for _, row in pairs]))
    oracle = found.pop(ORACLE)
    return Quality(dense, oracle, [one for some in found.values() for one in some], left_out)


class _Silent:
    def update(self, count: int) -> None:
        """Ignore the progress of one variant."""
