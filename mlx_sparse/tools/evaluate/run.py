"""Implement ``mlx-sparse eval``: measure the quality of methods on the user's model and text."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...checks import ConfigError, Parser, check_int, did_you_mean, read_length
from ...files import cache_directory
from ...lm.loading import refuse_unquantizable
from ...lm.model import select_methods
from ...methods import parse
from ..assets.models import DEFAULT
from ..formats import write
from ..progress import Bar
from ..terminal import fill
from ..verdict import verdicts
from . import table, texts
from .inputs import add_options, check_options, encode_texts, fingerprint, head_dim, load_model
from .journal import Journal, as_json
from .results import Row, Trial, run_facts
from .runner import Prefix, Prompt, Run, Steps, observed_by
from .tasks import PASSAGES, RECALL, SHORTEST, TASKS, Passage, family
from .variants import Variant, quantized_variants, read_budget, read_methods, variants_of

NAMES = (*TASKS, RECALL)
DEFAULT_TASKS = ("copying", "bits_per_byte")


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse eval`` with the arguments ``argv``, and return the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    args.command = shlex.join(["mlx-sparse", "eval", *argv])
    evaluation = _Evaluation(args)
    try:
        rows = sorted(evaluation.rows(), key=lambda row: (row.context, args.tasks.index(row.task)))
    except KeyboardInterrupt:
        rest = f"the same command resumes from {args.out}" if args.out else "without --out, nothing is stored"
        print(f"\nmlx-sparse eval: interrupted; {rest}", file=sys.stderr)
        return 130
    if args.json:
        print("\n".join(json.dumps(as_json(row)) for row in rows))
    else:
        print("\n\n".join([*map(str, table.tables(rows)), fill(*verdicts(rows))]))
    if args.out is not None:
        facts = {"run": evaluation.facts()}
        lines = [json.dumps(as_json(row) | facts, allow_nan=False) for row in rows]
        write(args.out / "results.jsonl", "\n".join(lines))
        print(f"Wrote {args.out / 'results.jsonl'}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse eval",
        description=textwrap.fill(
            "Compare methods with dense attention on real text, teacher-forced. A decode method runs the decode steps "
            f"after a dense prefill. A prefill method runs the prefill: {', '.join(PASSAGES)} "
            "then score tokens inside the prompt, and the other tasks score the answer after the prompt. METHOD+METHOD "
            "is sparse in prefill and decode. Separate list items by commas or spaces, and texts by spaces.",
            78,
        ),
        epilog="Example:\n  mlx-sparse eval --methods sparq,h2o,streaming --tasks copying --budget 1/2,1/8 "
        "--limit 50 --out results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)

    def add_list(name: str, metavar: str, default: Sequence[str], text: str) -> None:
        parser.add_argument(name, metavar=metavar, nargs="+", default=default, help=text)

    def add_number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, metavar="N", type=int, default=default, help=f"{text} (default: {default})")

    add_list("--methods", "METHOD,...", [], "such as sparq:rank=16,h2o,sample:dense_below=0")
    add_list("--tasks", "TASK,...", DEFAULT_TASKS, f"some of {', '.join(NAMES)} (default: {','.join(DEFAULT_TASKS)})")
    add_list(
        "--budget",
        "SHARE,...",
        [],
        "shares of the bytes that dense attention moves, such as 1/2,1/8; the formulas of the papers determine the "
        "parameters that METHOD omits (default: the settings of METHOD)",
    )
    add_list(
        "--kv-bits",
        "N,...",
        [],
        "after a dense prefill, also decode from KV caches quantized to N bits, densely and with each decode method",
    )
    add_list("--context", "N,...", ["2k"], "prompt lengths in tokens (default: 2k)")
    add_number("--limit", 6, "examples per task")
    add_number("--batch", 8, "examples per batch")
    add_number("--prefill-step-size", 2048, "tokens per chunk of a sparse prefill")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for results.jsonl and all trials; the same command resumes from the trials after an interruption",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Parse the lists in ``args``, and raise an error for invalid options before anything is fetched or loaded."""
    args.methods = read_methods(args.methods)
    args.tasks = _split_lists(args.tasks)
    args.budget = [read_budget(share) for share in _split_lists(args.budget)]
    args.kv_bits = [_bits(text) for text in _split_lists(args.kv_bits)]
    args.context = list(dict.fromkeys(read_length(length, "--context") for length in _split_lists(args.context)))
    for name in args.tasks:
        if name not in NAMES:
            raise ConfigError(f"--tasks: expected some of {', '.join(NAMES)}, got {name!r}.{did_you_mean(name, NAMES)}")
    if not args.methods:
        raise ConfigError("--methods: expected a method such as sparq, got none.")
    if RECALL in args.tasks and not any(select_methods(parse(method))[0] for method in args.methods):
        raise ConfigError(f"--tasks: expected a prefill method such as sample with {RECALL}, got none.")
    check_int("--seed", args.seed, 0, (1 << 63) - 1)
    for option in ("--limit", "--batch", "--prefill-step-size"):
        check_int(option, getattr(args, option.strip("-").replace("-", "_")), 1)
    for context in args.context:
        check_int("--context", context, SHORTEST)
    check_options(args)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)


def _bits(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--kv-bits: expected numbers of bits such as 8,4, got {text!r}.")
    return int(text)


def _split_lists(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(piece.strip() for text in texts for piece in text.split(",")))


class _Evaluation:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model, self.tokenizer, _ = load_model(args.model, args.cache_dir, args.accept_license)
        for bits in args.kv_bits:
            refuse_unquantizable(self.model, bits)
        self.texts = texts.read(args.text, cache=cache_directory(args.cache_dir))
        tokens = encode_texts(self.tokenizer, self.texts)
        self.lengths = list(map(len, tokens))
        self.tokens = [token for of_text in tokens for token in of_text]
        self.D = head_dim(self.model)
        self.key = fingerprint(self.model, self.tokens, args.limit, args.seed, args.prefill_step_size, args.batch)

    def rows(self) -> Iterator[Row]:
        """Run all tasks at all context lengths. Yield each group's rows as soon as the group has run."""
        args = self.args
        journal = Journal(args.out and args.out / "trials.jsonl", "eval", self.key, Trial)
        groups = self.plans()
        total = sum(1 + len(plan.variants) for group in groups for plan in group) * args.limit
        with Bar("", total, "runs") as progress:
            for group in groups:
                if group[0].prefill:
                    for passage in group[0].examples:
                        self._add(group[0], self._prompt(group[0], passage), progress, journal)
                else:
                    for start in range(0, args.limit, args.batch):
                        for plan, steps in self._steps(group, slice(start, start + args.batch)):
                            self._add(plan, steps, progress, journal)
                yield from (row for plan in group for row in plan.rows())

    @staticmethod
    def _add(plan: Run, subject: Any, progress: Bar, journal: Journal[Trial]) -> None:
        progress.stage(f"{plan.task} {plan.context:,}")
        plan.add(subject, progress, journal)

    def plans(self) -> list[list[Run]]:
        """Generate the examples for all tasks before any task runs, so that unsuitable texts raise an error early.

        Tasks of one group share the first tokens of their prompts.
        """
        args = self.args
        groups: dict[tuple[int, bool, str], list[Run]] = {}
        for context in args.context:
            variants, left_out = variants_of(args.methods, args.budget, context, self.D)
            print(*left_out, sep="\n", end="\n" if left_out else "", file=sys.stderr)
            variants += quantized_variants(variants, args.kv_bits)
            for task in args.tasks:
                for prefill, chosen in zip((False, True), split(task, variants), strict=True):
                    if chosen:
                        make: Any = (PASSAGES if prefill else TASKS)[task]
                        made = make(self.tokens, self.tokenizer, context=context, limit=args.limit, seed=args.seed)
                        plan = Run(task, context, prefill, list(made), chosen, self.D)
                        groups.setdefault((context, prefill, task if prefill else family(task)), []).append(plan)
        if not groups:
            raise ConfigError("--budget: expected a share that a method can meet, got none. Use a larger share.")
        return list(groups.values())

    def _prompt(self, plan: Run, passage: Passage) -> Prompt:
        return Prompt(self.model, self.tokenizer, passage, self.args.prefill_step_size, recall=plan.task == RECALL)

    def _steps(self, group: list[Run], batch: slice) -> Iterator[tuple[Run, Steps]]:
        observed = observed_by([variant for plan in group for variant in plan.variants])
        prefix = Prefix(self.model, [plan.examples[batch] for plan in group], observed)
        for plan in group:
            given = self.model, self.tokenizer, plan.examples[batch], self.args.prefill_step_size
            yield plan, Steps(*given, prefix=prefix, observed=observed)

    def facts(self) -> dict[str, object]:
        args = self.args
        read = list(zip(self.texts, self.lengths, strict=True))
        options = {"seed": args.seed, "prefill_step_size": args.prefill_step_size, "batch": args.batch}
        return run_facts(args.command, args.model or DEFAULT, self.model, read, **options)


def split(task: str, variants: Sequence[Variant]) -> tuple[list[Variant], list[Variant]]:
    """Return the variants that ``task`` scores in decode steps, and the variants that it scores inside prompts."""
    if task == RECALL:  # scored inside prompts, independent of the decode method
        return [], [variant for variant in variants if variant.stages[0] is not None]
    of_prompts = [one for one in variants if task in PASSAGES and one.stages[0] is not None and one.stages[1] is None]
    return [one for one in variants if task in TASKS and one not in of_prompts], of_prompts
