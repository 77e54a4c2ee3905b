"""``mlx-sparse demo``: mlx-lm's own command on a real model and a real text, dense and sparse, side by side."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...calibrate import MODELLED, device_kind
from ...checks import ArtefactError, ConfigError, Parser
from ...files import cache_directory
from ...lm.model import select_methods
from ...methods import parse
from ..assets import blas
from ..assets.smollm2 import prepare_model
from .command import answer, compare, generate_command, parse_outcome, run_command
from .settle import ANSWERED, MOST_TOKENS, Settled, settle, thresholds

CHAT_TOKENS = 64  # that a chat template adds to a text
WIDTH = 79


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 when both commands ran, whatever they answered."""
    return _demo(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse demo",
        description="Ask a small real model about a real text, with dense and with sparse attention, and compare. "
        "The first run downloads 93 MB and writes a model of 540 MB into the cache.",
    )
    parser.add_argument("--model", metavar="DIR", help="mlx-lm model directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--attn", metavar="METHOD", default="sparq", help="sparse method (default: %(default)s)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--cache-dir", metavar="DIR", help="where downloads and the model go (default: user's cache)")
    blas.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser


def _demo(args: argparse.Namespace) -> int:
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens: expected at least 1, got {args.max_tokens}.")
    select_methods(parse(args.attn))  # a mistake is to show now, not after the dense run
    cache = cache_directory(args.cache_dir)
    model = _model_directory(args.model) if args.model else prepare_model(cache)
    environment = blas.chosen(args.fast_blas, cache)
    rows = thresholds(model, args.attn, environment)
    most = _most_tokens(model, args.max_tokens) if args.model else ANSWERED
    settled = settle(args.attn, rows, _counter(model), most)
    task = settled.task
    dense = generate_command(str(model), args.max_tokens)
    sparse = [*dense, "--attn", settled.attn, "--attn-report", "json"]
    if any(row["how"] == MODELLED for row in rows):
        sparse.append("--no-calibrate")  # it was just tried
    if not args.json:
        _say_task(model, settled)
    outcomes = []
    for name, command in (("dense", dense), (args.attn, sparse)):
        say = None if args.json else _Answer(command).say
        outcomes.append(parse_outcome(run_command(name, command, task.prompt, environment, say)))
    if outcomes[1].report is None:
        raise ArtefactError(f"--attn: expected a report of {args.attn}, got none. Run `mlx-sparse doctor`.")
    result = compare(model, task.key, args.attn, *outcomes) | {"commands": [dense, sparse]}
    result |= {"thresholds": rows, "forced": settled.forced}
    print(json.dumps(result) if args.json else _table(result))
    return 0


def _model_directory(name: str) -> Path:
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model: expected a model directory with a config.json, got {name}. Convert one first.")
    return path


def _counter(model: Path) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text."""
    from mlx_lm import utils

    load_tokenizer: Any = utils.load_tokenizer
    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer.encode(text))


def _most_tokens(model: Path, answer: int) -> int:
    """Return the most tokens of a text: the model has room for them and the answer, and they take little time."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    longest = config.get("max_position_embeddings") if isinstance(config, dict) else None
    most = MOST_TOKENS[device_kind()]
    return min(most, longest - answer - CHAT_TOKENS) if isinstance(longest, int) else most


def _short(word: str) -> str:
    """Return a path as a person would type it here."""
    for folder, typed in ((Path.cwd(), ""), (Path.home(), "~/")):
        if word.startswith(f"{folder}/"):
            return typed + word[len(f"{folder}/") :]
    return word


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<10}", subsequent_indent=" " * 10)


def _say_task(model: Path, settled: Settled) -> None:
    print(_wrapped("Model", _short(str(model))))
    print(_wrapped("Text", settled.task.about))
    print(_wrapped("Question", settled.task.question))
    if settled.note:
        print(_wrapped("Sparse", settled.note), flush=True)


class _Answer:
    """Print a command, and its answer while it arrives."""

    def __init__(self, command: list[str]) -> None:
        line = "$ " + " ".join(map(_short, command))
        print()
        print(textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False), flush=True)
        self._said, self._over = "", False

    def say(self, out: str) -> None:
        """Print what is new in ``out``, all of the command's standard output so far."""
        if self._over:
            return
        text, self._over = answer(out)
        if new := text[len(self._said) :]:
            start = "" if self._said else "  | "
            print(start + new.replace("\n", "\n  | "), end="", flush=True)
            self._said = text
        if self._over:
            print(flush=True)


def _table(result: dict[str, Any]) -> str:
    dense, sparse, report = result["dense"], result["sparse"], result["report"]
    rows = [
        ("", "dense", result["attn"]),
        ("pass key found", *("yes" if side["right"] else "no" for side in (dense, sparse))),
        ("prompt, tokens/s", f"{dense['prompt_tps']:.1f}", f"{sparse['prompt_tps']:.1f}"),
        ("generation, tokens/s", f"{dense['generation_tps']:.1f}", f"{sparse['generation_tps']:.1f}"),
    ]
    if report["sparse_calls"]:
        rows.append(("K/V moved per token", *(f"{side['bytes_per_token'] / 1e6:.2f} MB" for side in (dense, sparse))))
    lines = ["", *(f"{name:<22}{left:>12}{right:>12}" for name, left, right in rows), ""]
    lines.append(f"Same tokens at {result['same_tokens']} of {result['tokens']} positions, tokenizing both answers.")
    if result["bytes_ratio"] is not None:
        lines.append(f"{result['attn']} moved {result['bytes_ratio']:.0%} of the bytes that dense attention reads.")
        lines.append("Bytes are counted by the papers' formulae, not measured.")
    lines.append(f"Prompt of {dense['prompt_tokens']:,} tokens. Calls with {report['attn']}:")
    lines.append(f"  {report['sparse_calls']:>6,} sparse, in {report['served_layers']} of {report['layers']} layers")
    if prompts := report.get("prefill"):
        density = f", density {prompts['density']['mean']:.1%}" if prompts["calls"] else ""
        lines.append(f"  {prompts['calls']:>6,} sparse for the prompt{density}")
    lines += [f"  {count:>6,} dense: {reason}" for reason, count in report["dense_calls"].items()]
    if result["device"] == "cpu":
        lines.append("These speeds are of a CPU and say nothing about a Mac.")
    return "\n".join(line if len(line) <= WIDTH else textwrap.fill(line, WIDTH) for line in lines)
