"""``mlx-sparse demo``: mlx-lm's own command on a real model and a real text, dense and sparse, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ..checks import ArtefactError, ConfigError, Parser
from ..files import cache_directory
from ..lm.model import select_methods
from ..methods import parse
from .assets import blas
from .assets.smollm2 import prepare_model
from .generate_command import Outcome, generate_command, parse_outcome, run_command

TOPIC = "compound"
KEY = "71853"
CHARACTERS = 10_000  # of a text in which SmolLM2-135M finds the key; in others it may not
WIDTH = 79
FORCED = "dense_below=0 makes it sparse at this length, where it may be slower than dense attention"


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
    attn, forced = sparse_at_once(args.attn)
    cache = cache_directory(args.cache_dir)
    model = _model_directory(args.model) if args.model else prepare_model(cache)
    environment = blas.chosen(args.fast_blas, cache)
    task = pass_key_task(CHARACTERS)
    dense = generate_command(str(model), args.max_tokens)
    sparse = [*dense, "--attn", attn, "--attn-report", "json"]

    def show(*lines: str) -> None:
        if not args.json:
            print(*lines, sep="\n", flush=True)

    show(_wrapped("Model", _short(str(model))), _wrapped("Text", task.about), _wrapped("Question", task.question))
    if forced:
        show(_wrapped("Sparse", FORCED))
    outcomes = []
    for name, command in (("dense", dense), (args.attn, sparse)):
        line = "$ " + " ".join(map(_short, command))
        show("", textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
        outcomes.append(parse_outcome(run_command(name, command, task.prompt, environment)))
        show(textwrap.indent(outcomes[-1].text.strip(), "  | "))
    if outcomes[1].report is None:
        raise ArtefactError(f"--attn: expected a report of {args.attn}, got none. Run `mlx-sparse doctor`.")
    result = compare(model, KEY, args.attn, *outcomes) | {"commands": [dense, sparse], "forced": forced}
    print(json.dumps(result) if args.json else _table(result))
    return 0


def sparse_at_once(attn: str) -> tuple[str, bool]:
    """Return ``attn`` with ``dense_below=0`` where the user leaves the threshold open, and True if that changes it."""
    configs = parse(attn)
    select_methods(configs)  # a mistake is to show now, not after the dense run
    changes: Any = {"dense_below": 0}
    parts = [dataclasses.replace(config, **changes) if config.measurable else config for config in configs]
    forced = any(config.measurable for config in configs)
    return ("+".join(map(str, parts)) if forced else attn), forced


@dataclass(frozen=True)
class Task:
    """A prompt whose answer contains `KEY`, its question, and a description."""

    prompt: str
    question: str
    about: str


def pass_key_task(characters: int) -> Task:
    """State `KEY` between two paragraphs in the middle of a text, and ask for it at the end."""
    paragraphs = topics[TOPIC].split("\n\n")
    ends = list(accumulate(len(paragraph) + 2 for paragraph in paragraphs))
    count = bisect(ends, characters)
    length = ends[count - 1]
    before = bisect(ends, length / 2)
    needle = f"A note to the reader: the pass key of this text is {KEY}. Please remember that the pass key is {KEY}."
    question = "What is the pass key? Answer with: The pass key is, and its five digits."
    text = [*paragraphs[:before], needle, *paragraphs[before:count]]
    start, end = "Here is a text. A pass key, a number, is hidden in it.", f"That was the text. {question}"
    about = (
        f"the first {length:,} characters of Python's language reference on {TOPIC} statements "
        f"(pydoc_data.topics); the pass key {KEY} is stated {ends[before - 1] / length:.0%} of the way in"
    )
    return Task("\n\n".join([start, *text, end]), question, about)


def _model_directory(name: str) -> Path:
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model: expected a model directory with a config.json, got {name}. Convert one first.")
    return path


def _short(word: str) -> str:
    """Return a path as a person would type it here."""
    for folder, typed in ((Path.cwd(), ""), (Path.home(), "~/")):
        if word.startswith(f"{folder}/"):
            return typed + word[len(f"{folder}/") :]
    return word


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<10}", subsequent_indent=" " * 10)


def compare(model: Path, key: str, attn: str, dense: Outcome, sparse: Outcome) -> dict[str, Any]:
    """Return the figures of both runs as plain data. ``key`` is the right answer."""
    import mlx.core as mx
    from mlx_lm import utils

    report = sparse.report or {}
    load_tokenizer: Any = utils.load_tokenizer
    tokenizer = load_tokenizer(model)
    ours, theirs = (tokenizer.encode(run.text, add_special_tokens=False) for run in (sparse, dense))
    calls = report["sparse_calls"]

    def side(run: Outcome, moved: int) -> dict[str, Any]:
        return {
            "text": run.text,
            "right": key in run.text,
            "prompt_tokens": run.prompt_tokens,
            "prompt_tps": run.prompt_tps,
            "generation_tokens": run.generation_tokens,
            "generation_tps": run.generation_tps,
            "bytes_per_token": moved / calls * report["served_layers"] if calls else 0.0,
        }

    return {
        "attn": attn,
        "device": "cpu" if mx.default_device() == mx.Device(mx.DeviceType.cpu, 0) else "gpu",
        "key": key,
        "dense": side(dense, report["dense_bytes"]),
        "sparse": side(sparse, report["sparse_bytes"]),
        "same_tokens": sum(a == b for a, b in zip(ours, theirs, strict=False)),
        "tokens": max(len(ours), len(theirs)),
        "bytes_ratio": report["sparse_bytes"] / report["dense_bytes"] if calls else None,
        "report": report,
    }


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
