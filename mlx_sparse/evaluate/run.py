"""``mlx-sparse eval``: what a method costs in quality, on your model and your text."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ..artefact.identity import leaves, weights_hash
from ..checks import ConfigError, check_int, read_length
from ..config import parse
from ..demo import blas
from ..demo.models import add_model_options, find_model
from ..demo.store import cache_directory
from ..lm.command import loading
from ..lm.model import select_methods
from .arms import Arm, arms_of, read_methods
from .budget import read_budget
from .journal import Journal
from .results import Row, Trial
from .table import table
from .tasks import PASSAGES, SHORTEST, TASKS

AGREEMENT, MASS = "top_k_agreement", "retained_mass"
NAMES = (*TASKS, MASS, AGREEMENT)
DEFAULT_TASKS = ("repetition", "bits_per_byte")


def main(argv: Sequence[str]) -> int:
    """Run the evaluation; return the exit code."""
    args = _parser().parse_args(argv)
    _check(args)
    blas.use(["eval", *argv], cache_directory(args.cache_dir))
    args.command = shlex.join(["mlx-sparse", "eval", *argv])
    rows = list(_Evaluation(args).rows())
    print("\n".join(json.dumps(row.as_dict()) for row in rows) if args.json else table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sparse eval",
        description="Compare methods with dense attention on real text, teacher-forced. A decode method runs the steps "
        "after a prompt that was processed densely. A prefill method runs the prompt: in bits_per_byte, repetition and "
        "retained_mass tokens inside it are predicted, in the other tasks the answer after it. Where METHOD+METHOD "
        "names both, the prompt and the steps after it are sparse. Lists take commas or spaces.",
        epilog="Example:\n  mlx-sparse eval --methods sparq,h2o,streaming --tasks repetition --budget 1/2,1/8 "
        "--limit 50 --out results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
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
    parser.add_argument("--text", metavar="FILE", nargs="+", help="text files (default: Python's language reference)")
    parser.add_argument("--context", metavar="N,...", nargs="+", default=["2k"], help="prompt tokens (default: 2k)")
    parser.add_argument("--limit", metavar="N", type=int, default=6, help="examples per task (default: 6)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="for the places in the text (default: 0)")
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
        help="write results.jsonl, pictures and report.html there, and keep every result in trials.jsonl as it comes: "
        "the same command goes on where it stopped",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where the default model goes (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong before anything is loaded, and read the lists."""
    args.methods = read_methods(args.methods)
    args.tasks = [name.strip() for text in args.tasks or DEFAULT_TASKS for name in text.split(",")]
    args.budget = [read_budget(share) for text in args.budget for share in text.split(",")]
    args.context = [read_length(length) for text in args.context for length in text.split(",")]
    for name in args.tasks:
        if name not in NAMES:
            raise ConfigError(f"--tasks: expected some of {', '.join(NAMES)}, got {name!r}.")
    if not args.methods and set(args.tasks) != {AGREEMENT}:
        raise ConfigError("--methods: expected a method such as sparq, got none.")
    prefill = [select_methods(parse(method))[0] for method in args.methods]
    if MASS in args.tasks and not any(prefill):
        raise ConfigError(f"--tasks: expected a prefill method such as sample with {MASS}, got none.")
    check_int("--limit", args.limit, 1)
    check_int("--batch", args.batch, 1)
    check_int("--prefill-step-size", args.prefill_step_size, 1)
    for context in args.context:
        check_int("--context", context, SHORTEST)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)


class _Evaluation:
    """A model, a text and what is asked of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model, self.tokenizer, self.config = load_model(args.model, args.cache_dir, args.accept_licence)
        self.tokens = read_tokens(self.tokenizer, args.text)
        self.D = head_dim(self.model)
        key = fingerprint(self.model, self.tokens, args.limit, args.seed, args.prefill_step_size)
        self.journal = Journal(args.out and args.out / "trials.jsonl", "eval", key, Trial.read)

    def rows(self) -> Iterator[Row]:
        """Of all contexts and tasks."""
        from tqdm import tqdm

        from .runner import run

        args, plans = self.args, []
        for context in args.context:
            arms, left_out = arms_of(args.methods, args.budget, context, self.D)
            print(*left_out, sep="\n", end="\n" if left_out else "", file=sys.stderr)
            plans += [(context, task, *split(task, arms)) for task in args.tasks if task != AGREEMENT]
        runs = sum(1 + len(arms) for _, _, *both in plans for arms in both if arms) * args.limit
        with tqdm(total=runs, unit="run", disable=None) as progress:
            for context, task, in_steps, in_prompt in plans:
                progress.set_description(f"{task} {context:,}")
                common = {"progress": progress, "journal": self.journal, "context": context, "D": self.D}
                if in_steps:
                    yield from run(task, self._steps(task, context, in_steps), in_steps, **common)
                if in_prompt:
                    yield from run(task, self._prompts(task, context), in_prompt, **common, prefill=True)

    def _steps(self, task: str, context: int, arms: Sequence[Arm]) -> Iterator[Any]:
        from .runner import Steps, observed_by

        examples = list(TASKS[task](self.tokens, self.tokenizer, **self._choice(context)))
        observed, size = observed_by(arms), self.args.batch
        for start in range(0, len(examples), size):
            batch = examples[start : start + size]
            yield Steps(self.model, self.tokenizer, batch, self.args.prefill_step_size, observed=observed)

    def _prompts(self, task: str, context: int) -> Iterator[Any]:
        from .runner import Prompt

        for passage in PASSAGES[task](self.tokens, self.tokenizer, **self._choice(context)):
            yield Prompt(self.model, self.tokenizer, passage, self.args.prefill_step_size, mass=task == MASS)

    def _choice(self, context: int) -> dict[str, int]:
        return {"context": context, "limit": self.args.limit, "seed": self.args.seed}


def split(task: str, arms: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    """The methods that ``task`` scores in the steps after a prompt, and those that it scores in the prompt."""
    in_prompt = [arm for arm in arms if task in PASSAGES and arm.stages[1] is None]
    in_steps = [arm for arm in arms if task in TASKS and arm not in in_prompt]
    if task == MASS:  # of prompts, whatever comes after them
        in_prompt = [arm for arm in arms if arm.stages[0] is not None]
    return in_steps, in_prompt


def head_dim(model: Any) -> int:
    """Components of a key, by running the model on one token without evaluating it."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    keys = next((cache.keys for cache in leaves(caches) if getattr(cache, "keys", None) is not None), None)
    if keys is None:
        raise ConfigError("--model: expected a model with a KV cache, got one without.")
    size: int = keys.shape[-1]
    return size


def load_model(name: str | None, cache: str | None, licence: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its tokenizer and its ``config.json``; SmolLM2 by default. ``licence`` is one that the user accepts."""
    from mlx_lm import load

    path = find_model(name, cache_directory(cache), licence)
    with loading(path):
        model, tokenizer, config = load(path, return_config=True)  # type: ignore[misc]
    return model, tokenizer, config


def read_tokens(tokenizer: Any, files: list[str] | None, option: str = "--text") -> list[int]:
    """The tokens of ``files``, or of Python's language reference; ``option`` is who named them."""
    texts = []
    for file in files or []:
        try:
            texts.append(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{option}: expected readable UTF-8 text files, got {error}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{option}: expected readable UTF-8 text files, got {file}: {error}.") from None
    # transformers warns of texts longer than the context, of which only pieces are used here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokens: list[int] = tokenizer.encode("\n\n".join(texts or [topics[name] for name in sorted(topics)]))
    return tokens


def fingerprint(model: Any, tokens: Sequence[int], *options: Any) -> str:
    """A hash that stands for a command's inputs: the model, the text and the options."""
    import numpy as np

    digest = hashlib.sha256(json.dumps([weights_hash(model), options]).encode())
    digest.update(np.array(tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()
