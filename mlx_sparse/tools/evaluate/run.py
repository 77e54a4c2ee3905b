"""``mlx-sparse eval``: what a method costs in quality, on your model and your text."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...checks import ConfigError, Parser, check_int, meant, read_length
from ...files import cache_directory, replace_file
from ...lm.loading import refuse_unquantisable
from ...lm.model import select_methods
from ...methods import parse
from ..assets.models import DEFAULT
from . import report, texts
from .budget import read_budget
from .inputs import add_options, check_options, encode_texts, fingerprint, head_dim, load_model
from .journal import Journal, as_json
from .metadata import Facts, run_facts
from .report.read import RESULTS
from .results import Row, Trial
from .selection import SelectionRow
from .selection import run as compare_choices
from .selection import table as table_of_choices
from .table import table
from .tasks import PASSAGES, SHORTEST, TASKS
from .tasks.base import opening
from .variants import Arm, arms_of, quantised, read_methods

AGREEMENT, MASS = "top_k_agreement", "retained_mass"
NAMES = (*TASKS, MASS, AGREEMENT)
DEFAULT_TASKS = ("repetition", "bits_per_byte")


def main(argv: Sequence[str]) -> int:
    """Run the evaluation; return the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    args.command = shlex.join(["mlx-sparse", "eval", *argv])
    evaluation = _Evaluation(args)
    try:
        rows, choices = list(evaluation.rows()), list(evaluation.choices())
    except KeyboardInterrupt:
        kept = f"the same command goes on from {args.out}" if args.out else "without --out nothing is kept"
        print(f"\nmlx-sparse eval: interrupted; {kept}", file=sys.stderr)
        return 130
    if args.json:
        print("\n".join(json.dumps(as_json(row)) for row in (*rows, *choices)))
    else:
        print("\n\n".join([table(rows)] * bool(rows) + [table_of_choices(choices)] * bool(choices)))
    if args.out is not None:
        _write(args.out, rows, choices, evaluation.facts())
        print(f"Wrote {args.out / 'report.html'}", file=sys.stderr)
    return 0


def _write(folder: Path, rows: Sequence[Row], choices: Sequence[SelectionRow], facts: Facts) -> None:
    """Every row with the facts of the run, for `mlx-sparse report`; and the report itself."""
    run = {"run": as_json(facts)}
    lines = [json.dumps(as_json(row) | run, allow_nan=False) for row in (*rows, *choices)]
    replace_file(folder / RESULTS, lambda new: new.write_text("\n".join(lines) + "\n", encoding="utf-8"))
    report.write(folder, rows, facts, selection=choices)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse eval",
        description="Compare methods with dense attention on real text, teacher-forced. A decode method runs the steps "
        "after a prompt that was processed densely. A prefill method runs the prompt: in bits_per_byte, repetition and "
        "retained_mass tokens inside it are predicted, in the other tasks the answer after it. Where METHOD+METHOD "
        "names both, the prompt and the steps after it are sparse. Lists take commas or spaces, --text spaces.",
        epilog="Example:\n  mlx-sparse eval --methods sparq,h2o,streaming --tasks repetition --budget 1/2,1/8 "
        "--limit 50 --out results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--methods", metavar="METHOD,...", nargs="+", default=[], help="such as sparq:rank=16,h2o,sample:dense_below=0"
    )
    parser.add_argument(
        "--tasks", metavar="TASK,...", nargs="+", help=f"of {', '.join(NAMES)} (default: {','.join(DEFAULT_TASKS)})"
    )
    parser.add_argument(
        "--budget",
        metavar="SHARE,...",
        nargs="+",
        default=[],
        help="shares of dense attention's transfers, such as 1/2,1/8: settings that METHOD does not name follow from "
        "the papers' formulae (default: the methods as they are)",
    )
    parser.add_argument(
        "--kv-bits",
        metavar="N,...",
        nargs="+",
        default=[],
        help="run the steps after dense prompts over caches quantised in so many bits too, densely and with each "
        "decode method",
    )
    parser.add_argument("--context", metavar="N,...", nargs="+", default=["2k"], help="prompt tokens (default: 2k)")
    parser.add_argument("--limit", metavar="N", type=int, default=6, help="examples per task (default: 6)")
    parser.add_argument("--batch", metavar="N", type=int, default=8, help="examples decoded together (default: 8)")
    parser.add_argument(
        "--prefill-step-size",
        metavar="N",
        type=int,
        default=2048,
        help="tokens per step of a sparse prompt (default: 2048)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="write results.jsonl, pictures and report.html there, and keep every result there as it comes: "
        "the same command goes on where it stopped",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong before anything is fetched or loaded, and read the lists."""
    args.methods = read_methods(args.methods)
    args.tasks = [name.strip() for name in _pieces(args.tasks or DEFAULT_TASKS)]
    args.budget = [read_budget(share) for share in _pieces(args.budget)]
    args.kv_bits = [_bits(text) for text in _pieces(args.kv_bits)]
    args.context = list(dict.fromkeys(read_length(length.strip(), "--context") for length in _pieces(args.context)))
    for name in args.tasks:
        if name not in NAMES:
            raise ConfigError(f"--tasks: expected some of {', '.join(NAMES)}, got {name!r}.{meant(name, NAMES)}")
    if not args.methods and set(args.tasks) != {AGREEMENT}:
        raise ConfigError("--methods: expected a method such as sparq, got none.")
    prefill = [select_methods(parse(method))[0] for method in args.methods]
    if MASS in args.tasks and not any(prefill):
        raise ConfigError(f"--tasks: expected a prefill method such as sample with {MASS}, got none.")
    check_int("--limit", args.limit, 1)
    check_int("--seed", args.seed, 0, (1 << 63) - 1)
    check_int("--batch", args.batch, 1)
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    for context in args.context:
        check_int("--context", context, SHORTEST)
    check_options(args)
    if args.out is not None:
        report.check()
        args.out.mkdir(parents=True, exist_ok=True)


def _bits(text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"--kv-bits: expected numbers of bits such as 8,4, got {text!r}.")
    return int(text)


def _pieces(texts: Sequence[str]) -> list[str]:
    """What stands between commas or blanks, each once."""
    return list(dict.fromkeys(piece for text in texts for piece in text.split(",")))


class _Evaluation:
    """A model, a text and what is asked of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model, self.tokenizer, _ = load_model(args.model, args.cache_dir, args.accept_licence)
        for bits in args.kv_bits:
            refuse_unquantisable(self.model, {"bits": bits})
        self.texts = texts.read(args.text, cache=cache_directory(args.cache_dir))
        tokens = encode_texts(self.tokenizer, self.texts)
        self.lengths = list(map(len, tokens))
        self.tokens = [token for of_text in tokens for token in of_text]
        self.D = head_dim(self.model)
        self.key = fingerprint(self.model, self.tokens, args.limit, args.seed, args.prefill_step_size, args.batch)
        self.journal = Journal(args.out and args.out / "trials.jsonl", "eval", self.key, Trial)

    def rows(self) -> Iterator[Row]:
        """The rows of all contexts and tasks, each as soon as its examples have run."""
        from tqdm import tqdm

        from .runner import run

        plans = self._plans()
        runs = sum(1 + len(arms) for *_, arms in plans) * self.args.limit
        with tqdm(total=runs, unit="run", disable=None) as progress:
            for context, task, prefill, examples, arms in plans:
                progress.set_description(f"{task} {context:,}")
                subjects = self._prompts(task, examples) if prefill else self._steps(examples, arms)
                common: dict[str, Any] = {
                    "progress": progress,
                    "journal": self.journal,
                    "context": context,
                    "D": self.D,
                }
                yield from run(task, subjects, arms, **common, prefill=prefill)

    def _plans(self) -> list[tuple[int, str, bool, list[Any], list[Arm]]]:
        """Context, task, whether tokens of the prompt are scored, examples and methods of all that is to run.

        All examples are made first: what is wrong with a text is to show before hours of runs.
        """
        args, plans = self.args, []
        for context in args.context:
            arms, left_out = arms_of(args.methods, args.budget, context, self.D)
            print(*left_out, sep="\n", end="\n" if left_out else "", file=sys.stderr)
            arms += quantised(arms, args.kv_bits)
            for task in args.tasks:
                for prefill, chosen in enumerate(split(task, arms)):
                    if chosen:
                        made = (PASSAGES if prefill else TASKS)[task](
                            self.tokens, self.tokenizer, context=context, limit=args.limit, seed=args.seed
                        )
                        plans.append((context, task, bool(prefill), list(made), chosen))
        if not plans and AGREEMENT not in args.tasks:
            raise ConfigError("--budget: expected a share within reach of a method, got none. Name a larger one.")
        return plans

    def _steps(self, examples: Sequence[Any], arms: Sequence[Arm]) -> Iterator[Any]:
        from .runner import Steps, observed_by

        observed, size = observed_by(arms), self.args.batch
        for start in range(0, len(examples), size):
            batch = examples[start : start + size]
            yield Steps(self.model, self.tokenizer, batch, self.args.prefill_step_size, observed=observed)

    def _prompts(self, task: str, passages: Sequence[Any]) -> Iterator[Any]:
        from .runner import Prompt

        for passage in passages:
            yield Prompt(self.model, self.tokenizer, passage, self.args.prefill_step_size, mass=task == MASS)

    def choices(self) -> Iterator[SelectionRow]:
        """How well approximate choices of keys agree with exact ones, if that is asked for."""
        if AGREEMENT in self.args.tasks:
            args = self.args
            asked: dict[str, Any] = {"limit": args.limit, "seed": args.seed, "opening": opening(self.tokenizer)}
            for context in args.context:
                kept = {"out": args.out, "key": self.key}
                yield from compare_choices(self.model, self.tokens, context=context, **asked, **kept)

    def facts(self) -> Facts:
        """What the figures belong to."""
        args = self.args
        return run_facts(
            args.command,
            name=args.model or DEFAULT,
            model=self.model,
            texts=list(zip(self.texts, self.lengths, strict=True)),
            seed=args.seed,
            prefill_step_size=args.prefill_step_size,
            batch=args.batch,
        )


def split(task: str, arms: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    """The methods that ``task`` scores in the steps after a prompt, and those that it scores in the prompt."""
    in_prompt = [arm for arm in arms if task in PASSAGES and arm.stages[0] is not None and arm.stages[1] is None]
    in_steps = [arm for arm in arms if task in TASKS and arm not in in_prompt]
    if task == MASS:  # of prompts, whatever comes after them
        in_prompt = [arm for arm in arms if arm.stages[0] is not None]
    return in_steps, in_prompt
