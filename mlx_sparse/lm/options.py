"""Add the sparse attention options to the commands of mlx-lm and mlx-vlm, and print one-line errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..checks import shortened
from ..core.base import Dense, Method
from ..methods import parse, read_toml

REPORTS = ("text", "full", "recall", "json", "json+recall", "off")

OURS = ("argument --attn", "argument --lossless")  # start of argparse's messages about them


class _Once(argparse.Action):
    """Argparse action that stores the value of an option, and fails if the option is given twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            fail(parser, f"{option_string}: expected this option once, got it twice. Join methods with '+'.")
        setattr(namespace, self.dest, values)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sparse attention options to the parser of a command. Errors in them are one line, without the usage."""
    original = parser.error

    def error(message: str) -> NoReturn:
        if message.startswith(OURS):
            fail(parser, f"{message.removeprefix('argument ')}.")
        original(message)

    parser.error = error  # type: ignore[method-assign]
    group = parser.add_argument_group(
        "sparse attention",
        "Use sparse attention for prefill, for decoding, or for both (mlx-sparse-attention). Attention is dense in a "
        "stage without a method.",
    )
    group.add_argument(
        "--attn",
        action=_Once,
        metavar="METHOD[:KEY=VALUE,...][+METHOD...]",
        help="Methods with parameters, for example 'gather' for prefill, 'sparq:rank=16,top_k=256' for decoding, or "
        "'gather+sparq' for both. 'mlx-sparse matrix' lists all methods (default: dense attention).",
    )
    group.add_argument(
        "--attn-config",
        action=_Once,
        metavar="FILE.toml",
        help="TOML file with one table of parameters per method. Parameters in --attn take precedence.",
    )
    group.add_argument(
        "--attn-backend",
        default="auto",
        metavar="NAME",
        help="Backend: 'metal' (kernels for Apple GPUs), 'cpu' (native kernels for CPUs), 'ops' (MLX array "
        "operations), or 'auto', which selects metal or cpu if it is available (default: auto).",
    )
    group.add_argument(
        "--lossless",
        nargs="?",
        const=0,
        type=int,
        metavar="N",
        help="Generate the same tokens as dense attention: the method drafts N tokens (1 to 7), and one dense call "
        "checks them. Without N, the number of drafts with the most tokens per second is measured; it is 0 if dense "
        "steps are faster.",
    )
    group.add_argument(
        "--no-calibrate",
        action="store_true",
        help="Do not measure the context length at which sparse attention becomes faster. Use earlier measurements on "
        "this machine, or else a documented model. By default, each model shape is measured once, at the first long "
        "context, in at most 10 seconds.",
    )
    group.add_argument(
        "--attn-report",
        choices=REPORTS,
        metavar="FORMAT",
        default="text",
        help="Format of the report on standard error at the end: time to the first token, sparse calls, bytes saved, "
        "and dense calls with reasons, in at most eight lines ('text', the default); everything ('full'); JSON "
        "('json'); nothing ('off'). "
        "With a prefill method, 'recall' and 'json+recall' also measure the attention recall of prefill, which takes "
        "an additional dense pass over the keys.",
    )


def requested(args: argparse.Namespace) -> tuple[tuple[Method, ...], bool]:
    """Return the methods that the options select, and True if the command may measure crossover lengths."""
    base: dict[str, Method] = {}
    calibrates = not args.no_calibrate
    if args.attn_config is not None:
        base, may_calibrate = read_toml(args.attn_config)
        calibrates = calibrates and may_calibrate
    return parse(args.attn, base) if args.attn is not None else tuple(base.values()) or (Dense(),), calibrates


def fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Print a one-line error instead of argparse's usage text, and end the program with exit code 2."""
    end(parser.prog, message)


def end(program: str, message: str) -> NoReturn:
    """Print a one-line error and end the program with exit code 2."""
    print_error(program, message)
    raise SystemExit(2)


def print_error(program: str, message: str) -> None:
    """Print a one-line error to standard error."""
    print_line(f"{program}: error: {shortened(message)}")


def print_line(text: str) -> None:
    """Print ``text`` to standard error. If this fails, for example on a full disk, print nothing from then on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - Python writes the buffered text again when it ends
