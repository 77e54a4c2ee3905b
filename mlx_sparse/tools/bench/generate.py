"""Implement ``mlx-sparse bench generate``: alternate sparse and dense runs of ``mlx_lm.generate`` or an exported model.

The MLX variants run ``mlx_lm.generate`` on real text. `onnx_export.bench_generate` has the ONNX Runtime variants.
"""

from __future__ import annotations

import argparse
import bisect
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...checks import ArtefactError, ConfigError, check_int, read_length
from ...files import cache_directory
from ...methods import parse, split_methods
from .. import formats
from ..assets.models import add_model_options, check_model, find_model
from ..environment import machine
from ..evaluate import texts
from ..generate_command import generate_command, parse_outcome, run_command
from .core import Row, Spread, Variant, collect, prepare_and_check, take_turns

ONNX = "mlx_sparse.onnx_export.bench_generate"  # imported by name, because mlx_sparse does not require onnx
RUNTIMES = ("mlx", "onnx")
LENGTHS, MAX_TOKENS, REPEAT = "2k,4k", 32, 3
DENSE = "dense"
LONG_TOKEN = 16  # characters; more than the average length of a token
SLACK = 64  # extra characters to try for a prefix with the exact number of tokens

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Context:
    """A prompt of ``S`` tokens. ``text`` is empty if the prompt is given as token ids."""

    S: int
    text: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return a dict from the name to the value of each column that describes the prompt in a result row."""
        return {"S": self.S}


class Generation(Variant):
    """Benchmark variant that generates tokens from a prompt with one method.

    Attributes:
        speeds: dict from the stage ("prompt" or "generation") to the speed in each turn, in tokens per second.
        remark: a note on a correct result, or None.
    """

    remark: str | None = None

    def __init__(self, context: Context, method: str, backend: str, **details: object) -> None:
        self.case, self.role = context, "dense" if method == DENSE else "sparse"
        self.row = Row(context, method, backend, details, spreads={})
        self.speeds: dict[str, list[float]] = {"prompt": [], "generation": []}

    def finish(self, dense: Generation) -> None:
        """Store in the row the speeds and their ratios to the speeds of ``dense`` in the same turns."""
        for name, ours in ((name, speeds) for name, speeds in self.speeds.items() if speeds):
            ratios = [own / other for own, other in zip(ours, dense.speeds[name], strict=True)]
            self.row.spreads |= {name: Spread.of(ours), f"{name}_ratio": Spread.of(ratios)}
            self.row.turns, self.row.note = len(ours), self.remark


def measure(variants: Sequence[Generation], repeat: int) -> Iterator[Row]:
    """Check the variants for one prompt, run the correct variants alternately, and yield all rows."""
    ready = [variant for variant in variants if prepare_and_check(variant)]
    take_turns(ready, repeat)
    dense = {variant.row.backend: variant for variant in ready if variant.role == "dense"}
    for variant in variants:
        if variant in ready and variant.row.backend in dense:
            variant.finish(dense[variant.row.backend])
        yield variant.row


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Return the exit code: 1 if a result is wrong, else 0."""
    from ...lm.model import select_methods

    methods = [text for text in split_methods(args.attn) if text != DENSE]
    for text in methods:
        select_methods(parse(text))
    for option, value, runtime in (("--threads", args.threads, "onnx"), ("--text", args.text, "mlx")):
        if value is not None and args.runtime != runtime:
            raise ConfigError(f"{option}: expected none with --runtime {args.runtime}, got {value}.")
    check_int("--repeat", args.repeat, 1)
    tokens = check_int("--max-tokens", args.max_tokens, 1)
    threads = check_int("--threads", 1 if args.threads is None else args.threads, 1)
    lengths = [read_length(text) for text in args.lengths.split(",")]
    cache, load, where = cache_directory(args.cache_dir), os.getloadavg()[0], machine()
    check_model(args.model, cache, args.accept_license)
    texts.check([args.text or texts.DEFAULT])
    if args.runtime == "onnx":
        make = partial(importlib.import_module(ONNX).variants, threads=threads)
    else:
        (source,) = texts.read([args.text or texts.DEFAULT], cache=cache)
        make = partial(commands, text=source)
    model = find_model(args.model, cache, args.accept_license)
    facts: dict[str, object] = {"command": args.command, "date": date.today().isoformat(), "machine": where}
    printer = formats.Printer(args, facts | {"load average": f"{load:.1f} before, {os.cpu_count()} processors"})
    rows = list[Row]()
    for variants in make(model, [DENSE, *methods], lengths, tokens):
        rows += collect(measure(variants, args.repeat), printer)
    right = not any(row.failed for row in rows)
    about = f"{Path(model).name}; {where['chip']}, {where['device']}; load average before: {load:.1f}"
    printer.end(f"{about}; medians of {args.repeat} turns (quartiles).\n\n{table(rows)}", right)
    return 0 if right else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of ``mlx-sparse bench generate``."""
    parser.description = (
        "Run mlx_lm.generate on real text, alternately with dense attention and each method, and print the speeds of "
        "prefill and generation. With --runtime onnx, decode with the model as export-onnx writes it in float32."
    )
    add_model_options(parser)
    parser.add_argument("--runtime", choices=RUNTIMES, default="mlx", help="library to time (default: mlx)")
    parser.add_argument("--attn", metavar="METHOD,...", default="sparq", help="such as sparq,sample+sparq")
    parser.add_argument("--lengths", metavar="S,...", default=LENGTHS, help=f"prompt lengths (default: {LENGTHS})")
    about = f"tokens to generate in each run (default: {MAX_TOKENS})"
    parser.add_argument("--max-tokens", metavar="N", type=int, default=MAX_TOKENS, help=about)
    parser.add_argument("--repeat", metavar="N", type=int, default=REPEAT, help=f"timed runs (default: {REPEAT})")
    names = f"a file or one of {', '.join(texts.NAMES)} (default: {texts.DEFAULT})"
    parser.add_argument("--text", metavar="TEXT", help=f"with mlx: the prompts are the start of {names}")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder for fetched files (default: user's cache)")
    parser.add_argument("--threads", metavar="N", type=int, help="with onnx: threads of ONNX Runtime (default: 1)")
    formats.add_options(parser)


# MLX


def commands(
    model: str, methods: Sequence[str], lengths: Sequence[int], tokens: int, *, text: texts.Text
) -> Iterator[list[Generation]]:
    """Yield one list of variants for each prompt length, with one variant per method.

    Raises:
        ConfigError: the text is too short, or no prefix of the text has exactly the requested number of tokens.
    """
    encode = _encoder(model)
    for context in [Context(S, prompt_of(text.text, S, encode)) for S in lengths]:
        yield [Command(context, method, model, tokens, encode) for method in methods]


class Command(Generation):
    """A run of ``mlx_lm.generate`` with one method. Each turn starts a new process."""

    def __init__(self, context: Context, method: str, model: str, tokens: int, encode: Encode) -> None:
        super().__init__(context, method, "mlx", peak_memory=0.0)
        attn = [] if method == DENSE else ["--attn", method, "--attn-report", "json"]
        self._command = [*generate_command(model, tokens), "--ignore-chat-template", *attn]
        self._encode, self._what = encode, f"{method}, {context.S} tokens,"

    def check(self) -> str | None:
        return None  # `finish` compares the generated tokens with dense attention

    def run(self, turn: int) -> float:
        out = parse_outcome(run_command(self._what, self._command, self.case.text, dict(os.environ)))
        if out.prompt_tokens != self.case.S:
            raise ArtefactError(f"mlx_lm.generate: expected a prompt of {self.case.S} tokens, got {out.prompt_tokens}.")
        self.speeds["prompt"].append(out.prompt_tps)
        self.speeds["generation"].append(out.generation_tps)
        peak = max(self.row.details["peak_memory"], out.peak_memory or 0.0)
        self.row.details |= {"peak_memory": peak, "tokens": out.generation_tokens}
        self.tokens = self._encode(out.text)[len(self._encode("")) :]  # the same in every turn
        self.row.details["report"], self.remark = out.report, never_sparse(self.row.method, out.report)
        return out.generation_tps

    def finish(self, dense: Generation) -> None:
        super().finish(dense)
        assert isinstance(dense, Command)
        pairs = zip(self.tokens, dense.tokens, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.row.details |= {"same_tokens": same, "as_dense": self.tokens == dense.tokens}


def prompt_of(text: str, S: int, encode: Encode) -> str:
    """Return a prefix of ``text`` with exactly ``S`` tokens.

    Raises:
        ConfigError: no prefix has ``S`` tokens.
    """
    enough = range(min(len(text), LONG_TOKEN * S) + 1)
    shortest = bisect.bisect_left(enough, S, key=lambda n: len(encode(text[:n])))
    for n in range(shortest, min(shortest + SLACK, len(text) + 1)):
        if len(encode(text[:n])) == S:
            return text[:n]
    raise ConfigError(
        f"--lengths: expected prompts that are shorter than the text, got {S} of {len(encode(text))} tokens. "
        "Give a longer --text."
    )


def never_sparse(method: str, report: Mapping[str, Any] | None) -> str | None:
    """Return a note if the prefill method or the decode method made only dense calls, else None.

    Raises:
        ArtefactError: ``method`` is not "dense", but ``report`` is None.
    """
    if method == DENSE:
        return None
    if report is None:
        raise ArtefactError(f"--attn: expected a report of {method}, got none. Run `mlx-sparse doctor`.")
    from ...lm.model import select_methods

    counts = (report.get("prefill") or {}).get("calls", 0), report["sparse_calls"]
    parts = zip(select_methods(parse(method)), counts, strict=True)
    never = [config.name for config, calls in parts if config and not calls]
    reasons = ", ".join(f"{count:,} {why}" for why, count in report["dense_calls"].items())
    return f"no call of {' and '.join(never)} was sparse: {reasons}" if never else None


def _encoder(model: str) -> Encode:
    """Return a function that encodes text in the same way as ``mlx_lm.generate --ignore-chat-template``."""
    from mlx_lm import utils

    from ...lm.loading import loading

    with loading(model):
        load_tokenizer: Any = utils.load_tokenizer
        tokenizer = load_tokenizer(utils._download(model))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=True))


SPEEDS = ("prefill, tokens/s", "speed-up", "generation, tokens/s", "speed-up")
HEADER = ("prompt", "method", "backend", *SPEEDS, "note")


def table(rows: Sequence[Row]) -> str:
    """Return ``rows`` as a Markdown table."""
    lines = []
    for row in rows:
        found, about = row.details, row.note or ""
        names = ("prompt", "prompt_ratio", "generation", "generation_ratio")
        cells = [row.spreads.get(name) for name in names]
        digits = (1, 2, 1, 2)
        texts_ = [cell.text(n) if cell else "" for cell, n in zip(cells, digits, strict=True)]
        if not about and "as_dense" in found:
            same = "all" if found["as_dense"] else f"the first {found['same_tokens']} of {found['tokens']}"
            about = f"tokens as dense: {same}; {found['peak_memory']:.2f} GB"
        lines.append([f"{row.case.S:,}", f"`{row.method}`", row.backend, *texts_, about])
    return formats.table(HEADER, lines)
