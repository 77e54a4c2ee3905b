"""Options for mlx-lm's commands, and errors about them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..methods import Dense, Method, parse, read_toml

SHARDS = ("context", "context:local")
REPORTS = ("text", "recall", "json", "json+recall", "off")


class _Once(argparse.Action):
    """Store a value and refuse a second use of the option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            fail(parser, f"{option_string}: expected once, got twice. Join methods with '+'.")
        setattr(namespace, self.dest, values)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our options to a command's parser."""
    group = parser.add_argument_group(
        "sparse attention",
        "Use a sparse attention method for prefill, for decoding, or one for each (mlx-sparse-attention). A stage "
        "without a method stays dense.",
    )
    group.add_argument(
        "--attn",
        action=_Once,
        metavar="METHOD[:KEY=VALUE,...][+METHOD...]",
        help="Method and parameters, for example 'sample', 'sparq:rank=16,top_k=256' or both, 'sample+sparq'. "
        "'mlx-sparse matrix' lists the methods and their stages (default: dense attention).",
    )
    group.add_argument(
        "--attn-config",
        action=_Once,
        metavar="FILE.toml",
        help="Parameters from a TOML file with one table per method; --attn wins over it.",
    )
    group.add_argument(
        "--attn-backend",
        default="auto",
        metavar="NAME",
        help="Backend of the methods: 'metal' (our kernels, on Apple GPUs), 'ops' (MLX array operations), or 'auto': "
        "metal if it can run (default: auto).",
    )
    group.add_argument(
        "--shard",
        choices=SHARDS,
        help="Under mlx.launch, shard the context: every process runs the whole model and has a part of the keys and "
        "values. With 'context:local' each selects among its own keys, which takes fewer messages (default: mlx-lm's "
        "own sharding of the model).",
    )
    group.add_argument(
        "--lossless",
        nargs="?",
        const=0,
        type=int,
        metavar="N",
        help="Give the tokens of dense attention: the method drafts N tokens (1 to 7), one dense call over the same "
        "cache checks them, and rejected ones are removed (default N: as many as give most tokens per second, none if "
        "dense steps are faster).",
    )
    group.add_argument(
        "--no-calibrate",
        action="store_true",
        help="Measure nothing: from what context on a method is sparse is left to a documented model, unless this "
        "machine has been measured before. Otherwise the first context that is long enough is measured, once for each "
        "model's shape, in at most 10 seconds.",
    )
    group.add_argument(
        "--attn-report",
        choices=REPORTS,
        default="text",
        help="How to say at the end, on standard error, which calls were sparse, which dense and why, and what that "
        "saved (default: text). 'recall' and 'json+recall' also measure the attention recall of prompts, which takes "
        "a dense pass over the keys.",
    )


def requested(args: argparse.Namespace) -> tuple[tuple[Method, ...], bool]:
    """Return the methods of the options, and True if crossover lengths may be measured."""
    base: dict[str, Method] = {}
    calibrates = not args.no_calibrate
    if args.attn_config is not None:
        base, may_calibrate = read_toml(args.attn_config)
        calibrates = calibrates and may_calibrate
    return parse(args.attn, base) if args.attn is not None else tuple(base.values()) or (Dense(),), calibrates


def fail(parser: argparse.ArgumentParser, message: str) -> Any:
    """End the program with a one-line error; argparse would print the whole usage first."""
    end(parser.prog, message)


def end(program: str, message: str) -> Any:
    """End the program with a one-line error and exit code 2."""
    print_error(program, message)
    raise SystemExit(2)


def print_error(program: str, message: str) -> None:
    """Print a one-line error on standard error."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
