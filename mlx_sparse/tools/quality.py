"""Measure the quality of methods on the user's text, for `mlx-sparse advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from ..checks import ConfigError
from ..lm.model import absorbed_attention
from ..methods.sparq.low_rank import components, query_covariance
from ..model_info import leaves, new_caches
from .evaluate.journal import Journal
from .evaluate.results import Row, Trial
from .evaluate.runner import DENSE_STEP, Run, Steps, dense_prefill, observed_by
from .evaluate.tasks import Example
from .evaluate.variants import Variant, variants_of
from .progress import Bar
from .verdict import passes

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

ORACLE = "oracle_top_k"  # the best selection of keys; if it fails, every selection fails


@dataclass(frozen=True)
class Attempt:
    """A method with its settings, and its results in both tasks.

    Attributes:
        share: number of K and V elements that a decode step of the variant moves, divided by the number that dense
            attention moves. The method's formula gives this share. None if there is no formula.
    """

    variant: Variant
    share: float | None
    rows: list[Row]

    @property
    def sparse(self) -> bool:
        return any(row.sparse_calls for row in self.rows)

    @property
    def passes(self) -> bool:
        """True if the variant ran sparsely and is within the limits in both tasks."""
        return self.sparse and all(map(passes, self.rows))


@dataclass(frozen=True)
class Quality:
    """Measured quality of dense attention and of all attempts."""

    dense: list[Row]
    oracle: list[Attempt]
    attempts: list[Attempt]
    left_out: list[str]

    @property
    def oracle_fails(self) -> bool:
        return not any(attempt.passes for attempt in self.oracle)

    @property
    def best(self) -> Attempt | None:
        """The passing attempt that moves the fewest elements, or None. `ORACLE` does not count: it is only a bound."""
        passing = [one for one in self.attempts if one.passes and one.share and one.variant.method != ORACLE]
        return None if self.oracle_fails else min(passing, key=lambda one: one.share or 0, default=None)


def measure(
    model: nn.Module,
    tokenizer: Tokenizer,
    examples: Mapping[str, list[Example]],
    methods: Sequence[str],
    budgets: Sequence[Fraction],
    *,
    context: int,
    D: int,
) -> Quality:
    """Measure the quality of `ORACLE`, and then of each method, starting with the largest budget.

    If a method fails at a budget, the method's smaller budgets are skipped. If `ORACLE` fails at its largest budget,
    all other methods are skipped.

    Args:
        examples: dict from each task to its examples, with prompts of ``context`` tokens.
        budgets: for each budget, the largest share of dense attention's elements that a method may move.
    """
    wanted = [ORACLE, *(method for method in methods if method != ORACLE)]
    variants, left_out = variants_of(wanted, sorted(budgets, reverse=True), context, D)
    if not any(variant.method == ORACLE for variant in variants):
        raise ConfigError(f"--budget: expected a share that can be met at {context:,} keys, got none. Increase it.")
    journal: Journal[Trial] = Journal(None, "", "", Trial)  # stores dense results, so that dense attention runs once
    found: dict[str, list[Attempt]] = {ORACLE: []}
    dense: list[Row] = []
    observed = observed_by(variants)
    subjects = {task: Steps(model, tokenizer, made, DENSE_STEP, observed=observed) for task, made in examples.items()}
    each = 2 * sum(map(len, examples.values()))  # runs of a variant and of dense attention
    with Bar("", each * len(variants), "runs") as progress:
        for variant in variants:
            before = found.setdefault(variant.method, [])
            oracle_fails = variant.method != ORACLE and not any(one.passes for one in found[ORACLE])
            if oracle_fails or not all(one.passes for one in before):
                progress.update(each)
                continue
            progress.stage(variant.attn)
            runs = [Run(task, context, False, examples[task], [variant], D) for task in subjects]
            for of_task in runs:
                of_task.add(subjects[of_task.task], progress, journal)
            dense, rows = map(list, zip(*(of_task.rows() for of_task in runs), strict=True))
            before.append(Attempt(variant, variant.formula(context, D), rows))
    oracle = found.pop(ORACLE)
    return Quality(dense, oracle, [one for some in found.values() for one in some], left_out)


class Captured(NamedTuple):
    """Share that the first ``rank`` components of a projection capture in one layer with MLA (low_rank.5)."""

    share: float
    layer: int
    rank: int


def captured_shares(model: nn.Module, prompt: Sequence[int], layers: Sequence[int], rank: int) -> list[Captured]:
    """Prefill ``prompt``, and fit the projection of each of ``layers``, the indices of the caches with latents."""
    caches = leaves(dense_prefill(model, mx.array([prompt]), new_caches(model), None))
    found = []
    for layer, attention in zip(layers, absorbed_attention(model), strict=False):  # draft modules have no cache
        shares = components(query_covariance(attention), caches[layer].state[0])[2]
        found.append(Captured(float(shares[..., rank - 1].min()), layer, rank))
    return found
