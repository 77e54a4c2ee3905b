"""Implement ``mlx-sparse bench generate``: alternate sparse and dense runs of an mlx-lm model or an exported model.

The MLX variants prefill and decode real text with the functions of ``mlx-sparse try``. `onnx_export.bench_generate` has
the ONNX Runtime variants.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import ConfigError, Parser, check_int, read_length
from ...files import cache_directory
from ...methods import parse, split_methods
from .. import formats
from ..assets.models import DEFAULT, add_model_options, check_model, find_model
from ..environment import machine
from ..evaluate import texts
from .core import Row, Spread, Variant, collect, prepare_and_check, take_turns

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

ONNX = "mlx_sparse.onnx_export.bench_generate"  # imported by name, because mlx_sparse does not require onnx
RUNTIMES = ("mlx", "onnx")
LENGTHS, MAX_TOKENS, REPEAT = "2k,4k", 32, 3
DENSE = "dense"
DIGITS = {"time_to_first_token": 2, "prompt": 1, "generation": 1}  # from a measured value to its decimal places


@dataclass(frozen=True)
class Context:
    """A prompt of ``S`` tokens."""

    S: int

    def as_dict(self) -> dict[str, object]:
        return {"S": self.S}


class Generation(Variant):
    """Benchmark variant that generates tokens from a prompt with one method.

    Attributes:
        measured: dict from a name to its value in each turn: "time_to_first_token" in seconds, and the speeds of
            "prompt" and "generation" in tokens per second.
        remark: a note on a correct result, or None.
    """

    remark: str | None = None

    def __init__(self, context: Context, method: str, backend: str, **details: object) -> None:
        self.case, self.role = context, "dense" if method == DENSE else "sparse"
        self.row = Row(context, method, backend, details, spreads={})
        self.measured: dict[str, list[float]] = {name: [] for name in DIGITS}

    def finish(self, dense: Generation) -> None:
        """Store in the row the values and their ratios to the values of ``dense`` in the same turns."""
        for name, ours in ((name, values) for name, values in self.measured.items() if values):
            ratios = [own / other for own, other in zip(ours, dense.measured[name], strict=True)]
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
    if args.threads is not None and args.runtime == "mlx":
        raise ConfigError(f"--threads: expected none with --runtime mlx, got {args.threads}.")
    check_int("--repeat", args.repeat, 1)
    tokens = check_int("--max-tokens", args.max_tokens, 1)
    threads = check_int("--threads", 1 if args.threads is None else args.threads, 1)
    lengths = [read_length(text) for text in args.lengths.split(",")]
    cache, load, where = cache_directory(args.cache_dir), os.getloadavg()[0], machine()
    check_model(args.model, cache, args.accept_license)
    texts.check([args.text or texts.DEFAULT])
    (source,) = texts.read([args.text or texts.DEFAULT], cache=cache)
    make = partial(importlib.import_module(ONNX).variants, threads=threads) if args.runtime == "onnx" else variants_of
    model = find_model(args.model, cache, args.accept_license)
    facts = {
        "model": Path(args.model or DEFAULT).name,  # no folder, because rows are published
        "command": args.command,
        "date": date.today().isoformat(),
        "machine": where,
    }
    printer = formats.Printer(args, facts | {"load average": f"{load:.1f} before, {os.cpu_count()} processors"})
    rows = list[Row]()
    for variants in make(model, [DENSE, *methods], lengths, tokens, text=source.text):
        rows += collect(measure(variants, args.repeat), printer)
    right = not any(row.failed for row in rows)
    about = f"{Path(model).name}; {where['chip']}, {where['device']}; load average before: {load:.1f}"
    printer.end(f"{about}; medians of {args.repeat} turns (quartiles).\n\n{table(rows)}", right)
    return 0 if right else 1


def add_arguments(parser: Parser) -> None:
    """Add the description and the options of ``mlx-sparse bench generate``."""
    parser.description = (
        "Generate from real text, alternately with dense attention and each method, and print the time to the first "
        "token and the speeds of prefill and generation with mlx-lm. With --runtime onnx, run the model as export-onnx "
        "writes it in float32; only with a prefill method, time the first token."
    )
    add_model_options(parser)
    parser.add_argument("--runtime", choices=RUNTIMES, default="mlx", help="library to time (default: mlx)")
    parser.add_argument("--attn", metavar="METHOD,...", default="sparq", help="such as sparq,gather+sparq")
    parser.add_argument("--lengths", metavar="S,...", default=LENGTHS, help=f"prompt lengths (default: {LENGTHS})")
    about = f"tokens to generate in each run (default: {MAX_TOKENS})"
    parser.add_argument("--max-tokens", metavar="N", type=int, default=MAX_TOKENS, help=about)
    parser.add_argument("--repeat", metavar="N", type=int, default=REPEAT, help=f"timed runs (default: {REPEAT})")
    names = f"a file or one of {', '.join(texts.NAMES)} (default: {texts.DEFAULT})"
    parser.add_argument("--text", metavar="TEXT", help=f"the prompts are the start of {names}")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder for fetched files (default: user's cache)")
    parser.add_argument("--threads", metavar="N", type=int, help="with onnx: threads of ONNX Runtime (default: 1)")
    formats.add_options(parser)


def first_tokens(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    """Return the first ``length`` tokens of ``text``."""
    tokens = list(tokenizer.encode(text))
    if length > len(tokens):
        raise ConfigError(
            f"--lengths: expected prompts that are not longer than the text, got {length} of {len(tokens)} "
            "tokens. Give a longer --text."
        )
    return tokens[:length]


# MLX


def variants_of(
    model: str, methods: Sequence[str], lengths: Sequence[int], tokens: int, *, text: str
) -> Iterator[list[Generation]]:
    """Yield one list of variants for each prompt length, with one variant per method."""
    from ...lm.loading import load_text_model

    loaded, tokenizer, _ = load_text_model(model, only_mlx_lm=True)
    prompt = first_tokens(tokenizer, text, max(lengths))
    for S in lengths:
        yield [Answer(prompt[:S], method, loaded, tokenizer, tokens) for method in methods]


class Answer(Generation):
    """An answer of an mlx-lm model with one method, which each turn prefills and decodes anew."""

    def __init__(self, prompt: list[int], method: str, model: nn.Module, tokenizer: Tokenizer, tokens: int) -> None:
        super().__init__(Context(len(prompt)), method, "mlx", peak_memory=0.0)
        self._prompt, self._model, self._tokenizer, self._most = prompt, model, tokenizer, tokens

    def prepare(self) -> None:
        """Measure missing crossover lengths now, because a turn would time the measurement."""
        from ...calibrate import Calibration
        from ..comparison import measure_crossover

        self._calibration = Calibration(measures=True)
        if self.row.method != DENSE:
            measure_crossover(self._model, self.row.method, self._calibration)

    def check(self) -> str | None:
        return None  # `finish` compares the generated tokens with dense attention

    def run(self, turn: int) -> float:
        from mlx_lm.models.cache import make_prompt_cache

        from ...lm.model import sparse
        from ..comparison import decode

        model, method, details = self._model, self.row.method, self.row.details
        way: Any = nullcontext() if method == DENSE else sparse(model, method, calibration=self._calibration)
        with way as report:
            cache = make_prompt_cache(model)
            found, _ = decode(model, self._tokenizer, cache, self._prompt, self._most, lambda tokens: None)
        details["peak_memory"] = max(details["peak_memory"], found.peak_memory / 1e9)
        details["tokens"], self.tokens = len(found.tokens), found.tokens  # the same in every turn
        details["report"] = report and report.as_dict()
        self.remark = never_sparse(method, details["report"])
        values = (found.first, len(self._prompt) / found.first, found.tokens_per_second)
        for name, value in zip(DIGITS, values, strict=True):
            self.measured[name].append(value)
        return found.tokens_per_second

    def finish(self, dense: Generation) -> None:
        super().finish(dense)
        assert isinstance(dense, Answer)
        pairs = zip(self.tokens, dense.tokens, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.row.details |= {"same_tokens": same, "as_dense": self.tokens == dense.tokens}


def never_sparse(method: str, report: Mapping[str, Any] | None) -> str | None:
    """Return a note if the prefill method or the decode method made only dense calls, else None."""
    if report is None:  # dense
        return None
    from ...lm.model import select_methods

    counts = (report.get("prefill") or {}).get("calls", 0), report["sparse_calls"]
    parts = zip(select_methods(parse(method)), counts, strict=True)
    never = [config.name for config, calls in parts if config and not calls]
    reasons = ", ".join(f"{count:,} {why}" for why, count in report["dense_calls"].items())
    return f"no call of {' and '.join(never)} was sparse: {reasons}" if never else None


VALUES = ("first token, s", "prefill, tokens/s", "generation, tokens/s")
HEADER = ("prompt", "method", "backend", *(name for value in VALUES for name in (value, "ratio")), "note")


def table(rows: Sequence[Row]) -> str:
    """Return ``rows`` as a Markdown table."""
    lines = []
    for row in rows:
        found, about = row.details, row.note or ""
        digits = [one for name, n in DIGITS.items() for one in ((name, n), (f"{name}_ratio", 2))]
        cells = [spread.text(n) if (spread := row.spreads.get(name)) else "" for name, n in digits]
        if not about and "as_dense" in found:
            same = "all" if found["as_dense"] else f"the first {found['same_tokens']} of {found['tokens']}"
            about = f"tokens as dense: {same}; {found['peak_memory']:.2f} GB"
        lines.append([f"{row.case.S:,}", f"`{row.method}`", row.backend, *cells, about])
    return formats.table(HEADER, lines)
