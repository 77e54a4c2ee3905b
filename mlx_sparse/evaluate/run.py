"""``mlx-sparse eval``: what a method costs in quality, on your model and your text."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ..checks import ConfigError
from ..config import parse
from ..demo import blas
from ..demo.smollm2 import prepare_model
from ..demo.store import cache_directory
from ..lm.command import loading
from ..lm.model import select_methods
from .tasks import TASKS

HEADER = ["task", "method", "n", "bytes", "bits/byte", "Δ", "accuracy", "Δ", "agreement", "KL"]


def main(argv: Sequence[str]) -> int:
    """Run the evaluation; return the exit code."""
    args = _parser().parse_args(argv)
    for method in args.methods:
        select_methods(parse(method))
    if args.limit < 1 or args.context < 1024:
        raise ConfigError(f"--limit, --context: expected at least 1 and 1024, got {args.limit} and {args.context}.")
    environment = blas.environment(cache_directory(args.cache_dir))
    if environment != dict(os.environ):
        command = [sys.executable, "-m", "mlx_sparse.cli", "eval", *argv]
        return subprocess.run(command, env=environment, check=False).returncode
    rows = _evaluate(args)
    print("\n".join(json.dumps(row.as_dict()) for row in rows) if args.json else _table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sparse eval",
        description="Compare methods with dense attention on real text, teacher-forced, through the model's own decode "
        "steps. The prompt of each example is processed densely.",
    )
    parser.add_argument("--model", metavar="MODEL", help="path or Hugging Face repo (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--methods", metavar="METHOD", nargs="+", required=True, help="such as sparq:rank=16 streaming")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="(default: all)")
    parser.add_argument("--text", metavar="FILE", nargs="+", help="text files (default: Python's language reference)")
    parser.add_argument("--context", metavar="N", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--limit", metavar="N", type=int, default=6, help="examples per task (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="for the places in the text (default: 0)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where the default model goes (default: user's cache)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser


def _evaluate(args: argparse.Namespace) -> list[Any]:
    from mlx_lm import load
    from tqdm import tqdm

    from .runner import run

    path = args.model or str(prepare_model(cache_directory(args.cache_dir)))
    with loading(path):
        model, tokenizer = load(path)[:2]
    tokens = tokenizer.encode(_text(args.text))
    rows = []
    with tqdm(total=len(args.tasks) * args.limit * len(args.methods), unit="run", disable=None) as progress:
        for task in args.tasks:
            progress.set_description(task)
            examples = list(TASKS[task](tokens, context=args.context, limit=args.limit, seed=args.seed))
            rows += run(model, tokenizer, task, examples, args.methods, progress)
    return rows


def _text(files: list[str] | None) -> str:
    if files is None:
        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return "\n\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: expected readable UTF-8 text files, got {error}.") from None


def _table(rows: list[Any]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in rows:
        mean, delta, error = row.mean, row.delta, row.error
        cells = [row.task, f"`{row.method}`", str(row.examples), f"{row.compression:.3f}", f"{mean.bits:.4f}"]
        cells += [f"{delta.bits:+.4f} ± {error.bits:.4f}", f"{mean.accuracy:.3f}"]
        cells += [f"{delta.accuracy:+.3f} ± {error.accuracy:.3f}", f"{mean.agreement:.3f} ± {error.agreement:.3f}"]
        cells += [f"{mean.kl:.4f} ± {error.kl:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
