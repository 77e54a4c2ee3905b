"""Implement ``mlx-sparse bench step | prefill | generate``: parse the options and run all cases.

Each ``--runtime`` is a module with the functions ``check(request)``, ``machine()`` and ``variants(request, case)``.
This module needs only NumPy.
"""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from itertools import product

from ...checks import ConfigError, Parser, SparseAttentionError, check_int, read_length, read_shape
from ...core.base import Method
from ...extras import naming_missing
from ...methods import parse, split_methods
from .. import formats
from .core import ITEM_SIZES, Case, Request, Row, Shape, collect, log, measure, text

RUNTIMES = {  # modules, imported on request
    "mlx": "mlx_sparse.tools.bench.mlx_variants",
    "onnx": "mlx_sparse.onnx_export.bench",
    "cuda": "mlx_sparse.cuda_ref.bench",
}
GENERATE = "mlx_sparse.tools.bench.generate"
STAGES = {  # stage of the methods, examples, and the defaults of --attn, --lengths and --repeat
    "step": ("decode", "decode steps such as sparq:rank=16,streaming", "sparq", "4k,16k,64k", 9),
    "prefill": ("prefill", "prefill such as sample,minference", "sample", "4k,8k", 3),
}
SHAPES = "32x8x128"
BACKENDS = {"mlx": "auto", "onnx": "native,standard", "cuda": "triton"}
WARM_UP = 2  # turns before the timing of decode steps
ONLY = {  # option: the only --runtime and stage that accept it, and its help
    "--kv-bits": ("mlx", "step", "also time each method with quantized KV caches of N bits"),
    "--steps": ("mlx", "prefill", "tokens of a prefill chunk (default: 2048,all)"),
    "--threads": ("onnx", "", "threads of ONNX Runtime (default: 2)"),
}


@naming_missing()
def main(argv: Sequence[str]) -> int:
    """Run a benchmark. Return the exit code: 1 if a result is wrong, else 0."""
    args = _parser(argv).parse_args(argv)
    args.command = shlex.join(["mlx-sparse", "bench", *argv])
    formats.check_options(args)
    if args.stage == "generate":
        code: int = importlib.import_module(GENERATE).run(args)
        return code
    request = read(args)
    runtime = importlib.import_module(RUNTIMES[args.runtime])
    runtime.check(request)
    facts = {"command": args.command, "date": date.today().isoformat(), "machine": runtime.machine()}
    return 0 if run(request, runtime, formats.Printer(args, facts)) else 1


def run(request: Request, runtime: object, printer: formats.Printer) -> bool:
    """Measure all cases within ``request.budget`` and print the rows. Return True if all results are correct."""
    end, rows = time.monotonic() + request.budget, list[Row]()
    for number, case in enumerate(request.cases):
        log(f"[{number + 1}/{len(request.cases)}] {case}")
        now = time.monotonic()
        # Later cases take longer, so each case except the last gets only half of the remaining time.
        until = now + (end - now) / min(2, len(request.cases) - number)
        found = [Row(case, "", note=f"skipped: the time budget of {request.budget:g} s was used up")]
        if now < end:
            made = runtime.variants(request, case)  # type: ignore[attr-defined]
            found = measure(case, made, request.repeat, WARM_UP if case.step is None else 0, until)
        rows += collect(found, printer)
    right = not any(row.failed for row in rows)
    printer.end(text(rows), right)
    return right


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse bench",
        description="Check the result of every variant, then time sparse and dense attention alternately. Each row is "
        "printed as soon as it is measured: on standard error, or with -o jsonl on standard output.",
    )
    stages = parser.add_subparsers(dest="stage", metavar="WHAT", required=True)
    for stage, about in (("step", "a decode step of one layer"), ("prefill", "a prefill of one layer")):
        _add_options(stages.add_parser(stage, help=about, description=f"Time {about}."), stage)
    about = "tokens per second of mlx_lm.generate, or of an exported model"
    generate = stages.add_parser("generate", help=about)
    if "generate" in argv:  # this module needs more packages
        importlib.import_module(GENERATE).add_arguments(generate)
    return parser


def _add_options(parser: argparse.ArgumentParser, stage: str) -> None:
    _, examples, method, lengths, repeat = STAGES[stage]
    parser.add_argument("--runtime", choices=RUNTIMES, default="mlx", help="library to time (default: mlx)")
    parser.add_argument("--attn", metavar="METHOD,...", default=method, help=f"{examples} (default: {method})")
    parser.add_argument("--lengths", metavar="S,...", default=lengths, help=f"numbers of keys (default: {lengths})")
    about = f"query heads x KV heads x head dim (default: {SHAPES})"
    parser.add_argument("--shapes", metavar="QxKxD,...", default=SHAPES, help=about)
    parser.add_argument("--batches", metavar="B,...", default="1", help="batch sizes (default: 1)")
    about = f"{', '.join(ITEM_SIZES)} (default: float16)"
    parser.add_argument("--dtype", metavar="TYPE,...", default="float16", help=about)
    parser.add_argument("--repeat", metavar="N", type=int, default=repeat, help=f"timed runs (default: {repeat})")
    parser.add_argument("--backend", metavar="NAME,...", help=f"mlx: auto, ops, cpu, metal; onnx: {BACKENDS['onnx']}")
    parser.add_argument("--budget-s", metavar="N", type=float, default=math.inf, help="seconds (default: no limit)")
    for option, (runtime, of, about) in ONLY.items():
        if of in ("", stage):
            parser.add_argument(option, metavar="N" if of == "" else "N,...", help=f"with {runtime}: {about}")
    formats.add_options(parser)


def read(args: argparse.Namespace) -> Request:
    """Validate the parsed options and convert them to a request."""
    own: dict[str, str | None] = {option: getattr(args, option[2:].replace("-", "_"), None) for option in ONLY}
    for option, value in own.items():
        if value is not None and ONLY[option][0] != args.runtime:
            raise ConfigError(f"{option}: expected none with --runtime {args.runtime}, got {value}.")
    dtypes = args.dtype.split(",")
    if not set(dtypes) <= ITEM_SIZES.keys():
        raise ConfigError(f"--dtype: expected some of {', '.join(ITEM_SIZES)}, got {args.dtype!r}.")
    if not args.budget_s > 0:
        raise ConfigError(f"--budget-s: expected seconds, got {args.budget_s:g}.")
    sizes = [read_length(part) for part in args.lengths.split(",")]
    made = [Shape(*read_shape(part)) for part in args.shapes.split(",")]
    batches = [_number("--batches", part) for part in args.batches.split(",")]
    cases = [Case(*parts) for parts in product(dtypes, made, batches, sizes)]
    if args.stage == "prefill":
        default = "2048,all" if args.runtime == "mlx" else "all"
        chunks = (own["--steps"] or default).split(",")
        steps = [None if part == "all" else read_length(part, "--steps") for part in chunks]
        cases = [Case(c.dtype, c.shape, c.B, c.S, min(step or c.S, c.S)) for c, step in product(cases, steps)]
    return Request(
        stage=args.stage,
        methods=[_method(part, args.stage) for part in split_methods(args.attn)],
        backends=(args.backend or BACKENDS[args.runtime]).split(","),
        cases=list(dict.fromkeys(cases)),
        repeat=check_int("--repeat", args.repeat, 1),
        budget=args.budget_s,
        kv_bits=[_number("--kv-bits", part) for part in (own.get("--kv-bits") or "").split(",") if part],
        threads=_number("--threads", own["--threads"] or "2"),
    )


def _method(typed: str, stage: str) -> Method:
    wanted, examples, *_ = STAGES[stage]
    configs = parse(typed)
    if len(configs) != 1 or configs[0].name == "dense" or configs[0].stage != wanted:
        raise ConfigError(f"--attn: expected methods for {examples}, got {typed}.")
    return configs[0]


def _number(option: str, typed: str) -> int:
    return check_int(option, int(typed) if typed.isdecimal() else typed, 1)


if __name__ == "__main__":  # scripts/gpu_check.sh runs this module without an installation
    try:
        sys.exit(main(sys.argv[1:]))
    except SparseAttentionError as error:
        print(f"mlx-sparse bench: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
