"""``mlx-sparse bench step | prompt | generate``: the options, for every engine. Steps and prompts run without mlx."""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from ...checks import ConfigError, Parser, SparseAttentionError, check_int, check_share, read_length, read_shape
from ...extras import naming_missing
from ...methods import Method, parse, split_methods
from .. import formats
from .core import Shape
from .run import Plan, Request, run

ENGINES = {  # names: each is imported when it is asked for
    "mlx": "mlx_sparse.tools.bench.mlx",
    "onnx": "mlx_sparse.onnx_export.bench",
    "cuda": "mlx_sparse.cuda_ref.bench",
}
GENERATE = "mlx_sparse.tools.bench.generate"
DTYPES = ("float16", "bfloat16", "float32")
DENSITIES = "0.05,0.1,0.2,0.5"
STAGES = {  # whose methods they are, and which are named as examples
    "step": ("decode", "decode steps such as sparq:rank=16,streaming", "sparq"),
    "prompt": ("prefill", "prompts such as sample,minference", "sample"),
}
ONLY = {  # options that not all engines have: the engines that have them, what is typed, what is said of it
    "batches": (("mlx", "cuda"), "B,...", "sequences {}"),
    "dtype": (("mlx", "cuda"), "TYPE,...", f"of {', '.join(DTYPES)} (default: float16)"),
    "backend": (("mlx",), "NAME,...", "with mlx: auto, ops, metal (default: auto)"),
    "kv_bits": (("mlx",), "N,...", "with mlx: each method over caches quantised in so many bits besides"),
    "steps": (("mlx",), "N,...", "with mlx: queries per call (default: 2048,all)"),
    "threads": (("onnx",), "N,...", "with onnx (default: 1,2)"),
    "densities": (("cuda",), "SHARE,...", f"with cuda: share of the blocks (default: {DENSITIES})"),
    "budget_s": (("cuda",), "N", "with cuda: seconds; turns are saved first (default: 280)"),
}
STAGE_ONLY = {"steps": "prompt", "densities": "prompt", "kv_bits": "step"}


@dataclass(frozen=True)
class Defaults:
    """What an engine measures if it is not told."""

    lengths: str
    shapes: str
    repeat: int
    batches: str = "1"
    budget: float = math.inf  # seconds


DEFAULTS = {  # a method with defaults of its own stands in place of the stage
    ("mlx", "step"): Defaults("1k,2k,4k,8k,16k,32k,64k,128k", "32x8x128,32x32x128,9x3x64", 15),
    ("mlx", "prompt"): Defaults("4k,8k", "9x3x64,32x8x128", 3),
    ("onnx", "step"): Defaults("4k,16k,64k,128k", "32x8x128", 15),
    ("onnx", "saap"): Defaults("8k,16k,32k", "32x8x128", 15),
    ("onnx", "prompt"): Defaults("8k", "32x8x128,9x3x64", 15),
    ("cuda", "step"): Defaults("4k,8k,16k,32k,64k,128k,256k,512k", "32x8x128,32x32x128", 9, "1,8,64", 280),
    ("cuda", "saap"): Defaults("64k,128k,171k,256k,512k", "32x8x128", 9, budget=280),
    ("cuda", "prompt"): Defaults("8k,16k,32k,64k,128k,256k", "32x8x128", 5, budget=280),
}


@naming_missing()
def main(argv: Sequence[str], engine: str | None = None, program: str = "mlx-sparse bench") -> int:
    """Run a benchmark; return the exit code: 1 if a result was wrong.

    Args:
        engine: the only one, whose command this is.
    """
    parser = _parser(engine, program)
    args = parser.parse_args(argv)
    args.command = shlex.join([*program.split(), *argv])
    formats.check_options(args)
    if args.stage == "generate":
        code: int = importlib.import_module(GENERATE).run(args)
        return code
    request, budget = read(args)
    plan: Plan = importlib.import_module(ENGINES[args.engine]).plan(request)
    facts = {"command": args.command, "date": date.today().isoformat(), "machine": plan.machine}
    printer = formats.Printer(args, facts)
    return 0 if run(plan, printer, budget) else 1


def program(engine: str, name: str) -> int:
    """The command of one engine, as a program of its own: mistakes get one line."""
    try:
        return main(sys.argv[1:], engine, name)
    except SparseAttentionError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(engine: str | None, program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Time sparse attention against dense attention, in turns in one run, after checking that every "
        "result is right. Rows appear as they are measured, on standard error and with -o jsonl on standard output.",
    )
    stages = parser.add_subparsers(dest="stage", metavar="WHAT", required=True)
    step = stages.add_parser("step", help="one token in one layer", description=_what("a decode step of one layer"))
    prompt = stages.add_parser(
        "prompt", help="a prompt in one layer", description=_what("the attention of a prompt in one layer")
    )
    for stage, into in (("step", step), ("prompt", prompt)):
        _add_options(into, stage, [engine] if engine else list(ENGINES))
    if not engine:
        importlib.import_module(GENERATE).add_arguments(
            stages.add_parser("generate", help="tokens per second of mlx_lm.generate, or of an exported model")
        )
    return parser


def _what(done: str) -> str:
    return f"Time {done} by each method, by every dense attention there is and by a plain read of keys and values."


def _add_options(parser: argparse.ArgumentParser, stage: str, engines: Sequence[str]) -> None:
    def default(name: str) -> str:
        texts = {engine: getattr(DEFAULTS[engine, stage], name) for engine in engines}
        if len(texts) == 1 or len(set(texts.values())) == 1:
            return f"(default: {next(iter(texts.values()))})"
        return f"(default: {'; '.join(f'{engine} {text}' for engine, text in texts.items())})"

    if len(engines) > 1:
        parser.add_argument("--engine", choices=engines, default="mlx", help="what computes (default: mlx)")
    else:
        parser.set_defaults(engine=engines[0])
    _, example, method = STAGES[stage]
    parser.add_argument(
        "--attn", metavar="METHOD,...", default=method, help=f"methods of {example} (default: {method})"
    )
    parser.add_argument("--lengths", metavar="S,...", help=f"numbers of keys {default('lengths')}")
    parser.add_argument("--shapes", metavar="QxKxD,...", help=f"query heads x KV heads x head dim {default('shapes')}")
    parser.add_argument("--repeat", metavar="N", type=int, help=f"turns that count {default('repeat')}")
    for name, (owners, typed, said) in ONLY.items():
        if set(owners) & set(engines) and STAGE_ONLY.get(name, stage) == stage:
            option, kind = f"--{name.replace('_', '-')}", float if name == "budget_s" else str
            parser.add_argument(
                option, metavar=typed, type=kind, help=said.format(default(name)) if "{}" in said else said
            )
    formats.add_options(parser)


def read(args: argparse.Namespace) -> tuple[Request, float]:
    """What the options say, and the seconds that it may take.

    Raises:
        ConfigError: one of them is wrong, or the engine does not have it.
    """
    for name, (engines, *_) in ONLY.items():
        if getattr(args, name, None) is not None and args.engine not in engines:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: expected none with --engine {args.engine}, got {getattr(args, name)}.")
    methods = [_method(text, args.stage) for text in split_methods(args.attn)]
    default = DEFAULTS.get((args.engine, methods[0].name), DEFAULTS[args.engine, args.stage])

    def given(name: str, otherwise: str) -> list[str]:
        text: str | None = getattr(args, name, None)
        return (otherwise if text is None else text).split(",")

    if not set(dtypes := given("dtype", "float16")) <= set(DTYPES):
        raise ConfigError(f"--dtype: expected some of {', '.join(DTYPES)}, got {args.dtype!r}.")
    budget = getattr(args, "budget_s", None)
    if budget is not None and not budget > 0:
        raise ConfigError(f"--budget-s: expected seconds, got {budget:g}.")
    request = Request(
        engine=args.engine,
        stage=args.stage,
        attn=args.attn,
        methods=methods,
        lengths=[read_length(text) for text in given("lengths", default.lengths)],
        shapes=[Shape(*read_shape(text)) for text in given("shapes", default.shapes)],
        batches=[_number("--batches", text) for text in given("batches", default.batches)],
        dtypes=dtypes,
        repeat=check_int("--repeat", default.repeat if args.repeat is None else args.repeat, 1),
        backends=given("backend", "auto"),
        threads=[_number("--threads", text) for text in given("threads", "1,2")],
        steps=[None if text == "all" else read_length(text, "--steps") for text in given("steps", "2048,all")],
        kv_bits=[_number("--kv-bits", text) for text in given("kv_bits", "") if text],
        densities=[_share(text, given("densities", DENSITIES)) for text in given("densities", DENSITIES)],
    )
    return request, default.budget if budget is None else budget


def _method(text: str, stage: str) -> Method:
    wanted, example, _ = STAGES[stage]
    configs = parse(text)
    if len(configs) != 1 or configs[0].name == "dense" or configs[0].stage != wanted:
        raise ConfigError(f"--attn: expected methods of {example}, got {text}.")
    return configs[0]


def _number(option: str, text: str) -> int:
    return check_int(option, int(text) if text.isdecimal() else text, 1)


def _share(text: str, all_: Sequence[str]) -> float:
    try:
        return check_share("--densities", float(text))
    except ValueError:
        raise ConfigError(f"--densities: expected shares such as {DENSITIES}, got {','.join(all_)!r}.") from None
