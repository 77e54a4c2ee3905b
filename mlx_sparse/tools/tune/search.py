"""Try every setting on retrieval tasks inside a sparse prefill, and choose: the paper's tuning (section 4.4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import mlx.core as mx

from ...checks import ConfigError
from ...lm import sparse
from ...methods import Sample
from ..evaluate.journal import Journal
from ..evaluate.runner import passage_logits
from ..evaluate.tasks import RETRIEVAL, Passage

ENOUGH = 0.9  # share of dense attention's accuracy that the speed-first setting keeps


@dataclass(frozen=True, order=True)
class Setting:
    """The parameters of SampleAttention that are searched."""

    alpha_column: float
    alpha_slash: float
    chunks: int

    def __str__(self) -> str:
        return f"{self.alpha_column}:{self.alpha_slash}:{self.chunks}"


@dataclass(frozen=True)
class Trial:
    """A passage under one setting.

    Attributes:
        right, scored: tokens predicted right, and all that were asked for.
        density: mean over layers and heads of the share of causal block pairs attended.
        sampled: share of the rows that were scored to choose them.
        seconds: time of the whole prefill.
    """

    right: int
    scored: int
    density: float
    sampled: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A setting over all passages of a range; ``setting`` None is dense attention.

    Attributes:
        tasks: accuracy by task.
        seconds: fastest prefill, mean over the lengths.
    """

    setting: Setting | None
    tasks: dict[str, float]
    density: float
    sampled: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """The mean of the tasks' accuracies."""
        return mean(self.tasks.values())

    @property
    def work(self) -> float:
        """Attention's multiply-adds over those of dense: the block pairs, and the sample's scores (no values: half)."""
        return self.density + self.sampled / 2

    def as_dict(self) -> dict[str, Any]:
        """The setting and its figures as plain data for JSON."""
        setting = asdict(self.setting) if self.setting else {}
        figures = {"accuracy": self.accuracy, "tasks": self.tasks, "density": self.density, "sampled": self.sampled}
        return {**setting, **figures, "work": self.work, "seconds": self.seconds}


@dataclass(frozen=True)
class Tuned:
    """What was found for contexts of fewer than ``up_to`` keys, tuned at ``lengths``."""

    up_to: int
    lengths: tuple[int, ...]
    dense: Measured
    measured: list[Measured]
    accuracy_first: Measured
    speed_first: Measured

    @property
    def lossless(self) -> bool:
        """Whether the accuracy-first setting loses nothing; otherwise it is the one that loses least."""
        return self.accuracy_first.accuracy >= self.dense.accuracy


@dataclass(frozen=True)
class Search:
    """The inputs of a search; ``journal`` knows what has been tried."""

    model: Any
    tokenizer: Any
    tokens: list[int]
    journal: Journal[Trial]
    grid: Sequence[Setting]
    examples: int
    seed: int
    step: int
    block_size: int
    backend: str
    least_accuracy: float

    def runs(self, lengths: Sequence[int]) -> int:
        """Prefills that these lengths take."""
        return len(lengths) * len(RETRIEVAL) * self.examples * (1 + len(self.grid))

    def tune(self, up_to: int, lengths: tuple[int, ...], progress: Any) -> Tuned:
        """Try every setting at ``lengths``.

        Raises:
            ConfigError: the model cannot do the tasks even with dense attention.
        """
        dense = self._measure(None, lengths, progress)
        if dense.accuracy < self.least_accuracy:
            raise ConfigError(
                f"--lengths: expected tasks that the model can do, got {dense.accuracy:.2f} of the tokens right with "
                f"dense attention at {', '.join(f'{length:,}' for length in lengths)} tokens. "
                f"Leave that out, or lower --least-accuracy (now {self.least_accuracy:g})."
            )
        measured = [self._measure(setting, lengths, progress) for setting in self.grid]
        return Tuned(up_to, lengths, dense, measured, *choose(dense, measured))

    def _measure(self, setting: Setting | None, lengths: tuple[int, ...], progress: Any) -> Measured:
        trials: dict[tuple[str, int], list[Trial]] = {}
        for length, (task, make) in itertools.product(lengths, RETRIEVAL.items()):
            found = trials.setdefault((task, length), [])
            passages: Iterator[Passage] = make(
                self.tokens, self.tokenizer, context=length, limit=self.examples, seed=self.seed
            )
            for i, passage in enumerate(passages):
                name = f"{task}/{length}/{i}/{setting or 'dense'}"
                if name not in self.journal.results:
                    trial = self._try(setting, passage)
                    self.journal.add(name, trial)
                found.append(self.journal.results[name])
                progress.update()
        everything = list(itertools.chain(*trials.values()))
        return Measured(
            setting,
            {task: _accuracy(trials[task, length] for length in lengths) for task in RETRIEVAL},
            mean(trial.density for trial in everything),
            mean(trial.sampled for trial in everything),
            mean(min(t.seconds for task in RETRIEVAL for t in trials[task, length]) for length in lengths),
        )

    def _try(self, setting: Setting | None, passage: Passage) -> Trial:
        density, sampled = 1.0, 0.0
        if setting is None:
            logits, seconds = passage_logits(self.model, passage, self.step)
        else:
            config = Sample(**asdict(setting), block_size=self.block_size, dense_below=0)
            with sparse(self.model, config, backend=self.backend) as report:
                logits, seconds = passage_logits(self.model, passage, self.step)
            if report.prefill is not None and report.prefill.calls:
                density = mean(mean(heads) for heads in report.prefill.density.values())
                sampled = report.prefill.sampled
        right: Any = (logits.argmax(axis=-1) == mx.array(passage.targets)).sum().item()
        return Trial(right, len(passage.scored), density, sampled, seconds)


def choose(dense: Measured, measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """The accuracy-first and the speed-first setting.

    Accuracy first: the least work among those that lose nothing, or else the most accurate. Speed first: the least work
    among those that keep `ENOUGH` of dense attention's accuracy, or else the accuracy-first one. By work and not by the
    measured time, which repeats only on an idle machine; equal ones by the numbers themselves.
    """

    def least_work(candidates: Sequence[Measured]) -> Measured:
        return min(candidates, key=lambda found: (found.work, found.setting))

    lossless = [found for found in measured if found.accuracy >= dense.accuracy]
    best = max(found.accuracy for found in measured)
    accurate = least_work(lossless or [found for found in measured if found.accuracy == best])
    enough = [found for found in measured if found.accuracy >= ENOUGH * dense.accuracy]
    return accurate, least_work(enough) if enough else accurate


def _accuracy(trials: Iterator[list[Trial]]) -> float:
    every = list(itertools.chain(*trials))
    return sum(trial.right for trial in every) / sum(trial.scored for trial in every)


def whole_grid(alpha_column: Sequence[float], alpha_slash: Sequence[float], chunks: Sequence[int]) -> list[Setting]:
    """Every combination, in a fixed order."""
    return [Setting(*values) for values in itertools.product(*map(_ascending, (alpha_column, alpha_slash, chunks)))]


def _ascending(values: Sequence[Any]) -> list[Any]:
    return sorted(set(values))


RANGES = (16 << 10, 48 << 10, 80 << 10, 112 << 10, math.inf)  # keys below which each range ends (Table 6)


def by_range(lengths: Sequence[int], context: int) -> list[tuple[int, tuple[int, ...]]]:
    """The ends of the ranges that hold a length, with those lengths; the last one ends with the model's ``context``."""
    ends = {length: next(end for end in RANGES if length < end) for length in sorted(set(lengths))}
    return [
        (int(end) if math.isfinite(end) else context + 1, tuple(length for length in ends if ends[length] == end))
        for end in sorted(set(ends.values()))
    ]
