"""Try every setting on retrieval tasks inside a sparse prefill, and select two: the paper's tuning (section 4.4)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import mlx.core as mx

from ...checks import ConfigError
from ...lm import sparse
from ...methods import Sample
from ..evaluate.journal import Journal
from ..evaluate.runner import passage_logits
from ..evaluate.tasks import PASSAGES, Maker, Passage
from ..evaluate.tasks.base import starts
from ..evaluate.tasks.hidden import CITIES, Question, ask, hide, numbers

ENOUGH = 0.9  # share of dense attention's accuracy that the speed-first setting reaches
RANGES = (16 << 10, 48 << 10, 80 << 10, 112 << 10, math.inf)  # keys below which each range ends (Table 6)
ASKED = 4  # pass keys that a passage of needles asks for


def needles(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """State the pass keys of cities once each in a text, and ask for `ASKED` of them and answer at its end."""
    rng = random.Random(seed)
    for start in starts(tokens, context, limit, rng):
        text = tokens[start : start + context]
        keys = dict(zip(CITIES, numbers(rng, len(CITIES), tokenizer.decode(text)), strict=True))
        statements = [(rng.random(), f"\nThe pass key of {city} is {key}.\n") for city, key in keys.items()]
        dialog: list[int] = []
        scored = []
        for city in rng.sample(CITIES, ASKED):
            question = f"\nWhat is the pass key of {city}? The pass key of {city} is"
            asked = ask(tokenizer, question, f" {keys[city]}")
            scored += [len(dialog) + len(asked.tokens) - 1 + position for position in asked.scored]
            dialog += asked.tokens + asked.answer
        prompt = hide(tokenizer, text, statements, Question(dialog, [], []), context, 0).prompt
        yield Passage(prompt, [len(prompt) - len(dialog) + position for position in scored])


RETRIEVAL: Mapping[str, Maker[Passage]] = {"needles": needles, "repetition": PASSAGES["repetition"]}


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
        right, scored: tokens predicted right, and all that are scored.
        density: share of the causal block pairs attended, mean over layers and heads.
        sampled: share of the rows that were scored to select them.
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
        """Return the setting and its figures as plain data for JSON."""
        found = asdict(self)
        return (found.pop("setting") or {}) | found | {"accuracy": self.accuracy, "work": self.work}


@dataclass(frozen=True)
class Tuned:
    """The result for contexts of fewer than ``up_to`` keys, tuned at ``lengths``."""

    up_to: int
    lengths: tuple[int, ...]
    dense: Measured
    measured: list[Measured]
    accuracy_first: Measured
    speed_first: Measured

    @property
    def lossless(self) -> bool:
        """True if the accuracy-first setting loses nothing; otherwise that setting loses least."""
        return self.accuracy_first.accuracy >= self.dense.accuracy


@dataclass(frozen=True)
class Search:
    """The inputs of a search; ``journal`` has the trials that were run before."""

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
        """Return the number of prefills that these lengths take."""
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
        return Tuned(up_to, lengths, dense, measured, *select(dense, measured))

    def _measure(self, setting: Setting | None, lengths: tuple[int, ...], progress: Any) -> Measured:
        trials: dict[tuple[str, int], list[Trial]] = {}
        for length, (task, make) in itertools.product(lengths, RETRIEVAL.items()):
            options = {"context": length, "limit": self.examples, "seed": self.seed}
            for i, passage in enumerate(make(self.tokens, self.tokenizer, **options)):
                name = f"{task}/{length}/{i}/{setting or 'dense'}"
                if name not in self.journal.results:
                    self.journal.add(name, self._try(setting, passage))
                trials.setdefault((task, length), []).append(self.journal.results[name])
                progress.update()
        every = [trial for of_one in trials.values() for trial in of_one]
        of_task = {
            task: [t for (name, _), of_one in trials.items() if name == task for t in of_one] for task in RETRIEVAL
        }
        return Measured(
            setting,
            {task: sum(t.right for t in of_one) / sum(t.scored for t in of_one) for task, of_one in of_task.items()},
            mean(trial.density for trial in every),
            mean(trial.sampled for trial in every),
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


def select(dense: Measured, measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Return the accuracy-first and the speed-first setting.

    Accuracy first is the least work among those that lose nothing, or else the most accurate. Speed first is the least
    work among those that reach `ENOUGH` of dense attention's accuracy, or else the accuracy-first one. They are ranked
    by work, because times repeat only on an idle machine, and then by their numbers.
    """

    def least_work(candidates: Sequence[Measured]) -> Measured:
        return min(candidates, key=lambda found: (found.work, found.setting))

    lossless = [found for found in measured if found.accuracy >= dense.accuracy]
    best = max(found.accuracy for found in measured)
    accurate = least_work(lossless or [found for found in measured if found.accuracy == best])
    enough = [found for found in measured if found.accuracy >= ENOUGH * dense.accuracy]
    return accurate, least_work(enough) if enough else accurate


def whole_grid(*values: Sequence[Any]) -> list[Setting]:
    """Return every combination of the ``values`` of each parameter, in a fixed order."""
    return [Setting(*each) for each in itertools.product(*(sorted(set(of_one)) for of_one in values))]


def by_range(lengths: Sequence[int], context: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the ends of the ranges that hold a length, with those lengths; the last end is the model's ``context``."""
    ends = {length: next(end for end in RANGES if length < end) for length in sorted(set(lengths))}
    return [
        (int(end) if math.isfinite(end) else context + 1, tuple(length for length in ends if ends[length] == end))
        for end in sorted(set(ends.values()))
    ]
