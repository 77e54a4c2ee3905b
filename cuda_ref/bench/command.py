"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

from mlx_sparse import forms
from mlx_sparse.checks import (
    BackendUnavailable,
    ConfigError,
    Parser,
    SparseAttentionError,
    check_choice,
    check_int,
    check_rank,
    check_share,
    read_length,
    read_shape,
)
from mlx_sparse.extras import naming_missing
from mlx_sparse.forms import Result

from ..availability import unavailable

# Lengths, shapes and batches of steps of SparQ, of steps of SAAP, and of prompts.
STEPS = ("4k,8k,16k,32k,64k,128k,256k,512k", "32x8x128,32x32x128", "1,8,64")
SAAP = ("64k,128k,171k,256k,512k", "32x8x128", "1")
PROMPTS = ("8k,16k,32k,64k,128k,256k", "32x8x128", "1")
SAAP_LEAST = 4096  # keys
DENSITIES = "0.05,0.1,0.2,0.5"
DTYPES = ("float16", "bfloat16")


@naming_missing()
def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit code: 1 if a result was wrong or nothing could be measured.

    Raises:
        SparseAttentionError: an argument is wrong, or Triton's kernels cannot run here.
    """
    args = _parser().parse_args(argv)
    cases_of = _checked(args)
    if args.model:
        print(_model(args))
        return 0
    if reason := unavailable():
        raise BackendUnavailable(f"--cuda: expected an NVIDIA GPU with torch and triton, got none ({reason}).")
    measure = _prompts if args.prefill else _saap if args.saap else _steps
    facts = {"command": shlex.join(["mlx-sparse", "bench", "--cuda", *argv]), "date": date.today().isoformat()}
    lines: list[dict[str, Any]] = []

    def emit(line: dict[str, Any]) -> None:
        lines.append(line)
        if args.output == "jsonl":  # at once: whatever ends the run early, these are known
            print(json.dumps(line), flush=True)

    emit({"kind": "command"} | facts)
    right, text = measure(args, cases_of(), emit)
    emit({"kind": "end", "right": right, "text": text})
    if args.output != "jsonl":
        (machine,) = (line for line in lines if line["kind"] == "machine")
        rows = [line for line in lines if line["kind"] not in ("command", "machine", "end")]
        forms.put(args, {**facts, "machine": machine}, Result(rows, text, right))
    elif args.out:
        forms.write(args.out, "\n".join(map(json.dumps, lines)))
    return 0 if right else 1


def _steps(args: argparse.Namespace, cases: list[Any], emit: Callable[[Any], None]) -> tuple[bool, str]:
    """Measure decode steps: whether all was right, and the report."""
    from . import report
    from .run import run

    found = run(cases, args.budget_s, emit)
    for bar in report.bars(found):
        emit({"kind": "bar"} | bar.as_dict())
    for crossover in report.crossovers(found):
        emit(crossover)
    return found.right, report.text(found)


def _saap(args: argparse.Namespace, cases: list[Any], emit: Callable[[Any], None]) -> tuple[bool, str]:
    """Likewise steps of SAAP."""
    from . import saap, saap_report
    from .run import run

    found = run(cases, args.budget_s, emit, saap)
    for bar in saap_report.bars(found):
        emit({"kind": "bar"} | bar.as_dict())
    return found.right, saap_report.text(found)


def _prompts(args: argparse.Namespace, cases: list[Any], emit: Callable[[Any], None]) -> tuple[bool, str]:
    """Likewise prompts."""
    from . import prefill_report
    from .prefill import run

    machine, rows = run(cases, [float(text) for text in args.densities.split(",")], args.budget_s, emit)
    for bar in prefill_report.bars(rows):
        emit({"kind": "bar"} | bar.as_dict())
    right = not any(row.failed for row in rows) and any(row.times for row in rows)
    return right, prefill_report.text(machine, rows)


def _model(args: argparse.Namespace) -> str:
    from . import model, prefill_report, saap_report

    return prefill_report.model() if args.prefill else saap_report.model() if args.saap else model.table()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse bench --cuda",
        description="Time one decode step of SparQ or of SAAP, or a prompt with SampleAttention, on an NVIDIA GPU "
        "against torch's attention and our own dense kernel in turns in one run, after checking that every result is "
        "right.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prefill", action="store_true", help="time prompts, not decode steps")
    what.add_argument("--saap", action="store_true", help="time decode steps of SAAP, its query network included")
    parser.add_argument(
        "--lengths",
        metavar="S,...",
        help=f"numbers of keys (default: {STEPS[0]}; of SAAP: {SAAP[0]}; of prompts: {PROMPTS[0]})",
    )
    parser.add_argument(
        "--densities", metavar="SHARE,...", default=DENSITIES, help=f"of prompts' blocks (default: {DENSITIES})"
    )
    parser.add_argument("--batches", metavar="B,...", help=f"sequences (default: {STEPS[2]}; of SAAP: {SAAP[2]})")
    parser.add_argument(
        "--shapes",
        metavar="QxKxD,...",
        help=f"query heads x KV heads x head dim (default: {STEPS[1]}; of SAAP and of prompts: {SAAP[1]})",
    )
    parser.add_argument("--dtype", metavar="TYPE", default="float16", help=f"{' or '.join(DTYPES)} (default: float16)")
    parser.add_argument("--rank", metavar="R", type=int, default=32, help="of SparQ, beside 1/8 (default: 32)")
    parser.add_argument("--top-k", metavar="K", type=int, default=128, help="likewise (default: 128)")
    parser.add_argument(
        "--budget-s", metavar="N", type=float, default=280, help="seconds, of which first repetitions are saved (280)"
    )
    parser.add_argument("--model", action="store_true", help="instead, print what bytes allow: no measurement")
    forms.add_options(parser)
    return parser


def _checked(args: argparse.Namespace) -> Callable[[], list[Any]]:
    """Check the arguments; return what makes the cases of them, which takes torch."""
    default = PROMPTS if args.prefill else SAAP if args.saap else STEPS
    lengths = [read_length(text) for text in (args.lengths or default[0]).split(",")]
    shapes = [read_shape(text) for text in (args.shapes or default[1]).split(",")]
    numbers = [int(text) if text.isdecimal() else text for text in (args.batches or default[2]).split(",")]
    batches = [check_int("--batches", number, 1) for number in numbers]
    check_choice("--dtype", args.dtype, DTYPES)
    check_int("--top-k", args.top_k, 1)
    if args.prefill:
        _check_densities(args.densities)
    elif args.saap:
        _check_saap(lengths)
    else:
        _check_steps(args, lengths, shapes)
    if not args.budget_s > 0:
        raise ConfigError(f"--budget-s: expected seconds, got {args.budget_s:g}.")
    forms.check_options(args)

    def cases() -> list[Any]:
        from . import prefill, saap_cases
        from .cases import Setting, plan

        if args.prefill:
            return list(prefill.plan(lengths, shapes, args.dtype))
        if args.saap:
            return list(saap_cases.plan(lengths, batches, shapes, args.dtype))
        return list(plan(lengths, batches, shapes, args.dtype, Setting(args.rank, args.top_k)))

    return cases


def _check_steps(args: argparse.Namespace, lengths: list[int], shapes: list[tuple[int, int, int]]) -> None:
    for _, _, D in shapes:
        check_rank(args.rank, D)
    for S in lengths:
        if args.top_k >= S:
            raise ConfigError(f"--lengths: expected more than the {args.top_k} keys that SparQ attends to, got {S}.")


def _check_saap(lengths: list[int]) -> None:
    for S in lengths:
        if S < SAAP_LEAST:
            raise ConfigError(
                f"--lengths: expected at least {SAAP_LEAST} keys, twice what SAAP always attends, got {S}."
            )


def _check_densities(text: str) -> None:
    for share in text.split(","):
        try:
            check_share("--densities", float(share))
        except ValueError:
            raise ConfigError(f"--densities: expected shares such as {DENSITIES}, got {text!r}.") from None


def program() -> int:
    """``python -m mlx_sparse.cuda_ref.bench``."""
    try:
        return main(sys.argv[1:])
    except SparseAttentionError as error:
        print(f"mlx-sparse bench --cuda: error: {error}", file=sys.stderr)
        return 2
