"""Implement the command `mlx-sparse`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from . import __version__
from ._boot import VARIABLE
from .checks import ConfigError, Parser, SparseAttentionError
from .extras import naming_missing
from .files import cache_directory
from .tools.assets import openblas

# Commands of mlx-lm that take --attn, which are also subcommands of `mlx-sparse`.
HOSTED = ("generate", "chat", "server", "benchmark", "cache_prompt", "evaluate")

# Subcommands that parse their own arguments, with the module of their main() and their help.
OWN_PARSERS = {
    "try": (
        "tools.try_model",
        "compare dense and sparse decoding of your model on your text (run this first)",
    ),
    "advise": ("tools.advise", "decide whether sparse attention pays for your model and is safe on your text"),
    "calibrate": ("tools.measure", "measure the context length at which a method is faster on this machine"),
    "eval": ("tools.evaluate.run", "measure the quality of methods on your model and your text"),
    "tune": ("tools.tune", "find settings of the prefill methods for a model, and write a file for --attn-config"),
    "train-saap": ("tools.train.run", "train SAAP for a model on text, and write an artefact for --attn"),
    "bench": ("tools.bench.command", "time decode steps, prefill and generation, on MLX, ONNX Runtime or CUDA"),
    "export-onnx": ("onnx_export.exporter.command", "export a model as an ONNX file; also the command export-onnx"),
    "run-onnx": ("onnx_export.runtime.run", "generate text on ONNX Runtime with a file from export-onnx"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlx-sparse` with the arguments ``argv`` (default: ``sys.argv[1:]``) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    try:
        return _dispatch(parser, arguments)
    except SparseAttentionError as error:
        print(f"mlx-sparse: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe; discard the remaining output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


@naming_missing()
def _dispatch(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    if arguments[0] in HOSTED:
        return _hosted(arguments[0], arguments[1:])
    variable = os.environ.pop(VARIABLE, "").strip()  # these commands enable and disable models themselves
    if arguments[0] in OWN_PARSERS:
        return _own(OWN_PARSERS[arguments[0]][0], arguments[1:])
    args = parser.parse_args(arguments)
    return _matrix(args) if args.command == "matrix" else _doctor(args, variable)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse",
        description="Sparse attention for long-context models on MLX.",
        epilog="Examples:\n  mlx-sparse try MODEL --text notes.txt\n"
        "  mlx-sparse generate --model MODEL --prompt - --attn sparq < question.txt\n"
        "  mlx_lm.generate --model MODEL --prompt - --attn sparq:rank=16 < question.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, about) in OWN_PARSERS.items():
        commands.add_parser(name, help=about)
    for name in HOSTED:
        commands.add_parser(name, help=f"mlx_lm.{name} with --attn, without the start-up hook")
    matrix = commands.add_parser("matrix", help="print the table of methods and backends")
    matrix.add_argument("--json", action="store_true", help="print JSON")
    doctor = commands.add_parser(
        "doctor", help="print the installed packages, the backends that can run here, and why other backends cannot"
    )
    doctor.add_model("also print what --attn would do with a model, without running it")
    doctor.add_argument(
        "--attn",
        metavar="METHOD",
        help="with --model: methods to check (default: MLX_SPARSE_ATTN, or gather+sparq)",
    )
    doctor.add_argument("--attn-backend", metavar="NAME", help="with --model: ops, metal or auto (default: auto)")
    openblas.add_option(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _own(module: str, arguments: list[str]) -> int:
    """Run a subcommand of `OWN_PARSERS` and return its exit code. An `OSError` becomes a one-line `ConfigError`."""
    try:
        code: int = importlib.import_module(f"mlx_sparse.{module}").main(arguments)
    except BrokenPipeError:
        raise
    except OSError as error:  # for example a folder without write permission, or a full disk
        raise ConfigError(
            f"{error.filename or 'output'}: expected to read or write it, got: {error.strerror or error}."
        ) from None
    return code


def _hosted(name: str, arguments: list[str]) -> int:
    """Run a command of mlx-lm with the options that this package adds, such as --attn."""
    from .lm.command import run

    module = importlib.import_module(f"mlx_lm.{name}")
    # The start-up hook may have wrapped main() already.
    original = getattr(module.main, "__wrapped__", module.main)
    sys.argv = [f"mlx-sparse {name}", *arguments]
    run(original, sys.argv[0])
    return 0


def _matrix(args: argparse.Namespace) -> int:
    from .tools import matrix

    print(json.dumps(matrix.rows(), indent=2) if args.json else matrix.text())
    return 0


def _doctor(args: argparse.Namespace, variable: str) -> int:
    from .tools import doctor

    if args.model is None and (args.attn or args.attn_backend):
        raise ConfigError("--attn: expected the option --model too, got none. Name the model.")
    if args.fast_blas:
        openblas.fetch_libraries(cache_directory())
    attn = args.attn or variable or doctor.ATTN
    findings = doctor.examine(args.model, attn, args.attn_backend or "auto", variable=variable)
    print(json.dumps(findings, indent=2) if args.json else doctor.text(findings))
    return 1 if findings["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
