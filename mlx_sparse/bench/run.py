"""``mlx-sparse bench``: time of decode steps and prompts, kernels' traffic, the roofline model; ONNX and CUDA."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from .. import forms
from ..checks import ConfigError, Parser, check_int, check_local_window, check_rank, read_length, read_shape
from ..config import SAAP, Sample, SparQ, parse, split_methods
from ..forms import Result
from ..machine import machine

DTYPES = ("float16", "bfloat16", "float32")
LENGTHS, SHAPES = "1k,2k,4k,8k,16k,32k,64k,128k", "32x8x128,32x32x128,9x3x64"
PROMPTS, PROMPT_SHAPES, STEPS = "4k,8k", "9x3x64,32x8x128", "2048,all"
REPEAT, PROMPT_REPEAT = 15, 3
ONNX = "mlx_sparse.onnx_export.bench.run"  # a name: mlx_sparse runs without onnx
ONNX_PREFILL = "mlx_sparse.onnx_export.bench.prefill"
ONNX_SAAP, ONNX_SAAP_LENGTHS = "mlx_sparse.onnx_export.bench.saap", "8k,16k,32k"
ONNX_PROMPT, ONNX_PROMPT_SHAPES = "8k", "32x8x128,9x3x64"
ONNX_LENGTHS, ONNX_SHAPE = "4k,16k,64k,128k", "32x8x128"
# What has arguments of its own. --cuda runs without mlx.
APART = {"--cuda": "mlx_sparse.cuda_ref.bench.command", "--generate": "mlx_sparse.bench.generate"}


def main(argv: Sequence[str]) -> int:
    """Run a benchmark; return the exit code: 1 if a result was wrong."""
    for option, module in APART.items():
        if option in argv:
            code: int = importlib.import_module(module).main([argument for argument in argv if argument != option])
            return code
    args = _parser().parse_args(argv)
    forms.check_options(args)
    if args.plot:
        _check_plot(args)
    where = machine()  # now: it takes MLX, which what --onnx times does not
    result = _chosen(args)(args)
    facts = {"command": shlex.join(["mlx-sparse", "bench", *argv]), "date": date.today().isoformat()}
    forms.put(args, {**facts, "machine": where}, result)
    if args.plot:
        _plot(result, args.plot)
    return 0 if result.right else 1


def _chosen(args: argparse.Namespace) -> Callable[[argparse.Namespace], Result]:
    return _traffic if args.traffic else _roofline if args.roofline else _onnx if args.onnx else _time


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse bench",
        allow_abbrev=False,  # those of APART are looked for before the arguments are read
        description="Time decode steps or prompts of one layer by each method, the fastest dense attention and a plain "
        "read of keys and values in turns in one run, after checking that every result is right.",
    )
    parser.add_argument(
        "--attn",
        metavar="METHOD,...",
        default="sparq",
        help="such as sparq:rank=16,streaming,saap for decode steps, sample,minference for prompts (default: sparq)",
    )
    parser.add_argument(
        "--lengths",
        metavar="S,...",
        help=f"numbers of keys (default: {LENGTHS}; of prompts {PROMPTS}; with --onnx {ONNX_LENGTHS})",
    )
    parser.add_argument("--batches", metavar="B,...", help="sequences (default: 1)")
    parser.add_argument(
        "--shapes",
        metavar="QxKxD,...",
        help=f"query heads x KV heads x head dim (default: {SHAPES}; of prompts {PROMPT_SHAPES}; with --onnx one, "
        f"{ONNX_SHAPE})",
    )
    parser.add_argument("--dtype", metavar="TYPE,...", default="float16", help=", ".join(DTYPES))
    parser.add_argument("--backend", metavar="NAME,...", default="auto", help="auto, ops, metal (default: auto)")
    parser.add_argument(
        "--repeat", metavar="N", type=int, help=f"turns after a warm-up (default: {REPEAT}; of prompts {PROMPT_REPEAT})"
    )
    parser.add_argument(
        "--steps", metavar="N,...", default=STEPS, help=f"of prompts: queries per call (default: {STEPS})"
    )
    parser.add_argument("--threads", metavar="N,...", default="1,2", help="with --onnx (default: 1,2)")
    forms.add_options(parser)
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="also draw speed against length")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--traffic",
        action="store_true",
        help="instead, count the bytes that the Metal kernels of sparq, saap or sample and MLX's own move, in the "
        "harness of tests/msl (in a source checkout)",
    )
    other.add_argument(
        "--roofline",
        action="store_true",
        help="instead, model the time of sparq, saap or sample on Apple's chips: no measurement",
    )
    other.add_argument(
        "--onnx",
        action="store_true",
        help="instead, time the ONNX operators of sparq, saap or sample on onnxruntime against others on the CPU, and "
        "hold them to the bars of docs/results/onnx.md",
    )
    other.add_argument(
        "--cuda",
        action="store_true",
        help="instead, time the Triton kernels on an NVIDIA GPU against torch's attention, and hold them to the bars "
        "of docs/results/triton.md; --cuda --help shows its options",
    )
    other.add_argument(
        "--generate",
        action="store_true",
        help="instead, time mlx_lm.generate itself, densely and with each method; with --onnx an exported model; "
        "--generate --help shows its options",
    )
    return parser


def _time(args: argparse.Namespace) -> Result:
    from . import times
    from .dense import Shape

    methods = [times.read_method(text) for text in split_methods(args.attn)]
    batches = [_number("--batches", text) for text in (args.batches or "1").split(",")]
    dtypes, backends = _dtypes(args.dtype), args.backend.split(",")
    steps = [None if text == "all" else read_length(text, "--steps") for text in args.steps.split(",")]
    found = []
    for stage, lengths, shapes, repeat in (
        ("decode", LENGTHS, SHAPES, REPEAT),
        ("prefill", PROMPTS, PROMPT_SHAPES, PROMPT_REPEAT),
    ):
        if chosen := [config for config in methods if config.stage == stage]:
            sizes = times.Sizes(
                dtypes,
                [Shape(*read_shape(text)) for text in (args.shapes or shapes).split(",")],
                batches,
                [read_length(text) for text in (args.lengths or lengths).split(",")],
            )
            turns = check_int("repeat", repeat if args.repeat is None else args.repeat, 1)
            if stage == "decode":
                found.append(times.decode_steps(chosen, backends, sizes, turns))
            else:
                found.append(times.prompts(chosen, backends, sizes, steps, turns))
    where = machine()
    head = f"MLX {where['mlx']}, {where['chip']}, {where['device']}"
    text = "\n\n".join([head, *(part.text for part in found)])
    return Result([row for part in found for row in part.rows], text, all(part.right for part in found))


def _traffic(args: argparse.Namespace) -> Result:
    from . import prefill_traffic, saap_traffic, traffic

    if saap := _saap(args.attn):
        steps = saap_traffic.measure(saap)
        return Result([step.as_dict() for step in steps], saap_traffic.text(steps, saap))
    if _sample(args.attn):
        rows = prefill_traffic.measure()
        return Result([row.as_dict() for row in rows], prefill_traffic.text(rows))
    _sparq(args.attn)
    tables = traffic.measure()
    return Result([row for table in tables for row in table.as_dicts()], traffic.text(tables))


def _roofline(args: argparse.Namespace) -> Result:
    from . import prefill_roofline, roofline, saap_roofline

    if saap := _saap(args.attn):
        rows = saap_roofline.rows(saap)
        return Result(rows, saap_roofline.text(rows, saap))
    if sample := _sample(args.attn):
        rows = prefill_roofline.rows(sample)
        return Result(rows, prefill_roofline.text(rows, sample))
    config = _sparq(args.attn)
    check_rank(config.rank, min(shape.D for shape in roofline.SHAPES))
    rows = roofline.rows(config)
    return Result(rows, roofline.text(rows, config))


def _onnx(args: argparse.Namespace) -> Result:
    if args.batches:
        raise ConfigError(f"--batches: expected none with --onnx, whose steps are of one sequence, got {args.batches}.")
    repeat = check_int("repeat", REPEAT if args.repeat is None else args.repeat, 2)
    threads = [_number("--threads", number) for number in args.threads.split(",")]
    if sample := _sample(args.attn):
        if sample != Sample(block_size=sample.block_size, chunks=sample.chunks):
            raise ConfigError(f"--attn: expected block_size and chunks alone with --onnx, got {args.attn}.")
        lengths = [read_length(length) for length in (args.lengths or ONNX_PROMPT).split(",")]
        shapes = [read_shape(shape) for shape in (args.shapes or ONNX_PROMPT_SHAPES).split(",")]
        return Result(*importlib.import_module(ONNX_PREFILL).run(lengths, threads, shapes, sample, repeat))
    if saap := _saap(args.attn):
        if saap != SAAP(probes=saap.probes, sink_tokens=saap.sink_tokens, recent_tokens=saap.recent_tokens):
            raise ConfigError(
                f"--attn: expected probes, sink_tokens and recent_tokens alone with --onnx, got {args.attn}."
            )
        lengths = [read_length(length) for length in (args.lengths or ONNX_SAAP_LENGTHS).split(",")]
        shape = read_shape(args.shapes or ONNX_SHAPE)
        return Result(*importlib.import_module(ONNX_SAAP).run(lengths, threads, shape, saap, repeat))
    config = _sparq(args.attn)
    if config != SparQ(config.rank, config.top_k, config.local_window):
        raise ConfigError(f"--attn: expected rank, top_k and local_window alone with --onnx, got {args.attn}.")
    rows, text, right = importlib.import_module(ONNX).run(
        [read_length(length) for length in (args.lengths or ONNX_LENGTHS).split(",")],
        threads,
        read_shape(args.shapes or ONNX_SHAPE),
        rank=config.rank,
        top_k=config.top_k,
        window=check_local_window(config.local_window, config.top_k),
        repeat=repeat,
    )
    return Result(rows, text, right)


def _sample(text: str) -> Sample | None:
    """SampleAttention, if that is what is asked for."""
    (config, *others) = parse(text)
    return config if isinstance(config, Sample) and not others else None


def _saap(text: str) -> SAAP | None:
    """SAAP, likewise."""
    (config, *others) = parse(text)
    return config if isinstance(config, SAAP) and not others else None


def _sparq(text: str) -> SparQ:
    configs = parse(text)
    if len(configs) != 1 or not isinstance(configs[0], SparQ):
        raise ConfigError(f"--attn: expected sparq, saap or sample with or without parameters, got {text}.")
    return configs[0]


def _dtypes(text: str) -> list[str]:
    dtypes = text.split(",")
    if not set(dtypes) <= set(DTYPES):
        raise ConfigError(f"--dtype: expected some of {', '.join(DTYPES)}, got {text!r}.")
    return dtypes


def _number(option: str, text: str) -> int:
    return check_int(option, int(text) if text.isdecimal() else text, 1)


def _check_plot(args: argparse.Namespace) -> None:
    """Refuse before anything is timed what could not be drawn."""
    if args.traffic or args.roofline or args.onnx:
        raise ConfigError("--plot: expected times of decode steps or prompts to draw, got another option.")
    if args.plot.suffix != ".svg":
        raise ConfigError(f"--plot: expected a name that ends in .svg, got {args.plot}.")
    forms.check_folder("--plot", args.plot)
    from ..evaluate import report

    report.check()


def _plot(result: Result, path: Path) -> None:
    from ..evaluate import report

    figure = report.draw_speed(result.rows)
    if figure is None:
        print("mlx-sparse bench: --plot: nothing to draw: no row has times.", file=sys.stderr)
    else:
        report.save(figure, path)
