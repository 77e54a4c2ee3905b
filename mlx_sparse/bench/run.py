"""``mlx-sparse bench``: time of a decode step or a prompt, kernels' traffic, the roofline model; ONNX and CUDA."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from ..checks import ConfigError, check_int, check_local_window, check_rank, check_share, read_length, read_shape
from ..config import SAAP, Sample, SparQ, parse
from ..config.values import read_value
from .output import machine, write

DTYPES = ("float16", "bfloat16", "float32")
LENGTHS = "1k,2k,4k,8k,16k,32k,64k,128k"
SHAPES = "32x8x128,32x32x128,9x3x64"
ONNX = "mlx_sparse.onnx_export.bench.run"  # a name: mlx_sparse runs without onnx
ONNX_PREFILL = "mlx_sparse.onnx_export.bench.prefill"
ONNX_SAAP, ONNX_SAAP_LENGTHS = "mlx_sparse.onnx_export.bench.saap", "8k,16k,32k"
ONNX_PROMPT, ONNX_PROMPT_SHAPES = "8k", "32x8x128,9x3x64"
CUDA = "mlx_sparse.cuda_ref.bench.command"  # likewise without torch
ONNX_LENGTHS = "4k,16k,64k,128k"
ONNX_SHAPE = "32x8x128"
PREFILL_LENGTHS, PREFILL_SHAPES = "4k,8k", "9x3x64,32x8x128"


@dataclass(frozen=True)
class Result:
    """What a benchmark found: rows for programs, text for people, and whether what ran was right."""

    rows: list[dict[str, Any]]
    text: str
    right: bool = True


def main(argv: Sequence[str]) -> int:
    """Run a benchmark; return the exit code."""
    if "--cuda" in argv:  # it has arguments of its own, and runs without mlx
        code: int = importlib.import_module(CUDA).main([argument for argument in argv if argument != "--cuda"])
        return code
    args = _parser().parse_args(argv)
    args.attn = args.attn or ("sample" if args.prefill else "sparq")
    args.repeat = (3 if args.prefill else 15) if args.repeat is None else args.repeat
    _check_output(args.output)
    result = _chosen(args)(args)
    command = shlex.join(["mlx-sparse", "bench", *_without_output(argv)])
    facts = {"command": command, "date": date.today().isoformat(), "machine": machine()}
    document = json.dumps(facts | {"rows": result.rows}, indent=1, default=str)
    print(document if args.json else result.text)
    if args.output:
        write(args.output, document if args.output.suffix == ".json" else f"    {command}\n\n{result.text}")
    return 0 if result.right else 1


def _chosen(args: argparse.Namespace) -> Callable[[argparse.Namespace], Result]:
    if args.traffic:
        return _traffic
    if args.roofline:
        return _roofline
    if args.prefill:
        return _prefill
    return _onnx if args.onnx else _decode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sparse bench",
        allow_abbrev=False,  # --cuda is looked for before the arguments are read
        description="Time one decode step of SparQ or SAAP against MLX's dense attention, interleaved in one run, "
        "after checking that its result is right.",
    )
    parser.add_argument(
        "--attn",
        metavar="METHOD",
        help="such as sparq:rank=16 or saap; sample too with --traffic and --roofline (default: sparq; with --prefill "
        "sample)",
    )
    parser.add_argument(
        "--lengths",
        metavar="S,...",
        help=f"numbers of keys (default: {LENGTHS}; with --onnx {ONNX_LENGTHS}; with --prefill {PREFILL_LENGTHS})",
    )
    parser.add_argument(
        "--shapes",
        metavar="QxKxD,...",
        help=f"query heads x KV heads x head dim (default: {SHAPES}; with --onnx one, {ONNX_SHAPE}; with --prefill "
        f"{PREFILL_SHAPES})",
    )
    parser.add_argument("--dtype", metavar="TYPE,...", default="float16", help=", ".join(DTYPES))
    parser.add_argument("--backend", metavar="NAME", default="auto", help="auto, ops or metal")
    parser.add_argument("--repeat", metavar="N", type=int, help="steps of each kind (default: 15; with --prefill 3)")
    parser.add_argument("--threads", metavar="N,...", default="1,2", help="with --onnx (default: 1,2)")
    parser.add_argument(
        "--steps", metavar="N,...", default="2048,all", help="with --prefill: queries per call (default: 2048,all)"
    )
    parser.add_argument("--alphas", metavar="ALPHA,...", help="with --prefill: both alphas (default: the method's)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--traffic",
        action="store_true",
        help="instead, count the bytes that the Metal kernels and MLX's own move, in the harness of tests/msl "
        "(in a source checkout)",
    )
    other.add_argument(
        "--roofline", action="store_true", help="instead, model the time on Apple's chips: no measurement"
    )
    other.add_argument(
        "--prefill",
        action="store_true",
        help="instead, time the attention of a whole prompt by SampleAttention against MLX's dense attention",
    )
    other.add_argument(
        "--onnx",
        action="store_true",
        help="instead, time a decode step of the ONNX operators on onnxruntime against others on the CPU, and hold it "
        "to the bars of docs/results/onnx.md; with --attn sample attention to a whole prompt, with --attn saap against "
        "dense attention",
    )
    other.add_argument(
        "--cuda",
        action="store_true",
        help="instead, time a decode step of the Triton kernels on an NVIDIA GPU against torch's attention, and hold "
        "it to the bars of docs/results/triton.md; --cuda --help shows its options",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="also write FILE.json or FILE.md")
    return parser


def _decode(args: argparse.Namespace) -> Result:
    from tqdm import tqdm

    from . import decode, saap_decode
    from .dense import Shape

    saap = _saap(args.attn)
    config = saap or _sparq(args.attn)
    check_int("repeat", args.repeat, 2)
    lengths = [read_length(text) for text in (args.lengths or LENGTHS).split(",")]
    shapes = [Shape(*read_shape(text)) for text in (args.shapes or SHAPES).split(",")]
    cases = [(shape, S, dtype) for dtype in _dtypes(args.dtype) for shape in shapes for S in lengths]
    rows: list[Any] = []
    if saap:
        networks = saap_decode.networks(saap)
        for (shape, S, dtype), hidden in tqdm(list(product(cases, networks)), unit="row", disable=None):
            rows.append(saap_decode.measure(shape, S, dtype, saap, hidden, args.backend, args.repeat))
        text = saap_decode.table(rows)
    else:
        sparq = _sparq(args.attn)
        for shape in shapes:
            check_rank(sparq.rank, shape.D)
        for shape, S, dtype in tqdm(cases, unit="row", disable=None):
            rows.append(decode.measure(shape, S, dtype, sparq, args.backend, args.repeat))
        text = decode.table(rows)
    where = machine()
    head = f"MLX {where['mlx']}, {where['chip']}, {where['device']}, {config}, backend {rows[0].backend}"
    wrong = any(row.failed for row in rows)
    return Result([row.as_dict() for row in rows], f"{head}\n\n{text}", right=not wrong)


def _prefill(args: argparse.Namespace) -> Result:
    from tqdm import tqdm

    from .dense import Shape
    from .prefill import Row, measure, table

    config = _sample(args.attn)
    if config is None:
        raise ConfigError(f"--attn: expected sample with or without parameters, got {args.attn}.")
    check_int("repeat", args.repeat, 1)
    lengths = [read_length(text) for text in (args.lengths or PREFILL_LENGTHS).split(",")]
    shapes = [Shape(*read_shape(text)) for text in (args.shapes or PREFILL_SHAPES).split(",")]
    steps = [None if text == "all" else read_length(text, "--steps") for text in args.steps.split(",")]
    configs = [config]
    if args.alphas:
        alphas = [check_share("--alphas", read_value(text)) for text in args.alphas.split(",")]
        configs = [replace(config, alpha_column=alpha, alpha_slash=alpha) for alpha in alphas]
    cases = {
        (dtype, shape, S, min(step or S, S), config): None
        for dtype in _dtypes(args.dtype)
        for shape in shapes
        for S in lengths
        for step in steps
        for config in configs
    }
    rows: list[Row] = []
    for dtype, shape, S, step, config in tqdm(cases, unit="row", disable=None):
        rows.append(measure(shape, S, step, dtype, config, args.backend, args.repeat))
    where = machine()
    head = f"MLX {where['mlx']}, {where['chip']}, {where['device']}, backend {rows[0].backend}"
    wrong = any(row.failed for row in rows)
    return Result([row.as_dict() for row in rows], f"{head}\n\n{table(rows)}", right=not wrong)


def _traffic(args: argparse.Namespace) -> Result:
    from . import prefill_traffic, saap_traffic, traffic

    if saap := _saap(args.attn):
        steps = saap_traffic.measure(saap)
        return Result([step.as_dict() for step in steps], saap_traffic.text(steps, saap))
    if _sample(args.attn):
        rows = prefill_traffic.measure()
        return Result([row.as_dict() for row in rows], prefill_traffic.text(rows))
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
    check_int("repeat", args.repeat, 2)
    threads = [_threads(number) for number in args.threads.split(",")]
    if sample := _sample(args.attn):
        if sample != Sample(block_size=sample.block_size, chunks=sample.chunks):
            raise ConfigError(f"--attn: expected block_size and chunks alone with --onnx, got {args.attn}.")
        lengths = [read_length(length) for length in (args.lengths or ONNX_PROMPT).split(",")]
        shapes = [read_shape(shape) for shape in (args.shapes or ONNX_PROMPT_SHAPES).split(",")]
        return Result(*importlib.import_module(ONNX_PREFILL).run(lengths, threads, shapes, sample, args.repeat))
    if saap := _saap(args.attn):
        if saap != SAAP(probes=saap.probes, sink_tokens=saap.sink_tokens, recent_tokens=saap.recent_tokens):
            raise ConfigError(
                f"--attn: expected probes, sink_tokens and recent_tokens alone with --onnx, got {args.attn}."
            )
        lengths = [read_length(length) for length in (args.lengths or ONNX_SAAP_LENGTHS).split(",")]
        shape = read_shape(args.shapes or ONNX_SHAPE)
        return Result(*importlib.import_module(ONNX_SAAP).run(lengths, threads, shape, saap, args.repeat))
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
        repeat=args.repeat,
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
        raise ConfigError(f"--attn: expected sparq or saap with or without parameters, got {text}.")
    return configs[0]


def _dtypes(text: str) -> list[str]:
    dtypes = text.split(",")
    if not set(dtypes) <= set(DTYPES):
        raise ConfigError(f"--dtype: expected some of {', '.join(DTYPES)}, got {text}.")
    return dtypes


def _threads(text: str) -> int:
    return check_int("--threads", int(text) if text.isdecimal() else text, 1)


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix not in (".json", ".md"):
        raise ConfigError(f"-o: expected a name that ends in .json or .md, got {path}.")
    if not path.parent.is_dir():
        raise ConfigError(f"-o: expected a folder that exists, got {path.parent}.")


def _without_output(argv: Sequence[str]) -> list[str]:
    """The arguments that say what was run, not where its result went."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--output")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(list(argv))[1]
