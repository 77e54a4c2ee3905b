"""Implement ``mlx-sparse tune``: tune the prefill methods for a model in each range of context lengths.

The command runs every setting on retrieval tasks inside a sparse prefill. As in section 4.4 of the SampleAttention
paper, it selects two settings per method and range.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...checks import ConfigError, Parser, check_int, check_share, read_length
from ...core.base import Prefill
from ...lm import sparse
from ...lm.model import native_dense
from ...methods import Gather, Sample
from ..assets.models import DEFAULT
from ..evaluate.inputs import add_options, check_options, fingerprint, load_model, read_tokens
from ..evaluate.journal import Journal
from ..evaluate.runner import passage_logits
from ..evaluate.tasks import SHORTEST, Passage
from ..formats import check_own, write_toml
from ..progress import Bar
from .results import FIRST_LINE, RETRIEVAL, Measured, Trial, Tuned, as_dict, select, table, toml

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

# Values from Table 6 of the paper, and the numbers of chunks that the paper selects.
ALPHAS = (0.80, 0.85, 0.90, 0.92, 0.95, 0.98)
CHUNKS = (1, 2)
SHARES = (0.125, 0.25, 0.5, 0.75)  # shares of the earlier keys that gathered prefill keeps
LENGTHS = tuple(length << 10 for length in (8, 32, 64, 96, 128))  # one length in each range
METHODS = ("sample", "gather")
RANGES = (16 << 10, 48 << 10, 80 << 10, 112 << 10, math.inf)  # upper limits of the ranges in keys (Table 6)


@dataclass(frozen=True)
class Search:
    """A search for the best settings.

    Attributes:
        grids: settings of each method.
        journal: stores the trials.
        step: number of tokens of a prefill chunk.
        min_accuracy: accuracy of dense attention below which the search fails.
    """

    model: nn.Module
    tokenizer: Tokenizer
    tokens: list[int]
    grids: Sequence[Sequence[Prefill]]
    journal: Journal[Trial] = field(default_factory=lambda: Journal(None, "", "", Trial))
    examples: int = 2
    seed: int = 0
    step: int = 2048
    min_accuracy: float = 0.0

    def run(self, ranges: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tuned]:
        """Run every setting in every range, which is an upper limit and the lengths in the range."""
        runs = sum(len(of) for _, of in ranges) * len(RETRIEVAL) * self.examples * (1 + sum(map(len, self.grids)))
        found = []
        with Bar("", runs, "prompts") as progress:
            for up_to, lengths in ranges:
                progress.stage(f"prefill below {up_to:,} keys")
                found += self.tune(up_to, lengths, progress)
        return found

    def tune(self, up_to: int, lengths: tuple[int, ...], progress: Bar) -> list[Tuned]:
        """Run every setting at ``lengths``, and select two settings of each method."""
        dense = self._measure(None, lengths, progress)
        if dense.accuracy < self.min_accuracy:
            raise ConfigError(
                f"--lengths: expected lengths at which dense attention solves the tasks, got an accuracy of "
                f"{dense.accuracy:.2f} at {', '.join(f'{length:,}' for length in lengths)} tokens. "
                f"Leave that length out, or lower --min-accuracy (now {self.min_accuracy:g})."
            )
        found = []
        for grid in self.grids:
            measured = [self._measure(config, lengths, progress) for config in grid]
            found.append(Tuned(up_to, lengths, dense, measured, *select(dense, measured)))
        return found

    def _measure(self, config: Prefill | None, lengths: tuple[int, ...], progress: Bar) -> Measured:
        trials: list[tuple[str, int, Trial]] = []
        for length, (task, make) in itertools.product(lengths, RETRIEVAL.items()):
            options = {"context": length, "limit": self.examples, "seed": self.seed}
            for i, passage in enumerate(make(self.tokens, self.tokenizer, **options)):
                name = f"{task}/{length}/{i}/{config or 'dense'}"
                if name not in self.journal.results:
                    self.journal.add(name, self._try(config, passage))
                trials.append((task, length, self.journal.results[name]))
                progress.update()
        by_task = {task: [trial for name, _, trial in trials if name == task] for task in RETRIEVAL}
        return Measured(
            config,
            {task: sum(t.right for t in some) / sum(t.scored for t in some) for task, some in by_task.items()},
            mean(trial.density for *_, trial in trials),
            mean(trial.sampled for *_, trial in trials),
            mean(min(trial.seconds for _, at, trial in trials if at == length) for length in lengths),
        )

    def _try(self, config: Prefill | None, passage: Passage) -> Trial:
        density, sampled = 1.0, 0.0
        if config is None:
            with native_dense(self.model):
                logits, seconds = passage_logits(self.model, passage, self.step)
        else:
            with sparse(self.model, config) as report:
                logits, seconds = passage_logits(self.model, passage, self.step)
            if report.prefill is not None and report.prefill.calls:
                density = mean(mean(heads) for heads in report.prefill.density.values())
                sampled = report.prefill.sampled
        right: Any = (logits.argmax(axis=-1) == mx.array(passage.targets)).sum().item()
        return Trial(right, len(passage.scored), density, sampled, seconds)


def grids(args: argparse.Namespace) -> list[list[Prefill]]:
    """Return the settings of each method in ``args.methods``, in ascending order."""
    shared = {"block_size": args.block_size, "dense_below": 0}
    alphas = itertools.product(*(sorted(set(of)) for of in (args.alpha_column, args.alpha_slash, args.chunks)))
    found: dict[str, list[Prefill]] = {
        "sample": [Sample(alpha_column=c, alpha_slash=s, chunks=n, **shared) for c, s, n in alphas],
        "gather": [Gather(share=share, dense_below=0) for share in sorted(set(args.share))],
    }
    return [found[method] for method in args.methods]


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
    """Run ``mlx-sparse tune`` with the arguments ``argv``, and return the exit code."""
    args = _parser().parse_args(argv)
    settings = _check(args)
    state = args.out.with_name(f"{args.out.name}.state.jsonl") if args.out else None
    try:
        tuned = _tune(args, settings, state)
    except KeyboardInterrupt:
        rest = f"the same command resumes from {state}" if state else "without --out, nothing is stored"
        print(f"\nmlx-sparse tune: interrupted; {rest}", file=sys.stderr)
        return 130
    name = args.model or DEFAULT
    text = toml(tuned, args.prefer, name)
    if args.out is not None:
        write_toml(args.out, text)
        print(f"Wrote {args.out}; a run with more settings reuses {state}.", file=sys.stderr)
    if args.json:
        print(json.dumps(as_dict(tuned, args.prefer, name)))
    else:
        print(table(tuned, args.prefer))
        if args.out is None:
            print(f"\n{text}", end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse tune",
        description="Select the settings of the prefill methods for a model, by range of context length: the alphas "
        "and the number of chunks of SampleAttention, and the share of gathered prefill. The command runs every "
        "setting on needles and copies in real text, with questions and answers inside the sparse prefill. It selects "
        "two settings with the least work: accuracy first keeps the accuracy of dense attention, speed first at least "
        "90 percent of it.",
    )
    add_options(parser)
    parser.add_argument(
        "--out",
        metavar="FILE.toml",
        type=Path,
        help="write the settings for --attn-config, and every trial to FILE.toml.state.jsonl; the same command "
        "resumes from the trials after an interruption (default: print the settings)",
    )
    parser.add_argument(
        "--methods", metavar="METHOD", nargs="+", choices=METHODS, default=METHODS, help="(default: both)"
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
        ("--share", "SHARE", float, SHARES),
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


def _check(args: argparse.Namespace) -> list[list[Prefill]]:
    check_own("--out", args.out, FIRST_LINE)
    check_int("--examples", args.examples, 1)
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    if args.min_accuracy != 0:
        check_share("--min-accuracy", args.min_accuracy)
    args.lengths = [read_length(length) for length in args.lengths.split(",")] if args.lengths else None
    check_options(args)
    return grids(args)


def _tune(args: argparse.Namespace, settings: Sequence[Sequence[Prefill]], state: Path | None) -> list[Tuned]:
    model, tokenizer, config = load_model(args.model, args.cache_dir, args.accept_license)
    tokens = read_tokens(tokenizer, args.text, args.cache_dir)
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    bounds = {"the --text, divided by --examples": len(tokens) // args.examples}
    if context is not None:
        bounds["the model's context"] = context
    lengths = _lengths(args.lengths, bounds)
    ranges = group_by_range(lengths, context or max(lengths))
    options = (args.examples, args.seed, args.prefill_step_size)
    journal = Journal(state, "tune", fingerprint(model, tokens, *options), Trial)
    return Search(model, tokenizer, tokens, settings, journal, *options, args.min_accuracy).run(ranges)


def _lengths(wanted: Sequence[int] | None, bounds: dict[str, int]) -> Sequence[int]:
    """Check and return the ``wanted`` lengths. If ``wanted`` is None, return the default lengths within ``bounds``."""
    name = min(bounds, key=lambda name: bounds[name])
    lengths = wanted or [length for length in LENGTHS if length <= bounds[name]] or [bounds[name]]
    if min(lengths) < SHORTEST or max(lengths) > bounds[name]:
        wrong = min(lengths) if min(lengths) < SHORTEST else max(lengths)
        raise ConfigError(f"--lengths: expected {SHORTEST:,} to {bounds[name]:,} tokens ({name}), got {wrong:,}.")
    return lengths
