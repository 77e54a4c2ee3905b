"""What one run of a method on one example found, and rows of a table made of several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev


@dataclass(frozen=True)
class Outcome:
    """One example under one method.

    Attributes:
        bits: negative log2-likelihood of the target per byte of its text.
        accuracy: share of the scored target tokens that were the most likely ones.
        agreement: share of the scored positions where the most likely token is dense attention's.
        kl: mean Kullback-Leibler divergence from dense attention's distribution, nats.
        matched: characters of the target before the first token that was not the most likely one: what greedy decoding
            would have got right (SparQ paper, section 5).
        exact: 1 if every scored token was the most likely one, else 0.
    """

    bits: float
    accuracy: float
    agreement: float
    kl: float
    matched: float = 0.0
    exact: float = 0.0


@dataclass(frozen=True)
class Trial:
    """An outcome, and what the method's attention calls did.

    Attributes:
        outcome: how well it predicted.
        attn: the method as text, every automatic choice resolved.
        sparse_calls, dense_calls: attention calls; of examples that were decoded together, each one's.
        dense_reasons: number of the dense calls by reason.
        sparse_bytes, dense_bytes: bytes of K and V moved by the sparse calls, and by dense attention in their place.
        selectivity: (saap.12) share of the keys outside the exact part that were attended; None but for SAAP.
        density: of a prompt, by served layer and query head: share of the causal block pairs attended.
        sampled: share of a prompt's rows that were scored to choose the blocks.
        mass: retained mass over all layers, heads and rows of a prompt: least, 1st percentile, mean; empty if it was
            not measured.
    """

    outcome: Outcome
    attn: str = "dense"
    sparse_calls: int = 0
    dense_calls: int = 0
    sparse_bytes: float = 0
    dense_bytes: float = 0
    dense_reasons: dict[str, int] = field(default_factory=dict)
    selectivity: float | None = None
    density: list[list[float]] = field(default_factory=list)
    sampled: float = 0.0
    mass: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Depth:
    """The examples of a row whose answer stands at one ``depth`` of the prompt, 0 at its beginning and 1 at its end."""

    depth: float
    examples: int
    accuracy: float
    exact: float


@dataclass(frozen=True)
class Row:
    """A task under one method: means over the examples, with standard errors.

    Attributes:
        method: as it was asked for.
        attn: what ran, every automatic choice resolved.
        budget: the share of dense attention's transfers that the settings were made for, such as "1/8".
        context: tokens of the prompts.
        mean, mean_error: of the outcomes, and its standard error; NaN with one example.
        delta, error: of the differences to dense attention on the same example, and its standard error.
        formula: elements moved by the method's transfer formula at this context, over dense attention's; None where
            there is none.
        compression: bytes moved by the calls of the run that were sparse, over dense attention's.
        sparse_calls, dense_calls, dense_reasons: of all examples.
        prefill: whether the prompt itself was run through the method and scored, not steps after it.
        selectivity, density, sampled, mass: as in `Trial`, means over the examples; of ``mass`` the first is the least
            of them.
        depths: for tasks whose answer stands at a known depth.
    """

    task: str
    method: str
    attn: str
    budget: str | None
    context: int
    examples: int
    mean: Outcome
    mean_error: Outcome
    delta: Outcome
    error: Outcome
    formula: float | None
    compression: float
    sparse_calls: int
    dense_calls: int
    dense_reasons: dict[str, int] = field(default_factory=dict)
    prefill: bool = False
    selectivity: float | None = None
    density: list[list[float]] = field(default_factory=list)
    sampled: float = 0.0
    mass: list[float] = field(default_factory=list)
    depths: list[Depth] = field(default_factory=list)

    @property
    def served(self) -> str:
        """What ran: "dense" (the baseline), "sparse", "partly" (not all calls were) or "fell back" (none was)."""
        if self.method == "dense":
            return "dense"
        if not self.sparse_calls:
            return "fell back"
        return "partly" if self.dense_calls else "sparse"

    @property
    def of_prompt(self) -> bool:
        """Whether the method made the prompt alone cheaper, and not the steps after it."""
        return self.prefill or (bool(self.density) and self.compression == 1)

    @property
    def sparse_share(self) -> float:
        """The share of the calls that the method was asked about which were sparse."""
        return self.sparse_calls / max(1, self.sparse_calls + self.dense_calls)


FIGURES = tuple(Outcome.__annotations__)


def row_of(
    trials: Sequence[Trial],
    dense: Sequence[Trial],
    depths: Sequence[float | None],
    *,
    task: str,
    method: str,
    budget: str | None,
    context: int,
    formula: float | None,
    prefill: bool,
) -> Row:
    """One row of ``trials``; ``dense`` are the same examples under dense attention, ``depths`` their answers'."""
    outcomes, reference = ([vars(trial.outcome) for trial in of] for of in (trials, dense))
    deltas = [{name: a[name] - b[name] for name in a} for a, b in zip(outcomes, reference, strict=True)]
    moved, full = (sum(getattr(trial, name) for trial in trials) for name in ("sparse_bytes", "dense_bytes"))
    masses = [trial.mass for trial in trials if trial.mass]
    selectivities = [trial.selectivity for trial in trials if trial.selectivity is not None]
    layers = [trial.density for trial in trials]
    reasons: Counter[str] = Counter()
    for trial in trials:
        reasons.update(trial.dense_reasons)
    return Row(
        task=task,
        method=method,
        attn=trials[0].attn,
        budget=budget,
        context=context,
        examples=len(trials),
        mean=_means(outcomes),
        mean_error=_errors(outcomes),
        delta=_means(deltas),
        error=_errors(deltas),
        formula=formula,
        compression=moved / full if full else 1.0,
        sparse_calls=sum(trial.sparse_calls for trial in trials),
        dense_calls=sum(trial.dense_calls for trial in trials),
        dense_reasons=dict(reasons),
        prefill=prefill,
        selectivity=mean(selectivities) if selectivities else None,
        density=[[mean(heads) for heads in zip(*of, strict=True)] for of in zip(*layers, strict=True)],
        sampled=mean(trial.sampled for trial in trials),
        mass=[min(m[0] for m in masses), *(mean(m[i] for m in masses) for i in (1, 2))] if masses else [],
        depths=_depths(trials, depths),
    )


def _means(outcomes: Sequence[Mapping[str, float]]) -> Outcome:
    return Outcome(*(mean(outcome[name] for outcome in outcomes) for name in FIGURES))


def _errors(outcomes: Sequence[Mapping[str, float]]) -> Outcome:
    if len(outcomes) < 2:
        return Outcome(*(math.nan for _ in FIGURES))
    return Outcome(*(stdev(outcome[name] for outcome in outcomes) / math.sqrt(len(outcomes)) for name in FIGURES))


def _depths(trials: Sequence[Trial], depths: Iterable[float | None]) -> list[Depth]:
    by_depth: dict[float, list[Outcome]] = {}
    for trial, depth in zip(trials, depths, strict=True):
        if depth is not None:
            by_depth.setdefault(depth, []).append(trial.outcome)
    return [
        Depth(depth, len(found), mean(o.accuracy for o in found), mean(o.exact for o in found))
        for depth, found in sorted(by_depth.items())
    ]
