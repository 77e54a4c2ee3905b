"""Implement ``mlx-sparse tune-sample``: tune SampleAttention for a model in each range of context lengths.

The command runs every setting on retrieval tasks inside a sparse prefill. As in section 4.4 of the SampleAttention
paper, it selects two settings per range.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..checks import ConfigError, Parser, check_int, check_sample, check_share, read_length
from ..lm import sparse
from ..lm.model import native_dense
from ..methods import Sample
from . import terminal
from .assets.models import DEFAULT
from .evaluate.inputs import add_options, check_options, fingerprint, load_model, read_tokens
from .evaluate.journal import Journal
from .evaluate.runner import passage_logits
from .evaluate.tasks import PASSAGES, SHORTEST, Maker, Passage
from .formats import check_own, write_toml
from .progress import Bar

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

# Values from Table 6 of the paper, and the numbers of chunks that the paper selects.
ALPHAS = (0.80, 0.85, 0.90, 0.92, 0.95, 0.98)
CHUNKS = (1, 2)
LENGTHS = tuple(length << 10 for length in (8, 32, 64, 96, 128))  # one length in each range
FIRST_LINE = "# Written by mlx-sparse tune-sample"
NOT_LOSSLESS = "No setting keeps the accuracy of dense attention; accuracy first is the most accurate setting."
SPEED_FIRST_SHARE = 0.9  # share of dense attention's accuracy that the speed-first setting keeps
RANGES = (16 << 10, 48 << 10, 80 << 10, 112 << 10, math.inf)  # upper limits of the ranges in keys (Table 6)


RETRIEVAL: Mapping[str, Maker[Passage]] = {task: PASSAGES[task] for task in ("needle", "copying")}


@dataclass(frozen=True, order=True)
class Setting:
    """The parameters of SampleAttention that the command tunes."""

    alpha_column: float
    alpha_slash: float
    chunks: int

    def __str__(self) -> str:
        return f"{self.alpha_column}:{self.alpha_slash}:{self.chunks}"


@dataclass(frozen=True)
class Trial:
    """Result of the prefill of one passage with one setting.

    Attributes:
        right, scored: number of correctly predicted tokens and number of scored tokens.
        density: share of the causal block pairs that were attended to, averaged over layers and heads.
        sampled: share of the query rows that were sampled to select key blocks.
    """

    right: int
    scored: int
    density: float
    sampled: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Results of one setting over all passages of a range.

    Attributes:
        setting: the setting that was run; None for dense attention.
        tasks: dict from each task to the share of scored tokens that were predicted correctly.
        density, sampled: as in `Trial`, averaged over all trials.
        seconds: time in seconds of the fastest prefill at each length, averaged over the lengths.
    """

    setting: Setting | None
    tasks: dict[str, float]
    density: float
    sampled: float
    seconds: float

    @property
    def accuracy(self) -> float:
        return mean(self.tasks.values())

    @property
    def work(self) -> float:
        """Number of multiply-adds, divided by the number in dense attention.

        A sampled row counts half, because it is multiplied only with keys and not with values.
        """
        return self.density + self.sampled / 2

    def as_dict(self) -> dict[str, object]:
        found = asdict(self)
        return (found.pop("setting") or {}) | found | {"accuracy": self.accuracy, "work": self.work}


@dataclass(frozen=True)
class Tuned:
    """Two selected settings for contexts of fewer than ``up_to`` keys, and the measurements at all ``lengths``."""

    up_to: int
    lengths: tuple[int, ...]
    dense: Measured
    measured: list[Measured]
    accuracy_first: Measured
    speed_first: Measured

    @property
    def lossless(self) -> bool:
        return self.accuracy_first.accuracy >= self.dense.accuracy


@dataclass(frozen=True)
class Search:
    """A search for the best settings. ``journal`` stores the trials, and ``args`` contains the command's options."""

    model: nn.Module
    tokenizer: Tokenizer
    tokens: list[int]
    journal: Journal[Trial]
    args: argparse.Namespace

    @property
    def grid(self) -> list[Setting]:
        return settings_grid(self.args.alpha_column, self.args.alpha_slash, self.args.chunks)

    def tune(self, up_to: int, lengths: tuple[int, ...], progress: Bar) -> Tuned:
        """Run every setting at ``lengths`` and select two settings."""
        dense = self._measure(None, lengths, progress)
        if dense.accuracy < self.args.min_accuracy:
            raise ConfigError(
                f"--lengths: expected lengths at which dense attention solves the tasks, got an accuracy of "
                f"{dense.accuracy:.2f} at {', '.join(f'{length:,}' for length in lengths)} tokens. "
                f"Leave that length out, or lower --min-accuracy (now {self.args.min_accuracy:g})."
            )
        measured = [self._measure(setting, lengths, progress) for setting in self.grid]
        return Tuned(up_to, lengths, dense, measured, *select(dense, measured))

    def _measure(self, setting: Setting | None, lengths: tuple[int, ...], progress: Bar) -> Measured:
        trials: list[tuple[str, int, Trial]] = []
        for length, (task, make) in itertools.product(lengths, RETRIEVAL.items()):
            options = {"context": length, "limit": self.args.examples, "seed": self.args.seed}
            for i, passage in enumerate(make(self.tokens, self.tokenizer, **options)):
                name = f"{task}/{length}/{i}/{setting or 'dense'}"
                if name not in self.journal.results:
                    self.journal.add(name, self._try(setting, passage))
                trials.append((task, length, self.journal.results[name]))
                progress.update()
        by_task = {task: [trial for name, _, trial in trials if name == task] for task in RETRIEVAL}
        return Measured(
            setting,
            {task: sum(t.right for t in some) / sum(t.scored for t in some) for task, some in by_task.items()},
            mean(trial.density for *_, trial in trials),
            mean(trial.sampled for *_, trial in trials),
            mean(min(trial.seconds for _, at, trial in trials if at == length) for length in lengths),
        )

    def _try(self, setting: Setting | None, passage: Passage) -> Trial:
        density, sampled = 1.0, 0.0
        if setting is None:
            with native_dense(self.model):
                logits, seconds = passage_logits(self.model, passage, self.args.prefill_step_size)
        else:
            config = Sample(**asdict(setting), block_size=self.args.block_size, dense_below=0)
            with sparse(self.model, config) as report:
                logits, seconds = passage_logits(self.model, passage, self.args.prefill_step_size)
            if report.prefill is not None and report.prefill.calls:
                density = mean(mean(heads) for heads in report.prefill.density.values())
                sampled = report.prefill.sampled
        right: Any = (logits.argmax(axis=-1) == mx.array(passage.targets)).sum().item()
        return Trial(right, len(passage.scored), density, sampled, seconds)


def select(dense: Measured, measured: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Return the accuracy-first and the speed-first setting.

    The accuracy-first setting has the least work of all settings that are as accurate as dense attention. If no
    setting is that accurate, the most accurate setting is selected. The speed-first setting has the least work of all
    settings that keep `SPEED_FIRST_SHARE` of dense attention's accuracy. If no setting keeps that share, both settings
    are the same. Settings are ranked by work, because times are reproducible only on an idle machine.
    """

    def cheapest(candidates: Sequence[Measured]) -> Measured:
        return min(candidates, key=lambda found: (found.work, found.setting))

    lossless = [found for found in measured if found.accuracy >= dense.accuracy]
    best = max(found.accuracy for found in measured)
    accurate = cheapest(lossless or [found for found in measured if found.accuracy == best])
    enough = [found for found in measured if found.accuracy >= SPEED_FIRST_SHARE * dense.accuracy]
    return accurate, cheapest(enough) if enough else accurate


def settings_grid(*values: Sequence[Any]) -> list[Setting]:
    """Return a setting for every combination of the parameters' values. The settings are in ascending order."""
    return [Setting(*each) for each in itertools.product(*(sorted(set(of_one)) for of_one in values))]


def group_by_range(lengths: Sequence[int], context: int) -> list[tuple[int, tuple[int, ...]]]:
    """Group ``lengths`` by the ranges in `RANGES`. Return the upper limit and the lengths of each range.

    Ranges that have no length are omitted. Upper limits are exclusive. The infinite limit of the last range is replaced
    by ``context + 1``.
    """
    ends = {length: next(end for end in RANGES if length < end) for length in sorted(set(lengths))}
    return [
        (int(end) if math.isfinite(end) else context + 1, tuple(length for length in ends if ends[length] == end))
        for end in sorted(set(ends.values()))
    ]


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse tune-sample`` with the arguments ``argv``, and return the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    state = args.out.with_name(f"{args.out.name}.state.jsonl") if args.out else None
    try:
        tuned = _tune(args, state)
    except KeyboardInterrupt:
        rest = f"the same command resumes from {state}" if state else "without --out, nothing is stored"
        print(f"\nmlx-sparse tune-sample: interrupted; {rest}", file=sys.stderr)
        return 130
    name = args.model or DEFAULT
    text = toml(tuned, args.prefer, name, args.block_size)
    if args.out is not None:
        write_toml(args.out, text)
        print(f"Wrote {args.out}; a run with more settings reuses {state}.", file=sys.stderr)
    if args.json:
        print(json.dumps(as_dict(tuned, name, args.block_size)))
    else:
        print(table(tuned))
        if args.out is None:
            print(f"\n{text}", end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse tune-sample",
        description="Select the alphas and the number of chunks of SampleAttention for a model, by range of context "
        "length. The command runs every setting on needles and copies in real text, with questions and answers "
        "inside the sparse prefill. It selects two settings with the least work: accuracy first keeps the accuracy of "
        "dense attention, speed first at least 90 percent of it.",
    )
    add_options(parser)
    parser.add_argument(
        "--out",
        metavar="FILE.toml",
        type=Path,
        help="write the settings for --attn-config, and every trial to FILE.toml.state.jsonl; the same command "
        "resumes from the trials after an interruption (default: print the settings)",
    )
    parser.add_argument("--prefer", choices=("accuracy", "speed"), default="accuracy", help="(default: accuracy)")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        help="context lengths to tune at (default: 8k,32k,64k,96k,128k, limited by the model and the text)",
    )
    for name, metavar, kind, values in (
        ("--alpha-column", "A", float, ALPHAS),
        ("--alpha-slash", "A", float, ALPHAS),
        ("--chunks", "N", int, CHUNKS),
    ):
        text = f"values to try (default: {' '.join(map(str, values))})"
        parser.add_argument(name, metavar=metavar, nargs="+", type=kind, default=values, help=text)
    parser.add_argument("--block-size", metavar="N", type=int, default=128, help="tokens per block (default: 128)")
    parser.add_argument("--examples", metavar="N", type=int, default=2, help="per task and length (default: 2)")
    parser.add_argument(
        "--prefill-step-size", metavar="N", type=int, default=2048, help="tokens of a prefill chunk (default: 2048)"
    )
    parser.add_argument(
        "--min-accuracy",
        metavar="SHARE",
        type=float,
        default=0.5,
        help="stop if the accuracy of dense attention is lower (default: 0.5)",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    check_own("--out", args.out, FIRST_LINE)
    for setting in settings_grid(args.alpha_column, args.alpha_slash, args.chunks):
        check_sample(setting.alpha_column, setting.alpha_slash, setting.chunks, args.block_size)
    check_int("--examples", args.examples, 1)
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    if args.min_accuracy != 0:
        check_share("--min-accuracy", args.min_accuracy)
    args.lengths = [read_length(length) for length in args.lengths.split(",")] if args.lengths else None
    check_options(args)


def _tune(args: argparse.Namespace, state: Path | None) -> list[Tuned]:
    model, tokenizer, config = load_model(args.model, args.cache_dir, args.accept_license)
    tokens = read_tokens(tokenizer, args.text, args.cache_dir)
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    bounds = {"the --text, divided by --examples": len(tokens) // args.examples}
    if context is not None:
        bounds["the model's context"] = context
    lengths = _lengths(args.lengths, bounds)
    ranges = group_by_range(lengths, context or max(lengths))
    options = (args.examples, args.seed, args.prefill_step_size, args.block_size)
    journal = Journal(state, "tune-sample", fingerprint(model, tokens, *options), Trial)
    search = Search(model, tokenizer, tokens, journal, args)
    runs = sum(len(of) for _, of in ranges) * len(RETRIEVAL) * args.examples * (1 + len(search.grid))
    with Bar("", runs, "prompts") as progress:
        found = []
        for up_to, lengths in ranges:
            progress.stage(f"below {up_to:,} keys")
            found.append(search.tune(up_to, lengths, progress))
    return found


def _lengths(wanted: Sequence[int] | None, bounds: dict[str, int]) -> Sequence[int]:
    """Check and return the ``wanted`` lengths. If ``wanted`` is None, return the default lengths within ``bounds``."""
    name = min(bounds, key=lambda name: bounds[name])
    lengths = wanted or [length for length in LENGTHS if length <= bounds[name]] or [bounds[name]]
    if min(lengths) < SHORTEST or max(lengths) > bounds[name]:
        wrong = min(lengths) if min(lengths) < SHORTEST else max(lengths)
        raise ConfigError(f"--lengths: expected {SHORTEST:,} to {bounds[name]:,} tokens ({name}), got {wrong:,}.")
    return lengths


def toml(tuned: Sequence[Tuned], prefer: str, model: str, block_size: int) -> str:
    """Return TOML text for ``--attn-config``. The text contains the preferred setting of each range.

    The measurements are comments in the text. ``prefer`` is "accuracy" or "speed".
    """
    # JSON text has no line breaks, so the name cannot end the comment.
    lines = [
        f"{FIRST_LINE} for {json.dumps(model)}: {prefer} first.",
        "# Use this file with --attn-config. Contexts beyond the last range use the last range.",
        "[sample]",
        f"block_size = {block_size}",
    ]
    for found in tuned:
        first, other = (found.accuracy_first, found.speed_first)[:: 1 if prefer == "accuracy" else -1]
        other_name = "speed" if prefer == "accuracy" else "accuracy"
        assert first.setting is not None
        lines += [
            "",
            f"# Tuned at {', '.join(f'{length:,}' for length in found.lengths)} keys.",
            f"# dense: {_summary(found.dense)}",
            f"# this: {_summary(first)}",
            f"# {other_name} first: {_summary(other)} with {other.setting}",
            *([] if found.lossless else [f"# {NOT_LOSSLESS}"]),
            "[[sample.ranges]]",
            f"up_to = {found.up_to}",
            *(f"{name} = {value}" for name, value in asdict(first.setting).items()),
        ]
    return "\n".join(lines) + "\n"


def _summary(row: Measured) -> str:
    shares = f"accuracy {row.accuracy:.3f}, density {row.density:.3f}, sampled {row.sampled:.3f}"
    return f"{shares}, {row.seconds:.2f} s per prompt"


def table(tuned: Sequence[Tuned]) -> str:
    """Return all measurements and the selected settings as text."""
    rows = []
    for found in tuned:
        for row in (found.dense, *found.measured):
            best = {"accuracy first": found.accuracy_first, "speed first": found.speed_first}
            chosen = ", ".join(name for name, one in best.items() if one is row)
            values = list(asdict(row.setting).values()) if row.setting else ["dense", "", ""]
            shares = [*row.tasks.values(), row.accuracy, row.density, row.sampled, row.work]
            cells = [f"< {found.up_to:,}", *values, *(f"{value:.3f}" for value in shares), f"{row.seconds:.2f}", chosen]
            rows.append(cells)
    header = ["keys", "column", "slash", "chunks", *RETRIEVAL, "accuracy", "density", "sampled", "work", "seconds", ""]
    lines = [
        "work = density + sampled / 2: multiply-adds relative to dense attention. Settings are ranked by work.",
        f"Speed first keeps at least {SPEED_FIRST_SHARE:.0%} of dense attention's accuracy.",
    ]
    for one in tuned:
        both = f"{one.accuracy_first.setting} (accuracy first), {one.speed_first.setting} (speed first)"
        lines.append(f"Below {one.up_to:,} keys: {both}.{'' if one.lossless else f' {NOT_LOSSLESS}'}")
    return f"{terminal.table(header, rows, 4)}\n\n{terminal.fill(*lines)}"


def as_dict(tuned: Sequence[Tuned], model: str, block_size: int) -> dict[str, object]:
    """Return all measurements and the selected settings as a dict for JSON."""
    ranges = [
        {name: getattr(found, name) for name in ("up_to", "lengths", "lossless")}
        | {name: getattr(found, name).as_dict() for name in ("dense", "accuracy_first", "speed_first")}
        | {"measured": [row.as_dict() for row in found.measured]}
        for found in tuned
    ]
    return {"model": model, "block_size": block_size, "ranges": ranges}
