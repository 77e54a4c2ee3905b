"""``mlx-sparse bench generate``: tokens per second of ``mlx_lm.generate`` itself, densely and with each method."""

from __future__ import annotations

import argparse
import bisect
import importlib
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ...checks import ArtefactError, ConfigError, check_int, read_length
from ...files import cache_directory
from ...methods import parse, split_methods
from .. import formats
from ..assets import blas
from ..assets.models import add_model_options, check_model, find_model
from ..demo.command import generate_command, run_command
from ..demo.outcome import Outcome, parse_outcome
from ..environment import machine
from ..evaluate import texts
from .core import Length, Row, Sample, Spread, Turns, take_turns
from .run import Plan
from .run import run as run_plan

ONNX = "mlx_sparse.onnx_export.bench.generate"  # a name: mlx_sparse runs without onnx
ENGINES = ("mlx", "onnx")
LENGTHS = {"mlx": "2k,4k", "onnx": "4k,8k,16k,32k"}
MAX_TOKENS, REPEAT = {"mlx": 64, "onnx": 16}, 3
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


@dataclass(frozen=True)
class Way:
    """What a run is given.

    Attributes:
        method: dense attention, or what ``--attn`` names.
        kv_bits: of a quantised cache; None for another.
        attn: whether ``--attn`` is given.
    """

    method: str
    kv_bits: int | None = None
    attn: bool = False

    def __str__(self) -> str:
        name = f"--attn {self.method}" if self.attn and self.method == DENSE else self.method
        return name if self.kv_bits is None else f"{name} --kv-bits {self.kv_bits}"

    @property
    def options(self) -> list[str]:
        """Of ``mlx_lm.generate``."""
        options = ["--attn", self.method, "--attn-report", "json"] if self.attn else []
        if self.kv_bits is not None:
            options += ["--kv-bits", str(self.kv_bits), "--quantized-kv-start", "0"]
        return options


@dataclass(frozen=True)
class Prompt(Length):
    """So many tokens, and what they are made of."""

    text: str = ""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; return the exit code: 1 if a result was wrong."""
    from ...lm.model import select_methods

    methods = [text for text in split_methods(args.attn) if text != DENSE]
    for text in methods:
        select_methods(parse(text))
    for name, options in (("onnx", ("threads", "dtype")), ("mlx", ("text", "kv_bits"))):
        if given := [option for option in options if getattr(args, option) is not None and args.engine != name]:
            value = getattr(args, given[0])
            raise ConfigError(
                f"--{given[0].replace('_', '-')}: expected none with --engine {args.engine}, got {value}."
            )
    check_int("--repeat", args.repeat, 1)
    tokens = MAX_TOKENS[args.engine] if args.max_tokens is None else check_int("--max-tokens", args.max_tokens, 1)
    lengths = [read_length(text) for text in (args.lengths or LENGTHS[args.engine]).split(",")]
    if args.engine == "onnx" and args.fast_blas:
        raise ConfigError("--fast-blas: expected none with --engine onnx, which times onnxruntime, got one. Drop one.")
    cache, before, where = cache_directory(args.cache_dir), os.getloadavg()[0], machine()
    check_model(args.model, cache, args.accept_licence)
    texts.check([args.text or texts.DEFAULT])
    if args.engine == "onnx":
        model = find_model(args.model, cache, args.accept_licence)
        threads = 1 if args.threads is None else args.threads
        made: Plan = importlib.import_module(ONNX).plan(
            model, methods, lengths, tokens, args.repeat, threads, args.dtype
        )
    else:
        (source,) = texts.read([args.text or texts.DEFAULT], cache=cache)
        model = find_model(args.model, cache, args.accept_licence)
        ways = [Way(DENSE), *(Way(text, attn=True) for text in methods)]
        if args.kv_bits is not None:
            ways += [Way(DENSE, args.kv_bits), *(Way(text, args.kv_bits, attn=True) for text in (DENSE, *methods))]
        made = plan(model, ways, lengths, tokens, args.repeat, source, blas.chosen(args.fast_blas, cache))

    def report(rows: Sequence[Row]) -> str:
        load = f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors"
        head = f"MLX {where['mlx']}, mlx-lm {where['mlx-lm']}, {where['chip']}, {where['device']}; load average {load}."
        end = [CPU] if "cpu" in where["device"] or args.engine == "onnx" else []
        return "\n\n".join([head, made.text(rows), *end])

    facts = {"command": args.command, "date": date.today().isoformat(), "machine": where}
    facts |= {"load average": f"{before:.1f} before, {os.cpu_count()} processors"}
    printer = formats.Printer(args, facts)
    return 0 if run_plan(Plan(where, made.cases, made.measure, report), printer) else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options of this command."""
    parser.description = (
        "Run mlx_lm.generate on real text, densely and with each method in turns, and tell how fast it took in the "
        "prompt and generated. With --engine onnx, decode with the model exported by export-onnx instead."
    )
    add_model_options(parser)
    parser.add_argument("--engine", choices=ENGINES, default="mlx", help="what generates (default: mlx)")
    parser.add_argument(
        "--attn", metavar="METHOD,...", default="sparq", help="such as sparq,sample+sparq (default: sparq)"
    )
    parser.add_argument(
        "--lengths",
        metavar="S,...",
        help=f"tokens of the prompt (default: {LENGTHS['mlx']}; onnx {LENGTHS['onnx']})",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help=f"tokens to generate (default: {MAX_TOKENS['mlx']}; onnx {MAX_TOKENS['onnx']}, in each turn)",
    )
    parser.add_argument(
        "--kv-bits",
        metavar="N",
        type=int,
        help="with mlx: run everything with quantised caches too, from the first token on, and dense attention there "
        "with --attn dense besides (docs/spec/quantised.md)",
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=REPEAT, help=f"turns (default: {REPEAT})")
    parser.add_argument(
        "--text",
        metavar="TEXT",
        help=f"with mlx: the prompts are its start: a file or one of {', '.join(texts.NAMES)} "
        f"(default: {texts.DEFAULT})",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where a named model goes (default: user's cache)")
    blas.add_option(parser)
    parser.add_argument("--threads", metavar="N", type=int, help="with onnx (default: 1)")
    parser.add_argument("--dtype", metavar="TYPE", help="with onnx: of the export (default: the model's)")
    formats.add_options(parser)


def plan(
    model: str,
    ways: Sequence[Way],
    lengths: Sequence[int],
    max_tokens: int,
    repeat: int,
    text: texts.Text,
    environment: dict[str, str],
) -> Plan:
    """Runs of the command for each length; the first way is the dense attention that others are compared with.

    Raises:
        ConfigError: the text is too short, or has no beginning of exactly so many tokens.
    """
    encode = _encoder(model)
    prompts = [Prompt(S, prompt_of(text.text, S, encode)) for S in lengths]
    about = f"{Path(model).name}; the start of {text.name} (SHA-256 {text.sha256[:16]})"
    about += f", {max_tokens} tokens generated, {repeat} turns; medians (quartiles)."

    def measure(prompt: Prompt, _: float) -> Iterator[Row]:
        steps = {str(way): Command(way, model, max_tokens, prompt, environment) for way in ways}
        take_turns(steps, Turns(repeat))
        for way, command in zip(ways, steps.values(), strict=True):
            yield row(way, prompt, steps[str(ways[0])].runs, command.runs, encode)

    return Plan({}, prompts, measure, lambda rows: f"{about}\n\n{table(rows)}")


class Command:
    """The command with one method; every step runs it once more.

    Attributes:
        runs: what they printed.

    Raises:
        ArtefactError: a run fails, or takes in another prompt.
    """

    def __init__(self, way: Way, model: str, max_tokens: int, prompt: Prompt, environment: dict[str, str]) -> None:
        self._what, self._prompt, self._environment = f"{way}, {prompt.S} tokens,", prompt, environment
        self._command = [*generate_command(model, max_tokens), "--ignore-chat-template", *way.options]
        self.runs: list[Run] = []

    def __call__(self, turn: int) -> Sample:
        before = _busy()
        outcome = parse_outcome(run_command(self._what, self._command, self._prompt.text, self._environment))
        if (tokens := outcome.prompt_tokens) != self._prompt.S:
            raise ArtefactError(f"mlx_lm.generate: expected a prompt of {self._prompt.S} tokens, got {tokens}.")
        self.runs.append(Run(outcome, _busy() - before))
        return Sample(self.runs[-1].busy)


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


def row(way: Way, prompt: Prompt, dense: Sequence[Run], runs: Sequence[Run], encode: Encode) -> Row:
    """What is to be said of one method at one length; ``dense[i]`` and ``runs[i]`` are of the same turn."""
    found = Row(prompt, str(way), spreads={}, turns=len(runs))
    for name in ("prompt", "generation"):
        ours, theirs = ([getattr(run.outcome, f"{name}_tps") for run in some] for some in (runs, dense))
        found.compare(name, ours, theirs)
    found.spreads["busy_seconds"] = Spread.of([run.busy for run in runs])
    first, other = runs[0].outcome, dense[0].outcome
    tokens, dense_tokens = (encode(text)[len(encode("")) :] for text in (first.text, other.text))
    differing = (i for i, (a, b) in enumerate(zip(tokens, dense_tokens, strict=False)) if a != b)
    same = next(differing, min(len(tokens), len(dense_tokens)))
    found.details |= {"method": way.method, "tokens": first.generation_tokens, "same_tokens": same}
    found.details |= {"kv_bits": way.kv_bits, "peak_memory": max(run.outcome.peak_memory or 0.0 for run in runs)}
    found.details |= {"as_dense": tokens == dense_tokens} | _said(way.method, first.report)
    found.note = found.details.pop("note")
    return found


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
    from ...lm.model import select_methods

    prefill, decode = select_methods(parse(method))
    fell_back = [config.name for config, calls in ((prefill, prompts), (decode, steps)) if config and not calls]
    if fell_back:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report["dense_calls"].items())
        found["note"] = f"no call of {' and '.join(fell_back)} was sparse: {reasons}"
    return found


HEADER = [
    *("prompt", "method", "prompt, tokens/s", "over dense", "generation, tokens/s", "over dense", "processor, s"),
    *("K/V per token, over dense", "peak memory, GB", "tokens as dense"),
]


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = []
    for row in rows:
        found, cells = row.details, [f"{row.case.S:,}", f"`{row.name}`"]
        for name in ("prompt", "prompt_ratio", "generation", "generation_ratio"):
            cells.append(_cell(row.spreads[name], 2 if name.endswith("ratio") else 1))
        busy = row.spreads["busy_seconds"]
        cells.append(f"{busy.median:.1f}" if busy else "")
        share = found["bytes_per_token"] and found["bytes_per_token"] / found["dense_bytes_per_token"]
        cells.append("" if share is None else f"{share:.1%}")
        cells.append(f"{found['peak_memory']:.2f}")
        cells.append("all" if found["as_dense"] else f"the first {found['same_tokens']} of {found['tokens']}")
        lines.append(cells)
    notes = [f"* `{row.name}` at {row.case.S:,}: {row.note}." for row in rows if row.note]
    return "\n\n".join([formats.table(HEADER, lines), *(["\n".join(notes)] if notes else [])])


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _encoder(model: str) -> Encode:
    """Return the tokenizer as ``mlx_lm.generate`` uses it for a text that is no chat."""
    from mlx_lm import utils

    from ...lm.loading import loading

    with loading(model):
        load_tokenizer: Any = utils.load_tokenizer
        tokenizer = load_tokenizer(utils._download(model))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=True))

    return encode
