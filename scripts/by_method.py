"""The command line of scripts that say something of one method: --attn, -o and --out."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from mlx_sparse.checks import ConfigError, SparseAttentionError
from mlx_sparse.methods import Method, parse
from mlx_sparse.tools import formats
from mlx_sparse.tools.environment import versions

Found = tuple[Sequence[Mapping[str, Any]], str]  # rows for programs, Markdown for people
Methods = Mapping[str, Callable[[Any], Found]]


def main(argv: Sequence[str], script: str, about: str, kinds: Mapping[str, Methods]) -> int:
    """Print what the function of the method says; return the exit code.

    Args:
        script: the file that is run; ``about`` is its help.
        kinds: of machines, the first by default, each with its methods.
    """
    name = Path(script).name
    parser = argparse.ArgumentParser(prog=name, description=about)
    if len(kinds) > 1:
        parser.add_argument(
            "--of", choices=kinds, default=next(iter(kinds)), help="kind of machine (default: %(default)s)"
        )
    methods = list(next(iter(kinds.values())))
    parser.add_argument(
        "--attn", metavar="METHOD", default=methods[0], help=f"{', '.join(methods)} (default: {methods[0]})"
    )
    formats.add_options(parser)
    args = parser.parse_args(argv)
    try:
        formats.check_options(args)
        config = _method(args.attn, methods)
        rows, text = kinds[getattr(args, "of", next(iter(kinds)))][config.name](config)
    except SparseAttentionError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    facts = {"command": shlex.join(["python", f"scripts/{name}", *argv]), "date": date.today().isoformat()}
    printer = formats.Printer(args, {**facts, "versions": versions()})
    for row in rows:
        printer.line(row)
    printer.end(text, right=True)
    return 0


def bare(config: Method) -> None:
    """Raise `ConfigError` unless a method has no parameters."""
    if config != type(config)():
        raise ConfigError(f"--attn: expected {config.name} without parameters, got {config}.")


def _method(text: str, names: Sequence[str]) -> Method:
    (config, *others) = parse(text)
    if others or config.name not in names:
        choice = f"{', '.join(names[:-1])} or {names[-1]}"
        raise ConfigError(f"--attn: expected {choice} with or without parameters, got {text}.")
    return config
