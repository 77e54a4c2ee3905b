"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from mlx_sparse.checks import (
    BackendUnavailable,
    ConfigError,
    SparseAttentionError,
    check_choice,
    check_int,
    check_rank,
    check_share,
    read_length,
    read_shape,
)
from mlx_sparse.files import replace_file

from ..availability import unavailable

LENGTHS = "4k,8k,16k,32k,64k,128k,256k,512k"
SHAPES = "32x8x128,32x32x128"
PROMPTS, PROMPT_SHAPES, DENSITIES = "8k,16k,32k,64k,128k,256k", "32x8x128", "0.05,0.1,0.2,0.5"
DTYPES = ("float16", "bfloat16")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit code: 1 if a result was wrong or nothing could be measured.

    Raises:
        SparseAttentionError: an argument is wrong, or Triton's kernels cannot run here.
    """
    args = _parser().parse_args(argv)
    cases_of = _checked(args)
    if args.model:
        print(_model(args.prefill))
        return 0
    if reason := unavailable():
        raise BackendUnavailable(f"--cuda: expected an NVIDIA GPU with torch and triton, got none ({reason}).")
    measure = _prompts if args.prefill else _steps
    command = shlex.join(["mlx-sparse", "bench", "--cuda", *argv])
    with _lines(args.output) as emit:
        emit({"kind": "command", "command": command, "date": date.today().isoformat()})
        right, text = measure(args, cases_of(), emit)
        emit({"kind": "end", "right": right})
    print(text)
    if args.output:
        page = f"    {command}\n\n{text}\n"
        replace_file(args.output.with_suffix(".md"), lambda new: new.write_text(page, encoding="utf-8"))
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


def _prompts(args: argparse.Namespace, cases: list[Any], emit: Callable[[Any], None]) -> tuple[bool, str]:
    """Likewise prompts."""
    from . import prefill_report
    from .prefill import run

    machine, rows = run(cases, [float(text) for text in args.densities.split(",")], args.budget_s, emit)
    for bar in prefill_report.bars(rows):
        emit({"kind": "bar"} | bar.as_dict())
    right = not any(row.failed for row in rows) and any(row.times for row in rows)
    return right, prefill_report.text(machine, rows)


def _model(prefill: bool) -> str:
    try:
        from . import model, prefill_report
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"--model: expected {error.name} to be installed, got none. Run: pip install 'mlx-sparse-attention[cuda]'"
        ) from None
    return prefill_report.model() if prefill else model.table()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sparse bench --cuda",
        description="Time one decode step of SparQ, or a prompt with SampleAttention, on an NVIDIA GPU against torch's "
        "attention and our own dense kernel in turns in one run, after checking that every result is right.",
    )
    parser.add_argument("--prefill", action="store_true", help="time prompts, not decode steps")
    parser.add_argument(
        "--lengths", metavar="S,...", help=f"numbers of keys (default: {LENGTHS}; of prompts: {PROMPTS})"
    )
    parser.add_argument(
        "--densities", metavar="SHARE,...", default=DENSITIES, help=f"of prompts' blocks (default: {DENSITIES})"
    )
    parser.add_argument("--batches", metavar="B,...", default="1,8,64", help="sequences (default: 1,8,64)")
    parser.add_argument(
        "--shapes",
        metavar="QxKxD,...",
        help=f"query heads x KV heads x head dim (default: {SHAPES}; of prompts: {PROMPT_SHAPES})",
    )
    parser.add_argument("--dtype", metavar="TYPE", default="float16", help=f"{' or '.join(DTYPES)} (default: float16)")
    parser.add_argument("--rank", metavar="R", type=int, default=32, help="of SparQ, beside 1/8 (default: 32)")
    parser.add_argument("--top-k", metavar="K", type=int, default=128, help="likewise (default: 128)")
    parser.add_argument(
        "--budget-s", metavar="N", type=float, default=280, help="seconds, of which first repetitions are saved (280)"
    )
    parser.add_argument("--model", action="store_true", help="instead, print what bytes allow: no measurement")
    parser.add_argument("-o", "--output", metavar="FILE.jsonl", type=Path, help="also write FILE.jsonl and FILE.md")
    return parser


def _checked(args: argparse.Namespace) -> Callable[[], list[Any]]:
    """Check the arguments; return what makes the cases of them, which takes torch."""
    default = (PROMPTS, PROMPT_SHAPES) if args.prefill else (LENGTHS, SHAPES)
    lengths = [read_length(text) for text in (args.lengths or default[0]).split(",")]
    shapes = [read_shape(text) for text in (args.shapes or default[1]).split(",")]
    batches = [check_int("--batches", int(text) if text.isdecimal() else text, 1) for text in args.batches.split(",")]
    check_choice("--dtype", args.dtype, DTYPES)
    check_int("--top-k", args.top_k, 1)
    if args.prefill:
        _check_densities(args.densities)
    else:
        _check_steps(args, lengths, shapes)
    if not args.budget_s > 0:
        raise ConfigError(f"--budget-s: expected seconds, got {args.budget_s:g}.")
    if args.output and (args.output.suffix != ".jsonl" or not args.output.parent.is_dir()):
        raise ConfigError(f"-o: expected FILE.jsonl in a folder that exists, got {args.output}.")

    def cases() -> list[Any]:
        from . import prefill
        from .cases import Setting, plan

        if args.prefill:
            return list(prefill.plan(lengths, shapes, args.dtype))
        return list(plan(lengths, batches, shapes, args.dtype, Setting(args.rank, args.top_k)))

    return cases


def _check_steps(args: argparse.Namespace, lengths: list[int], shapes: list[tuple[int, int, int]]) -> None:
    for _, _, D in shapes:
        check_rank(args.rank, D)
    for S in lengths:
        if args.top_k >= S:
            raise ConfigError(f"--lengths: expected more than the {args.top_k} keys that SparQ attends to, got {S}.")


def _check_densities(text: str) -> None:
    for share in text.split(","):
        try:
            check_share("--densities", float(share))
        except ValueError:
            raise ConfigError(f"--densities: expected shares such as {DENSITIES}, got {text!r}.") from None


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives what writes a line of JSON; the file gets its name when all are written, and is FILE.part until then."""
    if path is None:
        yield lambda _: None
        return
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as stream:

        def emit(row: dict[str, Any]) -> None:
            stream.write(json.dumps(row) + "\n")
            stream.flush()

        yield emit
    part.replace(path)


def program() -> int:
    """``python -m mlx_sparse.cuda_ref.bench``."""
    try:
        return main(sys.argv[1:])
    except SparseAttentionError as error:
        print(f"mlx-sparse bench --cuda: error: {error}", file=sys.stderr)
        return 2
