"""``mlx-sparse eval``: what a method costs in quality, on your model and your text."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from .. import artefact
from ..checks import ConfigError
from ..config import SAAP, parse
from ..demo import blas
from ..demo.smollm2 import prepare_model
from ..demo.store import cache_directory
from ..lm.command import loading
from ..lm.model import select_methods
from .picture import check_picture, draw_density
from .results import Row, Trial, table
from .tasks import PASSAGES, SHORTEST, TASKS


def main(argv: Sequence[str]) -> int:
    """Run the evaluation; return the exit code."""
    args = _parser().parse_args(argv)
    stages = [select_methods(parse(method)) for method in args.methods]
    for _, decode in stages:
        if isinstance(decode, SAAP) and decode.file is not None:
            artefact.load(decode.file)  # a mistake is to show now, not after the dense runs
    if args.limit < 1 or args.context < SHORTEST:
        raise ConfigError(
            f"--limit, --context: expected at least 1 and {SHORTEST}, got {args.limit} and {args.context}."
        )
    if args.prefill_step_size < 1:
        raise ConfigError(f"--prefill-step-size: expected at least 1, got {args.prefill_step_size}.")
    if args.density_map is not None:
        check_picture(args.density_map)
        if all(prefill is None for prefill, _ in stages):
            raise ConfigError("--density-map: expected a prefill method such as sample among --methods, got none.")
    blas.use(["eval", *argv], cache_directory(args.cache_dir))
    rows = list(_evaluate(args))
    print("\n".join(json.dumps(row.as_dict()) for row in rows) if args.json else table(rows))
    if args.density_map is not None:
        draw_density(rows, args.density_map)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sparse eval",
        description="Compare methods with dense attention on real text, teacher-forced. A decode method runs the steps "
        "after a prompt that was processed densely, a prefill method the text itself, in which tokens of the second "
        "half are predicted. Where METHOD+METHOD names both, the prompt and the steps after it are sparse.",
    )
    parser.add_argument("--model", metavar="MODEL", help="path or Hugging Face repo (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--methods", metavar="METHOD", nargs="+", required=True, help="such as sparq:rank=16 sample:dense_below=0"
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="(default: all)")
    parser.add_argument("--text", metavar="FILE", nargs="+", help="text files (default: Python's language reference)")
    parser.add_argument("--context", metavar="N", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--limit", metavar="N", type=int, default=6, help="examples per task (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="for the places in the text (default: 0)")
    parser.add_argument(
        "--prefill-step-size", metavar="N", type=int, default=2048, help="tokens per step of a prefill (default: 2048)"
    )
    parser.add_argument("--mass", action="store_true", help="measure the retained mass of prefill methods (slow)")
    parser.add_argument("--density-map", metavar="FILE.png", type=Path, help="draw density by layer and head")
    parser.add_argument(
        "--resume", metavar="FILE", type=Path, help="keep results in this file, and do not run again what is there"
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where the default model goes (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser


def _evaluate(args: argparse.Namespace) -> Iterator[Row]:
    from tqdm import tqdm

    from .journal import Journal
    from .runner import Prompt, Steps, run

    model, tokenizer, _ = load_model(args.model, args.cache_dir)
    tokens = read_tokens(tokenizer, args.text)
    options = (args.context, args.limit, args.seed, args.prefill_step_size, args.mass)
    journal = Journal(args.resume, "eval", fingerprint(model, tokens, *options), Trial.read)
    of_text = {"context": args.context, "limit": args.limit, "seed": args.seed}
    # A prefill method alone is scored in the prompt; every other one in the steps after it.
    in_prompt = {method: select_methods(parse(method))[1] is None for method in args.methods}
    decode, prefill = ([method for method in args.methods if in_prompt[method] == wanted] for wanted in (False, True))
    runs = sum(1 + len(methods) for methods in (decode, prefill) if methods) * len(args.tasks) * args.limit
    with tqdm(total=runs, unit="run", disable=None) as progress:
        for task in args.tasks:
            progress.set_description(task)
            if decode:
                examples = TASKS[task](tokens, tokenizer, **of_text)
                steps = (Steps(model, tokenizer, example, args.prefill_step_size) for example in examples)
                yield from run(task, steps, decode, progress, journal)
            if prefill:
                passages = PASSAGES[task](tokens, tokenizer, **of_text)
                size = args.prefill_step_size
                prompts = (Prompt(model, tokenizer, passage, size, mass=args.mass) for passage in passages)
                yield from run(task, prompts, prefill, progress, journal, prefill=True)


def load_model(name: str | None, cache: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its tokenizer and its ``config.json``; SmolLM2 by default."""
    from mlx_lm import load

    path = name or str(prepare_model(cache_directory(cache)))
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
    """A hash that stands for a command's inputs: the model's weights (the ends of each), the text and the options."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten

    digest = hashlib.sha256(json.dumps(options).encode())
    digest.update(np.array(tokens, dtype=np.int64).tobytes())
    weights: Any = tree_flatten(model.parameters())
    for name, array in weights:
        flat = array.reshape(-1)
        ends = mx.concatenate([flat[:64], flat[-64:]]).astype(mx.float32)
        digest.update(f"{name} {array.shape} {array.dtype}".encode() + np.array(ends).tobytes())
    return digest.hexdigest()
