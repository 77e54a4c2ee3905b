"""Define classes for results: a trial for each example, and a row for each method and task. Collect run facts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ...model_info import config_of, kv_shapes, model_type, weights_hash
from .. import environment
from .texts import Text

if TYPE_CHECKING:
    from mlx import nn


@dataclass(frozen=True)
class Outcome:
    """Quality of one method on one example.

    Attributes:
        bits: negative log2-likelihood of the target, divided by the number of bytes in the target's text.
        accuracy: share of the scored target tokens that the method ranks as the most likely tokens.
        agreement: share of the scored positions where the method and dense attention have the same most likely token.
        kl: mean Kullback-Leibler divergence in nats of the method's predictions from dense attention's predictions.
        matched: number of characters of the target before the first token that is not the most likely token. Greedy
            decoding would reproduce these characters (SparQ paper, section 5).
        exact: 1 if every scored token is the most likely token, else 0.
    """

    bits: float
    accuracy: float
    agreement: float
    kl: float
    matched: float = 0.0
    exact: float = 0.0


@dataclass(frozen=True)
class Trial:
    """Outcome of one method on one example, and statistics of the method's attention calls.

    Attributes:
        attn: the method as text, with all automatic settings resolved.
        sparse_calls, dense_calls: number of attention calls. A call on a batch counts once for each example.
        sparse_bytes: K and V bytes that the sparse calls moved.
        dense_bytes: K and V bytes that dense attention would have moved in the sparse calls.
        dense_reasons: dict from a reason to the number of calls that were dense for that reason.
        selectivity: for SAAP, the share of attended keys among all keys that are neither sinks nor recent (saap.12).
        density: share of a prompt's causal block pairs that each sparse layer attends to, averaged over query heads.
        sampled: share of a prompt's query rows that were scored to select key blocks.
        recall: minimum, 1st percentile and mean of the attention recall over all layers, heads and rows of a prompt;
            empty if the recall was not measured.
    """

    outcome: Outcome
    attn: str = "dense"
    sparse_calls: int = 0
    dense_calls: int = 0
    sparse_bytes: float = 0
    dense_bytes: float = 0
    dense_reasons: dict[str, int] = field(default_factory=dict)
    selectivity: float | None = None
    density: list[float] = field(default_factory=list)
    sampled: float = 0.0
    recall: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Results of one method on one task, averaged over the examples.

    If there is only one example, the standard errors are NaN.

    Attributes:
        method: the method as the user wrote it.
        attn: the method with all automatic settings resolved.
        budget: largest share of dense attention's elements that the method may move, such as "1/8"; None if no setting
            depends on a budget.
        mean, mean_error: mean of each metric, and the standard error of the mean.
        delta, error: mean difference of each metric from dense attention on the same examples, and its standard error.
        formula: share of dense attention's elements that a decode step moves according to the method's formula; None
            if there is no decode method or ``prefill`` is True.
        compression: bytes that the sparse calls moved, divided by the bytes that dense attention would have moved.
        sparse_calls, dense_calls, dense_reasons: as in `Trial`, summed over the examples.
        prefill: True if tokens inside the prompt were scored; False if decode steps after the prompt were scored.
        selectivity, density, sampled, recall: as in `Trial`, averaged over the examples. The minimum recall is not
            averaged, but is the lowest of all examples.
        depths: dict from each depth of the answer, such as "50%", to the accuracy at that depth; empty if the task has
            no depth.
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
    density: list[float] = field(default_factory=list)
    sampled: float = 0.0
    recall: list[float] = field(default_factory=list)
    depths: dict[str, float] = field(default_factory=dict)

    @property
    def served(self) -> str:
        """Kind of run: "dense" (baseline), "sparse", "partly" (some calls dense) or "fell back" (all calls dense)."""
        if self.method == "dense":
            return "dense"
        if not self.sparse_calls:
            return "fell back"
        return "partly" if self.dense_calls else "sparse"

    @property
    def of_prompt(self) -> bool:
        return self.prefill or (bool(self.density) and self.compression == 1)

    @property
    def sparse_share(self) -> float:
        return self.sparse_calls / max(1, self.sparse_calls + self.dense_calls)


METRICS = tuple(Outcome.__annotations__)


def row_of(trials: Sequence[Trial], dense: Sequence[Trial], depths: Sequence[float | None], **about: Any) -> Row:
    """Average the trials of one method into one row.

    Args:
        dense: trials of dense attention on the same examples.
        depths: depth of the answer in each example's prompt; None if the task has no depth.
        about: ``task``, ``method``, ``budget``, ``context``, ``formula`` and ``prefill`` of the row.
    """
    outcomes, reference = ([vars(trial.outcome) for trial in of] for of in (trials, dense))
    deltas = [{name: a[name] - b[name] for name in a} for a, b in zip(outcomes, reference, strict=True)]
    moved, full = (sum(getattr(trial, name) for trial in trials) for name in ("sparse_bytes", "dense_bytes"))
    recalls = [trial.recall for trial in trials if trial.recall]
    selectivities = [trial.selectivity for trial in trials if trial.selectivity is not None]
    reasons: Counter[str] = Counter()
    for trial in trials:
        reasons.update(trial.dense_reasons)
    return Row(
        **about,
        attn=trials[0].attn,
        examples=len(trials),
        mean=_means(outcomes),
        mean_error=_errors(outcomes),
        delta=_means(deltas),
        error=_errors(deltas),
        compression=moved / full if full else 1.0,
        sparse_calls=sum(trial.sparse_calls for trial in trials),
        dense_calls=sum(trial.dense_calls for trial in trials),
        dense_reasons=dict(reasons),
        selectivity=mean(selectivities) if selectivities else None,
        density=[mean(of_layer) for of_layer in zip(*(trial.density for trial in trials), strict=True)],
        sampled=mean(trial.sampled for trial in trials),
        recall=[min(r[0] for r in recalls), *(mean(r[i] for r in recalls) for i in (1, 2))] if recalls else [],
        depths=_depths(trials, depths),
    )


def _means(outcomes: Sequence[Mapping[str, float]]) -> Outcome:
    return Outcome(*(mean(outcome[name] for outcome in outcomes) for name in METRICS))


def _errors(outcomes: Sequence[Mapping[str, float]]) -> Outcome:
    if len(outcomes) < 2:
        return Outcome(*(math.nan for _ in METRICS))
    return Outcome(*(stdev(outcome[name] for outcome in outcomes) / math.sqrt(len(outcomes)) for name in METRICS))


def _depths(trials: Sequence[Trial], depths: Iterable[float | None]) -> dict[str, float]:
    found: dict[float, list[float]] = {}
    for trial, depth in zip(trials, depths, strict=True):
        if depth is not None:
            found.setdefault(depth, []).append(trial.outcome.accuracy)
    return {f"{depth:.0%}": mean(found[depth]) for depth in sorted(found)}


def run_facts(
    command: str, name: str, model: nn.Module, texts: Sequence[tuple[Text, int]], **options: int
) -> dict[str, object]:
    """Collect the inputs and the machine of a run. Paths are as the user typed them.

    Environment variables are not included. A list of KV heads or head dims means that the layers differ.

    Args:
        texts: pairs of a text and its number of tokens.
        options: ``seed``, ``prefill_step_size`` and ``batch``.
    """
    shapes = [shape for shape in kv_shapes(model) if shape is not None]
    kv_heads, head_dims = (sorted({shape[axis] for shape in shapes}) for axis in (0, 1))
    sizes = [each[0] if len(each) == 1 else each for each in (kv_heads, head_dims)]
    heads = config_of(model).get("num_attention_heads")
    return {
        "command": command,
        "date": date.today().isoformat(),
        **options,
        "versions": environment.versions(),
        "machine": environment.hardware(),
        "model": {
            "name": name,
            "type": model_type(model),
            "hash": weights_hash(model),
            "layers": len(shapes),
            "query_heads": heads,
            "kv_heads": sizes[0],
            "head_dim": sizes[1],
        },
        "texts": [
            {"name": text.name, "sha256": text.sha256, "bytes": len(text.text.encode()), "tokens": tokens}
            for text, tokens in texts
        ],
    }
