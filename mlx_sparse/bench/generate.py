"""``mlx-sparse bench --generate``: tokens per second of ``mlx_lm.generate`` itself, densely and with each method."""

from __future__ import annotations

import argparse
import bisect
import importlib
import os
import resource
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from .. import forms
from ..checks import ArtefactError, ConfigError, Parser, check_int, read_length
from ..config import parse, split_methods
from ..demo import blas
from ..demo.command import generate_command, run_command
from ..demo.models import add_model_options, check_model, find_model
from ..demo.outcome import Outcome, parse_outcome
from ..demo.store import cache_directory
from ..evaluate import texts
from ..forms import Result
from ..lm.command import loading
from ..lm.model import select_methods
from ..machine import machine
from .timing import Spread

ONNX = "mlx_sparse.onnx_export.exporter.bench"  # a name: mlx_sparse runs without onnx
LENGTHS, ONNX_LENGTHS = "2k,4k", "4k,8k,16k,32k"
MAX_TOKENS, ONNX_MAX_TOKENS, REPEAT = 64, 16, 3
DENSE = "dense"
LONG_TOKEN = 16  # characters: more than a token of text has on average
SLACK = 64  # characters beyond the shortest prefix of enough tokens, among which one has them exactly
CPU = "These speeds are of a CPU and say nothing about a Mac."

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Run:
    """One run of the command: what it printed, and the seconds of the processor that it took, its start included."""

    outcome: Outcome
    busy: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit code: 1 if a result was wrong."""
    args = _parser().parse_args(argv)
    forms.check_options(args)
    methods = [text for text in split_methods(args.attn) if text != DENSE]
    for text in methods:
        select_methods(parse(text))
    check_int("--repeat", args.repeat, 1)
    tokens = ONNX_MAX_TOKENS if args.onnx else MAX_TOKENS
    args.max_tokens = check_int("--max-tokens", tokens if args.max_tokens is None else args.max_tokens, 1)
    lengths = [read_length(text) for text in (args.lengths or (ONNX_LENGTHS if args.onnx else LENGTHS)).split(",")]
    cache = cache_directory(args.cache_dir)
    check_model(args.model, cache, args.accept_licence)
    texts.check([args.text])
    if args.onnx and args.fast_blas:
        raise ConfigError("--fast-blas: expected none with --onnx, which times onnxruntime, got one. Drop one.")
    (source,) = texts.read([args.text], cache=cache)
    model = find_model(args.model, cache, args.accept_licence)
    before = os.getloadavg()[0]
    if args.onnx:
        run = importlib.import_module(ONNX).run
        result: Result = run(model, methods, lengths, args.max_tokens, args.repeat, args.threads, args.dtype)
    else:
        environment = blas.chosen(args.fast_blas, cache)
        result = measure(model, methods, lengths, args.max_tokens, args.repeat, source, environment)
    command = shlex.join(["mlx-sparse", "bench", "--generate", *argv])
    load = f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors"
    where = machine()
    facts = {"command": command, "date": date.today().isoformat(), "machine": where, "load average": load}
    head = f"MLX {where['mlx']}, mlx-lm {where['mlx-lm']}, {where['chip']}, {where['device']}; load average {load}."
    end = [CPU] if "cpu" in where["device"] or args.onnx else []
    forms.put(args, facts, Result(result.rows, "\n\n".join([head, result.text, *end]), result.right))
    return 0 if result.right else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse bench --generate",
        description="Run mlx_lm.generate on real text, densely and with each method in turns, and tell how fast it "
        "took in the prompt and generated. With --onnx, decode with the model exported by export-onnx instead.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--attn", metavar="METHOD,...", default="sparq", help="such as sparq,sample+sparq (default: sparq)"
    )
    parser.add_argument(
        "--lengths",
        metavar="S,...",
        help=f"tokens of the prompt (default: {LENGTHS}; with --onnx {ONNX_LENGTHS})",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help=f"tokens to generate (default: {MAX_TOKENS}; with --onnx {ONNX_MAX_TOKENS}, in each turn)",
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=REPEAT, help=f"turns (default: {REPEAT})")
    parser.add_argument(
        "--text",
        metavar="TEXT",
        default=texts.DEFAULT,
        help=f"the prompts are its start: a file or one of {', '.join(texts.NAMES)} (default: {texts.DEFAULT})",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where a named model goes (default: user's cache)")
    blas.add_option(parser)
    parser.add_argument("--onnx", action="store_true", help="decode with the exported model on onnxruntime")
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="with --onnx (default: 1)")
    parser.add_argument("--dtype", metavar="TYPE", help="with --onnx: of the export (default: the model's)")
    forms.add_options(parser)
    return parser


def measure(
    model: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    max_tokens: int,
    repeat: int,
    text: texts.Text,
    environment: dict[str, str],
) -> Result:
    """Rows of each length, dense attention first.

    Raises:
        ConfigError: the text is too short, or has no beginning of exactly so many tokens.
        ArtefactError: the command fails.
    """
    encode = _encoder(model)
    prompts = {S: prompt_of(text.text, S, encode) for S in lengths}
    rows = []
    for S, prompt in prompts.items():
        found: dict[str, list[Run]] = {name: [] for name in (DENSE, *methods)}
        for _ in range(repeat):
            for name, runs in found.items():
                command = [*generate_command(model, max_tokens), "--ignore-chat-template"]
                if name != DENSE:
                    command += ["--attn", name, "--attn-report", "json"]
                before = _busy()
                outcome = parse_outcome(run_command(f"{name}, {S} tokens,", command, prompt, environment))
                if (tokens := outcome.prompt_tokens) != S:
                    raise ArtefactError(f"mlx_lm.generate: expected a prompt of {S} tokens, got {tokens}.")
                runs.append(Run(outcome, _busy() - before))
        rows += [row(name, S, found[DENSE], runs, encode) for name, runs in found.items()]
    about = f"{Path(model).name}; the start of {text.name} (SHA-256 {text.sha256[:16]})"
    about += f", {max_tokens} tokens generated, {repeat} turns"
    return Result(rows, f"{about}; medians (quartiles).\n\n{table(rows)}")


def prompt_of(text: str, S: int, encode: Encode) -> str:
    """The beginning of ``text`` that has exactly ``S`` tokens.

    Raises:
        ConfigError: there is none.
    """
    enough = range(min(len(text), LONG_TOKEN * S) + 1)
    shortest = bisect.bisect_left(enough, S, key=lambda n: len(encode(text[:n])))
    for n in range(shortest, min(shortest + SLACK, len(text) + 1)):
        if len(encode(text[:n])) == S:
            return text[:n]
    raise ConfigError(
        f"--lengths: expected prompts that the text is long enough for, got {S} of {len(encode(text))} tokens. "
        "Give a longer --text."
    )


def row(method: str, S: int, dense: Sequence[Run], runs: Sequence[Run], encode: Encode) -> dict[str, Any]:
    """What is to be said of one method at one length; ``dense[i]`` and ``runs[i]`` are of the same turn."""
    found: dict[str, Any] = {"method": method, "S": S, "turns": len(runs)}
    for name, of in (("prompt", _prompt), ("generation", _generation)):
        ratios = [of(ours) / of(theirs) for ours, theirs in zip(runs, dense, strict=True)]
        found |= _spread(name, [of(run) for run in runs]) | _spread(f"{name}_ratio", ratios)
    found |= _spread("busy_seconds", [run.busy for run in runs])
    first, theirs = runs[0].outcome, dense[0].outcome
    ours, dense_tokens = (encode(text)[len(encode("")) :] for text in (first.text, theirs.text))
    differing = (i for i, (a, b) in enumerate(zip(ours, dense_tokens, strict=False)) if a != b)
    same = next(differing, min(len(ours), len(dense_tokens)))
    found |= {"tokens": first.generation_tokens, "same_tokens": same, "as_dense": ours == dense_tokens}
    return found | _said(method, first.report)


def _prompt(run: Run) -> float:
    return run.outcome.prompt_tps


def _generation(run: Run) -> float:
    return run.outcome.generation_tps


def _spread(name: str, samples: Sequence[float]) -> dict[str, float]:
    spread = Spread.of(samples)
    return {f"{name}_low": spread.low, name: spread.median, f"{name}_high": spread.high}


def _busy() -> float:
    """Seconds of the processor that the programs started from here have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _said(method: str, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the report of a run says; nothing of dense attention."""
    found: dict[str, Any] = {"attn": method, "sparse_calls": 0, "sparse_prompt_calls": 0, "dense_calls": {}}
    found |= {"bytes_per_token": None, "dense_bytes_per_token": None, "note": None}
    if report is None:
        if method != DENSE:
            raise ArtefactError(f"--attn: expected a report of {method}, got none. Run `mlx-sparse doctor`.")
        return found
    steps, prompts = report["sparse_calls"], (report.get("prefill") or {}).get("calls", 0)
    found |= {"attn": report["attn"], "sparse_calls": steps, "sparse_prompt_calls": prompts}
    found["dense_calls"] = report["dense_calls"]
    if steps:
        found["bytes_per_token"] = report["sparse_bytes"] / steps * report["served_layers"]
        found["dense_bytes_per_token"] = report["dense_bytes"] / steps * report["served_layers"]
    prefill, decode = select_methods(parse(method))
    fell_back = [config.name for config, calls in ((prefill, prompts), (decode, steps)) if config and not calls]
    if fell_back:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report["dense_calls"].items())
        found["note"] = f"no call of {' and '.join(fell_back)} was sparse: {reasons}"
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    header = ["prompt", "method", "prompt, tokens/s", "over dense", "generation, tokens/s", "over dense"]
    header += ["processor, s", "K/V per token, over dense", "tokens as dense"]
    lines = []
    for found in rows:
        cells = [f"{found['S']:,}", f"`{found['method']}`"]
        for name in ("prompt", "prompt_ratio", "generation", "generation_ratio"):
            low, middle, high = (found[f"{name}{end}"] for end in ("_low", "", "_high"))
            digits = 2 if name.endswith("ratio") else 1
            cells.append(f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})")
        cells.append(f"{found['busy_seconds']:.1f}")
        share = found["bytes_per_token"] and found["bytes_per_token"] / found["dense_bytes_per_token"]
        cells.append("" if share is None else f"{share:.1%}")
        cells.append("all" if found["as_dense"] else f"the first {found['same_tokens']} of {found['tokens']}")
        lines.append(cells)
    notes = [f"* `{found['method']}` at {found['S']:,}: {found['note']}." for found in rows if found["note"]]
    return "\n\n".join([forms.table(header, lines), *(["\n".join(notes)] if notes else [])])


def _encoder(model: str) -> Encode:
    """How ``mlx_lm.generate`` makes tokens of a text that is no chat."""
    from mlx_lm import utils

    with loading(model):
        load_tokenizer: Any = utils.load_tokenizer
        tokenizer = load_tokenizer(utils._download(model))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=True))

    return encode
